"""Normalisation: partial sums of weight gradients, statistics, copies of strided inputs."""

from __future__ import annotations

import math
from dataclasses import replace

from memest.units import MIB
from memest.workspaces.layout import (
    acc_bytes,
    argument,
    ceil_div,
    contiguous_copy,
    integer,
    is_channels_last,
    is_contiguous,
    kernel_copy,
    tensor,
    until,
)
from memest.workspaces.operator_call import GpuTraits, OpCall, TensorSpec, Workspace
from memest.workspaces.reduce import ReduceKernel, reduction_scratch
from memest.workspaces.registry import rule

__all__ = []

_COPY = "normalisation input, contiguous"
_MAX_BLOCKS = 32 * 1024
_MANY_ROWS = 64 * 1024


@rule("aten.native_layer_norm", "aten._fused_rms_norm", needs="input")
def layer_norm(_call: OpCall, _gpu: GpuTraits, spec: TensorSpec) -> tuple[Workspace, ...]:
    """Nothing, unless the input is not contiguous: a copy of it.

    The copy is there before the results are.

    Source: ATen/native/cuda/layer_norm_kernel.cu (1.13 to 2.13).
    Evidence: recorded (torch 2.11).
    """
    return _copies_first(spec)


def _copies_first(*specs: TensorSpec) -> tuple[Workspace, ...]:
    """Contiguous copies that are made before the results."""
    copies = (copy for spec in specs for copy in contiguous_copy(spec, _COPY))
    return tuple(replace(copy, results_before=0) for copy in copies)


