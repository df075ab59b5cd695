"""Replay a stream of allocations: how much would be allocated and reserved, and when.

``replay`` is a pure function. It takes the fast loops of :mod:`memest.replay.fast` and
:mod:`memest.replay.releasing` while they are exact and the full model of
:mod:`memest.replay.allocator` otherwise; the answer is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import neg
from typing import TYPE_CHECKING

from memest.errors import ReplayError
from memest.events import Chains
from memest.replay.conf import AllocatorConf
from memest.replay.fast import MAX_FAST_BYTES, Placement, place
from memest.replay.releasing import place_releasing
from memest.replay.sizes import NO_DIVISIONS, UNBOUNDED_RANGE, expandable_range, round_size
from memest.replay.waves import Waves, waves_of

if TYPE_CHECKING:
    from memest.replay.blocks import Block

__all__ = ["Replay", "check_events", "peak_without", "replay", "replay_reference"]

_WAVES = "the waves of the stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the allocator would report for a stream.

    Attributes:
        peak_allocated_bytes: as ``torch.cuda.max_memory_allocated``.
        peak_allocated_index: the first event at which that peak is reached.
        peak_reserved_bytes: as ``torch.cuda.max_memory_reserved``.
        final_allocated_bytes: allocated after the last event replayed.
        final_reserved_bytes: reserved after it.
        num_alloc_retries: how often caches had to be released for an allocation.
        num_ooms: 1 when the stream ran out of memory, 0 otherwise.
        oom_index: the event at which it did; the replay stops there.
        block_bytes: size handed out for each allocation number, 0 for one never allocated.
        num_segments: segments held at the end, as torch counts them (expandable ones are not).
        allocated_curve: allocated after each event replayed, if asked for.
        reserved_curve: reserved after each event replayed, if asked for.
    """

    peak_allocated_bytes: int
    peak_allocated_index: int
    peak_reserved_bytes: int
    final_allocated_bytes: int
    final_reserved_bytes: int
    num_alloc_retries: int
    num_ooms: int
    oom_index: int | None
    block_bytes: list[int]
    num_segments: int
    allocated_curve: array[int] | None = None
    reserved_curve: array[int] | None = None


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    conf: AllocatorConf | None = None,
    *,
    limit_bytes: int | None = None,
    total_bytes: int | None = None,
    curve: bool = False,
    chains: Chains | None = None,
    streams: bytes = b"",
    empty_cache_at: Sequence[int] = (),
    dispensable: Collection[int] = (),
) -> Replay:
    """Replay allocations and frees from an empty allocator.

    Args:
        events: v >= 0 allocates allocation number v; v < 0 frees allocation number ``~v``.
        sizes: requested bytes of each allocation number; 0 makes its events do nothing. A number
            is allocated at most once.
        conf: options of the allocator.
        limit_bytes: bytes the driver can give this process; None for as many as it takes.
        total_bytes: memory of the whole device, by default ``limit_bytes``. A
            ``per_process_memory_fraction`` is a share of it, and an expandable segment can grow
            over 1.125 times as many addresses.
        curve: whether to keep allocated and reserved bytes after each event.
        chains: parts of the events that are copies of each other; one that finds the allocator in
            the same state as an earlier one is not played again. The answer is the same without.
            Events that come with chains were composed by memest and are not checked again.
        streams: CUDA stream of each allocation number; empty where all are on one. A block can
            only be used again on its own stream.
        empty_cache_at: events in front of which the program calls
            ``torch.cuda.empty_cache``, in order.
        dispensable: allocation numbers that the program goes on without where memory does not
            suffice for them.

    Returns:
        Peaks, their places, and the size of every block handed out.

    Raises:
        ReplayError: when the stream contradicts itself; the message names the event.

    Example:
        >>> from memest.units import MIB
        >>> result = replay([0, 1, ~0], [30 * MIB, 5 * MIB])
        >>> result.peak_allocated_bytes // MIB, result.peak_reserved_bytes // MIB
        (35, 50)
    """
    conf = AllocatorConf() if conf is None else conf
    total_bytes = limit_bytes if total_bytes is None else total_bytes
    sizes_of_kinds = sizes
    if chains is not None and chains.kinds:
        sizes_of_kinds = [sizes[number] for number in chains.examples]
    if sizes_of_kinds and min(sizes_of_kinds) < 0:
        check_events(events, sizes)
        worst = min(sizes)
        raise ReplayError(f"allocation number {sizes.index(worst)} has {worst} bytes; 0 is least")
    if conf.max_split_size is None and not (conf.expandable_segments and empty_cache_at):
        placement = _place(
            events,
            sizes,
            sizes_of_kinds,
            conf,
            limit_bytes,
            total_bytes,
            chains,
            streams,
            empty_cache_at,
            dispensable,
        )
        if placement is not None:
            return _summarize(events, placement, chains, curve=curve)
    return replay_reference(
        events,
        sizes,
        conf,
        limit_bytes=limit_bytes,
        total_bytes=total_bytes,
        curve=curve,
        streams=streams,
        empty_cache_at=empty_cache_at,
        dispensable=dispensable,
    )


