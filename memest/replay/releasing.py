"""The replay where memory goes back to the driver: under a limit, and where caches are emptied.

Pools then know of each other, because what is reserved counts for all of them and is given back by
all of them, so they are played together. Blocks are kept as in :mod:`memest.replay.fast`, and as
there the rules are those of :mod:`memest.replay.allocator`; the tests prove both equal. Segments
are fixed; growing ones and options that give back in other ways are left to the full model.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from memest.replay.fast import SEGMENT_GAP, FreeBlocks, Placement, segment_rules
from memest.replay.sizes import ROUND_LARGE

__all__ = ["place_releasing"]


@dataclass(slots=True)
class _Pool:
    """The blocks of one size class and stream.

    Attributes:
        rules: as :func:`memest.replay.fast.segment_rules` has them.
        free: its free blocks.
        segments: bytes of each segment by its start.
    """

    rules: tuple[int, int, int]
    free: FreeBlocks = field(default_factory=FreeBlocks)
    segments: dict[int, int] = field(default_factory=dict)

    def release(self) -> int:
        """Give back every segment that is free as a whole; returns their bytes."""
        whole = {
            start: nbytes
            for start, nbytes in self.segments.items()
            if self.free.other_end.get(start) == start + nbytes
        }
        for start, nbytes in whole.items():
            del self.segments[start]
            del self.free.other_end[start], self.free.other_end[start + nbytes]
            self.free.bins[nbytes].remove(start)
        return sum(whole.values())


def _release(
    pools: Iterable[_Pool], growth: list[tuple[int, int]], index: int, reserved: int
) -> int:
    """Give back what can be, and note it; returns the bytes."""
    released = sum(pool.release() for pool in pools)
    if released:
        growth.append((index, reserved - released))
    return released


def place_releasing(
    events: Sequence[int],
    rounded_sizes: Sequence[int],
    limit_bytes: int | None,
    large_segment_size: int,
    streams: bytes = b"",
    *,
    empty_cache_at: Collection[int] = (),
    dispensable: Collection[int] = (),
) -> Placement:
    """Place every allocation, giving back whole free segments where that has to be.

    Args:
        events: valid ones, as for :func:`memest.replay.replay.replay`.
        rounded_sizes: the rounded size of each allocation number, 0 for one that is never made.
        limit_bytes: the most that may be reserved; None for no limit.
        large_segment_size: segment for large requests below 10 MiB.
        streams: CUDA stream of each allocation number; empty where all are on one.
        empty_cache_at: events in front of which all is given back.
        dispensable: allocation numbers that the program goes on without.

    Returns:
        The placement, up to where memory ran out if it did.
    """
    pools: dict[tuple[bool, int], _Pool] = {}
    starts: list[int | None] = [None] * len(rounded_sizes)
    homes: list[_Pool | None] = [None] * len(rounded_sizes)
    placement = Placement([0] * len(rounded_sizes))
    block_bytes, growth = placement.block_bytes, placement.growth
    small_rules, large_rules = segment_rules(large_segment_size)
    empties = set(empty_cache_at)
    limit = math.inf if limit_bytes is None else limit_bytes
    lowest = reserved = 0
    for index, event in enumerate(events):
        if index in empties:
            reserved -= _release(pools.values(), growth, index, reserved)
        if event >= 0:
            size = rounded_sizes[event]
            if not size:
                continue
            is_small, stream = size < large_rules[0], streams[event] if streams else 0
            pool = pools.get((is_small, stream))
            if pool is None:
                pool = pools[is_small, stream] = _Pool(small_rules if is_small else large_rules)
            bins, sizes, other_end = pool.free.bins, pool.free.sizes, pool.free.other_end
            least, segment, own_from = pool.rules
            at = bisect_left(sizes, size)
            while at < len(sizes) and not bins[sizes[at]]:
                del bins[sizes.pop(at)]
            if at < len(sizes):
                start = bins[sizes[at]].pop(0)
                end = other_end.pop(start)
                del other_end[end]
            else:
                if size >= own_from:
                    segment = -(-size // ROUND_LARGE) * ROUND_LARGE
                if reserved + segment > limit:
                    placement.num_retries += 1
                    reserved -= _release(pools.values(), growth, index, reserved)
                    if reserved + segment > limit:
                        if event in dispensable:
                            continue
                        placement.oom_index = index
                        break
                start = lowest = lowest - segment - SEGMENT_GAP
                end = start + segment
                pool.segments[start] = segment
                reserved += segment
                growth.append((index, reserved))
            homes[event], starts[event] = pool, start
            if end - start - size < least:
                block_bytes[event] = end - start
                continue
            block_bytes[event] = size
            start += size
        else:
            freed = starts[~event]
            pool = homes[~event]
            if freed is None or pool is None:
                continue
            start, end = freed, freed + block_bytes[~event]
            bins, sizes, other_end = pool.free.bins, pool.free.sizes, pool.free.other_end
            if start in other_end:
                low = other_end.pop(start)
                bins[start - low].remove(low)
                start = low
            if end in other_end:
                high = other_end.pop(end)
                bins[high - end].remove(end)
                end = high
        other_end[start], other_end[end] = end, start
        if end - start not in bins:
            bins[end - start] = []
            insort(sizes, end - start)
        insort(bins[end - start], start)
    placement.num_segments = sum(len(pool.segments) for pool in pools.values())
    return placement
