"""Composing a run from a few traced steps gives what tracing all of them gives."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from memest.hardware.catalogue import find_gpu, traits
from memest.steps.batch_line import BatchLine, NotLinearError
from memest.steps.stream import make_stream
from memest.replay.replay import replay
from memest.setup import Setup
from memest.trace.training import TracePlan, trace_training

GPU = traits(find_gpu("a100"))


class Net(torch.nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(self.norm(x)))
        return x


def trace(setup: Setup, plan: TracePlan, batch: int = 64):
    with torch.device("meta"):
        model = Net()
    return trace_training(
        model,
        setup,
        make_batch=lambda: {"x": torch.empty(batch, 512, device="meta")},
        loss_of=lambda out, _: out.pow(2).mean(),
        gpu=GPU,
        plan=plan,
    )


def peaks(trace_, setup: Setup):
    stream = make_stream(trace_, GPU, num_steps=setup.num_steps, grad_accum=setup.grad_accum)
    result = replay(stream.events, stream.sizes)
    return result.peak_allocated_bytes, result.peak_reserved_bytes


@pytest.mark.parametrize("loop", ["trainer", "plain", "accelerate"])
@pytest.mark.parametrize("grad_accum", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_a_composed_run_equals_a_fully_traced_one(loop, grad_accum, optim):
    setup = Setup(loop=loop, grad_accum=grad_accum, optim=optim, num_steps=4)

    full = trace(setup, TracePlan(steps=4, micro_steps=grad_accum))
    short = trace(setup, TracePlan(steps=2, micro_steps=min(grad_accum, 3)))

    whole = make_stream(full, GPU, num_steps=4, grad_accum=grad_accum)
    composed = make_stream(short, GPU, num_steps=4, grad_accum=grad_accum)
    expected = [whole.sizes[e] if e >= 0 else -whole.sizes[~e] for e in whole.events]
    assert expected == [
        composed.sizes[e] if e >= 0 else -composed.sizes[~e] for e in composed.events
    ]
    assert whole.marks == composed.marks


def test_many_micro_steps_cost_no_more_than_a_few():
    """Repetitions are capped; the capped run has the peaks of the uncapped one."""
    many = Setup(grad_accum=40)

    exact = trace(many, TracePlan(steps=2, micro_steps=40))
    capped = trace(many, TracePlan(steps=2, micro_steps=3))

    assert peaks(exact, many) == peaks(capped, many)


def test_two_traces_give_every_batch():
    setup = Setup()
    line = BatchLine(trace(setup, TracePlan(), 40), 40, trace(setup, TracePlan(), 41), 41)

    for batch in (2, 17, 64, 333):
        direct = trace(setup, TracePlan(), batch)
        between = line.at(batch)
        assert direct.sizes == between.sizes
        assert peaks(direct, setup) == peaks(between, setup)


def test_traces_of_different_steps_are_no_line():
    a = trace(Setup(), TracePlan(), 8)
    b = trace(Setup(optim="sgd"), TracePlan(), 9)

    with pytest.raises(NotLinearError):
        BatchLine(a, 8, b, 9)


class Rows(torch.nn.Module):
    """Looks up one element a row, with row numbers on the device or on the host."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.table = torch.nn.Linear(64, 512)
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.zeros(64, dtype=torch.int64, device=x.device)
        return self.table(x)[torch.arange(64, device=self.device), chosen]


def first_look_up(device: str):
    """Sizes of the events from the result of the look-up's layer to what follows it."""
    with torch.device("meta"):
        model = Rows(device)
    setup = Setup(loop="plain", optim="none", num_steps=1)
    traced = trace_training(
        model,
        setup,
        make_batch=lambda: {"x": torch.empty(64, 64, device="meta")},
        loss_of=lambda out, _: out.sum(),
        gpu=GPU,
        plan=TracePlan(steps=1),
    )
    stream = make_stream(traced, GPU, num_steps=1)
    names = [stream.label_names[label] for label in stream.labels]
    at = next(i for i, e in enumerate(stream.events) if e >= 0 and names[e] == "aten.index.Tensor")
    events = stream.events[at - 1 : at + 2]
    return [(e >= 0, names[max(e, ~e)].rpartition(": ")[2]) for e in events]


def test_what_is_made_before_the_results_stands_before_them():
    copy = "index, from the host"
    assert first_look_up("cpu") == [(True, copy), (True, "aten.index.Tensor"), (False, copy)]
    assert not any(name == copy for _, name in first_look_up("meta"))
