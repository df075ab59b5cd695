"""The fast replay: no limit met, nothing given back to the driver.

Under these conditions the pools of small and of large blocks, and those of several streams, know
nothing of each other, and the allocator needs no linked blocks: a free block is two dictionary
entries (its end by its start, its start by its end) and its address in the list of its size. Sizes
repeat from layer to layer, so most requests find a block of just their size and look no further;
among others the allocator's order is (size, address). Everything that can be computed afterwards,
at the speed of C, is (see :mod:`memest.replay.replay`). The rules are those of
:mod:`memest.replay.allocator`; the tests prove both equal.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, compress
from operator import and_
from typing import Any

from memest.events import Chain, Chains
from memest.replay.sizes import (
    MIN_BLOCK_SIZE,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    SMALL_SEGMENT_SIZE,
    SMALL_SIZE,
)

__all__ = ["MAX_FAST_BYTES", "SEGMENT_GAP", "FreeBlocks", "Placement", "place", "segment_rules"]

MAX_FAST_BYTES = 1 << 44  # growth must stay within UNBOUNDED_RANGE
# The gap keeps neighbouring segments from merging.
SEGMENT_GAP = MIN_BLOCK_SIZE
_NO_OWN_SEGMENT = 1 << 62
_NOT = bytes([1]) + bytes(255)
_PLACED = "what the fast loops placed"
_MEMORIES = 24  # partitions and placements that streams of one structure keep


@dataclass(slots=True)
class Placement:
    """What the fast loops find out.

    Attributes:
        block_bytes: size handed out for each allocation number, 0 for one never allocated.
        growth: (index of the event, reserved bytes after it) whenever reserved bytes changed.
        num_segments: driver allocations; 0 for expandable segments, as torch counts.
        num_retries: how often caches had to be released for an allocation.
        oom_index: the event at which memory ran out.
        rounded: the rounded size of each kind of allocation, empty where that was not kept.
        odd: the numbers whose block is not of that size, with its size.
    """

    block_bytes: list[int]
    growth: list[tuple[int, int]] = field(default_factory=list)
    num_segments: int = 0
    num_retries: int = 0
    oom_index: int | None = None
    rounded: Sequence[int] = ()
    odd: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Pool:
    """The events of one pool and where its blocks were put.

    Attributes:
        events: of this pool.
        indices: of each of them, in the whole stream.
        numbers: that are of this pool.
        block_bytes: size handed out for each number of this pool.
        starts: address of each number.
        chains: copies among the events.
        sizes: tells this pool from others that were placed by the same rules.
        odd: the numbers whose block is not of their rounded size, with its size: those with a rest
            that was not split off, and with 0 those that are never allocated.
        growth: (index in the whole stream, bytes that came).
    """

    events: list[int]
    indices: list[int]
    numbers: list[int]
    block_bytes: list[int]
    starts: list[int | None]
    chains: Sequence[Chain]
    sizes: tuple[object, ...]
    odd: dict[int, int] = field(default_factory=dict)
    growth: list[tuple[int, int]] = field(default_factory=list)

    def stretches(self, free: FreeBlocks) -> Iterator[tuple[int, int]]:
        """The events to be played, as (first, behind the last), one stretch after the other.

        A part that is a copy of an earlier one and begins with the same free blocks, with what it
        takes over at the same addresses, comes out as the earlier one did: its placement is
        copied, the free blocks become those that the earlier one left, and it is not played.

        Args:
            free: the free blocks, as they are whenever the next stretch is asked for.
        """
        parts = sorted(
            ((part, chain) for chain in self.chains for part in chain.parts),
            key=lambda pair: pair[0].start,
        )
        earlier_placements: dict[tuple[object, ...], tuple[int, tuple[object, ...]]] = {}
        here = 0
        block_bytes, starts = self.block_bytes, self.starts
        for part, chain in parts:
            at = bisect_left(self.indices, part.start)
            if at > here:
                yield here, at
            here = bisect_left(self.indices, part.start + chain.length, at)
            inherited_frees = [c for c in part.inherited_frees if starts[c] is not None]
            before = free.state()
            state = (
                id(chain),
                before,
                len(self.growth),
                tuple([starts[c] for c in inherited_frees]),
                tuple([block_bytes[c] for c in inherited_frees]),
            )
            earlier = earlier_placements.get(state)
            if earlier is None:
                num_growths = len(self.growth)
                if here > at:
                    yield at, here
                if len(self.growth) == num_growths:
                    earlier_placements[state] = part.number, free.state()
                continue
            number, left = earlier
            first, count = part.number, chain.count
            block_bytes[first : first + count] = block_bytes[number : number + count]
            starts[first : first + count] = starts[number : number + count]
            copied = range(number, number + count)
            self.odd |= {first + n - number: size for n, size in self.odd.items() if n in copied}
            if left != before:
                free.become(left)
        if here < len(self.events):
            yield here, len(self.events)


@dataclass(slots=True)
class FreeBlocks:
    """The free blocks of a pool.

    Attributes:
        bins: addresses of the blocks of each size, sorted; a bin may have become empty.
        sizes: of the bins, sorted.
        other_end: end of each block by its start, and start by its end: no two of them touch.
        tail: (start of the last one, end of what is mapped) of a growing segment, else (0, 0).
    """

    bins: dict[int, list[int]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    other_end: dict[int, int] = field(default_factory=dict)
    tail: tuple[int, int] = (0, 0)

    def state(self) -> tuple[object, ...]:
        """All of it, to compare and to come back to."""
        bins = self.bins
        return tuple([(size, *bins[size]) for size in self.sizes if bins[size]]), self.tail

    def become(self, state: tuple[Any, ...]) -> None:
        """Take on an earlier state."""
        bins, self.tail = state
        self.sizes[:] = [size for size, *_ in bins]
        self.bins.clear()
        self.other_end.clear()
        for size, *starts in bins:
            self.bins[size] = starts
            for start in starts:
                self.other_end[start] = start + size
                self.other_end[start + size] = start


def _pools(
    events: Sequence[int],
    rounded: Sequence[int],
    kinds: Sequence[int],
    block_bytes: list[int],
    chains: Chains | None,
    streams: bytes,
) -> tuple[list[_Pool], list[_Pool]]:
    """The small and the large pools, one of each for a stream; requests of 0 bytes are in none.

    Raises:
        IndexError: an event of a number that has no size.
    """
    small = bytes([0 < size <= SMALL_SIZE for size in rounded])
    # at the speed of C where no request is of 0 bytes, which is almost always
    large = (
        bytes([size > SMALL_SIZE for size in rounded]) if 0 in rounded else small.translate(_NOT)
    )
    both: tuple[list[_Pool], list[_Pool]] = [], []
    for stream in (*sorted(set(streams)),) or (None,):
        for pools, inside in zip(both, (small, large), strict=True):
            key = inside, stream
            partition = _recall(chains, key)
            if partition is None:
                mask = bytes(map(inside.__getitem__, kinds))
                if stream is not None:
                    mask = bytes(map(and_, mask, streams.translate(_only(stream))))
                partition = _partition(events, mask)
                _remember(chains, key, partition)
            pools.append(
                _Pool(
                    events=partition[0],
                    indices=partition[1],
                    numbers=partition[2],
                    block_bytes=list(block_bytes),
                    starts=[None] * len(block_bytes),
                    chains=() if chains is None else chains.chains,
                    sizes=(key, *compress(rounded, inside)),
                )
            )
    return both


def _only(stream: int) -> bytes:
    """A table that makes 1 of this stream and 0 of every other."""
    return bytes([number == stream for number in range(256)])


def _partition(events: Sequence[int], inside: bytes) -> tuple[list[int], list[int], list[int]]:
    """The events whose number is inside, their indices, and those numbers."""
    # Python reads an event -1-v, a free, as the v-th entry from the end
    table = inside + inside[::-1]
    mask = list(map(table.__getitem__, events))
    return (
        list(compress(events, mask)),
        list(compress(range(len(mask)), mask)),
        list(compress(range(len(inside)), inside)),
    )


def _recall(chains: Chains | None, key: object) -> Any:
    """What was remembered, which then stays longest; None where it is not known."""
    memories = {} if chains is None else chains.memo.setdefault(_PLACED, {})
    value = memories.pop(key, None)
    if value is not None:
        memories[key] = value
    return value


def _remember(chains: Chains | None, key: object, value: object) -> None:
    if chains is None:
        return
    memories = chains.memo.setdefault(_PLACED, {})
    if len(memories) >= _MEMORIES:
        oldest, *_ = memories  # at once: other threads may remember, too
        memories.pop(oldest, None)
    memories[key] = value


def _place_pool(
    pool: _Pool, chains: Chains | None, rules: tuple[int, ...], place: Callable[[], bool]
) -> bool:
    """Place a pool, or find that the same sizes were placed by the same rules before.

    GPUs differ in a few workspaces: often only in the one pool or the other.
    """
    key = rules, pool.sizes
    placement = _recall(chains, key)
    if placement is not None:
        pool.odd, pool.growth = placement
        return True
    if not place():
        return False
    starts = pool.starts
    if len(starts) - starts.count(None) < len(pool.numbers):
        pool.odd |= {number: 0 for number in pool.numbers if starts[number] is None}
    _remember(chains, key, (pool.odd, pool.growth))
    return True


def _placement(
    pools: tuple[list[_Pool], list[_Pool]],
    rounded: Sequence[int],
    block_bytes: list[int],
    limit_bytes: int,
) -> Placement | None:
    all_pools = [*pools[0], *pools[1]]
    growths = sorted(growth for pool in all_pools for growth in pool.growth)
    totals = list(accumulate(size for _, size in growths))
    if totals and totals[-1] > limit_bytes:
        return None
    growth = [(index, total) for (index, _), total in zip(growths, totals, strict=True)]
    odd = {number: size for pool in all_pools for number, size in pool.odd.items()}
    for number, size in odd.items():
        block_bytes[number] = size
    return Placement(block_bytes, growth, rounded=rounded, odd=odd)


def place(
    events: Sequence[int],
    rounded: Sequence[int],
    kinds: Sequence[int],
    limit_bytes: int,
    large_segment_size: int,
    chains: Chains | None = None,
    streams: bytes = b"",
    *,
    range_bytes: int | None = None,
) -> Placement | None:
    """Place every allocation: with fixed segments, or with one growing segment per pool.

    Args:
        events: as for :func:`memest.replay.replay.replay`.
        rounded: the rounded size of each kind of allocation, 0 where none is made.
        kinds: the kind of each allocation number.
        limit_bytes: the most that may be reserved.
        large_segment_size: segment for large requests below 10 MiB, or page of the large pool.
        chains: parts of the events that are copies of each other.
        streams: CUDA stream of each allocation number; empty where all are on one.
        range_bytes: addresses that a growing segment can grow over; None for fixed ones.

    Returns:
        The placement, or None when the limit would be exceeded, or might be by growing segments,
        or when a free block is so large that the allocator might not take it for smaller than the
        tail with its room to grow.

    Raises:
        TypeError, IndexError: when an event frees what was not allocated (left to the caller, so
            that the loop need not look).
    """
    block_bytes = list(map(rounded.__getitem__, kinds))
    small, large = pools = _pools(events, rounded, kinds, block_bytes, chains, streams)
    small_rules: tuple[int, ...]
    large_rules: tuple[int, ...]
    if range_bytes is None:
        place_pool: Callable[..., bool] = _place_in_segments
        small_rules, large_rules = segment_rules(large_segment_size)
    else:
        place_pool, too_large = _place_in_pages, max(range_bytes - limit_bytes, 0)
        small_rules, large_rules = (SMALL_SEGMENT_SIZE, too_large), (large_segment_size, too_large)
    for members, rules in ((small, small_rules), (large, large_rules)):
        for pool in members:
            if not _place_pool(pool, chains, rules, partial(place_pool, pool, *rules)):
                return None
    if range_bytes is None:
        placement = _placement(pools, rounded, block_bytes, limit_bytes)
        if placement is not None:
            placement.num_segments = len(placement.growth)
        return placement
    # The allocator compares the size of a fixed segment with its limit (7.4): where that might
    # tell, the full model decides.
    margin = max(max(rounded, default=0) + ROUND_LARGE, large_segment_size)
    grows = any(pool.growth for pool in large)
    limit_bytes -= margin if grows else 0
    return _placement(pools, rounded, block_bytes, limit_bytes)


def segment_rules(large_segment_size: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The rules of fixed segments for small and for large requests.

    Returns:
        For each the least rest that is split off, the size of a new segment, and the request from
        which on it gets a segment of its own.
    """
    return (
        (MIN_BLOCK_SIZE, SMALL_SEGMENT_SIZE, _NO_OWN_SEGMENT),
        (SMALL_SIZE + 1, large_segment_size, MIN_LARGE_ALLOC),
    )


