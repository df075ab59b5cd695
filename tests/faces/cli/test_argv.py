"""The spellings of other command lines."""

from contextlib import nullcontext

import pytest

from memest.cli.argv import closest_flags, normalise
from memest.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        (["estimate", "some_model", "-b", "4"], ["estimate", "some_model", "-b", "4"]),
        (["--per_device_train_batch_size", "8"], ["--batch", "8"]),
        (["--per_device_train_batch_size=8"], ["--batch=8"]),
        (["--gradient_accumulation_steps", "2"], ["--grad-accum", "2"]),
        (["--torch_dtype", "bfloat16"], ["--dtype", "bfloat16"]),
        (["--cutoff_len", "4"], ["--seq-len", "4"]),
        (["--bf16"], ["--bf16"]),
        (["--bf16", "True", "model"], ["--bf16", "model"]),
        (["--bf16", "model"], ["--bf16", "model"]),
        (["--bf16=true"], ["--bf16"]),
        (["--packing", "bfd", "model"], ["--packing", "bfd", "model"]),
        (["--packing=wrapped"], ["--packing=wrapped"]),
        (["--bf16", "False"], ["--switched-off=bf16"]),
        (["--bf16", "--bf16", "no"], ["--switched-off=bf16"]),
        (["--bf16=maybe"], ["--bf16=maybe"]),
        (["--use_cache"], ["--use-cache=true"]),
        (["--use-cache", "False"], ["--use-cache=false"]),
        (["--no_use_cache"], ["--use-cache=false"]),
        (["--no-use-cache=false"], ["--use-cache=true"]),
        (["--checkpointing"], ["--checkpointing=full"]),
        (["--checkpointing="], ["--checkpointing=full"]),
        (["--checkpointing", "--bf16"], ["--checkpointing=full", "--bf16"]),
        (["--checkpointing", "none"], ["--checkpointing=none"]),
        (["--checkpointing", "every_n:3", "m"], ["--checkpointing=every_n:3", "m"]),
        (["--gradient_checkpointing", "True"], ["--checkpointing=full"]),
        (["--gradient_checkpointing=False"], ["--checkpointing=none"]),
        (["--activation-checkpointing", "gpt2"], ["--checkpointing=full", "gpt2"]),
        (["--checkpointing", "ful"], ["--checkpointing=ful"]),
        (["--max_grad_norm", "-1"], ["--max-grad-norm", "-1"]),
        (["--unpriced", "--mine"], ["--unpriced", "--mine"]),
        (["--bf16", "0"], ["--switched-off=bf16"]),
        (["--freeze", "a_b=c_d"], ["--freeze", "a_b=c_d"]),
        (["--foo_bar=c_d"], ["--foo-bar=c_d"]),
        (["estimate", "--help"], ["estimate", "--help"]),
        (["estimate", "--help", "--batch", "8"], ["estimate", "--help", "--batch", "8"]),
        (["estimate", "--help", "peft"], ["estimate", "--help-group=peft", "--help"]),
        (["fits", "-h", "peft", "x"], ["fits", "--help-group=peft", "-h", "x"]),
        (["estimate", "--help=all"], ["estimate", "--help-group=all", "--help"]),
        (["estimate", "--help", "--", "a"], ["estimate", "--help", "--", "a"]),
        (["gpus", "--help", "a100"], ["gpus", "--help", "a100"]),
        (["--bf16", "--", "--a_b", "--bf16", "True"], ["--bf16", "--", "--a_b", "--bf16", "True"]),
    ],
)
def test_normalise(given, expected):
    assert normalise(given) == expected


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        (["--fsdp", "--num-gpus", "4"], "--fsdp"),
        (["--optim"], "--optim"),
        (["--gpu", "-q"], "--gpu"),
        (["estimate", "gpt2", "--gpu", "--config", "dpo.yaml"], "--gpu"),
        (["fits", "--gpu", "--launch=python train.py"], "--gpu"),
        (["--batch", "8", "--lora-r", "--"], "--lora-r"),
    ],
)
def test_a_value_that_is_missing_is_named(given, flag):
    with pytest.raises(ConfigError, match=f"{flag} needs a value: {flag} [A-Z]+. "):
        normalise(given)


def test_a_word_behind_a_switch_is_no_value_of_it():
    assert normalise(["fits", "--bf16", "gpt2"]) == ["fits", "--bf16", "gpt2"]
    with pytest.raises(ConfigError, match="--offload-optimizer is a switch"):
        normalise(["fits", "gpt2", "--offload-optimizer", "cpu"])
    with pytest.raises(ConfigError, match="torchrun begins a launch command"):
        normalise(["fits", "torchrun", "train.py", "--bf16", "gpt2"])


def test_normalise_is_idempotent():
    given = ["--bf16", "True", "--use_cache", "no", "--gradient_checkpointing", "--batch_size", "4"]
    once = normalise(given)
    assert normalise(once) == once


def test_closest_flags():
    assert closest_flags("--bach")[0] == "--batch"
    assert closest_flags("--per_device_train_batchsize")[0] == "--per-device-train-batch-size"


@pytest.mark.parametrize(
    ("words", "clash"),
    [
        (["--batch", "8", "--per_device_train_batch_size=4"], True),
        (["--batch=8", "--batch-size", "8"], False),  # says the same
        (["--batch", "8", "--batch", "4"], False),  # changed at the end of a line
        (["--gpu", "t4", "--gpu", "l4"], False),
    ],
    ids=str,
)
def test_one_option_by_two_names_has_one_value(words, clash):
    said = (
        pytest.raises(ConfigError, match="are the same option: drop one")
        if clash
        else nullcontext()
    )
    with said:
        normalise(["estimate", "gpt2", *words])