def check_events(events: Sequence[int], sizes: Sequence[int]) -> None:
    """Find the first contradiction in a stream.

    Raises:
        ReplayError: for an allocation number without a size, allocated twice, freed when it is
            not alive, or of a negative size. The message begins with the event's index.
    """
    unborn, alive, dead = 0, 1, 2
    state = bytearray(len(sizes))
    for index, event in enumerate(events):
        number = event if event >= 0 else ~event
        if number >= len(sizes):
            raise ReplayError(
                f"event {index}: allocation number {number} has no size; there are {len(sizes)}"
            )
        if event < 0 and state[number] != alive:
            why = "it was never allocated" if state[number] == unborn else "it is free already"
            raise ReplayError(f"event {index}: free of allocation number {number}, but {why}")
        if event >= 0 and state[number] != unborn:
            raise ReplayError(f"event {index}: allocation number {number} is allocated again")
        if sizes[number] < 0:
            raise ReplayError(
                f"event {index}: allocation number {number} has {sizes[number]} bytes; sizes "
                "start at 0"
            )
        state[number] = alive if event >= 0 else dead


def _place(
    events: Sequence[int],
    sizes: Sequence[int],
    sizes_of_kinds: Sequence[int],
    conf: AllocatorConf,
    limit_bytes: int | None,
    total_bytes: int | None,
    chains: Chains | None,
    streams: bytes,
    empty_cache_at: Sequence[int],
    dispensable: Collection[int],
) -> Placement | None:
    """The fast replay, or None where it would not be exact."""
    if total_bytes is not None and conf.per_process_memory_fraction < 1.0:
        if conf.garbage_collection_threshold > 0.0:
            return None
        share = int(conf.per_process_memory_fraction * total_bytes)
        limit_bytes = share if limit_bytes is None else min(limit_bytes, share)
    kinds: Sequence[int] = range(len(sizes))
    if chains is not None and chains.kinds:
        kinds = chains.kinds
    if conf.roundup_power2_divisions == NO_DIVISIONS:
        rounded = [(size + 511) & -512 for size in sizes_of_kinds]
    else:
        divisions = conf.roundup_power2_divisions
        rounded_by_size = {
            size: round_size(size, divisions) if size else 0 for size in set(sizes_of_kinds)
        }
        rounded = [rounded_by_size[size] for size in sizes_of_kinds]
    gives_back = not conf.expandable_segments and (limit_bytes is not None or bool(empty_cache_at))
    # Every event of a valid stream is different from all others; this catches a second
    # allocation or free of the same number, and the loops stumble over a free that comes first,
    # unless they pass over what memory did not suffice for.
    if chains is None and (gives_back or len(set(events)) != len(events) or 0 in sizes):
        check_events(events, sizes)
    large = conf.large_segment_size
    if gives_back:
        return place_releasing(
            events,
            list(map(rounded.__getitem__, kinds)),
            limit_bytes,
            large,
            streams,
            empty_cache_at=empty_cache_at,
            dispensable=dispensable,
        )
    limit = MAX_FAST_BYTES if limit_bytes is None else min(limit_bytes, MAX_FAST_BYTES)
    span = None
    if conf.expandable_segments:
        span = UNBOUNDED_RANGE if total_bytes is None else expandable_range(total_bytes)
        limit = limit if total_bytes is None else min(limit, total_bytes)
    try:
        return place(events, rounded, kinds, limit, large, chains, streams, range_bytes=span)
    except (TypeError, IndexError):
        check_events(events, sizes)
        raise


