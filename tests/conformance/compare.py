"""Recorded and predicted events in one form, and their alignment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher

from memest.profile.stream import Stream
from memest.replay.snapshot import TraceEvent

FOREIGN = -1  # stands for allocations made before the compared part began


@dataclass(frozen=True, slots=True)
class Event:
    """A birth or a death; ``number`` counts births in order, ``size`` is as requested."""

    born: bool
    number: int
    size: int

    @property
    def signed(self) -> int:
        return self.size if self.born else -self.size


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


def predicted_events(stream: Stream, begin: int) -> list[Event]:
    """The same for a predicted stream from one event on."""
    events: list[Event] = []
    numbers: dict[int, int] = {}
    for value in stream.events[begin:]:
        if value >= 0:
            numbers[value] = len(numbers)
            events.append(Event(True, numbers[value], stream.sizes[value]))
        else:
            events.append(Event(False, numbers.get(~value, FOREIGN), stream.sizes[~value]))
    return events


def align(recorded: list[Event], predicted: list[Event]) -> list[tuple[str, int, int, int, int]]:
    """Where two histories differ, as difflib's opcodes without the equal parts."""
    matcher = SequenceMatcher(
        None, [e.signed for e in recorded], [e.signed for e in predicted], autojunk=False
    )
    return [code for code in matcher.get_opcodes() if code[0] != "equal"]
