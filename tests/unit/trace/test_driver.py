"""Steps of one's own that ask and time the GPU, on a machine without one."""

from __future__ import annotations

import torch

import memest
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
