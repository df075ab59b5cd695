"""ZeRO-3 of 4-bit bases: what DeepSpeed itself was measured to do, against predicted ranks."""

from __future__ import annotations

import pytest

import memest
from memest.config.options import setup_from_options
from memest.profiles.axes import key_of, structure_of, traced_setup
from memest.replay.replay import check_events
from support.evaluation_ranks import check_evaluation, predicted_evaluation
from support.ranks import as_run, predicted_rank
from support.recorded import check_recorded
from support.recorded_ranks import case_of, names_of, recorded_run

HOST = 6144
RNG = 3 * 5056
"""What a CPU keeps of its generator for each checkpoint; a GPU's is in host memory too."""
LLAMA = "meta-llama/Llama-3.2-1B?num_hidden_layers=2"
FOUR = {
    "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16", "lora_r": 8, "bf16": True,
    "bnb_4bit_quant_storage": "bfloat16",
}  # fmt: skip


@pytest.mark.slow("zero_3_qlora_stored", "zero_3_qlora_checkpointing", "zero_3_qlora_reentrant")
@pytest.mark.parametrize("name", names_of("zero_3_qlora*", "*_evaluated"))
def test_a_rank_of_a_quantised_base_allocates_what_deepspeed_does(name):
    """Every phase; where nothing is offloaded, every allocation and free of the steps."""
    case = case_of(name)
    checkpoints = "checkpointing" in case["setup"]
    host = HOST + RNG * checkpoints
    check_recorded(recorded_run(name), predicted_rank(case), host, any_order=checkpoints)


@pytest.mark.parametrize("name", names_of("zero_3_qlora*_evaluated"))
def test_a_rank_evaluates_a_quantised_base_in_what_deepspeed_does(name):
    stream = predicted_evaluation(case_of(name))
    check_events(stream.events, stream.sizes)
    check_evaluation(recorded_run(name), as_run(stream), HOST)


def test_its_trace_has_half_precision_adapters_and_the_hooks_of_stage_3():
    """``zero.Init`` never saw the model, so the engine casts all of it, adapters too."""
    four = setup_from_options(num_gpus=4, zero=3, **FOUR)
    key = key_of(structure_of(four))
    assert key["in_half"] is True
    assert key["partitioned"] is True
    assert four.partitions_whole_model
    whole = setup_from_options(num_gpus=4, zero=3, bf16=True, lora_r=8)
    assert not whole.partitions_whole_model
    assert not traced_setup(whole).distributed.in_half


def test_packed_weights_are_divided_and_scales_are_not():
    limits = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}

    def found(ranks):
        spread = {"num_gpus": ranks, "zero_settings": {
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 1_000_000, **limits},
        }}  # fmt: skip
        estimate = memest.estimate(
            LLAMA, batch=4, seq_len=1024, gpu="a100-80gb", max_batch=False, checkpointing="full",
            use_reentrant=True, **FOUR, **spread,
        )  # fmt: skip
        return {str(r.category): r.bytes for r in estimate.breakdown}, estimate

    two, estimate = found(2)
    eight, _ = found(8)
    packed, embedded = 2 * 60_817_408 // 2, 128_256 * 2048 * 2
    divided = (packed + embedded) * (1 / 2 - 1 / 8)
    assert two["parameters"] - eight["parameters"] == pytest.approx(divided, rel=0.02)
    assert any("whole model on every GPU" in note for note in estimate.notes)
