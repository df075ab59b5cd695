"""What a recording shows besides its addresses: the course of memory, holes, and other options.

The course and the holes are those of the recorded run, since its replay makes the same choices.
Under other options the recorded allocations and frees are played again from an allocator that
holds, packed by address, what was alive when the recording began: how those blocks would lie had
the options been others from the start, a recording does not tell.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from memest.errors import ConfigError
from memest.replay.allocator import CachingAllocator
from memest.replay.blocks import Block, SimpleDriver
from memest.replay.conf import AllocatorConf
from memest.replay.replay import Replay, replay_reference
from memest.replay.retrace import SnapshotReplay, replay_snapshot
from memest.replay.rewind import rewind
from memest.replay.snapshot import Snapshot, TraceEvent

__all__ = [
    "CachePicture",
    "Inspection",
    "OtherOptions",
    "TimelinePoint",
    "cache_at_end",
    "inspect",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """The highest figures of a stretch of events, in bytes; ``event`` is its last one."""

    event: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePicture:
    """What is reserved without being allocated, at one moment.

    Attributes:
        moment: which one, in words.
        event: its index.
        allocated_bytes: in blocks handed out.
        reserved_bytes: in segments.
        releasable_bytes: free in whole segments, or whole pages of expandable ones: what
            ``empty_cache`` gives back.
        stuck_bytes: free between blocks that are in use, and blocks that wait for other streams.
        largest_free_bytes: the largest free block.
        free_blocks: how many there are.
    """

    moment: str
    event: int
    allocated_bytes: int
    reserved_bytes: int
    releasable_bytes: int
    stuck_bytes: int
    largest_free_bytes: int
    free_blocks: int

    @property
    def cached_bytes(self) -> int:
        """Reserved without being allocated."""
        return self.reserved_bytes - self.allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherOptions:
    """The recorded allocations under some options of the allocator.

    Attributes:
        options: as ``PYTORCH_CUDA_ALLOC_CONF`` spells them; ``as recorded`` for the recording's.
        peak_allocated_bytes: from the first event on.
        peak_reserved_bytes: from the first event on.
        survives: whether the request that the recording ran out of memory at is served; None
            where it never did.
    """

    options: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    survives: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """One device of a recording.

    Attributes:
        comparison: the replay against the recording.
        timeline: stretches of equal length.
        pictures: of the cache, at the moments that matter.
        options: the recorded ones first.
        earlier_bytes: allocated before the first event, and laid anew under ``options``.
        limit_bytes: what the allocator could have where it ran out of memory, else None.
    """

    comparison: SnapshotReplay
    timeline: tuple[TimelinePoint, ...]
    pictures: tuple[CachePicture, ...]
    options: tuple[OtherOptions, ...]
    earlier_bytes: int
    limit_bytes: int | None


@dataclass(slots=True)
class _Course:
    """What one device had after every event."""

    allocated: array[int] = field(default_factory=lambda: array("q"))
    reserved: array[int] = field(default_factory=lambda: array("q"))


def inspect(
    snapshot: Snapshot, others: Sequence[tuple[str, AllocatorConf]] = (), *, points: int = 120
) -> tuple[Inspection, ...]:
    """Look at every device of a recording.

    Args:
        snapshot: the recording.
        others: options to play it again with, each with its spelling.
        points: of the timeline, at most.

    Returns:
        One for each device that has events.

    Raises:
        ReplayError: the trace contradicts the segments.
        ConfigError: for no point at all.
    """
    if points < 1:
        raise ConfigError(f"a timeline of {points} points: at least 1 is needed.")
    courses: dict[int, _Course] = {}

    def follow(device: int, _index: int, allocator: CachingAllocator) -> None:
        course = courses.setdefault(device, _Course())
        course.allocated.append(allocator.stats.allocated_bytes.all.current)
        course.reserved.append(allocator.stats.reserved_bytes.all.current)

    comparisons = replay_snapshot(snapshot, watch=follow)
    moments = {
        c.device: _moments(courses[c.device], snapshot.traces[c.device]) for c in comparisons
    }
    pictures: dict[int, list[CachePicture]] = {device: [] for device in moments}

    def look(device: int, index: int, allocator: CachingAllocator) -> None:
        for moment in moments[device].get(index, ()):
            pictures[device].append(_picture(moment, index, allocator))

    replay_snapshot(snapshot, watch=look)
    return tuple(
        _inspection(
            snapshot,
            comparison,
            courses[comparison.device],
            pictures[comparison.device],
            others,
            points,
        )
        for comparison in comparisons
    )


def cache_at_end(snapshot: Snapshot) -> dict[int, CachePicture]:
    """What each device held when the recording ended, by its index; told by its segments alone.

    Raises:
        ReplayError: the segments contradict each other.
    """
    pictures = {}
    for device in sorted({segment.device for segment in snapshot.segments}):
        segments = [segment for segment in snapshot.segments if segment.device == device]
        allocator, _ = rewind((), segments, snapshot.conf, SimpleDriver())
        pictures[device] = _picture("end", 0, allocator)
    return pictures


def _inspection(
    snapshot: Snapshot,
    comparison: SnapshotReplay,
    course: _Course,
    pictures: Sequence[CachePicture],
    others: Sequence[tuple[str, AllocatorConf]],
    points: int,
) -> Inspection:
    trace = snapshot.traces[comparison.device]
    end = next((i for i, event in enumerate(trace) if event.action == "oom"), None)
    limit = None if end is None else course.reserved[end] + trace[end].address
    events, sizes, streams, earlier = _stream(snapshot, comparison.device, end)

    def run(conf: AllocatorConf) -> Replay:
        return replay_reference(events, sizes, conf, limit_bytes=limit, streams=streams)

    return Inspection(
        comparison=comparison,
        timeline=_timeline(course, points),
        pictures=tuple(pictures),
        options=tuple(
            OtherOptions(
                options=spelling,
                peak_allocated_bytes=result.peak_allocated_bytes,
                peak_reserved_bytes=result.peak_reserved_bytes,
                survives=None if end is None else result.num_ooms == 0,
            )
            for spelling, conf in (("as recorded", snapshot.conf), *others)
            for result in (run(conf),)
        ),
        earlier_bytes=earlier,
        limit_bytes=limit,
    )


def _moments(course: _Course, trace: Sequence[TraceEvent]) -> dict[int, list[str]]:
    """The events after which the cache is looked at, with the names of these moments."""
    names: dict[int, list[str]] = {}
    top = course.allocated.index(max(course.allocated))
    names.setdefault(top, []).append("allocated peak")
    full = course.reserved.index(max(course.reserved))
    names.setdefault(full, []).append("reserved peak")
    oom_events = [index for index, event in enumerate(trace) if event.action == "oom"]
    if oom_events:
        names.setdefault(oom_events[0], []).append("out of memory")
    names.setdefault(len(trace) - 1, []).append("end")
    return names


def _picture(moment: str, index: int, allocator: CachingAllocator) -> CachePicture:
    blocks = allocator.blocks()
    free = [block for block in blocks if block.is_available]
    allocated = sum(block.size for block in blocks if block.allocated)
    reserved = sum(block.size for block in blocks)
    releasable = sum(map(_releasable, free))
    return CachePicture(
        moment=moment,
        event=index,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        releasable_bytes=releasable,
        stuck_bytes=reserved - allocated - releasable,
        largest_free_bytes=max((block.size for block in free), default=0),
        free_blocks=len(free),
    )


def _releasable(block: Block) -> int:
    if block.expandable is None:
        return 0 if block.is_split else block.size
    first, last = block.expandable.pages_within(block.address, block.address + block.size)
    return last - first


def _timeline(course: _Course, points: int) -> tuple[TimelinePoint, ...]:
    count = len(course.allocated)
    step = max(-(-count // points), 1)
    return tuple(
        TimelinePoint(
            event=min(start + step, count) - 1,
            allocated_bytes=max(course.allocated[start : start + step]),
            reserved_bytes=max(course.reserved[start : start + step]),
        )
        for start in range(0, count, step)
    )


def _stream(
    snapshot: Snapshot, device: int, end: int | None
) -> tuple[list[int], list[int], bytes, int]:
    """The recorded allocations and frees as a stream, and the bytes that were there before.

    Args:
        snapshot: the recording.
        device: one of its devices.
        end: the event that ran out of memory; its request is the stream's last allocation.
    """
    trace = snapshot.traces[device]
    names: dict[int, int] = {}
    streams: list[int] = []
    sizes: list[int] = []
    events: list[int] = []
    numbers: dict[int, int] = {}

    def allocate(address: int, size: int, stream: int) -> None:
        numbers[address] = len(sizes)
        events.append(len(sizes))
        sizes.append(size)
        streams.append(names.setdefault(stream, len(names)))

    segments = [segment for segment in snapshot.segments if segment.device == device]
    _, alive = rewind(trace, segments, snapshot.conf, SimpleDriver())
    for address, block in sorted(alive.items()):
        allocate(address, block.requested, block.stream)
    earlier = sum(sizes)
    for index, event in enumerate(trace):
        if index == end:
            allocate(-1, event.size, event.stream)
            break
        if event.action == "alloc":
            allocate(event.address, event.size, event.stream)
        elif event.action == "free_completed" and event.address in numbers:
            events.append(~numbers.pop(event.address))
    return events, sizes, bytes(streams) if len(names) > 1 else b"", earlier
