"""Evaluations on several GPUs: the Trainer's own on real ranks against predicted ones."""

from __future__ import annotations

import pytest

from memest.replay.replay import check_events
from memest.trace.generation import TRACED_STEPS
from support.evaluation_ranks import (
    HOST,
    check_evaluation,
    predicted_evaluation,
    real_evaluation,
    with_tail,
)
from support.ranks import as_run, of_steps, predicted_rank
from support.real_memory import differences
from support.recorded_ranks import case_of, names_of, recorded_run
from support.releases import as_heard
from support.tensor_ranks import traced_generation

RNG = 5056
"""What a CPU keeps of its generator for each checkpoint; a GPU's is in host memory too."""
FULL = {"fsdp": "full_shard"}
ACCELERATE = {"loop": "accelerate"}

CASES = [
    ("llama", {}, {}, 2, True),
    ("llama", {}, FULL, 2, True),
    ("llama", {}, FULL, 3, False),
    ("llama", {"precision": "bf16", "batch": 2}, FULL, 4, True),
    ("llama", {}, {"fsdp": "shard_grad_op"}, 2, True),
    ("llama-tied", {}, FULL, 2, False),
    ("llama", {}, FULL, 1, True),
    ("llama", {}, {**FULL, "fsdp_version": 1}, 2, True),
    ("llama", {}, {"fsdp": "shard_grad_op", "fsdp_version": 1}, 2, False),
]
IDS = ["ddp", "fsdp2", "fsdp2-loss", "fsdp2-bf16", "fsdp2-grad", "fsdp2-tied", "fsdp2-alone",
       "fsdp1", "fsdp1-grad"]  # fmt: skip


@pytest.mark.slow(
    but=(
        "fsdp2-tied",
        "fsdp1-grad",
    )
)
@pytest.mark.parametrize(("model", "setup", "spread", "ranks", "keeps"), CASES, ids=IDS)
def test_a_rank_evaluates_in_what_a_real_one_does(model, setup, spread, ranks, keeps):
    """After three steps of training: every phase, every allocation and free of the batches."""
    case = {
        "model": model, "ranks": ranks, "setup": {**ACCELERATE, **setup}, "spread": spread,
        "evaluation": [3, keeps],
    }  # fmt: skip
    _compare(real_evaluation(case), predicted_evaluation(case))


@pytest.mark.slow(but=("zero_2_evaluated",))
@pytest.mark.parametrize("name", names_of("zero_*_evaluated", "zero_3_qlora*"))
def test_a_rank_evaluates_in_what_it_does_with_deepspeed(name):
    """ZeRO-3 follows its record of a training step into the evaluation."""
    case = case_of(name)
    # the last training step's two chunks of tokens
    chunks = 2 if case["setup"].get("fused_loss") == "trl-chunked" else 0
    _compare(recorded_run(name), predicted_evaluation(case), HOST + chunks * RNG)


@pytest.mark.slow(but=("sp_2_zero_3_evaluated",))
@pytest.mark.parametrize("name", names_of("sp_*_evaluated"))
def test_ranks_that_share_sequences_evaluate_whole_ones(name):
    """Ulysses stands aside in evaluations: every rank has batches and all tokens of its own."""
    _compare(recorded_run(name), predicted_evaluation(case_of(name)))


def _compare(real, stream, host=HOST):
    check_events(stream.events, stream.sizes)
    check_evaluation(real, as_heard(real, as_run(stream), host), host)


@pytest.mark.slow(but=("llama-tied",))
@pytest.mark.parametrize(
    ("model", "setup", "fsdp"),
    [("llama", {}, "full_shard"), ("llama-tied", {"precision": "bf16"}, "shard_grad_op")],
    ids=["llama", "llama-tied"],
)
def test_a_rank_of_fsdp2_generates(model, setup, fsdp):
    """The prompt, then each token: a forward whose units are gathered and given back."""
    case = {
        "model": model, "ranks": 2, "setup": {**ACCELERATE, **setup}, "spread": {"fsdp": fsdp},
        "generation": {"new_tokens": 8},
    }  # fmt: skip
    real = real_evaluation(case)
    stream = predicted_rank(
        case,
        lambda training, twins: with_tail(
            training, traced_generation(twins.built_model.trained_model, twins, case), TRACED_STEPS
        ),
    )
    check_events(stream.events, stream.sizes)
    run = as_run(stream)
    measured = {phase.name: phase for phase in real.phases}
    steps = [phase for phase in run.phases if phase.name.startswith("generation")]
    assert len(steps) == TRACED_STEPS
    for phase in steps:
        assert abs(phase.alive - measured[phase.name].alive) <= 1024, phase.name
    for one in (real, run):
        one.events = [e for e in of_steps(one).events if e.phase.startswith("generation")]
    assert len(run.allocations(at_least=8192)) > 150
    assert differences(real, run, at_least=8192) == []
