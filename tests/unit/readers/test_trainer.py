"""Trainers of transformers and TRL in scripts: their arguments, and what they make of them."""

import pytest

import memest
from support.training_scripts import LOADED, TRAINER, read


@pytest.mark.parametrize(("multiple", "is_named"), [(8, False), (1024, True)])
def test_rows_that_are_filled_up_far_are_named(write, multiple, is_named):
    collator = f"DataCollatorForLanguageModeling(None, pad_to_multiple_of={multiple})"
    parts = {"before": "from transformers import DataCollatorForLanguageModeling",
             "trainer": f", data_collator={collator}"}  # fmt: skip
    names = ("before", "arguments", "between", "trainer", "after")
    text = TRAINER.format(**{**dict.fromkeys(names, ""), "model": "'gpt2'", **parts})
    run = memest.read_config(write("train.py", text))

    assert ("filled up" in " ".join(run.setup.unpriced)) == is_named


def test_older_arguments_of_trl_bring_older_defaults(write):
    """``max_seq_length`` went with TRL 0.20, which brought bf16 and checkpointing."""
    text = (
        "from trl import SFTConfig, SFTTrainer\n"
        "SFTTrainer('gpt2', args=SFTConfig(max_seq_length=256, packing=True)).train()\n"
    )
    options = memest.read_config(write("sft.py", text)).options

    assert (options["precision"], options["checkpointing"]) == ("fp32", "none")
    assert options["seq_len"] == 256
    assert "fused_loss" not in options


def test_a_model_that_a_script_loads_for_trl_has_its_own_dtype(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(LOADED.replace("Trainer(", "trl.DPOTrainer(").format("import trl"))
    run = memest.read_config(path, seq_len=8)
    assert (run.options["method"], run.options["dtype"]) == ("dpo", "auto")


def test_trl_makes_adapters_beside_a_quantised_base_bfloat16(tmp_path):
    text = """
from transformers import BitsAndBytesConfig
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
SFTTrainer("gpt2", SFTConfig("o", max_length=64), train_dataset=d, peft_config=LoraConfig(r=4),
           quantization_config=BitsAndBytesConfig(load_in_4bit=True)).train()
"""
    options = read(tmp_path, text).options
    assert options["quantization"] == {"load_in_4bit": True}
    assert options["cast_weights"] == ["trainable=bfloat16"]
    assert options["prepare_kbit"] is False


_ADAPTED = """
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import {0}Config, {0}Trainer
model = AutoModelForCausalLM.from_pretrained("gpt2")
args = {0}Config("o", deepspeed={{"zero_optimization": {{"stage": {1}}}}}, max_length=8,
                 gradient_checkpointing_kwargs={{"use_reentrant": False}})
{2}
"""

_BY_TRAINER = "{}Trainer(model, args=args, train_dataset=d, peft_config=LoraConfig(r=4)).train()"

_BY_PEFT = "{}Trainer(get_peft_model(model, LoraConfig(r=4){}), args=args, train_dataset=d).train()"


@pytest.mark.parametrize("trainer", ["SFT", "DPO"])
@pytest.mark.parametrize(
    ("stage", "made", "casts"),
    [(3, _BY_TRAINER, False), (2, _BY_TRAINER, True), (3, _BY_PEFT, True),
     (3, _BY_PEFT.replace("{})", ", autocast_adapter_dtype=False)"), False)],
)  # fmt: skip
def test_trl_leaves_adapters_in_the_dtype_of_their_base_under_stage_3(
    tmp_path, trainer, stage, made, casts
):
    text = _ADAPTED.format(trainer, stage, made.format(trainer, ""))
    setup = memest.read_command(
        f"accelerate launch --num_processes 4 {_script(tmp_path, text)}"
    ).setup
    assert setup.adapter.autocast_adapter_dtype is casts
    assert setup.recomputes_reentrantly is (stage == 3)


def _script(folder, text):
    path = folder / "train.py"
    path.write_text(text)
    return path


_ONLINE_DPO = """
from transformers import AutoModelForCausalLM
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
def reward(completions, **_):
    return [0.0 for _ in completions]
model = AutoModelForCausalLM.from_pretrained("gpt2")
args = OnlineDPOConfig("o", per_device_train_batch_size=4, gradient_accumulation_steps=2)
OnlineDPOTrainer({}, reward_funcs={}, args=args, train_dataset=d).train()
"""


@pytest.mark.parametrize(
    ("model", "reward", "named"),
    [("model", "reward", 0), ("'gpt2'", "reward", 0), ("model", "'some/reward-model'", 1)],
)
def test_an_online_dpo_trainer_has_the_defaults_of_its_configuration(
    tmp_path, model, reward, named
):
    path = tmp_path / "train.py"
    path.write_text(_ONLINE_DPO.format(model, reward))
    setup = memest.read_config(path).setup

    assert (setup.method, setup.batch, setup.grad_accum) == ("online-dpo", 4, 2)
    assert (setup.seq_len, setup.rollouts.completion_len) == (512, 64)
    assert (setup.dtype, setup.precision, setup.checkpointing) == ("auto", "bf16", "full")
    assert len(setup.unpriced) == named


def test_the_configuration_of_online_dpo_stands_behind_reference_and_rewards(tmp_path):
    text = _ONLINE_DPO.replace("reward_funcs={}, args=args", "None, reward, args")
    assert read(tmp_path, text.format("model")).setup.batch == 4
