"""What a software took unasked: options that a question leaves open follow the release."""

from __future__ import annotations

import pytest

from memest.config.quantization import Quantization
from memest.config.release_defaults import RELEASE_DEFAULTS, release_default
from memest.config.setup import Dtype, Loop, Setup, Software
from memest.errors import ConfigError
from memest.readers.origins import origins_of
from memest.readers.run_config import settle


@pytest.mark.parametrize(
    ("software", "optimizer", "dtype", "reentrant"),
    [
        ("", "adamw_torch_fused", "auto", False),
        ("torch=2.4", "adamw_torch", "auto", False),
        ("torch=2.8,transformers=4.54", "adamw_torch_fused", "float32", True),
        ("torch=2.8,transformers=4.53", "adamw_torch", "float32", True),
        ("transformers=4.32", "adamw_torch", "float32", True),
        ("transformers=4.31", "adamw_hf", "float32", True),
        ("torch=2.4,transformers=5.0", "adamw_torch", "auto", False),
    ],
)
def test_what_is_left_open_follows_the_release(software, optimizer, dtype, reentrant):
    setup = Setup(software=Software.parse(software), checkpointing="full")

    assert setup.optimizer == optimizer
    assert setup.loaded_dtype == dtype
    assert setup.recomputes_reentrantly is reentrant
    shown = setup.to_dict()
    assert (shown["optim"], shown["dtype"]) == (optimizer, dtype)


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        # transformers 4.16 is of 27 January 2022; bitsandbytes and peft were not there yet
        ("2022-01", {"torch": "1.10", "transformers": "4.15"}),
        ("2022-01-11", {"torch": "1.10", "transformers": "4.15"}),
        (
            "2024-03",
            {"torch": "2.2", "transformers": "4.38", "bitsandbytes": "0.42", "peft": "0.9"},
        ),
        ("cuda=11.3,2022-01,torch=1.9", {"torch": "1.9", "transformers": "4.15", "cuda": "11.3"}),
    ],
)
def test_a_month_means_what_was_out_when_it_began(text, versions):
    assert Software.parse(text).to_dict() == versions


def test_later_months_have_no_earlier_releases():
    months = [f"{year}-{month:02d}" for year in range(2019, 2027) for month in range(1, 12)]
    softwares = [Software.parse(month) for month in months]
    for name in ("torch", "transformers", "bitsandbytes", "peft"):
        releases = [getattr(each, name) or (0, 0) for each in softwares]
        assert releases == sorted(releases)
        assert len(set(releases)) > 15


def test_what_is_named_stays_in_every_release():
    old = Software.parse("torch=1.10,transformers=4.18")
    setup = Setup(software=old, optim="adamw_torch_fused", dtype="bfloat16", use_reentrant=False)

    assert setup.optimizer == "adamw_torch_fused"
    assert setup.loaded_dtype is Dtype.BFLOAT16
    assert not setup.recomputes_reentrantly


def test_the_adamw_of_transformers_was_the_trainers_alone():
    old = Software.parse("transformers=4.18")
    assert Setup(software=old).optimizer == "adamw_hf"
    assert Setup(software=old, loop=Loop.PLAIN).optimizer == "adamw_torch"


def test_what_a_quantised_base_leaves_was_float16():
    base = {"quantization": {"load_in_4bit": True}, "adapter": {"peft_type": "LORA", "r": 8}}
    assert Setup(software=Software.parse("transformers=4.57"), **base).loaded_dtype == "float16"
    assert Setup(**base).loaded_dtype is Dtype.AUTO


@pytest.mark.parametrize(
    ("family", "software", "attention"),
    [
        # what AutoModel.from_config of the releases made: 4.40.2, 4.44.2, 4.48.3 and 4.53.3
        ("llama", "transformers=4.40", "auto"),
        ("mixtral", "transformers=4.40", "auto"),
        ("phi", "transformers=4.40", "auto"),
        ("bert", "transformers=4.40", "eager"),
        ("gpt2", "transformers=4.40", "eager"),
        ("gpt2", "transformers=4.44", "auto"),
        ("gpt_neox", "transformers=4.44", "auto"),
        ("wav2vec2", "transformers=4.44", "auto"),
        ("roberta", "transformers=4.44", "eager"),
        ("distilbert", "transformers=4.44", "eager"),
        ("gemma2", "transformers=4.44", "sdpa"),
        ("roberta", "transformers=4.48", "auto"),
        ("esm", "transformers=4.53", "eager"),
        ("pegasus", "transformers=4.48", "eager"),
        ("pegasus", "transformers=4.53", "auto"),
        ("data2vec-vision", "transformers=4.53", "auto"),
        # read: the model files of these releases
        ("mistral", "transformers=4.36", "eager"),
        ("llama", "transformers=4.35", "eager"),
        ("llama", "transformers=4.44,torch=2.0", "eager"),
        ("llama", "transformers=4.44,torch=2.1", "auto"),
        ("gemma2", "transformers=4.46", "eager"),
        ("gemma2", "transformers=5.20", "sdpa"),
        ("gemma2", "", "auto"),
        ("t5", "transformers=5.14", "eager"),
        ("t5", "transformers=5.15", "auto"),
        ("a family of later", "transformers=4.44", "auto"),
    ],
)
def test_attention_left_open_is_that_of_the_class_of_the_time(family, software, attention):
    row = release_default("attn_implementation", Software.parse(software), family)
    assert row.value == attention


