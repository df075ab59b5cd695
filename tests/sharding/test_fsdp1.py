"""FSDP1: ranks of the real ``FullyShardedDataParallel``, against predicted ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ranks import as_run, of_steps, predicted_rank, real_rank
from real_memory import differences

import memest
from memest.errors import ConfigError
from memest.events import Weight
from memest.replay.replay import check_events
from memest.sharding.fsdp1 import flat_of

HOST = 6144
RNG = 5056
"""What a CPU keeps of its generator for each checkpoint."""


def case(model="llama", ranks=2, fsdp="full_shard", setup=(), **spread):
    return {
        "model": model, "ranks": ranks, "setup": {"loop": "plain", **dict(setup)},
        "spread": {"fsdp": fsdp, "fsdp_version": 1, **spread},
    }  # fmt: skip


ACCELERATE = {"loop": "accelerate", "precision": "bf16"}
CASES = {
    "tutorial": case(),
    "accelerate": case(ranks=4, setup=ACCELERATE),
    "accelerate accumulates": case(setup={**ACCELERATE, "grad_accum": 2}),
    "script accumulates": case("llama-tied", setup={"grad_accum": 2}),
    "parameters for the optimizer, odd ranks": case("llama-gqa", 3, fsdp_use_orig_params=True),
    "kept, gathered behind": case(
        "gpt_neox", 3, "shard_grad_op", fsdp_backward_prefetch="backward_post"
    ),
    "kept, accumulates": case(
        ranks=2, fsdp="shard_grad_op", setup={"loop": "accelerate", "grad_accum": 3}
    ),
    "gathered behind": case("gpt_neox", 3, fsdp_backward_prefetch="backward_post"),
    "nothing ahead": case(fsdp_backward_prefetch="no_prefetch"),
    "recomputation": case(setup={"checkpointing": "full"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rank_allocates_what_fsdp_does(name):
    """Every phase, and every allocation and free of the steps, in order."""
    run = CASES[name]
    stream = predicted_rank(run)
    check_events(stream.events, stream.sizes)
    predicted, real = as_run(stream), real_rank(run)
    measured = {phase.name: phase for phase in real.phases}
    host = HOST + (3 * RNG if "checkpointing" in run["setup"] else 0)
    steps = [phase for phase in predicted.phases if not phase.name.startswith("load")]
    assert len(steps) > 10
    for phase in steps:
        same = measured[phase.name]
        assert abs(phase.alive - same.alive) <= host, f"alive when {phase.name} begins"
        assert abs(phase.peak - same.peak) <= host + 0.005 * real.peak, phase.name
    assert len(predicted.allocations(at_least=8192)) > 150
    assert differences(of_steps(real), of_steps(predicted), at_least=8192) == []


def weight(shape, **more):
    given = {"trains": True, "decays": True, "has_grad": True, "dtype": "bfloat16", **more}
    return Weight("w", shape, (), **given)


def test_parameters_begin_at_aligned_addresses_if_they_are_the_optimizers():
    weights = [weight((3,)), weight((9,)), weight((8,))]
    loose = flat_of((0, 1, 2), weights, ranks=4, aligned=False)
    assert (loose.offsets, loose.elements, loose.shard_elements) == ((0, 3, 12), 20, 5)
    # 16 bytes are 8 elements; and every rank has as many
    aligned = flat_of((0, 1, 2), weights, ranks=5, aligned=True)
    assert (aligned.offsets, aligned.elements, aligned.shard_elements) == ((0, 8, 24), 35, 7)


@pytest.mark.parametrize(
    ("other", "words"),
    [({"dtype": "float32"}, "bfloat16 and float32"), ({"trains": False}, "frozen parameters [(]w")],
)
def test_what_fsdp1_does_not_flatten_is_refused(other, words):
    weights = [weight((4,)), replace(weight((4,)), **other)]
    with pytest.raises(ConfigError, match=words):
        flat_of((0, 1), weights, ranks=2, aligned=True)


TINY = {"batch": 2, "seq_len": 64, "max_batch": False, "num_gpus": 4}


def test_the_version_is_an_option():
    run = {**TINY, "fsdp": "full_shard", "fsdp_wrap": ["BertLayer"]}
    one, two = (memest.estimate("prajjwal1/bert-tiny", fsdp_version=n, **run) for n in (1, 2))
    assert "FSDP1 full_shard" in str(one)
    assert "FSDP2 full_shard" in str(two)
    assert one.peak != two.peak
    away = memest.estimate("prajjwal1/bert-tiny", fsdp_version=1, fsdp_offload=True, **run)
    assert away.peak.allocated_bytes < one.peak.allocated_bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fsdp_version": 1}, "--fsdp-version has no meaning without --fsdp full_shard"),
        ({"fsdp": "full_shard", "fsdp_version": 3}, "must be 1 to 2"),
        (
            {"fsdp": "full_shard", "fsdp_backward_prefetch": "backward_pre"},
            "no meaning without --fsdp-version 1",
        ),
        (
            {"fsdp": "full_shard", "fsdp_version": 1, "fsdp_backward_prefetch": "backward_pro"},
            "Did you mean 'backward_pre'",
        ),
        (
            {"fsdp": "full_shard", "fsdp_version": 1, "fsdp_shard_size": 2},
            "no meaning without --fsdp full_shard of --fsdp-version 2",
        ),
        (
            {"fsdp": "full_shard", "fsdp_use_orig_params": False},
            "no meaning without --fsdp-version 1",
        ),
    ],
)
def test_options_that_say_nothing_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        memest.estimate("prajjwal1/bert-tiny", **TINY, **options)
