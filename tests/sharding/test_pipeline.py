"""Pipelines: real ``PipelineStage`` processes against predicted ranks, in order."""

from __future__ import annotations

import pytest
from pipeline_ranks import predicted_ranks, real_ranks
from ranks import as_run, of_steps
from real_memory import differences

from memest.replay.replay import check_events

HOST = 8192
"""Step counters, numbers wrapped as tensors, indices, which a CPU run cannot tell from a device's."""
RNG_STATES = 8 * 5056

CASES = [
    ("llama", {}, {"pp": 2, "pp_schedule": "gpipe", "pp_microbatches": 4}),
    ("llama", {}, {"pp": 3, "pp_schedule": "gpipe", "pp_microbatches": 2}),
    ("llama", {}, {"pp": 2, "pp_microbatches": 4}),
    ("llama", {}, {"pp": 3, "pp_microbatches": 5, "pp_return_outputs": False}),
    ("llama", {"grad_accum": 2}, {"pp": 2, "pp_microbatches": 3}),
    ("llama", {"checkpointing": "full"}, {"pp": 2, "pp_microbatches": 3}),
    ("llama-tied", {"zero_grad": "zero"}, {"pp": 2, "pp_split": [1, 2]}),
    ("gpt_neox", {}, {"pp": 2, "pp_microbatches": 3, "pp_return_outputs": False}),
    ("llama", {}, {"pp": 2, "pp_schedule": "zb-h1", "pp_microbatches": 4}),
    ("llama6", {}, {"pp": 2, "pp_schedule": "interleaved", "pp_microbatches": 4}),
    ("llama6", {}, {"pp": 2, "pp_schedule": "looped-bfs", "pp_microbatches": 3}),
    ("llama6", {}, {"pp": 2, "pp_schedule": "interleaved-zb", "pp_microbatches": 2}),
    ("llama6", {}, {"pp": 2, "pp_schedule": "zbv", "pp_microbatches": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "setup", "spread"), CASES)
def test_every_rank_allocates_what_a_real_one_does(model, setup, spread):
    """Buffers, pieces in the schedule's order, what is held until it is sent: phase by phase."""
    case = {"model": model, "setup": {"optim": "adamw_torch", **setup}, "spread": spread}
    real, streams = real_ranks(case), predicted_ranks(case)
    assert len(real) == len(streams) == spread["pp"]
    for rank, (measured, stream) in enumerate(zip(real, streams, strict=True)):
        check_events(stream.events, stream.sizes)
        predicted = as_run(stream)
        steps = [phase for phase in predicted.phases if not phase.name.startswith("load")]
        assert [p.name for p in measured.phases] == [p.name for p in steps]
        host = HOST + (RNG_STATES if "checkpointing" in setup else 0)
        for same, phase in zip(measured.phases, steps, strict=True):
            assert abs(phase.alive - same.alive) <= host, f"rank {rank}: alive at {phase.name}"
            assert abs(phase.peak - same.peak) <= host, f"rank {rank}: peak in {phase.name}"
        assert differences(of_steps(measured), of_steps(predicted), at_least=16384) == []
