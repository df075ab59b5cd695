"""Compiled code: what only a run on the GPU decides, as ranges."""

from __future__ import annotations

from memest.units import MIB
from memest.workspaces.layout import tensor
from memest.workspaces.operator_call import GpuTraits, OpCall, Workspace
from memest.workspaces.registry import rule

__all__ = ["measured_kernel", "padded_product"]

_LARGEST_L2 = 128 * MIB
_ALIGNMENT = {"float16": 8, "bfloat16": 8, "float32": 4, "float64": 2}


@rule("inductor.triton")
def measured_kernel(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:  # noqa: ARG001
    """A buffer as large as the L2 cache, while the first launch of a kernel is measured.

    A kernel with several configurations is timed at its first launch, with the cache flushed
    before each run; what it writes in place is copied within the peak that was reached, or to the
    host. Kernels with one configuration are not measured: none is expected, and the largest L2
    cache of the GPUs that are sold (126 MiB, B200) bounds it.

    Source: torch 2.13 _inductor/runtime/benchmarking.py, InductorBenchmarker.benchmark_gpu;
    _inductor/runtime/triton_heuristics.py, CachingAutotuner.copy_args_to_cpu_if_needed.
    Evidence: source.
    """
    return (Workspace(0, "Inductor's measurement of kernels", high_nbytes=_LARGEST_L2),)


@rule("inductor.matmul")
def padded_product(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:  # noqa: ARG001
    """Copies of operands and result padded to 16 bytes, where a measurement favours them.

    Extents that are no multiple of 8 (half precision) or 4 (float32) elements are padded where
    that is measured to be faster; memest measures nothing, so the copies are a range.

    Source: torch 2.13 _inductor/fx_passes/pad_mm.py, get_alignment_size and should_pad.
    Evidence: source.
    """
    first, second = tensor(call, 0, "mat1"), tensor(call, 1, "mat2")
    if first is None or second is None or len(first.shape) < 2 or first.dtype not in _ALIGNMENT:
        return ()
    unit = _ALIGNMENT[first.dtype]
    (rows, inner), columns = first.shape[-2:], second.shape[-1]
    batch = first.numel // (rows * inner) if first.numel else 0

    def pad(extent: int) -> int:
        return extent if extent == 1 else -(-extent // unit) * unit

    if (pad(rows), pad(inner), pad(columns)) == (rows, inner, columns):
        return ()
    elements = pad(rows) * pad(inner) + pad(inner) * pad(columns) + pad(rows) * pad(columns)
    size = batch * elements * first.itemsize
    return (Workspace(0, "padded operands of a matmul", high_nbytes=size),)
