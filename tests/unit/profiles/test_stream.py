"""Composing a run from a few traced steps gives what tracing all of them gives."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from memest.catalog.gpus import find_gpu, traits
from memest.config.options import setup_from_options
from memest.config.setup import Setup
from memest.profiles.pieces import splice
from memest.replay.replay import replay
from memest.trace.training import TracePlan, plan_to_compose, trace_training, trace_updates
from support.streams import make_stream

GPU = traits(find_gpu("a100"))


class Net(torch.nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(self.norm(x)))
        return x


def trace(setup: Setup, plan: TracePlan, batch: int = 64):
    with torch.device("meta"):
        model = Net()
    traced = trace_training(
        model,
        setup,
        make_batch=lambda: {
            "x": torch.empty(batch, 512, device="meta"),
            "labels": torch.empty(batch, dtype=torch.int64, device="meta"),
        },
        loss_of=lambda out, _: out.pow(2).mean(),
        gpu=GPU,
        plan=plan,
    )
    if plan.updates:
        return traced
    return splice(traced, trace_updates(traced.weights, setup, GPU))


def peaks(trace_, setup: Setup):
    stream = make_stream(trace_, GPU, num_steps=setup.num_steps, grad_accum=setup.grad_accum)
    result = replay(stream.events, stream.sizes)
    return result.peak_allocated_bytes, result.peak_reserved_bytes


@pytest.mark.slow(
    "adamw_torch-4-accelerate",
    "adamw_torch-3-trainer",
    "adamw_torch-3-plain",
    "adamw_torch-4-plain",
    "sgd-4-trainer",
    "adamw_torch_loop-4-trainer",
    "adamw_torch_loop-4-plain",
)
@pytest.mark.parametrize("loop", ["trainer", "plain", "accelerate"])
@pytest.mark.parametrize("grad_accum", [1, 2, 3, 4])
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adamw_torch_loop"])
def test_a_composed_run_equals_a_fully_traced_one(loop, grad_accum, optim):
    assert_composed(Setup(loop=loop, grad_accum=grad_accum, optim=optim, num_steps=4))


@pytest.mark.slow(
    "{'precision': 'fp16'}-4",
    "{'precision': 'fp16', 'loop': 'plain', 'max_grad_norm': 1.0}-4",
    "{'precision': 'bf16', 'loop': 'accelerate', 'zero_grad_at': 'before-forward'}-4",
)
@pytest.mark.parametrize("grad_accum", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp16"},
        {"precision": "fp16", "loop": "plain", "max_grad_norm": 1.0},
        {"precision": "bf16", "loop": "accelerate", "zero_grad_at": "before-forward"},
        {"loop": "plain", "zero_grad_at": "before-backward", "zero_grad": "zero"},
        {"loop": "plain", "del_outputs": True},
        {"zero_grad": "zero", "max_grad_norm": 0.0},
        {"optim": "none"},
        {"optim": "none", "loop": "plain"},
        {"optim": "adafactor"},
        {"software": "torch=1.13,transformers=4.30", "optim": "adamw_hf"},
        {"checkpointing": "none", "freeze": ("layers.0", "norm"), "precision": "fp16"},
    ],
    ids=str,
)
def test_so_it_does_with_other_options(options, grad_accum):
    assert_composed(setup_from_options(grad_accum=grad_accum, num_steps=3, **options))


def assert_composed(setup: Setup):
    """A run put together is, event by event, the one that was traced in one go."""
    run = {"num_steps": setup.num_steps, "grad_accum": setup.grad_accum}
    full = trace(setup, TracePlan(steps=setup.num_steps, micro_steps=setup.grad_accum))
    whole = make_stream(full, GPU, **run)
    composed = make_stream(trace(setup, plan_to_compose(setup)), GPU, **run)
    assert course(whole) == course(composed)
    assert whole.marks == composed.marks


def course(stream):
    """Every event with its size, operator, module and category."""
    told = [
        (size, stream.label_names[label], stream.module_names[module], category)
        for size, label, module, category in zip(
            stream.sizes, stream.labels, stream.modules, stream.categories, strict=True
        )
    ]
    return [(e >= 0, told[max(e, ~e)]) for e in stream.events]


@pytest.mark.slow
def test_many_micro_steps_cost_no_more_than_a_few():
    """Repetitions are capped; the capped run has the peaks of the uncapped one."""
    many = Setup(grad_accum=40)

    exact = trace(many, TracePlan(steps=3, micro_steps=40))
    capped = trace(many, plan_to_compose(many))

    assert peaks(exact, many) == peaks(capped, many)


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
