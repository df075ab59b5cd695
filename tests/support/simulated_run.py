"""A run as torch would have recorded it, made from a predicted stream.

The allocator of :mod:`memest.replay` stands in for torch's: it chooses the addresses, a driver
hands out segments where it likes, and what it does is written down in the fields of a real
snapshot.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from memest.calibration.recording.history import HistoryCounters, MarkNote
from memest.profiles.stream import Stream
from memest.replay import AllocatorConf, CachingAllocator
from support.snapshots import content_of

FAR = 0x7F00_0000_0000
SITE = "/usr/lib/python3.11/site-packages"


@dataclass
class RealRun:
    """What a run really does: the events of a stream, to be changed here and there."""

    stream: Stream
    events: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.events = self.events or list(self.stream.events)
        self.sizes = self.sizes or list(self.stream.sizes)

    def copy(self) -> RealRun:
        return RealRun(self.stream, list(self.events), list(self.sizes))

    def drop(self, number: int) -> RealRun:
        self.events = [event for event in self.events if event not in (number, ~number)]
        return self

    def insert(self, before: int, size: int, life: int = 1) -> RealRun:
        """A birth in front of the birth of another, and its death so many events later."""
        at, number = self.events.index(before), len(self.sizes)
        self.sizes.append(size)
        self.events.insert(at, number)
        self.events.insert(at + life, ~number)
        return self

    def resize(self, number: int, size: int) -> RealRun:
        self.sizes[number] = size
        return self

    def move(self, event: int, behind: int) -> RealRun:
        self.events.remove(event)
        self.events.insert(self.events.index(behind) + 1, event)
        return self

    def swap(self, first: int, second: int) -> RealRun:
        """Two events change places."""
        a, b = self.events.index(first), self.events.index(second)
        self.events[a], self.events[b] = self.events[b], self.events[a]
        return self

    def mark_places(self) -> list[int]:
        """Where the marks of the stream lie among these events."""
        where = {event: place for place, event in enumerate(self.events)}
        places = []
        for position in self.stream.mark_positions:
            following = (where[e] for e in self.stream.events[position:] if e in where)
            places.append(next(following, len(self.events)))
        return places


class _Driver:
    """Hands out segments in a wild order of addresses, and notes it."""

    def __init__(self, trace: list[dict[str, Any]]) -> None:
        self.trace = trace
        self.count = 0
        self.segments: dict[int, int] = {}

    def malloc(self, size: int) -> int:
        self.count += 1
        # up and down, like a real one; never two segments side by side
        address = FAR + (self.count * 37 % 101) * (1 << 38) + self.count * (1 << 30)
        self.segments[address] = size
        self._note("segment_alloc", address, size)
        return address

    def free(self, address: int, size: int) -> None:
        del self.segments[address]
        self._note("segment_free", address, size)

    def reserve(self, size: int) -> int:
        self.count += 1
        return FAR + self.count * (1 << 42)

    def map(self, address: int, size: int) -> bool:
        self._note("segment_map", address, size)
        return True

    def unmap(self, address: int, size: int) -> None:
        self._note("segment_unmap", address, size)

    def _note(self, action: str, address: int, size: int) -> None:
        self.trace.append({"action": action, "addr": address, "size": size, "stream": 0})


@dataclass
class Recording:
    """A snapshot's content, and what was noted at the marks."""

    content: dict[str, Any]
    marks: list[MarkNote]
    begin: HistoryCounters
    end: HistoryCounters


def record(
    run: RealRun,
    *,
    conf: AllocatorConf | None = None,
    begin: int = 0,
    frames: bool = True,
    max_entries: int | None = None,
    before: int = 1000,
) -> Recording:
    """Play a run and record it.

    Args:
        begin: index of the event at which the recording begins.
        frames: whether Python frames are recorded.
        max_entries: of the ring buffer.
        before: allocations that the process had made and freed before the run.
    """
    conf = conf or AllocatorConf()
    trace: list[dict[str, Any]] = []
    allocator = CachingAllocator(conf, driver=_Driver(trace))
    blocks, counters, begin_counters = (
        {},
        HistoryCounters(before, before),
        HistoryCounters(before, before),
    )
    notes = list(zip(run.stream.marks, run.mark_places(), strict=True))
    marks: list[MarkNote] = []
    for place, event in enumerate([*run.events, None]):
        if place == begin:
            trace.clear()
            begin_counters = counters
        while notes and notes[0][1] == place:
            mark, _ = notes.pop(0)
            if place >= begin:
                marks.append((mark.phase.value, mark.step, mark.micro_step, counters))
        if event is None:
            break
        if not run.sizes[max(event, ~event)]:
            continue
        if event >= 0:
            block = blocks[event] = allocator.malloc(run.sizes[event])
            entry = _entry("alloc", block.address, run.sizes[event])
            if frames:
                entry["frames"] = _frames(run.stream, event)
            trace.append(entry)
            counters = HistoryCounters(counters.allocated + 1, counters.freed)
        else:
            block = blocks.pop(~event)
            free_actions = ("free_requested", "free_completed")
            trace.extend(
                _entry(action, block.address, run.sizes[~event]) for action in free_actions
            )
            allocator.free(block)
            counters = HistoryCounters(counters.allocated, counters.freed + 1)
    trace.append(_entry("snapshot", 0, 0))
    if max_entries is not None:
        del trace[: max(len(trace) - max_entries, 0)]
    content = content_of(allocator, [trace])
    return Recording(copy.deepcopy(content), marks, begin_counters, counters)


def _entry(action: str, address: int, size: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": 17,
        "frames": [],
    }


def _frames(stream: Stream, number: int) -> list[dict[str, Any]]:
    """A stack like those of the main thread; the line says which operator."""
    if number >= len(stream.labels):
        line, name = 9999, "surprise"
    else:
        line, name = 100 + stream.labels[number], "forward"
    return [
        {"filename": f"{SITE}/torch/nn/modules/linear.py", "line": 125, "name": "forward"},
        {"filename": f"{SITE}/transformers/modeling_tiny.py", "line": line, "name": name},
        {"filename": f"{SITE}/torch/nn/modules/module.py", "line": 1700, "name": "_call_impl"},
        {"filename": f"{SITE}/transformers/trainer.py", "line": 4000, "name": "compute_loss"},
    ]
