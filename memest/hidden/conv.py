"""Convolution: workspaces that cuDNN asks for. Its heuristics decide, so every size is a range.

No formula exists outside cuDNN. What is expected here is what its tensor-core kernels need to
see channels last when the tensors lie channels first: a transposed copy of each operand.
"""

from __future__ import annotations

from memest.hidden.call import GpuTraits, Hidden, OpCall, TensorSpec, Value
from memest.hidden.layout import (
    acc_bytes,
    argument,
    integer,
    is_channels_last,
    is_contiguous,
    kernel_copy,
    tensor,
    until,
)
from memest.hidden.reduce import ReduceKernel, reduction_scratch
from memest.hidden.registry import rule
from memest.units import MIB

__all__ = []

_WORKSPACE = "cuDNN convolution workspace"
_MOST = 4096 * MIB


@rule("aten.convolution", "aten.cudnn_convolution", "aten._convolution")
def convolution(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """Expected: transposed copies of input, weight and output if channels first; at most 4 x.

    Nothing expected for channels last, for fp32 without TF32 and for depthwise convolutions.

    Source: ATen/native/cudnn/Conv_v8.cpp, Convolution.cpp; the size is cuDNN's (2.x).
    Evidence: memory, no trace of a convolution was at hand.
    """
    spec, weight = tensor(call, 0, "input"), tensor(call, 1, "weight")
    out = call.outputs[0] if call.outputs else None
    if spec is None or weight is None or out is None or not out.numel or not weight.numel:
        return ()
    groups = integer(call, 5 if "cudnn" in call.op else 8, "groups", 1)
    return (*_layout_copies(spec, weight), _workspace((spec, weight, out), groups, gpu))


@rule("aten.convolution_backward")
def convolution_backward(call: OpCall, gpu: GpuTraits) -> tuple[Hidden, ...]:
    """A workspace for the input's gradient, one for the weight's, scratch of the bias's sum.

    Both as in the forward pass; the weight's may hold an fp32 copy of the weight in addition.
    The first is freed before the second is made.

    Source: ATen/native/Convolution.cpp, cudnn/Conv_v8.cpp; the sizes are cuDNN's (2.x).
    Evidence: memory; sum of the bias: as the rule of sum.
    """
    grad, spec, weight = (
        tensor(call, 0, "grad_output"),
        tensor(call, 1, "input"),
        tensor(call, 2, "weight"),
    )
    if grad is None or spec is None or weight is None or not (grad.numel and weight.numel):
        return ()
    mask = argument(call, 10, "output_mask")
    groups = integer(call, 9, "groups", 1)
    found = list(_layout_copies(spec, weight))
    if is_channels_last(spec) and not is_channels_last(grad) and not is_contiguous(grad):
        found.append(kernel_copy(grad, "convolution gradient, other layout"))
    workspace = _workspace((spec, weight, grad), groups, gpu)
    if _wanted(mask, 0):
        found.append(until(workspace, len(found) + 1))
    if _wanted(mask, 1):
        extra = weight.numel * 4 if weight.itemsize == 2 else 0
        high = (workspace.high_nbytes or 0) + 4 * extra
        second = Hidden(workspace.nbytes + extra, _WORKSPACE, high_nbytes=high)
        found.append(until(second, len(found) + 1))
    if _wanted(mask, 2):
        dims = (0, *range(2, len(grad.shape)))
        kernel = ReduceKernel(acc_bytes(grad.dtype), in_place=grad.itemsize != 2)
        found += reduction_scratch(grad, dims, kernel, gpu, out_bytes=grad.itemsize)
    return tuple(found)


def _wanted(mask: Value, which: int) -> bool:
    return not isinstance(mask, tuple) or len(mask) <= which or bool(mask[which])


def _layout_copies(spec: TensorSpec, weight: TensorSpec) -> tuple[Hidden, ...]:
    """Copies that bring operands into one memory format: channels last if either of them is."""
    last = is_channels_last(spec) or is_channels_last(weight)
    return tuple(
        kernel_copy(operand, "convolution operand, other layout")
        for operand in (spec, weight)
        if operand.numel
        and not (is_channels_last(operand) if last else is_contiguous(operand))
        and not (last and _one_way(operand))
    )


def _one_way(spec: TensorSpec) -> bool:
    """Whether a contiguous tensor lies channels last as well (one channel, or one pixel)."""
    pixels = 1
    for extent in spec.shape[2:]:
        pixels *= extent
    return is_contiguous(spec) and (spec.shape[1] == 1 or pixels == 1)


def _workspace(
    operands: tuple[TensorSpec, TensorSpec, TensorSpec], groups: int, gpu: GpuTraits
) -> Hidden:
    spec, weight, _ = operands
    total = sum(operand.numel * operand.itemsize for operand in operands)
    tensor_cores = (spec.itemsize == 2 and gpu.capability >= (7, 0)) or gpu.capability >= (8, 0)
    depthwise = groups > 1 and weight.shape[1] == 1
    transposes = tensor_cores and not depthwise and not is_channels_last(spec)
    expected = total if transposes else 0
    high = min(max(4 * total, expected), max(_MOST, expected))
    return Hidden(expected, _WORKSPACE, high_nbytes=high)
