"""Sorting, selecting and scanning: scratch of cub and of the kernels around it."""

from __future__ import annotations

from dataclasses import replace

from memest.units import KIB
from memest.workspaces.layout import (
    argument,
    ceil_div,
    contiguous_copy,
    integer,
    is_contiguous,
    kernel_copy,
    round_up,
)
from memest.workspaces.operator_call import GpuTraits, OpCall, TensorSpec, Workspace
from memest.workspaces.registry import rule

__all__ = ["look_back_scratch", "nonzero_scratch", "radix_sort_scratch"]

_SMALL_SORT = 4096
_DIGITS = 256
_ALIGNMENT = 256


def radix_sort_scratch(
    n: int,
    key_bytes: int,
    value_bytes: int,
    bits: int,
    gpu: GpuTraits,
    *,
    freed_before: int | None = None,
) -> Workspace:
    """Scratch of one cub radix sort: histograms, look-back, a second array of keys and values.

    1 byte while one tile takes everything. The tile sizes belong to cub and to the GPU; the
    upper bound allows for half of the assumed ones. cub aligns every part to 256 bytes, and the
    first one within what it is given. Histograms count with the type of ``n``, 8 bytes.

    Recorded: 1 byte for n up to 2048, 72191 for n = 4096 of 8 + 8 bytes and 14 bits (torch 2.6 to
    2.8); 83455, 150015 and 4269567 for n = 4096, 8192 and 262144 of 64 bits (torch 2.11 with CUDA
    13 on an H200).
    """
    width = max(key_bytes, value_bytes, 4)
    if n <= 256 * max(1, 19 * 4 // width):
        return Workspace(1, "sort scratch", freed_before=freed_before)
    passes = max(1, ceil_div(bits, 8))
    tile = 384 * max(1, (24 if gpu.torch >= (2, 11) else 21) * 4 // width)
    look_back = ceil_div(n, tile) * _DIGITS * 4
    parts = [passes * _DIGITS * 8, look_back, passes * 4]
    if passes > 1:
        parts += [n * key_bytes, n * value_bytes]
    expected = sum(round_up(part, _ALIGNMENT) for part in parts) + _ALIGNMENT - 1
    high = expected + look_back + 64 * KIB
    return Workspace(expected, "sort scratch", high_nbytes=high, freed_before=freed_before)


def look_back_scratch(
    n: int, item: int, label: str, *, freed_before: int | None = None
) -> Workspace:
    """Scratch of one cub scan or selection: a state for each tile and 32 more, and a part beside.

    A state has 8 bytes, 16 for elements of 8 bytes. Recorded: 1279 for n up to 8192 and 2047 for
    262144 of int64, 1023 for 8 of int32 (torch 2.11 with CUDA 13 on an H200).
    """
    state = round_up((32 + ceil_div(n, 384 * 12)) * (16 if item > 4 else 8), _ALIGNMENT)
    return Workspace(state + 2 * _ALIGNMENT - 1, label, freed_before=freed_before)


def nonzero_scratch(spec: TensorSpec) -> list[Workspace]:
    """Count, reduce scratch and select scratch of one nonzero; its output lies between them."""
    if not spec.numel:
        return []
    reduce_bytes = 1 if spec.numel <= 4096 else 17663
    select = 767 + ceil_div(spec.numel, 4096) * 16 if spec.numel > _SMALL_SORT else 767
    copies = contiguous_copy(spec, "nonzero input, contiguous")
    return [
        *copies,
        Workspace(4, "nonzero count"),
        Workspace(
            reduce_bytes, "nonzero scratch", high_nbytes=32 * KIB, freed_before=len(copies) + 2
        ),
        Workspace(select, "nonzero scratch", high_nbytes=select + 16 * KIB),
    ]


@rule("aten.nonzero", needs="self")
def nonzero(_call: OpCall, _gpu: GpuTraits, spec: TensorSpec) -> list[Workspace]:
    """4 bytes, 1 or 17663 for the count and about 767 for the selection, after a contiguous copy.

    Source: ATen/native/cuda/Nonzero.cu (2.x).
    Evidence: recorded (15 calls, torch 2.8, 512 bytes or 17.5 KiB each); limits: memory.
    """
    return nonzero_scratch(spec)


@rule("aten.sort", "aten.argsort", "aten.msort", needs="self")
def sort(call: OpCall, gpu: GpuTraits, spec: TensorSpec) -> tuple[Workspace, ...]:
    """Slices up to 4096: nothing. Longer: n x 8 of indices and one cub sort (n x 24 and less).

    One slice or slices of a million: indices of one slice, one sort after the other. Under 128
    slices: two arrays of index and slice, n x 8 each. Else a segmented sort.

    Source: ATen/native/cuda/Sort.cpp, SortStable.cu (2.x).
    Evidence: source; cub's scratch: memory.
    """
    if not spec.shape:
        return ()
    if call.op.endswith(".stable"):
        dim = argument(call, 1, "dim")
        dim = dim if isinstance(dim, int) else -1
    else:
        dim = integer(call, 1, "dim", -1)
    at = dim % len(spec.shape)
    return _sort_scratch(spec, at, gpu)


def _sort_scratch(spec: TensorSpec, dim: int, gpu: GpuTraits) -> tuple[Workspace, ...]:
    length = spec.shape[dim]
    if length <= _SMALL_SORT:
        return ()
    workspaces: list[Workspace] = []
    if dim != len(spec.shape) - 1 or not is_contiguous(spec):
        workspaces.append(kernel_copy(spec, "sort input, contiguous"))
    slices = spec.numel // length
    if slices == 1 or length >= 1_000_000:
        workspaces.append(Workspace(length * 8, "sort positions"))
        workspaces.append(radix_sort_scratch(length, spec.itemsize, 8, 8 * spec.itemsize, gpu))
    elif slices < 128:
        pairs = [Workspace(spec.numel * 8, "sort positions and slices")] * 2
        keys = kernel_copy(spec, "sort keys, discarded")
        scratch = radix_sort_scratch(spec.numel, spec.itemsize, 8, 8 * spec.itemsize, gpu)
        workspaces += [*pairs, keys, scratch]
    else:
        workspaces.append(Workspace(spec.numel * 8, "sort positions"))
        second = spec.numel * (spec.itemsize + 8)
        workspaces.append(Workspace(second, "sort scratch", high_nbytes=second + 64 * KIB))
    return tuple(workspaces)


@rule("aten.topk", needs="self")
def topk(call: OpCall, gpu: GpuTraits, spec: TensorSpec) -> list[Workspace]:
    """A contiguous copy; for few long slices five arrays of 128 digits; k over 4096 is sorted.

    Blocks of one slice: about its length / 4096, kept between 32 and 4 x SMs in all.

    Source: ATen/native/cuda/TensorTopK.cu, TensorTopK.cpp (2.x).
    Evidence: recorded (one call, torch 2.8: 16384 + 2 x 128 + 1279 bytes); limits: memory.
    """
    k = integer(call, 1, "k", 0)
    if not spec.shape or not k:
        return []
    dim = integer(call, 2, "dim", -1) % len(spec.shape)
    workspaces = list(contiguous_copy(spec, "topk input, contiguous"))
    length = spec.shape[dim]
    slices = spec.numel // length
    if length >= 20_000 or (slices > 20 and length >= 3_000):
        blocks = min(max(ceil_div(length, 4096), 1), 4 * gpu.sm_count) * slices
        workspaces += [Workspace(4 * slices, "topk state")] * 4
        high = max(blocks, 32 * slices) * 512
        workspaces.append(Workspace(blocks * 512, "topk digit counts", high_nbytes=high))
        workspaces += [Workspace(blocks * 4, "topk block counts")] * 2
        workspaces.append(Workspace(1279, "topk scan scratch", high_nbytes=64 * KIB))
    values = call.output
    if k > _SMALL_SORT and values is not None and integer(call, 4, "sorted", 1):
        workspaces.append(kernel_copy(values, "topk sorted indices", 8))
        workspaces.append(kernel_copy(values, "topk sorted values"))
        workspaces += _sort_scratch(values, dim, gpu)
    return workspaces


@rule(
    "aten.cumsum",
    "aten.cumprod",
    "aten.logcumsumexp",
    "aten.cummax",
    "aten.cummin",
    needs="self out",
)
def scan(call: OpCall, _gpu: GpuTraits, spec: TensorSpec, out: TensorSpec) -> list[Workspace]:
    """A contiguous copy, a cast to the output's type; about 1 KiB when one slice is everything.

    Source: ATen/native/cuda/ScanUtils.cuh (2.13), ATen/cuda/cub.cuh.
    Evidence: source; size of cub's scratch: recorded (see look_back_scratch).
    """
    workspaces = list(contiguous_copy(spec, "scan input, contiguous"))
    if spec.dtype != out.dtype:
        workspaces = [kernel_copy(spec, "scan input, cast", out.itemsize)]
    dim = integer(call, 1, "dim", -1)
    length = spec.shape[dim % len(spec.shape)] if spec.shape else 1
    if length == spec.numel and length > 1:
        scratch = look_back_scratch(spec.numel, out.itemsize, "scan scratch")
        workspaces.append(replace(scratch, high_nbytes=scratch.nbytes + 16 * KIB))
    return workspaces


@rule("aten._unique2", "aten.unique_dim", "aten.unique_consecutive", "aten.bincount", needs="self")
def unique(_call: OpCall, gpu: GpuTraits, spec: TensorSpec) -> tuple[Workspace, ...]:
    """Sorted copy, order and inverse of n elements and one cub sort; twice that at most.

    Source: ATen/native/cuda/Unique.cu, UniqueCub.cu (2.x).
    Evidence: memory.
    """
    n, item = spec.numel, spec.itemsize
    arrays = n * (item + 16)
    scratch = radix_sort_scratch(n, item, 8, 8 * item, gpu)
    return (Workspace(arrays, "unique, sorted copies", high_nbytes=2 * arrays), scratch)


@rule("aten.randperm")
def randperm(call: OpCall, gpu: GpuTraits) -> tuple[Workspace, ...]:
    """Random keys n x 8, their sorted copy, the range n x 8 and one cub sort; n <= 30000 less.

    Source: ATen/native/cuda/Randperm.cu (2.x).
    Evidence: memory.
    """
    n = integer(call, 0, "n", 0)
    if n <= 1:
        return ()
    key = 4 if n <= 1 << 15 else 8
    arrays = [Workspace(n * 8, "randperm range"), Workspace(n * key, "randperm keys")]
    return (
        *arrays,
        Workspace(n * key, "randperm keys, sorted"),
        radix_sort_scratch(n, key, 8, 8 * key, gpu),
    )
