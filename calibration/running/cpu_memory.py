"""Measuring a real step on the CPU: every allocation, in order, with the phase it belongs to.

PyTorch's profiler reports each call of the CPU allocator. Marks are profiler ranges, so they lie in
the same stream. What a GPU would keep in host memory must not count: batches come from numpy memory
and are copied when they "move to the device", as a copy to a GPU is an allocation there.

What the stream contains and a trace does not:

* Scratch memory inside kernels. oneDNN is switched off (it packs weights and makes scratchpads);
  one thread, because some kernels make one buffer a thread. What is left is CPU kernels' own
  scratch: :data:`CPU_SCRATCH` lists the kernels with their sources, and only what such a kernel
  gives back before it returns is left out. Collectives (``c10d::``) write into what they are given;
  the copies that gloo makes, and gives back in a thread of its own, are left out too.
* Numbers on the host: ``step`` counters, Python numbers wrapped as 0-dim tensors, random seeds.
  They are a few bytes each and live in host memory in a CUDA run too.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["CPU_SCRATCH", "CpuRun", "MemoryEvent", "PhaseBytes", "mark", "measure"]

MARK_PREFIX = "memest:"
CPU_SCRATCH = {
    # im2col buffers; CUDA's convolutions have workspaces of their own (memest.workspaces)
    "aten::_slow_conv2d_forward": "ATen/native/ConvolutionMM2d.cpp",
    "aten::_slow_conv2d_backward": "ATen/native/ConvolutionMM2d.cpp",
    # the block that a transposing copy goes through (copy_same_type_transpose_)
    "aten::copy_": "ATen/native/Copy.cpp",
    # accumulation buffers, one a thread
    "aten::native_batch_norm": "ATen/native/Normalization.cpp",
    "aten::native_batch_norm_backward": "ATen/native/Normalization.cpp",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "cpu/FlashAttentionKernel.cpp",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "cpu/FlashAttentionKernel.cpp",
    # one memory format for all operands (memest.workspaces prices CUDA's copies)
    "aten::_convolution": "ATen/native/Convolution.cpp",
    "aten::convolution_backward": "ATen/native/Convolution.cpp",
    "aten::max_pool2d_with_indices_backward": "ATen/native/DilatedMaxPool2d.cpp",
    "aten::upsample_nearest2d": "ATen/native/cpu/UpSampleKernel.cpp",
    "aten::upsample_bilinear2d": "ATen/native/cpu/UpSampleKernel.cpp",
    # contiguous copies of what they are given; unreduced losses (memest.workspaces prices CUDA's)
    "aten::native_layer_norm": "ATen/native/layer_norm.cpp",
    "aten::native_layer_norm_backward": "ATen/native/layer_norm.cpp",
    "aten::_log_softmax_backward_data": "ATen/native/SoftMax.cpp",
    "aten::mse_loss": "ATen/native/Loss.cpp",
    "aten::smooth_l1_loss": "ATen/native/Loss.cpp",
}
"""CPU kernels that take memory of their own and give it back before they return, with sources."""
_COLLECTIVE = "c10d::"
_WHENEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class PhaseBytes:
    """One phase: bytes alive when it begins, and the highest during it."""

    name: str
    alive: int
    peak: int


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """One allocation (positive) or release (negative), by which operator, in which phase."""

    nbytes: int
    op: str
    phase: str
    key: int


@dataclass(slots=True)
class CpuRun:
    """A measured run; bytes count from the first mark on.

    Attributes:
        phases: one after the other.
        events: allocations and releases within them.
    """

    phases: list[PhaseBytes] = field(default_factory=list)
    events: list[MemoryEvent] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The highest of all phases."""
        return max(p.peak for p in self.phases)

    def allocations(self, at_least: int = 0) -> list[MemoryEvent]:
        """Allocations alone, in order."""
        return [e for e in self.events if e.nbytes >= max(at_least, 1)]


def mark(name: str) -> None:
    """Put a mark into the profiler's stream."""
    with torch.autograd.profiler.record_function(MARK_PREFIX + name):
        pass


def measure(step: Callable[[], object]) -> CpuRun:
    """Run ``step`` under the profiler; bytes count from the first mark on.

    Args:
        step: runs and calls :func:`mark`.
    """
    gc.collect()
    gc.disable()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            torch.backends.mkldnn.flags(enabled=False),
            torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profiler,
        ):
            step()
    finally:
        torch.set_num_threads(threads)
        gc.enable()
    return _read(profiler.kineto_results.experimental_event_tree())


@dataclass(frozen=True, slots=True)
class _Memory:
    """One record of the allocator: when, how much, where, and until when its operator ran."""

    start: int
    nbytes: int
    key: int
    path: str
    scratch_until: int


def _flat(
    nodes: Any, path: str = "", scratch_until: int = 0
) -> Iterator[_Memory | tuple[int, str]]:
    for node in nodes:
        if node.name == "[memory]":
            what = node.extra_fields
            yield _Memory(node.start_time_ns, what.alloc_size, what.ptr, path, scratch_until)
        elif node.name.startswith(MARK_PREFIX):
            yield node.start_time_ns, node.name.removeprefix(MARK_PREFIX)
        if node.children:
            yield from _flat(
                node.children, f"{path}/{node.name}", _scratch_end(node, scratch_until)
            )


def _scratch_end(node: Any, scratch_until: int) -> int:
    """Until when what is allocated in an operator and freed again counts as its scratch."""
    if node.name.startswith(_COLLECTIVE):
        return _WHENEVER
    return int(node.end_time_ns) if node.name in CPU_SCRATCH else scratch_until


def _without_scratch(records: list[Any]) -> Iterator[Any]:
    """Leave out what a listed kernel allocates and gives back before it returns.

    Left out, too, are releases of what was allocated before the profile began: PyTorch tells them
    only where a measurement before this one left an entry of the same address, and its size
    (``ProfiledCPUMemoryReporter`` of c10/core/CPUAllocator.cpp).
    """
    alive: dict[int, tuple[int, int]] = {}
    scratch: set[int] = set()
    for index, record in enumerate(records):
        if not isinstance(record, _Memory):
            continue
        if record.nbytes > 0:
            alive[record.key] = (index, record.scratch_until)
            if record.scratch_until == _WHENEVER:
                scratch.add(index)  # the profiler does not see what another thread frees
        elif record.key in alive:
            birth, until = alive.pop(record.key)
            if record.start <= until:
                scratch |= {birth, index}
        else:
            scratch.add(index)
    return (record for index, record in enumerate(records) if index not in scratch)


def _read(tree: Any) -> CpuRun:
    run = CpuRun()
    now = peak = alive = 0
    phase: str | None = None
    records = sorted(_flat(tree), key=lambda r: r.start if isinstance(r, _Memory) else r[0])
    for record in _without_scratch(records):
        if isinstance(record, _Memory):
            now += record.nbytes
            peak = max(peak, now)
            if phase is not None:
                run.events.append(MemoryEvent(record.nbytes, record.path, phase, record.key))
            continue
        if phase is None:
            now = 0
        else:
            run.phases.append(PhaseBytes(phase, alive, peak))
        phase = record[1]
        alive = peak = now
    # what follows the last mark belongs to no phase
    run.events = [event for event in run.events if event.phase != phase]
    return run
