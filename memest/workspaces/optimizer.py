"""Optimizers, clipping and the gradient scaler: what their fused kernels allocate."""

from __future__ import annotations

from memest.workspaces.layout import acc_bytes, argument, ceil_div, is_floating, tensors
from memest.workspaces.operator_call import GpuTraits, OpCall, Workspace
from memest.workspaces.registry import rule

__all__ = []

_CHUNK = 65536


@rule("aten._foreach_norm")
def foreach_norm(call: OpCall, _gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Partial norms: number of tensors x chunks (65536 elements) of the largest one x 4 bytes.

    The norms themselves, one block each, are outputs, made after it. Other orders than 1, 2 and
    infinity and tensors that do not lie alike go one by one, without the buffer.

    Source: ATen/native/cuda/ForeachReduceOp.cu (2.1 to 2.13; 2.0 had chunks of the same size).
    Evidence: recorded (torch 2.11, a model of 391 parameters).
    """
    tensor_specs = tensors(argument(call, 0, "self"))
    order = argument(call, 1, "ord")
    fast = order is None or order in (1, 2, float("inf"))
    if not tensor_specs or not fast or not all(is_floating(t) for t in tensor_specs):
        return ()
    chunks = ceil_div(max(t.numel for t in tensor_specs), _CHUNK)
    out = next((out for out in call.outputs if out is not None), tensor_specs[0])
    nbytes = len(tensor_specs) * chunks * acc_bytes(out.dtype)
    if not nbytes:
        return ()
    return (Workspace(nbytes, "gradient norm partials", results_before=0),)


@rule("aten._foreach_max")
def foreach_max(call: OpCall, _gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Partial maxima: number of tensors x chunks of the largest one x bytes of an element.

    Source: ATen/native/cuda/ForeachReduceOp.cu (2.4 on).
    Evidence: source, by analogy with the norm.
    """
    tensor_specs = tensors(argument(call, 0, "self"))
    if not tensor_specs:
        return ()
    chunks = ceil_div(max(t.numel for t in tensor_specs), _CHUNK)
    nbytes = len(tensor_specs) * chunks * tensor_specs[0].itemsize
    return (Workspace(nbytes, "maximum partials"),) if nbytes else ()
