"""Recorded and predicted events in one form."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from memest.profiles.stream import Stream
from memest.replay.snapshot import TraceEvent

FOREIGN = -1  # stands for allocations made before the compared part began


@dataclass(frozen=True, slots=True)
class Event:
    """A birth or a death; ``number`` counts births in order, ``size`` is as requested."""

    is_birth: bool
    number: int
    size: int


def recorded_events(trace: Iterable[TraceEvent]) -> list[Event]:
    """Allocations and frees of a recording, without the driver's calls."""
    events: list[Event] = []
    alive: dict[int, int] = {}
    count = 0
    for event in trace:
        if event.action == "alloc":
            alive[event.address] = count
            events.append(Event(True, count, event.size))
            count += 1
        elif event.action == "free_requested":
            events.append(Event(False, alive.pop(event.address, FOREIGN), event.size))
    return events


def predicted_events(
    stream: Stream, begin: int, end: int, *, without: Container[str] = ()
) -> list[Event]:
    """The same for a part of a predicted stream, less the allocations with some labels."""
    events: list[Event] = []
    numbers: dict[int, int] = {}
    for value in stream.events[begin:end]:
        if stream.label_names[stream.labels[max(value, ~value)]].rpartition(": ")[2] in without:
            continue
        if value >= 0:
            numbers[value] = len(numbers)
            events.append(Event(True, numbers[value], stream.sizes[value]))
        else:
            events.append(Event(False, numbers.get(~value, FOREIGN), stream.sizes[~value]))
    return events
