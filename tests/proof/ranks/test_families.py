"""Runs whose ranks share layers, experts or sequences: what is put together is what is traced."""

from __future__ import annotations

import pytest

from memest.catalog.resolve import resolve_model
from memest.config.options import merge_options
from memest.estimation.gpu_target import target_gpus
from memest.estimation.profiler import Profiler
from memest.estimation.whole_run import steps_run
from memest.profiles.axes import traced_setup
from memest.sharding.rank import rank_stream
from memest.trace.meta_model import build
from memest.trace.session import trace_built
from memest.trace.training import TracePlan
from support.streams import make_stream

LAYERS = {"num_gpus": 2, "tp": 2}
SEQUENCES = {**LAYERS, "tp_sequence_parallel": True, "loop": "plain"}
CONTEXT = {"bf16": True, "fsdp": "full_shard", "num_gpus": 4, "cp": 2}
ULYSSES = {"bf16": True, "num_gpus": 4, "zero": 2, "sp": 2}
BATCHES = [{"batch": batch, "seq_len": 64} for batch in (4, 6, 9)]
BATCHES_OF_256 = [{"batch": batch, "seq_len": 256} for batch in (4, 6, 9)]
LENGTHS = [{"batch": 4, "seq_len": length} for length in (256, 512, 384)]
BOTH = [{"batch": 4, "seq_len": 384}, {"batch": 6, "seq_len": 768}]
GROWN = {
    "layers": ("folder", LAYERS, BATCHES, ("batch",)),
    "experts": ("mixture", {**LAYERS, "ep": 2}, BATCHES, ("batch",)),
    "sequences": ("folder", SEQUENCES, BATCHES_OF_256, ("batch",)),
    "sequences, lengths": ("folder", SEQUENCES, LENGTHS, ("seq_len",)),
    "context": ("folder", CONTEXT, BOTH, ("batch", "seq_len")),
    "context of three": (
        "folder", {**CONTEXT, "num_gpus": 6, "cp": 3}, BOTH, ("batch", "seq_len"),
    ),
    "ulysses": ("folder", ULYSSES, BOTH, ("batch", "seq_len")),
    "ulysses, stage 3": ("folder", {**ULYSSES, "zero": 3}, BOTH, ("batch", "seq_len")),
}  # fmt: skip


@pytest.mark.slow(but=("layers", "ulysses"))
@pytest.mark.parametrize("name", GROWN)
def test_a_family_answers_what_a_trace_at_that_size_has(name, request):
    """Two sizes grow it, or one where two axes vary; the last is answered without a trace."""
    model, run, sizes, axes = GROWN[name]
    model = request.getfixturevalue(model)
    tracer = Profiler.of(model)
    setups = [merge_options(None, {**run, **size}) for size in sizes]
    traits = target_gpus(setups[0]).main.traits
    for setup in setups[:-1]:
        steps_run(tracer, setup, traits, axes)
    made = tracer.traces_made
    grown = steps_run(tracer, setups[-1], traits, axes)
    assert tracer.traces_made == made
    fresh = Profiler.of(model).trace(setups[-1], traits)
    assert list(grown.stream.events) == list(fresh.stream.events)
    assert grown.stream.sizes == fresh.stream.sizes


@pytest.mark.slow(but=("plain-context", "accelerate-ulysses"))
@pytest.mark.parametrize("run", [CONTEXT, ULYSSES], ids=["context", "ulysses"])
@pytest.mark.parametrize("loop", ["trainer", "accelerate", "plain"])
def test_a_composed_run_is_the_run_that_is_traced_whole(folder, loop, run):
    """Three micro-steps and two steps put together from pieces, against a trace of all of them."""
    more = {"batch": 2, "seq_len": 256, "grad_accum": 3, "loop": loop, "optim": "none"}
    tracer, setup = Profiler.of(folder), merge_options(None, {**run, **more})
    traits = target_gpus(setup).main.traits
    composed = steps_run(tracer, setup, traits).stream
    whole = traced_setup(tracer.resolve(setup))
    built = build(whole, resolve_model(folder), None, None, None)
    plan = TracePlan(steps=setup.num_steps, micro_steps=3, updates=False)
    trace = trace_built(built, whole, traits, plan)
    traced = make_stream(trace, traits, num_steps=setup.num_steps, grad_accum=3, cues=True)
    trace = trace_built(built, whole, traits)
    rank = rank_stream(traced, setup, trace.weights, trace.landmarks, 3)
    mine, theirs = (
        [one.sizes[e] if e >= 0 else -one.sizes[~e] for e in one.events] for one in (composed, rank)
    )
    assert mine == theirs
