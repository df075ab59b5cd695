"""What rules ask about arguments: values by position or name, and the layout of tensors."""

from __future__ import annotations

import dataclasses
import math

from memest.workspaces.operator_call import DTYPE_BYTES, OpCall, TensorSpec, Value, Workspace

__all__ = [
    "acc_bytes",
    "argument",
    "ceil_div",
    "contiguous_copy",
    "dense",
    "integer",
    "is_channels_last",
    "is_contiguous",
    "is_dense",
    "is_floating",
    "kernel_copy",
    "numel",
    "round_up",
    "tensor",
    "tensors",
    "transpose",
    "until",
]

_FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})
_HALF = frozenset({"float16", "bfloat16"})


def argument(call: OpCall, position: int, name: str) -> Value:
    """An argument by its position in the schema or its name; None where the caller gave none."""
    if position < len(call.args):
        return call.args[position]
    for key, value in call.kwargs:
        if key == name:
            return value
    return None


def tensor(call: OpCall, position: int, name: str) -> TensorSpec | None:
    """A tensor argument, None where there is none."""
    value = argument(call, position, name)
    return value if isinstance(value, TensorSpec) else None


def tensors(value: Value) -> tuple[TensorSpec, ...]:
    """The tensors of a list argument."""
    items = value if isinstance(value, tuple) else (value,)
    return tuple(item for item in items if isinstance(item, TensorSpec))


def integer(call: OpCall, position: int, name: str, default: int) -> int:
    """An integer argument (or a flag), with the default of the schema."""
    value = argument(call, position, name)
    return int(value) if isinstance(value, (int, float)) else default


def numel(spec: TensorSpec | None) -> int:
    """Number of elements, 0 for no tensor."""
    return 0 if spec is None else spec.numel


def ceil_div(value: int, divisor: int) -> int:
    """Quotient rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """Value rounded up to a multiple."""
    return -(-value // multiple) * multiple


def is_floating(spec: TensorSpec) -> bool:
    """Whether the dtype is one of the four that layers train in."""
    return spec.dtype in _FLOATING


def acc_bytes(dtype: str) -> int:
    """Bytes of the type that kernels accumulate a dtype in: fp32 for the half types."""
    return 4 if dtype in _HALF else DTYPE_BYTES[dtype]


def is_contiguous(spec: TensorSpec) -> bool:
    """Whether the elements lie row by row without holes (extents of 1 do not matter)."""
    if spec.numel == 0:
        return True
    expected = 1
    for extent, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


def is_channels_last(spec: TensorSpec) -> bool:
    """Whether a 4-D or 5-D tensor lies with the channels fastest, and not row by row as well."""
    if len(spec.shape) not in (4, 5) or is_contiguous(spec):
        return False
    order = (0, *range(2, len(spec.shape)), 1)
    permuted_spec = TensorSpec(
        tuple(spec.shape[d] for d in order), tuple(spec.stride[d] for d in order), spec.dtype
    )
    return is_contiguous(permuted_spec)


def is_dense(spec: TensorSpec) -> bool:
    """Whether some order of the dimensions makes the tensor contiguous (no overlap, no holes)."""
    if is_contiguous(spec):
        return True
    # extents 0 and 1 go last, as in TensorImpl::compute_non_overlapping_and_dense
    pairs = sorted((s, e) for e, s in zip(spec.shape, spec.stride, strict=True) if e > 1)
    expected = 1
    for stride, extent in pairs:
        if stride != expected:
            return False
        expected *= extent
    return True


def transpose(spec: TensorSpec, first: int, second: int) -> TensorSpec:
    """The view with two dimensions exchanged."""
    shape, stride = list(spec.shape), list(spec.stride)
    shape[first], shape[second] = shape[second], shape[first]
    stride[first], stride[second] = stride[second], stride[first]
    return TensorSpec(tuple(shape), tuple(stride), spec.dtype)


def dense(spec: TensorSpec) -> TensorSpec:
    """A tensor of the same shape that lies row by row."""
    stride = tuple(math.prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape)))
    return TensorSpec(spec.shape, stride, spec.dtype)


def kernel_copy(spec: TensorSpec, label: str, item: int | None = None) -> Workspace:
    """A dense copy of a tensor, of elements of so many bytes where they are not its own."""
    return Workspace(spec.numel * (item or spec.itemsize), label)


def contiguous_copy(spec: TensorSpec | None, label: str) -> tuple[Workspace, ...]:
    """The copy that ``contiguous()`` makes inside a kernel, if it makes one."""
    return () if spec is None or is_contiguous(spec) else (kernel_copy(spec, label),)


def until(workspace: Workspace, position: int) -> Workspace:
    """The same allocation, freed before the one at a position of the call is made."""
    return dataclasses.replace(workspace, freed_before=position)
