"""What a software took unasked: options that a question leaves open follow the release."""

from __future__ import annotations

import pytest

from memest.config.release_defaults import RELEASE_DEFAULTS, release_default
from memest.config.setup import Dtype, Loop, Setup, Software


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


def test_the_table_answers_for_every_release():
    for name in {row.option for row in RELEASE_DEFAULTS}:
        for text in ("", "torch=1.0", "transformers=1.0", "torch=1.0,transformers=1.0"):
            assert release_default(name, Software.parse(text)).option == name
