"""The fast replay: no limit met, nothing given back to the driver.

Under these conditions the pools of small and of large blocks, and those of several streams, know
nothing of each other, and the
allocator needs no linked blocks: a free block is two dictionary entries (its end by its start, its
start by its end) and one integer in a sorted list, ``size << 48 | address``, whose order is the
allocator's (size, address). Everything that can be computed afterwards, at the speed of C, is (see
:mod:`memest.replay.replay`). The rules are those of :mod:`memest.replay.allocator`; the tests prove
both equal.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, compress
from operator import add, and_
from typing import Any

from memest.events import Chain, Chains
from memest.replay.sizes import (
    MIN_BLOCK_SIZE,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    SMALL_SEGMENT_SIZE,
    SMALL_SIZE,
)

__all__ = ["MASK", "MAX_FAST_BYTES", "SEGMENT_GAP", "SHIFT", "Placement", "place", "segment_rules"]

SHIFT = 48
MASK = (1 << SHIFT) - 1
MAX_FAST_BYTES = 1 << 44  # addresses must stay below 2**48, growth within UNBOUNDED_RANGE
# The gap keeps neighbouring segments from merging.
SEGMENT_GAP = MIN_BLOCK_SIZE
_NO_OWN_SEGMENT = 1 << 62
_NOT = bytes([1]) + bytes(255)
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
    """

    block_bytes: list[int]
    growth: list[tuple[int, int]] = field(default_factory=list)
    num_segments: int = 0
    num_retries: int = 0
    oom_index: int | None = None