@rule("aten.native_layer_norm_backward", "aten._fused_rms_norm_backward", needs="grad_out input")
def layer_norm_backward(
    call: OpCall, gpu: GpuTraits, grad: TensorSpec, spec: TensorSpec
) -> list[Workspace]:
    """M rows over 65536, N / 32 below half the SMs: partial sums of weight and bias, then sums.

    Partial rows: min(32768 / ceil(N / 32), ceil(M / 32)) x N each. Otherwise nothing but copies
    of strided operands. Before 2.8 nothing for any M; up to 1.12 32 x N x 4 each.

    Source: ATen/native/cuda/layer_norm_kernel.cu (2.8 to 2.13).
    Evidence: source; before 2.8 and the release that changed it: memory.
    """
    normalized_shape = argument(call, 2, "normalized_shape")
    if not isinstance(normalized_shape, tuple):
        return []
    workspaces = list(_copies_first(grad, spec))
    columns = math.prod(int(n) for n in normalized_shape if isinstance(n, int))
    rows = spec.numel // max(columns, 1)
    outputs = [out for out in call.outputs[1:] if out is not None]
    if not outputs:
        return workspaces
    dtype = outputs[0].dtype
    if gpu.torch < (1, 13):
        return workspaces + [Workspace(32 * columns * 4, "norm partial sums")] * len(outputs)
    if gpu.torch < (2, 8) or rows <= _MANY_ROWS or columns // 32 >= gpu.sm_count // 2:
        return workspaces
    parts = min(_MAX_BLOCKS // ceil_div(columns, 32), ceil_div(rows, 32))
    partial = TensorSpec((parts, columns), (columns, 1), dtype)
    workspaces += [kernel_copy(partial, "norm partial sums")] * len(outputs)
    kernel = ReduceKernel(acc_bytes(dtype))
    for _ in outputs:
        workspaces.append(Workspace(columns * partial.itemsize, "norm weight gradient, summed"))
        scratch = reduction_scratch(partial, (0,), kernel, gpu, out_bytes=partial.itemsize)
        end = len(workspaces) + len(scratch)
        workspaces += [until(w, end) for w in scratch]
    return workspaces


@rule("aten.native_group_norm", needs="input")
def group_norm(call: OpCall, _gpu: GpuTraits, spec: TensorSpec) -> list[Workspace]:
    """Fused scale and shift N x C x 4 each; channels last also N x G x H x 24 of statistics.

    Source: ATen/native/cuda/group_norm_kernel.cu, ATen/native/group_norm.cpp (2.x).
    Evidence: source; H of the channels-last statistics: memory.
    """
    if len(spec.shape) < 2:
        return []
    batch, channels = integer(call, 3, "N", spec.shape[0]), integer(call, 4, "C", spec.shape[1])
    pixels, groups = integer(call, 5, "HxW", 1), integer(call, 6, "group", 1)
    workspaces = _group_norm_copies(spec)
    if is_channels_last(spec):
        rows = _closest_factor(pixels)
        workspaces.append(Workspace(batch * groups * rows * 24, "group norm statistics"))
    affine = argument(call, 1, "weight") is not None or argument(call, 2, "bias") is not None
    if pixels > 1 and affine:
        workspaces += [
            Workspace(batch * channels * acc_bytes(spec.dtype), "group norm scale, shift")
        ] * 2
    return workspaces


@rule("aten.native_group_norm_backward", needs="grad_out input")
def group_norm_backward(
    call: OpCall, _gpu: GpuTraits, grad: TensorSpec, spec: TensorSpec
) -> list[Workspace]:
    """Sums ds, db N x C x 4 each, then factors twice N x G x 4 and N x C x 4 (with weight).

    Source: ATen/native/cuda/group_norm_kernel.cu (2.x).
    Evidence: source.
    """
    if len(spec.shape) < 2:
        return []
    batch, channels = integer(call, 5, "N", spec.shape[0]), integer(call, 6, "C", spec.shape[1])
    pixels, groups = integer(call, 7, "HxW", 1), integer(call, 8, "group", 1)
    acc = acc_bytes(spec.dtype)
    workspaces = [*_group_norm_copies(grad), *_group_norm_copies(spec)]
    workspaces += [Workspace(batch * channels * acc, "group norm sums")] * 2
    if is_channels_last(spec) and pixels > 1:
        rows = _closest_factor(pixels)
        workspaces.append(Workspace(batch * channels * rows * 2 * acc, "group norm row sums"))
    if call.output is None:
        return workspaces
    workspaces += [Workspace(batch * groups * acc, "group norm factors")] * 2
    if pixels > 1 and argument(call, 4, "weight") is not None:
        workspaces.append(Workspace(batch * channels * acc, "group norm factors"))
    return workspaces


def _group_norm_copies(spec: TensorSpec) -> list[Workspace]:
    return [] if is_channels_last(spec) else list(contiguous_copy(spec, _COPY))


def _closest_factor(number: int) -> int:
    """The largest divisor up to the square root, as ClosestFactor finds it."""
    factor = int(max(number, 1) ** 0.5)
    while number % factor:
        factor -= 1
    return factor


@rule(
    "aten.cudnn_batch_norm",
    "aten.native_batch_norm",
    "aten._native_batch_norm_legit",
    "aten._batch_norm_with_update",
    needs="input",
)
def batch_norm(_call: OpCall, _gpu: GpuTraits, spec: TensorSpec) -> tuple[Workspace, ...]:
    """Nothing expected; channels last up to 2 KiB of partial statistics for each channel.

    Source: ATen/native/cuda/Normalization.cuh, cudnn/BatchNorm.cpp (workspace is cuDNN's, 2.x).
    Evidence: memory.
    """
    return _batch_norm_scratch(spec)


@rule(
    "aten.cudnn_batch_norm_backward", "aten.native_batch_norm_backward", "aten.batch_norm_backward"
)
def batch_norm_backward(call: OpCall, _gpu: GpuTraits) -> tuple[Workspace, ...]:
    """A copy of a gradient that lies otherwise than the input; statistics as in the forward.

    Source: ATen/native/cuda/Normalization.cuh, cudnn/BatchNorm.cpp (workspace is cuDNN's, 2.x).
    Evidence: memory.
    """
    cudnn = call.op.startswith("aten.cudnn")
    first, second = tensor(call, 0, "input"), tensor(call, 1, "grad_output")
    grad, spec = (second, first) if cudnn else (first, second)
    if spec is None:
        return ()
    copies: tuple[Workspace, ...] = ()
    if grad is not None and grad.numel and is_channels_last(grad) != is_channels_last(spec):
        # a tensor of one pixel lies both ways and is not copied
        both = is_contiguous(spec) and is_contiguous(grad)
        copies = () if both else (kernel_copy(grad, _COPY),)
    return copies + _batch_norm_scratch(spec)


def _batch_norm_scratch(spec: TensorSpec) -> tuple[Workspace, ...]:
    if not spec.numel or not is_channels_last(spec):
        return ()
    high = min(spec.shape[1] * 2048, 64 * MIB)
    return (Workspace(0, "batch norm workspace", high_nbytes=high),)