def _summarize(
    events: Sequence[int],
    placement: Placement,
    chains: Chains | None,
    *,
    curve: bool,
) -> Replay:
    """Peaks and curves from the sizes handed out, in passes that run at the speed of C."""
    if placement.oom_index is not None:
        events = events[: placement.oom_index + 1]
    allocated: list[int] = []
    rounded = placement.rounded
    waves = None
    if chains is not None and rounded and all(rounded) and not curve:
        waves = _waves(events, chains)
    if waves is not None:
        peak, peak_index, final = waves.peak(rounded, placement.odd)
    else:
        allocated = _running_sum(events, placement.block_bytes)
        peak, final = max(allocated, default=0), allocated[-1] if allocated else 0
        peak_index = allocated.index(peak) if allocated else 0
    growth = placement.growth
    reserved = max((nbytes for _, nbytes in growth), default=0)
    reserved_curve = None
    if curve:
        reserved_curve = array("q")
        for (index, value), (following, _) in pairwise([(0, 0), *growth, (len(events), 0)]):
            reserved_curve.extend(array("q", [value]) * (following - index))
    return Replay(
        peak_allocated_bytes=peak,
        peak_allocated_index=peak_index,
        peak_reserved_bytes=reserved,
        final_allocated_bytes=final,
        final_reserved_bytes=growth[-1][1] if growth else 0,
        num_alloc_retries=placement.num_retries,
        num_ooms=int(placement.oom_index is not None),
        oom_index=placement.oom_index,
        block_bytes=placement.block_bytes,
        num_segments=placement.num_segments,
        allocated_curve=array("q", allocated) if curve else None,
        reserved_curve=reserved_curve,
    )


def _waves(events: Sequence[int], chains: Chains) -> Waves | None:
    """The waves of a stream that is replayed again: to find them takes as long as four sums."""
    memo = chains.memo
    if not chains.kinds or _WAVES not in memo:
        memo[_WAVES] = None
        return None
    waves: Waves | None = memo[_WAVES]
    if waves is None:
        waves = memo[_WAVES] = waves_of(events, chains.kinds)
    return waves


def peak_without(result: Replay, events: Sequence[int], numbers: Collection[int]) -> int:
    """The allocated peak of a replay if some allocation numbers had not been made, bytes."""
    if not numbers:
        return result.peak_allocated_bytes
    block_bytes = list(result.block_bytes)
    for number in numbers:
        block_bytes[number] = 0
    return max(_running_sum(events, block_bytes), default=0)


def _running_sum(events: Sequence[int], amounts: Sequence[int]) -> list[int]:
    """The sum of what is alive after each event.

    An event -1-v finds the amount of number v, negated, from the end of the table: that is how
    Python reads a negative index.
    """
    table = [*amounts, *map(neg, reversed(amounts))]
    return list(accumulate(map(table.__getitem__, events)))


def replay_reference(
    events: Sequence[int],
    sizes: Sequence[int],
    conf: AllocatorConf | None = None,
    *,
    limit_bytes: int | None = None,
    total_bytes: int | None = None,
    curve: bool = False,
    streams: bytes = b"",
    empty_cache_at: Sequence[int] = (),
    dispensable: Collection[int] = (),
) -> Replay:
    """:func:`replay` with the full model only; slower, and the judge of the fast loops."""
    # here, because most questions never come this way
    from memest.replay.allocator import CachingAllocator
    from memest.replay.oom import OutOfMemory

    check_events(events, sizes)
    allocator = CachingAllocator(conf, capacity_bytes=limit_bytes, total_bytes=total_bytes)
    allocated_stat = allocator.stats.allocated_bytes.all
    reserved_stat = allocator.stats.reserved_bytes.all
    blocks: list[Block | None] = [None] * len(sizes)
    block_bytes = [0] * len(sizes)
    allocated_curve, reserved_curve = array("q"), array("q")
    peak_allocated = allocated_index = 0
    oom_index = None
    empties = set(empty_cache_at)
    for index, event in enumerate(events):
        if index in empties:
            allocator.empty_cache()
        if event >= 0:
            try:
                block = allocator.malloc(sizes[event], streams[event] if streams else 0)
            except OutOfMemory:
                if event not in dispensable:
                    oom_index = index
            else:
                if block is not None:
                    blocks[event] = block
                    block_bytes[event] = block.size
        elif (freed_block := blocks[~event]) is not None:
            allocator.free(freed_block)
        if allocated_stat.peak > peak_allocated:
            peak_allocated, allocated_index = allocated_stat.peak, index
        if curve:
            allocated_curve.append(allocated_stat.current)
            reserved_curve.append(reserved_stat.current)
        if oom_index is not None:
            break
    return Replay(
        peak_allocated_bytes=peak_allocated,
        peak_allocated_index=allocated_index,
        peak_reserved_bytes=reserved_stat.peak,
        final_allocated_bytes=allocated_stat.current,
        final_reserved_bytes=reserved_stat.current,
        num_alloc_retries=allocator.stats.num_alloc_retries,
        num_ooms=int(oom_index is not None),
        oom_index=oom_index,
        block_bytes=block_bytes,
        num_segments=allocator.stats.segment.all.current,
        allocated_curve=allocated_curve if curve else None,
        reserved_curve=reserved_curve if curve else None,
    )
