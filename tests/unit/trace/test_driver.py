"""Steps of one's own that ask and time the GPU, on a machine without one."""

from __future__ import annotations

import pytest
import torch

import memest
from memest.config.inputs import module_inputs_of
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.estimation.profiler import Profiler
from memest.workspaces.operator_call import GpuTraits, OpCall, TensorSpec
from memest.workspaces.registry import workspaces_of


def step(model, batch):
    assert torch.cuda.is_available()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(torch.cuda.current_stream())
    with torch.cuda.nvtx.range("forward"):
        scale = torch.tensor(3.0, device="cuda")
        loss = (2 ** model(batch["x"]) * scale).mean()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == 0.0
    assert torch.cuda.get_device_properties(0).total_memory > 0
    assert len(torch.cuda.mem_get_info()) == 2
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history()
    return loss


def test_what_a_step_asks_of_the_driver_is_answered():
    there = torch.cuda.is_available()
    answer = memest.estimate(
        torch.nn.Linear(8, 1), inputs={"x": "float32[B,8]"}, step_fn=step, batch=2, max_batch=False
    )
    assert answer.peak.allocated_bytes > 0
    assert torch.cuda.is_available() is there


def test_a_number_whose_powers_are_taken_is_a_tensor():
    spec = TensorSpec((4,), (1,), "float32")
    gpu = GpuTraits((8, 0), 108, 2048)

    def sizes(base):
        call = OpCall("aten.pow.Scalar", (base, spec), (), (spec,), "main")
        return [each.nbytes for each in workspaces_of(call, gpu)]

    assert sizes(2) == [8]
    assert sizes(1) == []


ROWS = 1 << 20
SHIFT = 16 * ROWS


class Beside(torch.nn.Module):
    """Two temporaries of 16 MiB one after the other, the first of them where it is told."""

    def __init__(self, *, aside, new=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.aside, self.new = aside, new
        self.stream = None

    def forward(self, x):
        if self.aside and (self.stream is None or self.new):
            self.stream = torch.cuda.Stream()
        stream = self.stream if self.aside else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            first = x * 2
            assert torch.cuda.current_stream() is stream
            stream.record_event(torch.cuda.Event()).wait()
        torch.cuda.current_stream().wait_stream(stream)
        del first
        with torch.no_grad():
            second = x * 3
        del second
        return (x[:4, 0] * self.weight).mean()


def answer(module, step_fn=None, **options):
    loss = None if step_fn else (lambda out, _batch: out)
    return memest.estimate(
        module, inputs={"x": f"float32[{ROWS},4]"}, loss=loss, step_fn=step_fn,
        max_batch=False, gpu="a100-80gb", **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    return answer(Beside(aside=False))


def test_a_side_stream_has_blocks_of_its_own(alone):
    aside = answer(Beside(aside=True))

    assert aside.peak.allocated_bytes == alone.peak.allocated_bytes
    assert aside.peak.reserved_bytes - alone.peak.reserved_bytes >= SHIFT
    assert aside.verdict == alone.verdict == "fits"


def test_streams_that_every_step_makes_anew_are_told():
    said = answer(Beside(aside=True, new=True)).gpu.reason
    assert "streams that a step makes anew" in said


def recorded(model, batch):
    side = torch.cuda.Stream()
    scale = batch["x"] * 2
    scale.record_stream(side)
    return model(batch["x"]) + scale.mean()


def across(model, batch):
    with torch.cuda.stream(torch.cuda.Stream()):
        return model(batch["x"])


@pytest.mark.parametrize(
    ("step_fn", "said"),
    [(recorded, "record_stream"), (across, "gradients that cross streams")],
)
def test_what_waits_for_another_stream_has_no_price(step_fn, said):
    fit = answer(Beside(aside=False), step_fn).gpu
    assert fit.verdict == "cannot say"
    assert said in fit.reason


def test_backward_runs_on_the_stream_of_its_forward():
    def forward(model, batch):
        with torch.cuda.stream(torch.cuda.Stream()):
            inner = model["inner"](batch["x"])
        return model["outer"](inner).sum()

    model = torch.nn.ModuleDict({"inner": torch.nn.Linear(8, 8), "outer": torch.nn.Linear(8, 8)})
    inputs = module_inputs_of({"x": "float32[4,8]"}, None, forward, None, None)
    run = Profiler.of(model, module_inputs=inputs).trace(
        Setup(batch=4, loop="plain"), GpuTraits((8, 0), 108, 2048)
    )
    stream = run.stream
    layers = {"inner": set(), "outer": set()}
    for number, label in enumerate(stream.labels):
        name, layer = stream.label_names[label], stream.module_names[stream.modules[number]]
        if name.startswith("aten.mm.default") and "workspace" not in name:
            layers[layer].add(stream.on_streams[number])
    assert layers == {"inner": {64}, "outer": {0}}
    workspaces = [name for name in stream.label_names if "cuBLAS workspace" in name]
    assert len([name for name in workspaces if name.endswith("on stream 1")]) == 2


@pytest.mark.parametrize("name", ["graph", "CUDAGraph", "make_graphed_callables", "MemPool"])
def test_graphs_are_refused(name):
    def graphed(model, batch):
        getattr(torch.cuda, name)(model)
        return model(batch["x"])

    with pytest.raises(ConfigError, match="pools of their own, which is not priced yet"):
        answer(Beside(aside=False), graphed)
