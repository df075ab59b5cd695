"""Steps of different lengths, put together, against a trace of steps of different lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate

import pytest

torch = pytest.importorskip("torch")

from memest.catalog.gpus import find_gpu, traits
from memest.catalog.resolve import resolve_model
from memest.config.setup import Setup
from memest.errors import TraceError
from memest.estimation.profiler import Profiler
from memest.estimation.whole_run import steps_run
from memest.profiles.joined import join_runs
from memest.profiles.stream import Stream
from memest.replay.replay import replay
from memest.trace.inputs.batch import plan_batch, realise
from memest.trace.losses.loss import loss_for
from memest.trace.model.adjust import set_use_cache
from memest.trace.model.build import build_model
from memest.trace.training import TracePlan, trace_training
from support.streams import make_stream

GPU = traits(find_gpu("a100"))
QWEN = {
    "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 512,
}  # fmt: skip
LENGTHS = [48, 48, 96, 33, 200, 33]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen")
    (path / "config.json").write_text(json.dumps(QWEN))
    return str(path)


def composed(folder, setup, lengths):
    tracer = Profiler(source=resolve_model(folder))
    runs = {}
    for length in set(lengths):
        found = steps_run(tracer, replace(setup, seq_len=length, num_steps=3), GPU)
        runs[length] = found.stream
    return join_runs([runs[length] for length in lengths])


def traced(folder, setup, lengths):
    """The same steps traced in one go, every batch of the length that is its turn."""
    setup = replace(setup, num_steps=len(lengths))
    built = build_model(resolve_model(folder), setup)
    set_use_cache(built.model, setup)
    turns = iter(lengths)

    def batch():
        plans, _, _ = plan_batch(built, replace(setup, seq_len=next(turns)))
        return realise(plans)

    trace = trace_training(
        built.model, setup, make_batch=batch, loss_of=loss_for(built), gpu=GPU,
        operators="cuda", plan=TracePlan(steps=len(lengths), micro_steps=1),
    )  # fmt: skip
    return make_stream(trace, GPU, num_steps=len(lengths))


def as_born(stream):
    """Sizes of births, and which birth each death ends: results may be numbered before scratch."""
    births = {}
    out = []
    for event in stream.events:
        if event >= 0:
            births[event] = len(births)
            out.append(stream.sizes[event])
        else:
            out.append(~births[~event])
    return out


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["trainer", "plain"])
@pytest.mark.parametrize("padded", [False, True])
def test_steps_put_together_are_those_of_one_run(folder, loop, padded):
    setup = Setup(batch=3, loop=loop, optim="none", padded=padded, dtype="float32")
    ours, one = composed(folder, setup, LENGTHS), traced(folder, setup, LENGTHS)
    assert sorted(ours.sizes[v] for v in ours.events if v >= 0) == sorted(
        one.sizes[v] for v in one.events if v >= 0
    )
    mine, theirs = (
        replay(s.events, s.sizes, chains=s.chains, curve=True) for s in (ours, one)
    )  # fmt: skip
    assert mine.peak_allocated_bytes == theirs.peak_allocated_bytes
    assert mine.peak_reserved_bytes == theirs.peak_reserved_bytes
    assert mine.final_allocated_bytes == theirs.final_allocated_bytes


def test_steps_of_one_length_are_the_run_itself(folder):
    setup = Setup(batch=3, dtype="float32", seq_len=64)
    tracer = Profiler(source=resolve_model(folder))
    three = steps_run(tracer, replace(setup, num_steps=3), GPU).stream
    six = steps_run(tracer, replace(setup, num_steps=6), GPU).stream
    ours = join_runs([three] * 6)
    assert as_born(ours) == as_born(six)
    assert [(m.phase, m.step) for m in ours.marks] == [(m.phase, m.step) for m in six.marks]


def asked_for(stream: Stream) -> int:
    """The most bytes that are alive, before any rounding."""
    changes = (stream.sizes[e] if e >= 0 else -stream.sizes[~e] for e in stream.events)
    return max(accumulate(changes))


@pytest.mark.slow
def test_an_order_of_lengths_leaves_blocks_that_nobody_fits(folder):
    """What is reserved depends on what came before, what is asked for on the largest alone."""
    setup = Setup(batch=16, dtype="float32", optim="none")
    rising = composed(folder, setup, [40, 40, 120, 200, 280, 360, 440, 500])
    alone = composed(folder, setup, [500, 500, 500])
    a, b = (replay(s.events, s.sizes) for s in (rising, alone))
    assert a.peak_reserved_bytes > b.peak_reserved_bytes
    assert asked_for(rising) == asked_for(alone)


def test_runs_that_leave_different_things_are_refused(folder):
    tracer = Profiler(source=resolve_model(folder))
    one = steps_run(tracer, Setup(batch=2, seq_len=32, num_steps=3, loop="plain"), GPU).stream
    other = steps_run(tracer, Setup(batch=2, seq_len=32, num_steps=3, optim="none"), GPU).stream
    with pytest.raises(TraceError, match="cannot be composed"):
        join_runs([one, one, other])
