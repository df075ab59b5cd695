"""Gradients of look-ups: embedding, and advanced indexing with accumulation."""

from __future__ import annotations

import math
from dataclasses import replace

from memest.workspaces.layout import (
    acc_bytes,
    argument,
    ceil_div,
    contiguous_copy,
    dense,
    integer,
    is_contiguous,
    kernel_copy,
    round_up,
    tensor,
)
from memest.workspaces.operator_call import GpuTraits, OpCall, TensorSpec, Value, Workspace
from memest.workspaces.registry import rule
from memest.workspaces.sort import look_back_scratch, nonzero_scratch, radix_sort_scratch

__all__ = []

_ROWS_PER_THREAD = 10
_ONE_KERNEL_INDICES = 3072


@rule("aten.embedding_dense_backward")
def embedding_dense_backward(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Up to 3072 indices nothing; else three sorted index arrays and fp32 partial rows p x D x 4.

    p = n / 10 + min(n, rows of the table). Since 2.11, few segments are summed with atomics
    instead: p x 8, and for half types an fp32 copy of the whole gradient.

    The gradient itself is made when the indices are sorted.

    Source: ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu (2.x); PR 172454.
    Evidence: recorded (n = 4096 to 262144, torch 2.11 with CUDA 13 on an H200).
    """
    grad, indices = tensor(call, 0, "grad_output"), tensor(call, 1, "indices")
    if grad is None or indices is None or not grad.shape:
        return ()
    workspaces = list(contiguous_copy(indices, "indices, contiguous"))
    workspaces += contiguous_copy(grad, "embedding gradient, contiguous")
    by_count = bool(integer(call, 4, "scale_grad_by_freq", 0))
    if indices.numel <= _ONE_KERNEL_INDICES and not by_count:
        return tuple(workspaces)
    n, columns, item = indices.numel, grad.shape[-1], indices.itemsize
    rows = max(integer(call, 2, "num_weights", 0), 0)
    segments = min(n, rows)
    partials = n // _ROWS_PER_THREAD + segments
    workspaces += [Workspace(n * item, f"embedding {what}") for what in ("sorted indices", "order")]
    end = len(workspaces) + 2
    workspaces.append(Workspace(n * item, "embedding positions", freed_before=end))
    workspaces.append(radix_sort_scratch(n, item, item, 8 * item, gpu, freed_before=end))
    workspaces = [replace(workspace, results_before=0) for workspace in workspaces]
    if by_count:
        workspaces.append(Workspace(n * item, "embedding counts"))
    workspaces.append(Workspace(n * item, "embedding segment offsets"))
    workspaces.append(Workspace(8, "embedding segment count"))
    # unique_by_key writes the keys it drops into a buffer of its own
    end = len(workspaces) + 2
    workspaces.append(Workspace(n * item, "embedding unique keys", freed_before=end))
    workspaces.append(look_back_scratch(n, item, "embedding selection scratch", freed_before=end))
    workspaces += [Workspace(segments * item, "embedding partials per segment")] * 2
    end = len(workspaces) + 1
    workspaces.append(look_back_scratch(segments, item, "embedding scan scratch", freed_before=end))
    workspaces.append(Workspace(8, "embedding partial count"))
    workspaces.append(Workspace(partials * item, "embedding partial offsets"))
    acc = acc_bytes(grad.dtype)
    if gpu.torch >= (2, 11) and _few_segments(segments, partials, columns, gpu):
        workspaces.append(Workspace(partials * item, "embedding partial owners"))
        if acc != grad.itemsize:
            workspaces.append(Workspace(rows * columns * acc, "embedding gradient, fp32"))
    else:
        workspaces.append(Workspace(partials * columns * acc, "embedding partial sums"))
    return tuple(workspaces)


def _few_segments(segments: int, partials: int, columns: int, gpu: GpuTraits) -> bool:
    """Whether the second pass would leave the GPU idle (fewer than 4 blocks for each SM)."""
    padded_columns = round_up(columns, 32)
    grid = ceil_div(segments * padded_columns, max(1, min(padded_columns, 1024)))
    return grid < 4 * gpu.sm_count and partials > 4 * grid and not gpu.deterministic


@rule(
    "aten._index_put_impl_",
    "aten.index_put_",
    "aten.index_put",
    "aten._unsafe_index_put",
)
def index_put(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Accumulating: linear, sorted and original index and their range, n x 8 each, a sort.

    Also a copy of the values where they were broadcast or strided, and of a strided target.
    Without accumulation nothing but what a look-up needs, except in deterministic mode (the
    same). A bool mask is first turned into indices, int32 into int64. An index on the host is
    wrapped and scaled there and copied once.

    Source: ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel, IndexingUtils (2.x).
    Evidence: recorded (one and two index tensors, n = 512 to 4096, one of them on the host;
    torch 2.6 and later, H100 and another card).
    """
    target, values = tensor(call, 0, "self"), tensor(call, 2, "values")
    indices = argument(call, 1, "indices")
    workspaces = _masks(indices) + _wide_indices(indices)
    if target is None or values is None or not isinstance(indices, tuple):
        return tuple(workspaces)
    if not integer(call, 3, "accumulate", 0) and not gpu.deterministic:
        return (*workspaces, *_alike_indices(indices))
    count, slice_size = _index_sizes(target, indices, values)
    if not count or not slice_size:
        return tuple(workspaces)
    workspaces += contiguous_copy(target, "index target, contiguous")
    workspaces += _linear_index(indices, count, len(workspaces))
    if values.numel != count * slice_size or not is_contiguous(values):
        workspaces.append(
            Workspace(count * slice_size * values.itemsize, "index values, contiguous")
        )
    workspaces += [
        Workspace(count * 8, f"index {what}") for what in ("sorted", "order", "positions")
    ]
    bits = (target.numel // slice_size).bit_length()
    workspaces.append(radix_sort_scratch(count, 8, 8, bits, gpu))
    return tuple(workspaces)


def _linear_index(indices: tuple[Value, ...], count: int, start: int) -> list[Workspace]:
    """Wrap, scale and add up: two arrays for each index, of which the first scaled one stays."""
    workspaces: list[Workspace] = []
    for number, index in enumerate(i for i in indices if isinstance(i, TensorSpec)):
        wraps = not index.on_host
        freed_before = start + len(workspaces) + 1 + wraps
        if wraps:
            workspaces.append(
                Workspace(
                    count * 8, "index, wrapped", freed_before=freed_before, in_expression=True
                )
            )
        until = None if number == 0 else freed_before
        workspaces.append(Workspace(count * 8, "index, linear", freed_before=until))
    return workspaces


def _index_sizes(
    target: TensorSpec, indices: tuple[Value, ...], values: TensorSpec
) -> tuple[int, int]:
    """Positions that the indices name, and elements of the target at each of them."""
    slice_size = 1
    dim = 0
    shapes: list[tuple[int, ...]] = []
    masked = False
    for index in indices:
        if not isinstance(index, TensorSpec):
            slice_size *= target.shape[dim]
            dim += 1
        elif index.dtype in ("bool", "uint8"):
            masked = True
            dim += len(index.shape)
        else:
            shapes.append(index.shape)
            dim += 1
    slice_size *= math.prod(target.shape[dim:])
    if masked:
        # how many are set is data: the values say it where they were not broadcast
        return values.numel // max(slice_size, 1), slice_size
    return math.prod(_broadcast(shapes)), slice_size


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    width = max((len(shape) for shape in shapes), default=0)
    padded_shapes = [(1,) * (width - len(shape)) + shape for shape in shapes]
    return tuple(
        next((extent for extent in column if extent != 1), 1)
        for column in zip(*padded_shapes, strict=True)
    )


def _masks(indices: Value) -> list[Workspace]:
    workspaces: list[Workspace] = []
    for index in indices if isinstance(indices, tuple) else ():
        if isinstance(index, TensorSpec) and index.dtype in ("bool", "uint8"):
            workspaces += () if index.on_host else nonzero_scratch(index)
            # half of the mask is set, for want of knowing better
            size = index.numel * max(len(index.shape), 1) * 8
            workspaces.append(Workspace(size // 2, "mask as indices", high_nbytes=size))
    return workspaces


def _wide_indices(indices: Value) -> list[Workspace]:
    items = indices if isinstance(indices, tuple) else ()
    return [
        kernel_copy(index, "index, int64", 8)
        for index in items
        if isinstance(index, TensorSpec) and index.dtype == "int32" and not index.on_host
    ]


def _alike_indices(indices: tuple[Value, ...]) -> list[Workspace]:
    """Index tensors are broadcast, copied from the host, and made contiguous if they differ."""
    tensor_specs = [
        i for i in indices if isinstance(i, TensorSpec) and i.dtype in ("int64", "int32")
    ]
    shape = _broadcast([index.shape for index in tensor_specs])
    expanded_indices = [_expand(index, shape) for index in tensor_specs]
    copies = [
        kernel_copy(index, "index, from the host", 8) for index in expanded_indices if index.on_host
    ]
    expanded_indices = [dense(index) if index.on_host else index for index in expanded_indices]
    if len({index.stride for index in expanded_indices}) < 2:
        return copies
    return copies + [
        kernel_copy(index, "index, contiguous", 8)
        for index in expanded_indices
        if not is_contiguous(index)
    ]


def _expand(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    lead = len(shape) - len(spec.shape)
    stride = (0,) * lead + tuple(
        0 if own == 1 and extent != 1 else step
        for own, step, extent in zip(spec.shape, spec.stride, shape[lead:], strict=True)
    )
    return TensorSpec(shape, stride, spec.dtype, spec.on_host)


@rule("aten.index.Tensor", "aten._unsafe_index", "aten.masked_select")
def look_up(call: OpCall, _gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Index tensors as int64 n x 8: cast from int32, made alike where they were broadcast.

    One int64 index needs nothing, one on the host is copied. A bool mask becomes indices, 8 bytes
    x dimensions of each set element; how many are set is not known, so half of them are expected
    and all at most. All of it is there before the result is.

    Source: ATen/native/IndexingUtils.h, TensorAdvancedIndexing.cpp, AdvancedIndex (2.x).
    Evidence: recorded (casts, two broadcast indices, scratch of nonzero: torch 2.8; an index on
    the host: 2.6).
    """
    if call.op.startswith("aten.masked_select"):
        return tuple(_masks((tensor(call, 1, "mask"),)))
    indices = argument(call, 1, "indices")
    if not isinstance(indices, tuple):
        return ()
    workspaces = (*_masks(indices), *_wide_indices(indices), *_alike_indices(indices))
    return tuple(replace(workspace, results_before=0) for workspace in workspaces)


@rule("aten._embedding_bag_dense_backward", needs="grad indices")
def embedding_bag_backward(
    call: OpCall, gpu: GpuTraits, grad: TensorSpec, indices: TensorSpec
) -> tuple[Workspace, ...]:
    """As the embedding's gradient: sorted indices and fp32 partial rows, for any number of them.

    Source: ATen/native/cuda/EmbeddingBag.cu, EmbeddingBackwardKernel.cu (2.x).
    Evidence: memory.
    """
    if not grad.shape:
        return ()
    n, item = indices.numel, indices.itemsize
    segments = min(n, max(integer(call, 5, "num_weights", 0), 0))
    partials = n // _ROWS_PER_THREAD + segments
    size = partials * grad.shape[-1] * acc_bytes(grad.dtype)
    arrays = [Workspace(n * item, "embedding index array")] * 4
    return (
        *contiguous_copy(grad, "embedding gradient, contiguous"),
        *arrays,
        radix_sort_scratch(n, item, item, 8 * item, gpu),
        Workspace(size, "embedding partial sums"),
    )
