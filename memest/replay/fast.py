"""The fast replay: one stream, no limit met, nothing given back to the driver.

Under these conditions the allocator needs no linked blocks: a free block is two dictionary
entries (its end by its start, its start by its end) and one integer in a sorted list,
``size << 48 | address``, whose order is the allocator's (size, address). Everything that can be
computed afterwards, at the speed of C, is (see :mod:`memest.replay.replay`). The rules are those of
:mod:`memest.replay.allocator`; the tests prove both equal.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from memest.replay.sizes import (
    MIN_BLOCK_SIZE,
    MIN_LARGE_ALLOC,
    ROUND_LARGE,
    SMALL_SEGMENT_SIZE,
    SMALL_SIZE,
)

__all__ = ["MAX_FAST_BYTES", "Placement", "place_default", "place_expandable"]

_SHIFT = 48
_MASK = (1 << _SHIFT) - 1
MAX_FAST_BYTES = 1 << 44  # addresses must stay below 2**48, growth within UNBOUNDED_RANGE
# An address in the small pool is odd and one in the large pool even, so one pair of dictionaries
# serves both. The gap keeps neighbouring segments from merging.
_SMALL_BASE = 1
_SEGMENT_GAP = MIN_BLOCK_SIZE


@dataclass(slots=True)
class Placement:
    """What the fast loops find out.

    Attributes:
        block_bytes: size handed out for each allocation number, 0 for one never allocated.
        growth: (index of the event, reserved bytes after it) whenever reserved bytes grew.
        num_segments: driver allocations; 0 for expandable segments, as torch counts.
    """

    block_bytes: list[int]
    growth: list[tuple[int, int]] = field(default_factory=list)
    num_segments: int = 0


def place_default(
    events: Sequence[int], rounded: Sequence[int], limit_bytes: int, large_segment_size: int
) -> Placement | None:
    """Place every allocation with fixed segments.

    Args:
        events: as for :func:`memest.replay.replay.replay`, without zero sizes.
        rounded: the rounded size of each allocation number.
        limit_bytes: the most that may be reserved.
        large_segment_size: segment for large requests below 10 MiB.

    Returns:
        The placement, or None when the limit would be exceeded.

    Raises:
        TypeError, IndexError: when an event frees what was not allocated (left to the caller, so
            that the loop need not look).
    """
    got = [0] * len(rounded)
    starts: list[int | None] = [None] * len(rounded)
    placement = Placement(got)
    small: list[int] = []
    large: list[int] = []
    end_of: dict[int, int] = {}
    start_of: dict[int, int] = {}
    reserved = 0
    next_address = 0
    for index, number in enumerate(events):
        if number >= 0:
            size = rounded[number]
            if size <= SMALL_SIZE:
                keys, least = small, MIN_BLOCK_SIZE
            else:
                keys, least = large, SMALL_SIZE + 1
            at = bisect_left(keys, size << _SHIFT)
            if at < len(keys):
                start = keys.pop(at) & _MASK
                end = end_of.pop(start)
                rest = end - start - size
                if rest < least:
                    del start_of[end]
                    got[number] = end - start
                    starts[number] = start
                    continue
            else:
                if keys is small:
                    segment = SMALL_SEGMENT_SIZE
                    start = next_address + _SMALL_BASE
                elif size < MIN_LARGE_ALLOC:
                    segment = large_segment_size
                    start = next_address
                else:
                    segment = -(-size // ROUND_LARGE) * ROUND_LARGE
                    start = next_address
                next_address += segment + _SEGMENT_GAP
                reserved += segment
                if reserved > limit_bytes:
                    return None
                placement.growth.append((index, reserved))
                rest = segment - size
                if rest < least:
                    got[number] = segment
                    starts[number] = start
                    continue
                end = start + segment
            got[number] = size
            starts[number] = start
            start += size
            end_of[start] = end
            start_of[end] = start
            insort(keys, rest << _SHIFT | start)
        else:
            start = starts[~number]  # type: ignore[assignment]
            size = got[~number]
            end = start + size
            keys = small if size <= SMALL_SIZE else large
            if start in start_of:
                low = start_of.pop(start)
                del end_of[low]
                del keys[bisect_left(keys, (start - low) << _SHIFT | low)]
                start = low
            if end in end_of:
                high = end_of.pop(end)
                del keys[bisect_left(keys, (high - end) << _SHIFT | end)]
                end = high
            end_of[start] = end
            start_of[end] = start
            insort(keys, (end - start) << _SHIFT | start)
    placement.num_segments = len(placement.growth)
    return placement


def place_expandable(
    events: Sequence[int],
    rounded: Sequence[int],
    limit_bytes: int,
    large_segment_size: int,
    range_bytes: int,
) -> Placement | None:
    """Place every allocation with one growing segment per pool.

    The free block that ends at the last mapped page (the tail) is used only when nothing else
    fits, so it is two numbers beside the sorted list instead of an entry in it.

    Args:
        events: as for :func:`place_default`.
        rounded: the rounded size of each allocation number.
        limit_bytes: the most that may be reserved.
        large_segment_size: page of the large pool.
        range_bytes: addresses that one segment can grow over.

    Returns:
        The placement, or None when the limit might be exceeded, or when a free block is so large
        that the allocator might not take it for smaller than the tail with its room to grow.

    Raises:
        TypeError, IndexError: as :func:`place_default`.
    """
    got = [0] * len(rounded)
    starts: list[int | None] = [None] * len(rounded)
    placement = Placement(got)
    small: list[int] = []
    large: list[int] = []
    end_of: dict[int, int] = {}
    start_of: dict[int, int] = {}
    small_tail = small_top = _SMALL_BASE
    large_tail = large_top = 0
    reserved = 0
    too_large = max(range_bytes - limit_bytes, 0) << _SHIFT
    for index, number in enumerate(events):
        if number >= 0:
            size = got[number] = rounded[number]
            keys = small if size <= SMALL_SIZE else large
            at = bisect_left(keys, size << _SHIFT)
            if at < len(keys):
                key = keys.pop(at)
                if key > too_large:
                    return None
                starts[number] = start = key & _MASK
                end = end_of.pop(start)
                start += size
                if start == end:
                    del start_of[end]
                else:
                    end_of[start] = end
                    start_of[end] = start
                    insort(keys, (end - start) << _SHIFT | start)
            elif keys is small:
                starts[number] = small_tail
                small_tail += size
                if small_tail > small_top:
                    missing = small_tail - small_top
                    grown = -(-missing // SMALL_SEGMENT_SIZE) * SMALL_SEGMENT_SIZE
                    small_top += grown
                    reserved += grown
                    if reserved > limit_bytes:
                        return None
                    placement.growth.append((index, reserved))
            else:
                starts[number] = large_tail
                large_tail += size
                if large_tail > large_top:
                    missing = large_tail - large_top
                    grown = -(-missing // large_segment_size) * large_segment_size
                    large_top += grown
                    # The allocator compares the size of a fixed segment with its limit (7.4).
                    if reserved + max(grown, size + ROUND_LARGE, large_segment_size) > limit_bytes:
                        return None
                    reserved += grown
                    placement.growth.append((index, reserved))
        else:
            start = starts[~number]  # type: ignore[assignment]
            size = got[~number]
            end = start + size
            keys = small if size <= SMALL_SIZE else large
            if start in start_of:
                low = start_of.pop(start)
                del end_of[low]
                del keys[bisect_left(keys, (start - low) << _SHIFT | low)]
                start = low
            if keys is small:
                if end == small_tail:
                    small_tail = start
                    continue
            elif end == large_tail:
                large_tail = start
                continue
            if end in end_of:
                high = end_of.pop(end)
                del keys[bisect_left(keys, (high - end) << _SHIFT | end)]
                end = high
            end_of[start] = end
            start_of[end] = start
            insort(keys, (end - start) << _SHIFT | start)
    return placement
