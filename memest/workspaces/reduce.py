"""Reductions: scratch of ``gpu_reduce_kernel``, and the copies that a reduction makes of its input.

The launch plan follows TensorIterator: dimensions are sorted (reduced ones first, then by
stride), neighbours are merged, and the plan depends on what is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memest.workspaces.layout import (
    acc_bytes,
    argument,
    ceil_div,
    contiguous_copy,
    is_floating,
    kernel_copy,
    until,
)
from memest.workspaces.operator_call import GpuTraits, OpCall, TensorSpec, Value, Workspace
from memest.workspaces.registry import rule

__all__ = ["ReduceKernel", "reduce_dims", "reduction_scratch"]

_INT32_MAX = (1 << 31) - 1
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256

Dim = tuple[int, int, int]
"""Extent, stride of the input, stride of the output (0 where reduced), both in elements."""


@dataclass(frozen=True, slots=True)
class ReduceKernel:
    """What a kernel passes to ``gpu_reduce_kernel`` as template arguments.

    Attributes:
        acc_bytes: size of the accumulator (value and index for argmax, four fields for var).
        in_place: whether partial results of a split iteration fit the output's type.
    """

    acc_bytes: int
    in_place: bool = True


def reduce_dims(value: Value, ndim: int) -> tuple[int, ...]:
    """Dimensions that an argument names: none and the empty list mean all of them."""
    if isinstance(value, tuple) and value:
        return tuple(sorted({int(d) % max(ndim, 1) for d in value if isinstance(d, int)}))
    if isinstance(value, int) and not isinstance(value, bool):
        return (value % max(ndim, 1),)
    return tuple(range(ndim))


def reduction_scratch(
    spec: TensorSpec,
    dims: tuple[int, ...],
    kernel: ReduceKernel,
    gpu: GpuTraits,
    *,
    out_bytes: int,
    keepdim: bool = False,
) -> tuple[Workspace, ...]:
    """Staging buffer and semaphores of a reduction that several blocks share, else nothing.

    Args:
        spec: the input as the kernel sees it.
        dims: reduced dimensions, not negative.
        kernel: accumulator of the kernel.
        gpu: the GPU.
        out_bytes: bytes of an element of the (first) output.
        keepdim: whether the output keeps the reduced dimensions.
    """
    if spec.numel == 0:
        return ()
    plan = _plan(spec, dims, keepdim=keepdim)
    workspaces: list[Workspace] = []
    if not _fits_32_bits(plan, spec.itemsize, out_bytes):
        count = math.prod(extent for extent, _, out in plan if out)
        if not kernel.in_place and out_bytes < kernel.acc_bytes:
            workspaces.append(Workspace(count * kernel.acc_bytes, "reduction accumulator"))
        plan = _largest_part(plan, spec.itemsize, out_bytes, kernel, gpu)
    buffer, semaphores = _launch(plan, spec.dtype, kernel, gpu)
    if buffer:
        workspaces.append(Workspace(buffer, "reduction scratch"))
        workspaces.append(Workspace(semaphores, "reduction semaphores"))
    return tuple(workspaces)


def _plan(spec: TensorSpec, dims: tuple[int, ...], *, keepdim: bool) -> list[Dim]:
    """Sort and merge dimensions as TensorIterator does for a reduction into a dense output."""
    out_stride = 1
    plan: list[Dim] = []
    for d in reversed(range(len(spec.shape))):
        extent = spec.shape[d]
        reduced = d in dims and not (keepdim and extent == 1)
        plan.append((extent, spec.stride[d], 0 if reduced else out_stride))
        if d not in dims:
            out_stride *= max(extent, 1)
    for i in range(1, len(plan)):
        at = i
        for j in reversed(range(i)):
            order = _compare(plan[j], plan[at])
            if order > 0:
                plan[j], plan[at] = plan[at], plan[j]
                at = j
            elif order < 0:
                break
    return _merge(plan)


def _compare(first: Dim, second: Dim) -> int:
    """1 if the second dimension moves in front of the first, -1 if it stays, 0 if undecided."""
    if (first[2] == 0) != (second[2] == 0):
        return 1 if second[2] == 0 else -1
    for operand in (2, 1):
        a, b = first[operand], second[operand]
        if a == 0 or b == 0:
            continue
        if a != b:
            return -1 if a < b else 1
        if first[0] > second[0]:
            return 1
    return 0


def _merge(dims: list[Dim]) -> list[Dim]:
    merged_dims: list[Dim] = []
    for dim in dims:
        if not merged_dims:
            merged_dims.append(dim)
            continue
        extent, stride, out = merged_dims[-1]
        if extent == 1 or dim[0] == 1 or (extent * stride == dim[1] and extent * out == dim[2]):
            source = dim if extent == 1 else merged_dims[-1]
            merged_dims[-1] = (extent * dim[0], source[1], source[2])
        else:
            merged_dims.append(dim)
    return merged_dims


def _fits_32_bits(plan: list[Dim], in_bytes: int, out_bytes: int) -> bool:
    if math.prod(extent for extent, _, _ in plan) > _INT32_MAX:
        return False
    reach_in = 1 + in_bytes * sum((extent - 1) * stride for extent, stride, _ in plan)
    reach_out = 1 + out_bytes * sum((extent - 1) * out for extent, _, out in plan)
    return max(reach_in, reach_out) <= _INT32_MAX


def _largest_part(
    plan: list[Dim], in_bytes: int, out_bytes: int, kernel: ReduceKernel, gpu: GpuTraits
) -> list[Dim]:
    """The part with the largest scratch when an iteration is halved until it fits 32 bits.

    The parts run one after the other and free their scratch, so only the largest one counts.
    """
    if _fits_32_bits(plan, in_bytes, out_bytes):
        return plan
    reach = [(e - 1) * max(abs(i) * in_bytes, abs(o) * out_bytes) for e, i, o in plan]
    at = max(range(len(plan)), key=lambda d: (reach[d], d))
    extent, stride, out = plan[at]
    halves = {extent // 2, extent - extent // 2}
    parts = []
    for half in halves:
        part = [*plan[:at], (half, stride, out), *plan[at + 1 :]]
        parts.append(_largest_part(part, in_bytes, out_bytes, kernel, gpu))
    dtype = "float64" if in_bytes == 8 else "float32"
    return max(parts, key=lambda part: _launch(part, dtype, kernel, gpu)[0])


def _pow2_floor(value: int) -> int:
    return 1 << (max(value, 1).bit_length() - 1)


def _launch(plan: list[Dim], dtype: str, kernel: ReduceKernel, gpu: GpuTraits) -> tuple[int, int]:
    """Bytes of staging buffer and semaphores for a launch plan; zeros when one block suffices."""
    num_reduced_dims = sum(1 for _, _, out in plan if out == 0)
    outputs = math.prod(extent for extent, _, out in plan if out)
    inputs = math.prod(extent for extent, _, _ in plan) // outputs
    fast = num_reduced_dims == len(plan) or (
        num_reduced_dims > 0 and plan[0][1] < plan[num_reduced_dims][1]
    )
    dim0, dim1 = (inputs, outputs) if fast else (outputs, inputs)
    fastest = 1 if not plan else plan[0][1] if fast else plan[num_reduced_dims][1]
    output_vec = 1
    if fastest == 1:
        if fast and dim0 >= 128 and num_reduced_dims == 1:
            # kernels load 2, 4 or 8 at once; below 4096 inputs, where that would change the
            # block, one block takes them all
            dim0 //= 4
        elif not fast:
            output_vec = _output_vec(plan, num_reduced_dims)
            dim0 //= output_vec
    width, height = _block(dim0, dim1, (256 if dtype == "complex128" else 512) // output_vec)

    step_in, step_out = (width, 1) if fast else (1, width)
    across_warps = ceil_div(inputs, step_in) >= min(height * 16, _MAX_VALUES_PER_THREAD)
    if across_warps:
        step_in *= height
    else:
        step_out *= height
    target = gpu.sm_count * (gpu.max_threads_per_sm // (width * height))
    grid = ceil_div(outputs // output_vec, step_out)
    values = ceil_div(inputs, step_in)
    if not across_warps or values < _MAX_VALUES_PER_THREAD or grid > target:
        return 0, 0
    target_ctas = min(ceil_div(target, grid), ceil_div(values, _MIN_VALUES_PER_THREAD))
    ctas = max(target_ctas, ceil_div(values, _MAX_VALUES_PER_THREAD))
    if ctas <= 1:
        return 0, 0
    buffer = kernel.acc_bytes * outputs * ctas
    return buffer if fast else buffer * width * output_vec, 4 * grid


def _output_vec(plan: list[Dim], fastest: int) -> int:
    # the base address counts as aligned: the allocator aligns to 512 bytes
    vec = 4
    for value in (plan[fastest][0], *(s for d, (_, s, _) in enumerate(plan) if d != fastest)):
        while value % vec:
            vec //= 2
    return vec


def _block(dim0: int, dim1: int, max_threads: int) -> tuple[int, int]:
    limit0 = _pow2_floor(dim0) if dim0 < max_threads else max_threads
    limit1 = _pow2_floor(dim1) if dim1 < max_threads else max_threads
    width = min(limit0, 32)
    height = min(limit1, max_threads // width)
    return min(limit0, max_threads // height), height


def _reduction_workspaces(
    spec: TensorSpec,
    out: TensorSpec,
    gpu: GpuTraits,
    kernel: ReduceKernel,
    dim: Value,
    *,
    cast: bool = False,
) -> tuple[Workspace, ...]:
    """Scratch of a reduction, after the cast that some of them make."""
    workspaces: tuple[Workspace, ...] = ()
    fused = spec.dtype in ("float16", "bfloat16") and out.dtype == "float32"
    if cast and spec.dtype != out.dtype and not fused and not spec.dtype.startswith("complex"):
        workspaces = (kernel_copy(spec, "reduction input, cast", out.itemsize),)
        spec = TensorSpec(spec.shape, spec.stride, out.dtype)
    keepdim = len(out.shape) == len(spec.shape)
    dims = reduce_dims(dim, len(spec.shape))
    return workspaces + reduction_scratch(
        spec, dims, kernel, gpu, out_bytes=out.itemsize, keepdim=keepdim
    )


_SUMS = ("sum", "nansum", "mean", "prod", "linalg_vector_norm", "norm")
_WITH_INDEX = ("argmax", "argmin")


@rule(
    *(f"aten.{name}" for name in _SUMS),
    *("aten.amax", "aten.amin", "aten.max.default", "aten.min.default", "aten.aminmax"),
    *("aten.max.dim", "aten.min.dim", "aten.argmax", "aten.argmin", "aten.max.dim_max"),
    *("aten.any", "aten.all", "aten.std", "aten.var", "aten.std_mean", "aten.var_mean"),
    needs="self out",
)
def reduction(
    call: OpCall, gpu: GpuTraits, spec: TensorSpec, out: TensorSpec
) -> tuple[Workspace, ...]:
    """Accumulator bytes x outputs x blocks per output (x block width if strided); a cast of ints.

    Accumulators: of sums and norms as the result, fp32 for half types; of extreme values the
    input's own type (two for aminmax), with an index 16 bytes (value, index, padding); 1 byte for
    any and all, which do not cast; Welford's four fields for deviations, 16 bytes, fp64 32. An
    integer or bool sum first copies its input to int64 (8 bytes per element); ``argmax`` without a
    dimension first copies an input that is not contiguous.

    Source: ATen/native/cuda/Reduce.cuh, ReduceSumProdKernel.cu, ReduceMomentKernel.cu,
    ReduceNormKernel.cu, ReduceMaxValuesKernel.cu, ReduceAMinMaxKernel.cu, ReduceArgMaxKernel.cu,
    ReduceLogicKernel.cu, ATen/native/ReduceOpsUtils.h, SharedReduceOps.h, LinearAlgebra.cpp (2.x).
    Evidence: recorded (68 pairs of buffer and semaphores of sums, and max over 10000 of 512, 1024
    and 2048 columns: H100, torch 2.6); the rest: source.
    """
    _, name, overload = call.op.split(".")
    dim = argument(call, 2 if "norm" in name else 1, "dim")
    copies: tuple[Workspace, ...] = ()
    if name in _SUMS:
        in_place = not spec.itemsize == out.itemsize == 2
        kernel = ReduceKernel(acc_bytes(out.dtype), in_place=in_place)
        if name in ("sum", "nansum", "mean", "prod") and overload == "default":
            dim = None
    elif name in ("std", "var", "std_mean", "var_mean"):
        kernel = ReduceKernel(32 if spec.dtype == "float64" else 16, in_place=False)
    elif name in ("any", "all"):
        kernel = ReduceKernel(1)
    elif name in _WITH_INDEX or overload in ("dim", "dim_max"):
        kernel = ReduceKernel(16, in_place=False)
        if name in _WITH_INDEX and dim is None:
            copies = contiguous_copy(spec, "argmax input, contiguous")
    else:
        values = 2 if name == "aminmax" else 1
        kernel = ReduceKernel(spec.itemsize * values, in_place=spec.itemsize != 2)
    return copies + _reduction_workspaces(spec, out, gpu, kernel, dim, cast=name in _SUMS)


@rule("aten.count_nonzero", needs="self out")
def count_nonzero(
    call: OpCall, gpu: GpuTraits, spec: TensorSpec, _out: TensorSpec
) -> tuple[Workspace, ...]:
    """A bool and an int64 for each element, then the scratch of an int64 sum.

    Source: ATen/native/TensorAdvancedIndexing.cpp, count_nonzero_cuda (1.8 to 2.x).
    Evidence: memory.
    """
    mask = kernel_copy(spec, "nonzero mask", 1), kernel_copy(spec, "nonzero mask, cast", 8)
    dims = reduce_dims(argument(call, 1, "dim"), len(spec.shape))
    wide = TensorSpec(spec.shape, spec.stride, "int64")
    return mask + reduction_scratch(wide, dims, ReduceKernel(8), gpu, out_bytes=8)


@rule("aten.logsumexp", needs="self out")
def logsumexp(
    call: OpCall, gpu: GpuTraits, spec: TensorSpec, out: TensorSpec
) -> tuple[Workspace, ...]:
    """The maxima, a full-sized exp(x - max), and the scratch of one amax and one sum.

    Source: ATen/native/ReduceOps.cpp, logsumexp_out_impl (1.8 to 2.x).
    Evidence: source.
    """
    if not is_floating(spec):
        return ()
    dim = argument(call, 1, "dim")
    maxima = kernel_copy(out, "logsumexp maxima", spec.itemsize)
    shifted_copy = kernel_copy(spec, "logsumexp shifted")
    first = _reduction_workspaces(spec, out, gpu, ReduceKernel(spec.itemsize), dim)
    last = _reduction_workspaces(spec, out, gpu, ReduceKernel(acc_bytes(spec.dtype)), dim)
    first = tuple(until(w, 1 + len(first)) for w in first)
    return (maxima, *first, shifted_copy, *last)