@dataclass(slots=True)
class _Pool:
    """The events of one pool and where its blocks were put.

    Attributes:
        events: of this pool.
        indices: of each of them, in the whole stream.
        chains: copies among the events.
        sizes: of the numbers of this pool.
        block_bytes: size handed out for each number.
        starts: address of each number.
        growth: (index in the whole stream, bytes that came).
    """

    events: list[int]
    indices: list[int]
    chains: Sequence[Chain]
    sizes: tuple[int, ...]
    block_bytes: list[int] = field(default_factory=list)
    starts: list[int | None] = field(default_factory=list)
    growth: list[tuple[int, int]] = field(default_factory=list)

    def stretches(self, free: _Free) -> Iterator[tuple[int, int]]:
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
            state = (
                id(chain),
                free.state(),
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
            free.become(left)
        if here < len(self.events):
            yield here, len(self.events)


@dataclass(slots=True)
class _Free:
    """The free blocks of a pool.

    Attributes:
        keys: ``size << 48 | address``, sorted.
        end_of: end of each by its start.
        start_of: start of each by its end.
        tail: (start of the last one, end of what is mapped) of a growing segment, else (0, 0).
    """

    keys: list[int] = field(default_factory=list)
    end_of: dict[int, int] = field(default_factory=dict)
    start_of: dict[int, int] = field(default_factory=dict)
    tail: tuple[int, int] = (0, 0)

    def state(self) -> tuple[object, ...]:
        """All of it, to compare and to come back to."""
        return tuple(self.keys), self.tail

    def become(self, state: tuple[Any, ...]) -> None:
        """Take on an earlier state."""
        keys, self.tail = state
        if keys == tuple(self.keys):
            return
        self.keys[:] = keys
        self.end_of.clear()
        self.start_of.clear()
        for key in keys:
            start = key & MASK
            end = start + (key >> SHIFT)
            self.end_of[start] = end
            self.start_of[end] = start


def _pools(
    events: Sequence[int], rounded_sizes: list[int], chains: Chains | None, streams: bytes
) -> tuple[list[_Pool], list[_Pool]]:
    """The small and the large pools, one of each for a stream; requests of 0 bytes are in none.

    Raises:
        IndexError: an event of a number that has no size.
    """
    small = bytes([0 < size <= SMALL_SIZE for size in rounded_sizes])
    # at the speed of C where no request is of 0 bytes, which is almost always
    large = (
        bytes([size > SMALL_SIZE for size in rounded_sizes])
        if 0 in rounded_sizes
        else small.translate(_NOT)
    )
    # GPUs differ in a few workspaces, which mostly stay on their side: the same pools again
    key = small, large, streams
    parts = None if chains is None else chains.memo.get(key)
    if parts is None:
        owners = [streams.translate(_only(stream)) for stream in sorted(set(streams))] or [b""]
        masks = [
            [bytes(map(and_, inside, own)) if own else inside for own in owners]
            for inside in (small, large)
        ]
        numbers = range(len(rounded_sizes))
        parts = [
            [(list(compress(numbers, mask)), _partition(events, mask, chains)) for mask in pools]
            for pools in masks
        ]
        if chains is not None:
            _remember(chains, key, parts)
    copies = () if chains is None else chains.chains
    size_of = rounded_sizes.__getitem__
    smalls, larges = (
        [
            _Pool(own_events, indices, copies, tuple(map(size_of, members)))
            for members, (own_events, indices) in pools
        ]
        for pools in parts
    )
    return smalls, larges


def _only(stream: int) -> bytes:
    """A table that makes 1 of this stream and 0 of every other."""
    return bytes([number == stream for number in range(256)])


def _partition(
    events: Sequence[int], inside: bytes, chains: Chains | None
) -> tuple[list[int], list[int]]:
    """The events whose number is inside, and their indices."""
    if chains is not None and inside in chains.memo:
        known: tuple[list[int], list[int]] = chains.memo[inside]
        return known
    # Python reads an event -1-v, a free, as the v-th entry from the end
    table = inside + inside[::-1]
    mask = list(map(table.__getitem__, events))
    partition = list(compress(events, mask)), list(compress(range(len(mask)), mask))
    if chains is not None:
        _remember(chains, inside, partition)
    return partition


def _remember(chains: Chains, key: object, value: object) -> None:
    if len(chains.memo) >= _MEMORIES:
        chains.memo.pop(next(iter(chains.memo)))
    chains.memo[key] = value


def _place_pool(
    pool: _Pool,
    count: int,
    chains: Chains | None,
    rules: tuple[int, ...],
    place: Callable[[], bool],
) -> bool:
    """Place a pool, or find that the same sizes were placed by the same rules before.

    GPUs differ in a few workspaces: often only in the one pool or the other.
    """
    key = rules, pool.sizes
    placement = None if chains is None else chains.memo.get(key)
    if placement is not None:
        pool.block_bytes, pool.growth = placement
        return True
    pool.block_bytes, pool.starts = [0] * count, [None] * count
    if not place():
        return False
    if chains is not None:
        _remember(chains, key, (pool.block_bytes, pool.growth))
    return True


def _placement(pools: tuple[list[_Pool], list[_Pool]], limit_bytes: int) -> Placement | None:
    all_pools = [*pools[0], *pools[1]]
    growths = sorted(growth for pool in all_pools for growth in pool.growth)
    totals = list(accumulate(size for _, size in growths))
    if totals and totals[-1] > limit_bytes:
        return None
    growth = [(index, total) for (index, _), total in zip(growths, totals, strict=True)]
    block_bytes = all_pools[0].block_bytes
    for pool in all_pools[1:]:
        if pool.sizes:
            block_bytes = list(map(add, block_bytes, pool.block_bytes))
    return Placement(block_bytes, growth)


def place(
    events: Sequence[int],
    rounded_sizes: list[int],
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
        rounded_sizes: the rounded size of each allocation number, 0 for one that is never made.
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
    small, large = pools = _pools(events, rounded_sizes, chains, streams)
    small_rules: tuple[int, ...]
    large_rules: tuple[int, ...]
    if range_bytes is None:
        place_pool: Callable[..., bool] = _place_in_segments
        small_rules, large_rules = segment_rules(large_segment_size)
    else:
        place_pool, too_large = _place_in_pages, max(range_bytes - limit_bytes, 0)
        small_rules, large_rules = (SMALL_SEGMENT_SIZE, too_large), (large_segment_size, too_large)
    count = len(rounded_sizes)
    for members, rules in ((small, small_rules), (large, large_rules)):
        for pool in members:
            if not _place_pool(
                pool, count, chains, rules, partial(place_pool, pool, rounded_sizes, *rules)
            ):
                return None
    if range_bytes is None:
        placement = _placement(pools, limit_bytes)
        if placement is not None:
            placement.num_segments = len(placement.growth)
        return placement
    # The allocator compares the size of a fixed segment with its limit (7.4): where that might
    # tell, the full model decides.
    margin = max(max(rounded_sizes, default=0) + ROUND_LARGE, large_segment_size)
    grows = any(pool.growth for pool in large)
    return _placement(pools, limit_bytes - margin if grows else limit_bytes)


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


def _place_in_segments(
    pool: _Pool, rounded_sizes: Sequence[int], least: int, segment_size: int, own_segment_from: int
) -> bool:
    """One pool with fixed segments; False where their addresses do not fit into a key.

    Args:
        pool: filled in.
        rounded_sizes: the rounded size of each allocation number.
        least: a rest smaller than this is not split off.
        segment_size: of a new segment.
        own_segment_from: a request of this size or more gets a segment of its own.
    """
    block_bytes, starts, growth = pool.block_bytes, pool.starts, pool.growth
    events, indices = pool.events, pool.indices
    free = _Free()
    keys, end_of, start_of = free.keys, free.end_of, free.start_of
    lowest = 1 << SHIFT  # the driver places each segment below the last
    for first, behind in pool.stretches(free):
        for place, number in enumerate(events[first:behind], first):
            if number >= 0:
                size = rounded_sizes[number]
                at = bisect_left(keys, size << SHIFT)
                if at < len(keys):
                    start = keys.pop(at) & MASK
                    end = end_of.pop(start)
                    rest = end - start - size
                    if rest < least:
                        del start_of[end]
                        block_bytes[number] = end - start
                        starts[number] = start
                        continue
                else:
                    segment = segment_size
                    if size >= own_segment_from:
                        segment = -(-size // ROUND_LARGE) * ROUND_LARGE
                    start = lowest = lowest - segment - SEGMENT_GAP
                    if start < 0:
                        return False
                    growth.append((indices[place], segment))
                    rest = segment - size
                    if rest < least:
                        block_bytes[number] = segment
                        starts[number] = start
                        continue
                    end = start + segment
                block_bytes[number] = size
                starts[number] = start
                start += size
                end_of[start] = end
                start_of[end] = start
                insort(keys, rest << SHIFT | start)
            else:
                start = starts[~number]  # type: ignore[assignment]
                size = block_bytes[~number]
                end = start + size
                if start in start_of:
                    low = start_of.pop(start)
                    del end_of[low]
                    del keys[bisect_left(keys, (start - low) << SHIFT | low)]
                    start = low
                if end in end_of:
                    high = end_of.pop(end)
                    del keys[bisect_left(keys, (high - end) << SHIFT | end)]
                    end = high
                end_of[start] = end
                start_of[end] = start
                insort(keys, (end - start) << SHIFT | start)
    return True


def _place_in_pages(pool: _Pool, rounded_sizes: Sequence[int], page: int, too_large: int) -> bool:
    """One pool with one growing segment; False where a free block is too large to be sure.

    The free block that ends at the last mapped page (the tail) is used only when nothing else
    fits, so it is two numbers beside the sorted list instead of an entry in it.
    """
    block_bytes, starts, growth = pool.block_bytes, pool.starts, pool.growth
    events, indices = pool.events, pool.indices
    free = _Free()
    keys, end_of, start_of = free.keys, free.end_of, free.start_of
    too_large <<= SHIFT
    for first, behind in pool.stretches(free):
        tail, top = free.tail
        for place, number in enumerate(events[first:behind], first):
            if number >= 0:
                size = block_bytes[number] = rounded_sizes[number]
                at = bisect_left(keys, size << SHIFT)
                if at < len(keys):
                    key = keys.pop(at)
                    if key > too_large:
                        return False
                    starts[number] = start = key & MASK
                    end = end_of.pop(start)
                    start += size
                    if start == end:
                        del start_of[end]
                    else:
                        end_of[start] = end
                        start_of[end] = start
                        insort(keys, (end - start) << SHIFT | start)
                else:
                    starts[number] = tail
                    tail += size
                    if tail > top:
                        growth_bytes = -(-(tail - top) // page) * page
                        top += growth_bytes
                        growth.append((indices[place], growth_bytes))
            else:
                start = starts[~number]  # type: ignore[assignment]
                size = block_bytes[~number]
                end = start + size
                if start in start_of:
                    low = start_of.pop(start)
                    del end_of[low]
                    del keys[bisect_left(keys, (start - low) << SHIFT | low)]
                    start = low
                if end == tail:
                    tail = start
                    continue
                if end in end_of:
                    high = end_of.pop(end)
                    del keys[bisect_left(keys, (high - end) << SHIFT | end)]
                    end = high
                end_of[start] = end
                start_of[end] = start
                insort(keys, (end - start) << SHIFT | start)
        free.tail = tail, top
    return True
