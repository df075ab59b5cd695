"""What the act of tracing changes, undone: each operator's backward against a run nobody watches.

``TensorSubclassLikeUtils.h`` makes autograd avoid in-place writes on meta tensors and under any
dispatch mode. These tests measure the real thing on the CPU without any mode.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from memest.calibration.running.cpu_memory import mark, measure
from memest.events import Phase
from memest.trace.cuda import in_place
from memest.trace.cuda.cpu_ops import cpu_handlers, cpu_operators
from memest.trace.cuda.cuda_ops import kernel_handlers
from memest.trace.cuda.in_place import in_place_handlers
from memest.trace.cuda.known_values import attach
from memest.trace.cuda.value_answers import answer_handlers
from memest.trace.inputs.batch import realise
from memest.trace.recorder import Recorder
from memest.trace.training import TracePlan, trace_training
from support.cases import GPU, twin
from support.real_memory import differences, run_of_trace

N = 32
ROWS = torch.arange(N) % 5


def _qkv(x, w):
    """Three products of one input: its first gradient is a view of a 2-D product."""
    return functional.linear(x, w) + functional.linear(x, w) * functional.linear(x, w)


def _parallel_residual(x, w):
    """GPT-NeoX: x + attention(norm(x)) + mlp(norm(x)): one gradient waits for two nodes."""
    size = (x.shape[-1],)
    left = functional.linear(functional.layer_norm(x, size), w)
    right = functional.linear(functional.layer_norm(x, size), w)
    return right + left + x


def _biased(rows, bias):
    out = torch.add(rows, bias)
    return out * 2


def _masked_attention(x, w):
    query = functional.linear(x, w).view(4, N, 2, N // 2).transpose(1, 2)
    mask = x.new_zeros(N, N)
    return functional.scaled_dot_product_attention(query, query, query, mask, 0.1)


CASES = {
    "residual join": lambda x, w: x.tanh() + x.sin(),
    "the same tensor twice": lambda x, w: x + x,
    "three arrivals": lambda x, w: x.tanh() + x.sin() * x.cos(),
    "query, key and value": _qkv,
    "parallel residual": _parallel_residual,
    "linear of a transposed input": lambda x, w: _qkv(x.transpose(1, 2), w),
    "linear of a transposed input, with a bias": lambda x, w: functional.linear(
        x.transpose(1, 2), w, w[0]
    ),
    "linear of four dimensions, with a bias": lambda x, w: functional.linear(
        x.view(2, 2, N, N).transpose(1, 2), w, w[0]
    ),
    "a bias that Python adds": lambda x, w: x.transpose(1, 2) @ w.t() + w[0],
    "a bias that Python adds to a variable": lambda x, w: _biased(x.transpose(1, 2) @ w.t(), w[0]),
    "matmul of an expanded input": lambda x, w: x @ w.expand(4, N, N) + x,
    "reshape of what cannot be viewed": lambda x, w: x.transpose(1, 2).reshape(4, -1) * 2,
    "tied weight": lambda x, w: functional.embedding(ROWS.to(x.device), w) @ w + x,
    "gather": lambda x, w: x.gather(1, ROWS.to(x.device).view(1, N, 1).expand(4, N, N)),
    "index_select": lambda x, w: x.index_select(1, ROWS.to(x.device)),
    "index": lambda x, w: x[:, ROWS.to(x.device)],
    "index of the first dimension": lambda x, w: x[ROWS.to(x.device) % 4],
    "select": lambda x, w: x[:, 0] * 2,
    "topk": lambda x, w: x.topk(3).values,
    "sort": lambda x, w: x.sort().values,
    "max": lambda x, w: x.max(1).values,
    "min": lambda x, w: x.min(-1, keepdim=True).values,
    "scatter_add": lambda x, w: x.scatter_add(
        1, ROWS.to(x.device).view(1, N, 1).expand(4, N, N), x * 2
    ),
    "index_add": lambda x, w: x.index_add(1, ROWS.to(x.device), x * 2),
    "cross entropy": lambda x, w: functional.cross_entropy(
        (x @ w).view(-1, N), ROWS.repeat(4).to(x.device)
    ),
    "masked_fill and where": lambda x, w: torch.where(x.masked_fill(x > 0, 1.0) > 0, x, x * 2),
    "layer norm of a transposed gradient": lambda x, w: (
        functional.layer_norm(x * 2, (N,)).transpose(1, 2).reshape(-1)
    ),
    "log_softmax of a transposed gradient": lambda x, w: (
        (x * 2).log_softmax(-1).transpose(1, 2).reshape(-1)
    ),
    "split and cat": lambda x, w: torch.cat(x.split(8, -1)[::-1], -1) * x,
    "mse_loss": lambda x, w: functional.mse_loss(x @ w, x.detach()),
    "smooth_l1_loss": lambda x, w: functional.smooth_l1_loss(x @ w, x.detach()),
    "attention with a mask": _masked_attention,
    "std_mean sums on its own": lambda x, w: sum(torch.std_mean(x * 2, -1)),
    "roll": lambda x, w: (x * 2).roll((1, 1), (1, 2)) * 2,
}  # fmt: skip


def _both(function):
    """The measured events of one forward and backward, and the traced ones."""

    def go(x, w, begin):
        begin(Phase.FORWARD)
        out = function(x * 1.0, w)
        begin(Phase.BATCH)
        gradient = torch.ones_like(out, memory_format=torch.contiguous_format)
        begin(Phase.BACKWARD)
        out.backward(gradient)
        begin(Phase.ZERO_GRAD)

    def start(device):
        make = {"device": device, "requires_grad": True}
        return torch.rand(4, N, N, **make), torch.rand(N, N, **make)

    x, w = start("cpu")
    real = measure(lambda: go(x, w, lambda phase: mark(f"{phase} 1 1")))
    handlers = {**answer_handlers(), **in_place_handlers(), **kernel_handlers()}
    handlers |= cpu_handlers(handlers)
    recorder = Recorder(handlers)
    x, w = start("meta")

    def begin(phase):
        recorder.mark(phase, 1, 1)
        if phase is Phase.ZERO_GRAD:
            recorder.forget()

    with cpu_operators(), recorder:
        go(x, w, begin)
    return real, run_of_trace(recorder.trace)


@pytest.mark.parametrize("name", CASES)
def test_same_allocations_as_without_a_trace(name):
    real, trace = _both(CASES[name])

    assert differences(real, trace, at_least=1024) == []


@pytest.mark.parametrize("operator", [lambda x: x.prod(-1), lambda x: x.cumprod(-1)])
def test_products_are_priced_too_high_at_most(operator):
    """Their real backward looks whether there are zeros, and takes a shorter way if not."""
    real, trace = _both(lambda x, w: operator(x))

    assert real.peak < trace.peak < 2.5 * real.peak


def test_an_addition_of_a_python_backward_is_no_join():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2 + gradient

    real, trace = _both(lambda x, w: Twice.apply(x))

    assert differences(real, trace, at_least=1024) == []


def test_without_the_handlers_a_join_would_cost_a_tensor(monkeypatch):
    monkeypatch.setattr(in_place, "_sole_owner", lambda: (0, 0))

    real, trace = _both(CASES["residual join"])

    made = [len(run.allocations(at_least=1024)) for run in (real, trace)]
    assert made[1] == made[0] + 1


# in place and out of place
JOINS = {
    "llama": (28, 6),
    "llama-tied": (28, 7),
    "bert": (12, 0),
    "gpt2": (12, 1),
    "t5": (31, 6),
    "gpt_neox": (21, 3),
}


def _real_joins(twins) -> tuple[int, int]:
    with torch.autograd.profiler.profile(use_kineto=True) as profiler:
        twins.real(**realise(twins.plans, device="cpu")).loss.backward()
    counts = {"aten::add_": 0, "aten::add": 0}

    def walk(nodes, parent):
        for node in nodes:
            if node.name in counts and parent.startswith("autograd::engine::evaluate_function"):
                counts[node.name] += not parent.endswith("AccumulateGrad")
            walk(node.children, node.name)

    walk(profiler.kineto_results.experimental_event_tree(), "")
    return counts["aten::add_"], counts["aten::add"]


@pytest.mark.slow("llama-tied")
@pytest.mark.parametrize("model", JOINS)
def test_joins_of_a_model(model, monkeypatch):
    twins = twin(model, loop="plain", attn_implementation="eager", optim="none")
    for config in (twins.real.config, twins.built_model.model.config):
        config.use_cache = False
    decided = []
    accumulate = in_place._accumulate

    def counted(recorder, func, args, kwargs):
        out = accumulate(recorder, func, args, kwargs)
        if recorder.in_backward and not torch.is_grad_enabled():
            decided.append(out is args[0])
        return out

    monkeypatch.setattr(in_place, "_accumulate", counted)
    trace_training(
        twins.built_model.model,
        twins.setup,
        make_batch=lambda: realise(twins.plans),
        loss_of=lambda outputs, _: outputs["loss"],
        gpu=GPU,
        operators="cpu",
        plan=TracePlan(steps=1),
    )

    assert _real_joins(twins) == JOINS[model]
    assert (decided.count(True), decided.count(False)) == JOINS[model]


def test_boolean_index_is_scattered_in_place():
    mask = torch.arange(N) % 3 == 0

    def pick(x, w):
        known = attach(mask.to("meta"), mask) if x.device.type == "meta" else mask
        return x[:, known]

    real, trace = _both(pick)

    assert real.peak == pytest.approx(trace.peak, abs=600)