def _place_in_segments(pool: _Pool, least: int, segment_size: int, own_segment_from: int) -> bool:
    """One pool with fixed segments.

    Args:
        pool: filled in.
        least: a rest smaller than this is not split off.
        segment_size: of a new segment.
        own_segment_from: a request of this size or more gets a segment of its own.
    """
    block_bytes, starts, odd, growth = pool.block_bytes, pool.starts, pool.odd, pool.growth
    events, indices = pool.events, pool.indices
    free = FreeBlocks()
    bins, sizes, other_end = free.bins, free.sizes, free.other_end
    bin_of = bins.get
    lowest = 0  # the driver places each segment below the last
    for first, behind in pool.stretches(free):
        for place, number in enumerate(events[first:behind], first):
            if number >= 0:
                size = block_bytes[number]
                fitting = bin_of(size)
                if fitting:
                    starts[number] = start = fitting.pop(0)
                    del other_end[start], other_end[start + size]
                    continue
                at = bisect_left(sizes, size)
                while at < len(sizes) and not bins[sizes[at]]:
                    del bins[sizes.pop(at)]
                if at < len(sizes):
                    block = sizes[at]
                    start = bins[block].pop(0)
                    end = other_end.pop(start)
                    starts[number] = start
                    rest = block - size
                    if rest < least:
                        del other_end[end]
                        block_bytes[number] = odd[number] = block
                        continue
                else:
                    block = segment_size
                    if size >= own_segment_from:
                        block = -(-size // ROUND_LARGE) * ROUND_LARGE
                    starts[number] = start = lowest = lowest - block - SEGMENT_GAP
                    growth.append((indices[place], block))
                    rest = block - size
                    if rest < least:
                        if rest:
                            block_bytes[number] = odd[number] = block
                        continue
                    end = start + block
                start += size
                size = rest
            else:
                number = ~number
                start = starts[number]  # type: ignore[assignment]
                size = block_bytes[number]
                end = start + size
                if start in other_end:
                    low = other_end.pop(start)
                    neighbours = bins[start - low]
                    del neighbours[bisect_left(neighbours, low)]
                    start, size = low, end - low
                if end in other_end:
                    high = other_end.pop(end)
                    neighbours = bins[high - end]
                    del neighbours[bisect_left(neighbours, end)]
                    end, size = high, high - start
            other_end[start] = end
            other_end[end] = start
            fitting = bin_of(size)
            if fitting is None:
                bins[size] = [start]
                insort(sizes, size)
            else:
                insort(fitting, start)
    return True


def _place_in_pages(pool: _Pool, page: int, too_large: int) -> bool:
    """One pool with one growing segment; False where a free block is too large to be sure.

    The free block that ends at the last mapped page (the tail) is used only when nothing else
    fits, so it is two numbers beside the bins instead of an entry in them.
    """
    block_bytes, starts, growth = pool.block_bytes, pool.starts, pool.growth
    events, indices = pool.events, pool.indices
    free = FreeBlocks()
    bins, sizes, other_end = free.bins, free.sizes, free.other_end
    bin_of = bins.get
    for first, behind in pool.stretches(free):
        tail, top = free.tail
        for place, number in enumerate(events[first:behind], first):
            if number >= 0:
                size = block_bytes[number]
                at = bisect_left(sizes, size)
                while at < len(sizes) and not bins[sizes[at]]:
                    del bins[sizes.pop(at)]
                if at == len(sizes):
                    starts[number] = tail
                    tail += size
                    if tail > top:
                        growth_bytes = -(-(tail - top) // page) * page
                        top += growth_bytes
                        growth.append((indices[place], growth_bytes))
                    continue
                block = sizes[at]
                if block >= too_large:
                    return False
                starts[number] = start = bins[block].pop(0)
                end = other_end.pop(start)
                if block == size:
                    del other_end[end]
                    continue
                start += size
                size = block - size
            else:
                number = ~number
                start = starts[number]  # type: ignore[assignment]
                size = block_bytes[number]
                end = start + size
                if start in other_end:
                    low = other_end.pop(start)
                    neighbours = bins[start - low]
                    del neighbours[bisect_left(neighbours, low)]
                    start, size = low, end - low
                if end == tail:
                    tail = start
                    other_end.pop(start, None)
                    continue
                if end in other_end:
                    high = other_end.pop(end)
                    neighbours = bins[high - end]
                    del neighbours[bisect_left(neighbours, end)]
                    end, size = high, high - start
            other_end[start] = end
            other_end[end] = start
            fitting = bin_of(size)
            if fitting is None:
                bins[size] = [start]
                insort(sizes, size)
            else:
                insort(fitting, start)
        free.tail = tail, top
    return True
