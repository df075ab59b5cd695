"""What is not priced together is refused, and says so."""

from typing import Any

import pytest

from memest.config.options import setup_from_options
from memest.errors import ConfigError

SPREAD: dict[str, dict[str, Any]] = {
    "--num-gpus": {"num_gpus": 2},
    "--fsdp": {"num_gpus": 2, "fsdp": "full_shard"},
    "--zero": {"num_gpus": 2, "zero": 2},
}


@pytest.mark.parametrize("flag", SPREAD)
def test_not_on_several_gpus(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} yet"):
        setup_from_options(**SPREAD[flag], optim="lomo")


SHARED: dict[str, dict[str, Any]] = {
    "sp": {"num_gpus": 2, "zero": 2, "sp": 2},
    "sp, stage 3": {"num_gpus": 2, "zero": 3, "sp": 2, "bf16": True},
    "cp": {"num_gpus": 2, "fsdp": "full_shard", "cp": 2},
    "tp": {"num_gpus": 2, "tp": 2},
}
FOUR: dict[str, Any] = {"load_in_4bit": True, "lora_r": 8}


@pytest.mark.parametrize("ways", SHARED)
def test_evaluations_go_with_what_gpus_share(ways: str) -> None:
    setup = setup_from_options(**SHARED[ways], eval_batch=2)
    assert setup.eval_batch == 2


@pytest.mark.parametrize(
    ("spread", "words"),
    [
        ({"num_gpus": 2, "pp": 2, "eval_batch": 2}, "--eval-batch"),
        ({"num_gpus": 2, "tp": 2, "ep": 2, "eval_batch": 2}, "--eval-batch"),
        ({**SHARED["sp"], "generate": 4}, "--generate"),
        ({**SHARED["cp"], "generate": 4}, "--generate"),
        ({**SHARED["sp"], "lora_r": 8, "load_in_8bit": True}, "load-in-4bit"),
        ({"num_gpus": 2, "zero": 3, "lora_r": 8, "load_in_8bit": True}, "LLM.int8 keep"),
        (
            {"num_gpus": 2, "zero": 1, "bf16": True, **FOUR, "bnb_4bit_quant_storage": "float16"},
            "every floating parameter to bfloat16",
        ),
    ],
)
def test_what_does_not_go_with_it_says_so(spread: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        setup_from_options(**spread)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adapters_go_with_every_stage_and_with_shared_sequences(stage: int) -> None:
    for more in ({"lora_r": 8}, FOUR):
        for ways in ({}, {"sp": 2}):
            setup_from_options(num_gpus=2, zero=stage, bf16=True, **more, **ways)


HEAD_READ: list[dict[str, Any]] = [{"use_liger_kernel": True}, {"fused_loss": "trl-chunked"}]


@pytest.mark.parametrize("more", HEAD_READ)
def test_a_head_that_is_read_but_not_called(more: dict[str, Any]) -> None:
    """FSDP's root, or the group of the final norm, gathers it; DeepSpeed does when it is read."""
    for flag in SPREAD:
        setup_from_options(**SPREAD[flag], **more)
    setup_from_options(**SPREAD["--fsdp"], fsdp_version=1, **more)
    setup_from_options(num_gpus=2, zero=3, **more)


@pytest.mark.parametrize("more", HEAD_READ)
def test_a_head_beside_adapters_is_a_unit_of_its_own(more: dict[str, Any]) -> None:
    lora = {"lora_r": 8, **SPREAD["--fsdp"], **more}
    setup_from_options(**lora, loop="plain")
    setup_from_options(**lora, fsdp_version=1)
    with pytest.raises(ConfigError, match="makes the head a unit of its own"):
        setup_from_options(**lora)


def test_losses_of_torchtune_come_behind_the_forward() -> None:
    with pytest.raises(ConfigError, match="behind the model's forward"):
        setup_from_options(**SPREAD["--fsdp"], fused_loss="torchtune-linear", loop="plain")
    with pytest.raises(ConfigError, match="have no DeepSpeed"):
        setup_from_options(num_gpus=2, zero=3, fused_loss="torchtune-linear", loop="plain")


def test_a_fused_loss_needs_the_whole_model() -> None:
    for spread in ({"num_gpus": 2, "pp": 2}, {"num_gpus": 2, "tp": 2}):
        with pytest.raises(ConfigError, match="parts of the model"):
            setup_from_options(**spread, fused_loss="trl-fused")


def test_a_head_in_shards_is_gathered_by_the_loss_of_trl_alone() -> None:
    adapted = {"num_gpus": 2, "fsdp": "full_shard", "lora_r": 8}
    setup_from_options(**adapted, fused_loss="trl-fused")
    for loss, words in (("trl-chunked", "depends on its release"), ("cce", "a DTensor of shards")):
        with pytest.raises(ConfigError, match=words):
            setup_from_options(**adapted, fused_loss=loss)


def test_not_where_weights_are_cut() -> None:
    setup_from_options(**SPREAD["--num-gpus"], optim="muon")
    for flag in ("--fsdp", "--zero"):
        with pytest.raises(ConfigError, match=f"{flag} yet"):
            setup_from_options(**SPREAD[flag], optim="muon")


def test_states_of_bitsandbytes_are_not_where_their_kernels_are_not() -> None:
    """FSDP2's parameters are DTensors; flat shards and partitions are tensors."""
    for spread in (SPREAD["--num-gpus"], SPREAD["--zero"], {**SPREAD["--fsdp"], "fsdp_version": 1}):
        setup_from_options(**spread, optim="adamw_8bit")
    with pytest.raises(ConfigError, match="DTensors, for which bitsandbytes' kernels"):
        setup_from_options(**SPREAD["--fsdp"], optim="adamw_8bit")


def test_a_deepspeed_configuration_may_be_its_text() -> None:
    text = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
    setup = setup_from_options(num_gpus=4, deepspeed=text)
    assert (setup.distributed.zero, setup.precision) == (2, "bf16")
    with pytest.raises(ConfigError, match="no JSON"):
        setup_from_options(num_gpus=4, deepspeed="{")


def test_deepspeeds_wire_of_shared_sequences_matters_where_they_are_shared() -> None:
    """``seq_parallel_communication_data_type`` is no matter of a run without such groups."""
    text = '{"zero_optimization": {"stage": 2}, "seq_parallel_communication_data_type": "bf16"}'
    alone = setup_from_options(num_gpus=4, deepspeed=text)
    assert alone.distributed.zero == 2
    with pytest.raises(ConfigError, match="seq_parallel_communication_data_type 'bf16'"):
        setup_from_options(num_gpus=4, sp=2, deepspeed=text)


def test_a_configuration_of_peft_may_be_its_text() -> None:
    setup = setup_from_options(adapter='{"peft_type": "LORA", "r": 4}')
    assert setup.adapter is not None
    assert setup.adapter.words == "LoRA, r 4"
    with pytest.raises(ConfigError, match="not JSON"):
        setup_from_options(adapter="{")
