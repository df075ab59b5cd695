"""What is not priced together is refused, and says so."""

from typing import Any

import pytest

from memest.errors import ConfigError
from memest.options import setup_from_options

SPREAD: dict[str, dict[str, Any]] = {
    "--num-gpus": {"num_gpus": 2},
    "--fsdp": {"num_gpus": 2, "fsdp": "full_shard"},
    "--zero": {"num_gpus": 2, "zero": 2},
}
EVERYWHERE: list[dict[str, Any]] = [
    {"eval_batch": 4}, {"optim": "lomo"}, {"use_liger_kernel": True},
]  # fmt: skip
SHARDED: list[dict[str, Any]] = [
    {"load_in_4bit": True, "lora_r": 8}, {"optim": "adamw_8bit"}, {"optim": "adam_mini"},
]  # fmt: skip


@pytest.mark.parametrize("flag", SPREAD)
@pytest.mark.parametrize("more", EVERYWHERE)
def test_not_on_several_gpus(flag: str, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{flag} yet"):
        setup_from_options(**SPREAD[flag], **more)


@pytest.mark.parametrize("more", SHARDED)
def test_not_where_weights_are_cut(more: dict[str, Any]) -> None:
    setup_from_options(**SPREAD["--num-gpus"], **more)
    for flag in ("--fsdp", "--zero"):
        with pytest.raises(ConfigError, match=f"{flag} yet"):
            setup_from_options(**SPREAD[flag], **more)


def test_a_deepspeed_configuration_may_be_its_text() -> None:
    text = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
    setup = setup_from_options(num_gpus=4, deepspeed=text)
    assert (setup.distributed.zero, setup.precision) == (2, "bf16")
    with pytest.raises(ConfigError, match="no JSON"):
        setup_from_options(num_gpus=4, deepspeed="{")


def test_a_configuration_of_peft_may_be_its_text() -> None:
    setup = setup_from_options(adapter='{"peft_type": "LORA", "r": 4}')
    assert setup.adapter is not None
    assert setup.adapter.words == "LoRA, r 4"
    with pytest.raises(ConfigError, match="not JSON"):
        setup_from_options(adapter="{")
