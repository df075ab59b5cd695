"""Undo a recorded trace: from the blocks at its end to the allocator before its first event.

A trace holds the last events only, so it usually starts in the middle of a run. Walking it
backwards gives the blocks alive at its start; the free blocks are what lies between them.

Two things can stay open. A large block that was freed within the trace may have had up to 1 MiB
of slack in front of a free block that was not used meanwhile; the slack then counts as free. And
unmapped pages do not name their pool: the nearest known pages decide.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from memest.errors import ReplayError
from memest.replay.allocator import CachingAllocator, EventPolicy
from memest.replay.blocks import Block, BlockPool, Driver, ExpandableSegment
from memest.replay.conf import AllocatorConf
from memest.replay.sizes import SMALL_SEGMENT_SIZE, SMALL_SIZE, round_size
from memest.replay.snapshot import DEFAULT_POOL, RecordedSegment, TraceEvent

__all__ = ["RECORDED_STREAM", "PoolKey", "rewind"]

RECORDED_STREAM = -1  # stands for the streams of record_stream, which a trace does not name

PoolKey = tuple[int, bool, tuple[int, int]]  # stream, small pool, private pool


@dataclass(slots=True)
class _Alive:
    """A block at the start of the trace; its size is known if it lived to the end.

    A later block right behind it tells where it ends too: free space is used from its front.
    """

    requested: int
    size: int | None = None
    pending: bool = False
    end: int | None = None


@dataclass(slots=True)
class _State:
    conf: AllocatorConf
    alive: dict[int, _Alive] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    fixed_segments: dict[int, tuple[int, PoolKey]] = field(default_factory=dict)
    mapped_runs: dict[PoolKey, list[tuple[int, int]]] = field(default_factory=dict)
    known_addresses: dict[PoolKey, list[int]] = field(default_factory=dict)


def rewind(
    trace: tuple[TraceEvent, ...],
    segments: list[RecordedSegment],
    conf: AllocatorConf,
    driver: Driver,
    total_bytes: int | None = None,
) -> tuple[CachingAllocator, dict[int, Block]]:
    """The allocator as it was before a trace, and its live blocks by address.

    Args:
        trace: events of one device, oldest first.
        segments: that device's segments after the last event.
        conf: the options of the recording.
        driver: where the allocator shall get memory from.
        total_bytes: memory of the device, if known; it bounds an expandable segment.

    Raises:
        ReplayError: when the trace and the segments contradict each other.
    """
    state = _final_state(trace, segments, conf)
    for index in range(len(trace) - 1, -1, -1):
        _undo(state, trace[index], index)
    allocator = CachingAllocator(
        conf, driver=driver, events=EventPolicy.AT_SYNC, total_bytes=total_bytes
    )
    for segment in segments:
        if segment.pool != DEFAULT_POOL and segment.pool not in allocator.heap.private:
            # The pool keeps the one use that this leaves it with: the recording ended before
            # its release.
            allocator.begin_pool(segment.pool)
            allocator.end_pool(segment.pool)
    restoration = _Restoration(allocator, state)
    for address, (size, key) in sorted(state.fixed_segments.items()):
        restoration.link(address, address + size, key)
        allocator.stats.segment.increase(1, small=key[1])
    for key, runs in state.mapped_runs.items():
        if runs:
            restoration.grow(key, _lowest_page(state, trace, key))
    live = restoration.live
    if len(live) != len(state.alive):
        lost_address = min(set(state.alive) - set(live))
        raise ReplayError(
            f"the snapshot has a block at {lost_address:#x}, but no segment around it"
        )
    allocator.stats.reset_peaks()
    return allocator, live


def _final_state(
    trace: tuple[TraceEvent, ...], segments: list[RecordedSegment], conf: AllocatorConf
) -> _State:
    state = _State(conf)
    for segment in segments:
        key = (segment.stream, segment.small, segment.pool)
        if segment.expandable:
            state.known_addresses.setdefault(key, []).append(segment.address)
            _add(
                state.mapped_runs.setdefault(key, []),
                segment.address,
                segment.address + segment.size,
            )
        else:
            state.fixed_segments[segment.address] = (segment.size, key)
        for block in segment.blocks:
            if block.state != "inactive":
                pending = block.state != "active_allocated"
                state.alive[block.address] = _Alive(block.requested, block.size, pending)
    for event in trace:
        if event.action == "segment_map":
            # The small pool grows by one page at a time: no request there exceeds half of one.
            key = (event.stream, event.size == SMALL_SEGMENT_SIZE, DEFAULT_POOL)
            state.known_addresses.setdefault(key, []).append(event.address)
    state.starts = sorted(state.alive)
    return state


def _undo(state: _State, event: TraceEvent, index: int) -> None:
    action, address, size, stream = event
    if action == "alloc":
        if state.alive.pop(address, None) is None:
            raise ReplayError(f"trace event {index}: alloc at {address:#x} leads to no block")
        place = bisect_left(state.starts, address)
        del state.starts[place]
        if place:
            below = state.alive[state.starts[place - 1]]
            size = round_size(below.requested, state.conf.roundup_power2_divisions)
            if 0 <= address - state.starts[place - 1] - size <= SMALL_SIZE:
                below.end = address
    elif action == "free_completed":
        if address in state.alive:
            raise ReplayError(f"trace event {index}: free at {address:#x}, which is alive after it")
        state.alive[address] = _Alive(size, pending=True)
        insort(state.starts, address)
    elif action == "free_requested":
        if address not in state.alive:
            raise ReplayError(f"trace event {index}: free at {address:#x} was never completed")
        state.alive[address].pending = False
    elif action == "segment_alloc":
        if state.fixed_segments.pop(address, None) is None:
            raise ReplayError(f"trace event {index}: the segment at {address:#x} is not there")
    elif action == "segment_free":
        state.fixed_segments[address] = (size, (stream, size == SMALL_SEGMENT_SIZE, DEFAULT_POOL))
    elif action == "segment_map":
        runs = [r for r in state.mapped_runs.values() if _covers(r, address, address + size)]
        if not runs:
            raise ReplayError(f"trace event {index}: the pages at {address:#x} are not mapped")
        _remove(runs[0], address, address + size)
    elif action == "segment_unmap":
        key = _nearest(state, address, stream, size)
        _add(state.mapped_runs.setdefault(key, []), address, address + size)


def _nearest(state: _State, address: int, stream: int, size: int) -> PoolKey:
    """The growing segment that pages belong to: the trace does not name it."""
    small_only = size % state.conf.large_segment_size != 0
    keys = [key for key in state.known_addresses if key[0] == stream and (key[1] or not small_only)]
    if keys:
        return min(
            keys, key=lambda key: min(abs(at - address) for at in state.known_addresses[key])
        )
    key = (stream, small_only, DEFAULT_POOL)
    state.known_addresses[key] = [address]
    return key


def _lowest_page(state: _State, trace: tuple[TraceEvent, ...], key: PoolKey) -> int:
    """Where a growing segment begins, as far as the trace shows.

    Pages below those mapped at the start may be mapped later. Once no page is mapped the segment
    is gone, and what follows is another one.
    """
    runs = list(state.mapped_runs[key])
    lowest = runs[0][0]
    for event in trace:
        if event.action not in ("segment_map", "segment_unmap"):
            continue
        if _nearest(state, event.address, event.stream, event.size) != key:
            continue
        if event.action == "segment_map":
            lowest = min(lowest, event.address)
            _add(runs, event.address, event.address + event.size)
        else:
            _remove(runs, event.address, event.address + event.size)
            if not runs:
                break
    return lowest


def _covers(runs: list[tuple[int, int]], begin: int, end: int) -> bool:
    return any(low <= begin and end <= high for low, high in runs)


def _add(runs: list[tuple[int, int]], begin: int, end: int) -> None:
    """Join a range to sorted, disjoint ranges."""
    for low, high in list(runs):
        if high == begin or low == end:
            runs.remove((low, high))
            begin, end = min(low, begin), max(high, end)
    insort(runs, (begin, end))


def _remove(runs: list[tuple[int, int]], begin: int, end: int) -> None:
    """Cut a range out of the one that covers it."""
    for place, (low, high) in enumerate(runs):
        if low <= begin and end <= high:
            runs[place : place + 1] = [r for r in ((low, begin), (end, high)) if r[0] < r[1]]
            return


_Piece = tuple[int, int, _Alive | None]  # address, size, None when free


def _fill(state: _State, begin: int, end: int, key: PoolKey) -> Iterator[_Piece]:
    """The blocks of a range of mapped addresses, live and free, in order."""
    conf, starts = state.conf, state.starts
    inside = starts[bisect_left(starts, begin) : bisect_left(starts, end)]
    at = begin
    for place, address in enumerate(inside):
        alive = state.alive[address]
        if address > at:
            yield at, address - at, None
        following = inside[place + 1] if place + 1 < len(inside) else end
        room = following - address
        size = alive.size
        if size is None:
            size = round_size(alive.requested, conf.roundup_power2_divisions)
            whole = conf.max_split_size is not None and size >= conf.max_split_size
            # A large block keeps a rest of up to 1 MiB, which a free block cannot have.
            if not conf.expandable_segments and not key[1]:
                slack = (following if alive.end is None else alive.end) - address - size
                if slack <= SMALL_SIZE or whole:
                    size += max(slack, 0)
        if size > room:
            raise ReplayError(f"the blocks at {address:#x} and {following:#x} overlap")
        yield address, size, alive
        at = address + size
    if at < end:
        yield at, end - at, None


@dataclass(slots=True)
class _Restoration:
    """The allocator as it is filled again, and its live blocks by address."""

    allocator: CachingAllocator
    state: _State
    live: dict[int, Block] = field(default_factory=dict)

    def link(
        self,
        begin: int,
        end: int,
        key: PoolKey,
        segment: ExpandableSegment | None = None,
        before: Block | None = None,
    ) -> Block | None:
        """Make the blocks of mapped addresses, count them, and hang them behind ``before``."""
        stream, small, pool = key[0], key[1], self.pool(key)
        stats = self.allocator.stats
        pieces = list(_fill(self.state, begin, end, key))
        for address, size, alive in pieces:
            block = before = _hang_behind(Block(address, size, stream, pool, segment), before)
            stats.reserved_bytes.increase(size, small=small)
            if alive is None:
                pool.insert_free(block)
                if segment is None and len(pieces) > 1:
                    stats.inactive_split.increase(1, small=small)
                    stats.inactive_split_bytes.increase(size, small=small)
                continue
            self.live[address] = block
            block.requested = alive.requested
            self.allocator.adopt(block, pending_on=RECORDED_STREAM if alive.pending else None)
        return before

    def grow(self, key: PoolKey, base: int) -> None:
        """The growing segments of a pool: one, or more where pages are too far apart for that."""
        runs, pool = self.state.mapped_runs[key], self.pool(key)
        while runs:
            segment = self.allocator.heap.new_expandable_segment(pool, base)
            limit = base + segment.size
            inside = [run for run in runs if run[1] <= limit] or runs[:1]
            runs = runs[len(inside) :]
            at, last = base, None
            for begin, end in [*inside, (limit, limit)]:
                if begin > at:
                    gap = Block(at, begin - at, key[0], pool, segment, mapped=False)
                    last = _hang_behind(gap, last)
                    pool.insert_unmapped(gap)
                last = self.link(begin, end, key, segment, last)
                at = end
            base = runs[0][0] if runs else 0

    def pool(self, key: PoolKey) -> BlockPool:
        """The pool of this kind."""
        _, small, name = key
        heap = self.allocator.heap
        pair = heap if name == DEFAULT_POOL else heap.private[name]
        return pair.small if small else pair.large


def _hang_behind(block: Block, before: Block | None) -> Block:
    block.prev = before
    if before is not None:
        before.next = block
    return block
