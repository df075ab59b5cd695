"""Whether a base is prepared is kept of checkpoints that are quantised already, too. Tier: fast."""

from __future__ import annotations

from dataclasses import replace

import pytest

import memest
from memest.catalog.resolve import resolve_model
from memest.config.options import setup_from_options
from memest.config.quantization import own_quantization
from memest.errors import ConfigError
from memest.estimation.early import with_own_base
from memest.profiles.axes import key_of, structure_of

COPY = "unsloth/Meta-Llama-3.1-8B-bnb-4bit"
SCRIPT = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
model = AutoModelForCausalLM.from_pretrained("{model}")
{prepared}
model = get_peft_model(model, LoraConfig(r=16))
Trainer(model, TrainingArguments("o"), train_dataset=d).train()
"""
LLAMA_FACTORY = """
model_name_or_path: {model}
stage: sft
do_train: true
finetuning_type: lora
template: llama3
dataset: alpaca_en_demo
cutoff_len: 64
"""


def own_base(setup):
    """The quantisation of a run on the copy."""
    quantization, _ = own_quantization(resolve_model(COPY).config, setup.quantization)
    return replace(setup, quantization=quantization)


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_checkpoint_takes_what_was_said_of_its_preparation(asked):
    setup = setup_from_options(lora_r=16, prepare_kbit=asked)

    run = own_base(setup)

    assert run.quantization.prepare is asked
    assert run.prepares_base is (asked is not False)
    assert run.prepare_kbit is None
    config = resolve_model(COPY).config
    settled = with_own_base(setup, config, COPY, settled=False)
    assert settled.checkpointing == ("none" if asked is False else "full")


def test_families_of_prepared_bases_and_of_others_are_kept_apart():
    keys = [
        key_of(structure_of(setup_from_options(lora_r=16, prepare_kbit=asked)))
        for asked in (None, True, False)
    ]
    assert all(keys.count(key) == 1 for key in keys)


def test_a_model_that_nobody_quantises_is_not_prepared():
    config = resolve_model("Qwen/Qwen3-0.6B").config
    said = setup_from_options(lora_r=16, prepare_kbit=False)
    assert with_own_base(said, config, "m", settled=True) == setup_from_options(lora_r=16)
    with pytest.raises(ConfigError, match=r"--prepare-kbit says nothing of m, .*--load-in-4bit"):
        with_own_base(setup_from_options(prepare_kbit=True), config, "m", settled=True)


@pytest.mark.parametrize(
    ("model", "prepared", "said"),
    [
        (COPY, "", False),
        (COPY, "model = prepare_model_for_kbit_training(model)", True),
        ("gpt2", "", None),
    ],
)
def test_scripts_say_whether_they_prepare_a_copy(tmp_path, model, prepared, said):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(model=model, prepared=prepared))
    run = memest.read_config(path, seq_len=8)
    assert run.setup.prepare_kbit is said
    if said:
        assert run.options["checkpointing"] == "full"


@pytest.mark.parametrize(("model", "said"), [(COPY, False), ("Qwen/Qwen3-0.6B", None)])
def test_llama_factory_prepares_no_copy(tmp_path, model, said):
    path = tmp_path / "lora.yaml"
    path.write_text(LLAMA_FACTORY.format(model=model))
    assert memest.read_config(path).setup.prepare_kbit is said