QLORA = {"quantization": {"load_in_4bit": True}, "adapter": {"peft_type": "LORA", "r": 8}}


@pytest.mark.parametrize(
    ("software", "loop", "reentrant"),
    [
        ("", "plain", True),
        ("peft=0.6", "accelerate", True),
        ("peft=0.5", "plain", False),
        ("peft=0.5,transformers=4.44", "plain", True),
        # the Trainer switches it on again
        ("", "trainer", False),
        ("transformers=4.44", "trainer", True),
    ],
)
def test_a_script_that_prepares_its_base_recomputes_as_peft_does(software, loop, reentrant):
    setup = Setup(software=Software.parse(software), loop=loop, checkpointing="full", **QLORA)
    assert setup.recomputes_reentrantly is reentrant
    unprepared = {**QLORA, "quantization": Quantization(format="bnb-4bit", prepare=False)}
    plain = Setup(software=Software.parse(software), loop=loop, checkpointing="full")
    bare = Setup(software=Software.parse(software), loop=loop, checkpointing="full", **unprepared)
    assert bare.recomputes_reentrantly is plain.recomputes_reentrantly


@pytest.mark.parametrize(
    ("software", "casts"), [("", True), ("peft=0.12", True), ("peft=0.11", False)]
)
def test_adapters_were_of_the_dtype_of_their_base_until_peft_0_11(software, casts):
    adapter = {"peft_type": "LORA", "r": 8}
    setup = Setup(software=Software.parse(software), adapter=adapter)
    assert setup.adapter.autocast_adapter_dtype is casts
    named = Setup(software=setup.software, adapter={**adapter, "autocast_adapter_dtype": True})
    assert named.adapter.autocast_adapter_dtype is True


@pytest.mark.parametrize(
    ("software", "quantization", "said"),
    [
        ("peft=0.3", {"load_in_4bit": True}, "since 0.4. Write peft=0.4 or later"),
        (
            "peft=0.9",
            {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
            "made float32 of packed weights too",
        ),
        ("peft=0.4", {"quant_method": "gptq", "bits": 4}, "layers of GPTQ since 0.5"),
    ],
)
def test_what_a_peft_had_not_is_refused(software, quantization, said):
    with pytest.raises(ConfigError, match=said):
        Setup(software=Software.parse(software), **{**QLORA, "quantization": quantization})


def test_a_method_that_a_peft_had_otherwise_is_refused():
    osf = {"peft_type": "OSF", "target_modules": ["q_proj"]}
    with pytest.raises(ConfigError, match=r"peft=0\.20 and OSF.*Write peft=0\.21 or later"):
        Setup(software=Software.parse("peft=0.20"), adapter=osf)
    assert Setup(software=Software.parse("peft=0.21"), adapter=osf).adapter.method == "osf"


def test_explained_are_the_rows_that_a_software_decides():
    run = settle((), {"software": "transformers=4.44,peft=0.9", "lora_r": 8, "load_in_8bit": True})
    rows = {each.option: each for each in origins_of(run, run.setup, "roberta")}
    assert rows["attn_implementation"].source.startswith("eager, default of the software: the mo")
    assert rows["prepare_kbit"].value == "float32"
    assert "peft 0.4.0 to 0.11.1" in rows["autocast_adapter_dtype"].source
    named = settle((), {"software": "peft=0.9", "lora_r": 8, "autocast_adapter_dtype": True})
    assert "default" not in next(
        each.source
        for each in origins_of(named, named.setup, "roberta")
        if each.option == "autocast_adapter_dtype"
    )


def test_the_table_answers_for_every_release():
    for name in {row.option for row in RELEASE_DEFAULTS}:
        for text in ("", "torch=1.0", "transformers=1.0", "torch=1.0,transformers=1.0"):
            assert release_default(name, Software.parse(text)).option == name
