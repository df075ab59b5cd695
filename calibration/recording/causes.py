"""Differences that seem to have one cause, told in the words of operators and modules."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from memest.calibration.recording.alignment import FOREIGN, Line
from memest.calibration.recording.differences import EventMatch, Relation
from memest.calibration.recording.recorded import History
from memest.profiles.stream import Stream
from memest.replay.sizes import round_size

__all__ = ["Difference", "group"]


@dataclass(slots=True, kw_only=True)
class Difference:
    """Differences that seem to have one cause.

    Attributes:
        relation: how the prediction differs.
        operator: of the predicted allocation; empty where it is missing.
        module: its module, numbers of layers replaced by ``*``.
        frame: Python code of the recorded allocation, empty where it is not known.
        near: operator and module of the last allocation before it that both sides have.
        ratio: predicted to recorded size, where they differ.
        count: how often.
        bytes: of all of them together: what differs in size, else their sizes.
        peak_bytes: how much larger the prediction is for them at the higher of the two peaks.
        recorded_event: of the first of them: index in the history, -1 where it has none.
        predicted_event: the same in the stream.
        recorded_bytes: of the first of them, 0 where it has none.
        predicted_bytes: the same.
    """

    relation: Relation
    operator: str
    module: str
    frame: str
    near: str
    ratio: float | None
    count: int = 0
    bytes: int = 0
    peak_bytes: int = 0
    recorded_event: int
    predicted_event: int
    recorded_bytes: int
    predicted_bytes: int


def group(event_match: EventMatch, history: History, stream: Stream) -> list[Difference]:
    """Differences of one cause together, the largest at the peak first.

    Args:
        event_match: what belongs together, and what does not.
        history: what was recorded; it has the frames.
        stream: what was predicted; it has operators and modules.
    """
    return _Grouping(event_match, history, stream).run()


_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")


class _Grouping:
    def __init__(self, event_match: EventMatch, history: History, stream: Stream) -> None:
        self.match, self.history, self.stream = event_match, history, stream
        self.mine, self.other = event_match.recorded, event_match.predicted
        aligned_births = [(i, j) for i, j in event_match.pairs if self.mine.is_birth(i)]
        self.before_mine = [i for i, _ in aligned_births]
        self.before_other = [j for _, j in aligned_births]
        self.peak, self.peak_other = self._peaks()

    def _peaks(self) -> tuple[int, int]:
        """The event with the higher peak of the two sides, and what is beside it on the other.

        What is predicted too much lies at the predicted peak, what is predicted too little at the
        recorded one.
        """
        (ours, high), (theirs, other_high) = _peak(self.mine), _peak(self.other)
        column = int(other_high > high)
        event = theirs if column else ours
        beside = bisect_right([pair[column] for pair in self.match.pairs], event) - 1
        counterpart = self.match.pairs[beside][1 - column] if beside >= 0 else -1
        return (counterpart, event) if column else (event, counterpart)

    def run(self) -> list[Difference]:
        groups: dict[Any, Difference] = {}
        for relation, i, j in self.match.differences:
            ours = self.mine.numbers[i] if i >= 0 else FOREIGN
            theirs = self.other.numbers[j] if j >= 0 else self._theirs(ours)
            if j < 0 and relation is not Relation.MISSING and theirs != FOREIGN:
                j = self.other.births[theirs]
            if i < 0 and relation is Relation.DROPPED:
                ours = self._ours(theirs)
            operator, module = self._operator_and_module(theirs) if theirs != FOREIGN else ("", "")
            frame = self.history.frame(self.mine.sources[ours]) if ours != FOREIGN else ""
            near = self._near(i, j)
            sizes = self.mine.size(i) if i >= 0 else 0, self.other.size(j) if j >= 0 else 0
            ratio = round(sizes[1] / sizes[0], 3) if relation is Relation.SIZE else None
            if relation is Relation.MISSING:
                key: tuple[Any, ...] = relation, frame, near if not frame else "", sizes[0]
            else:
                key = relation, operator, module, ratio
            if key not in groups:
                groups[key] = Difference(
                    relation=relation,
                    operator=operator,
                    module=module,
                    frame=frame,
                    near=near,
                    ratio=ratio,
                    recorded_event=self.mine.places[i] if i >= 0 else -1,
                    predicted_event=self.other.places[j] if j >= 0 else -1,
                    recorded_bytes=sizes[0],
                    predicted_bytes=sizes[1],
                )
            one = groups[key]
            one.count += 1
            one.bytes += abs(sizes[1] - sizes[0]) if relation is Relation.SIZE else max(sizes)
            one.peak_bytes += self._at_peak(relation, ours, theirs)
        return sorted(groups.values(), key=lambda d: (-abs(d.peak_bytes), -d.bytes, -d.count))

    def _theirs(self, ours: int) -> int:
        return self.match.births.get(ours, FOREIGN)

    def _ours(self, theirs: int) -> int:
        event = self.other.births[theirs] if theirs != FOREIGN else -1
        return self.mine.numbers[self.match.back[event]] if event >= 0 else FOREIGN

    def _near(self, i: int, j: int) -> str:
        """The last birth before an event that both sides have."""
        if i >= 0:
            place = bisect_left(self.before_mine, i) - 1
        else:
            place = bisect_left(self.before_other, j) - 1
        if place < 0:
            return ""
        number = self.other.numbers[self.before_other[place]]
        return " ".join(self._operator_and_module(number)).strip()

    def _operator_and_module(self, number: int) -> tuple[str, str]:
        """Operator and module of a predicted birth, numbers of layers replaced."""
        stream, source = self.stream, self.other.sources[number]
        module = stream.module_names[stream.modules[source]]
        return stream.label_names[stream.labels[source]], _LAYER.sub("*", module)

    def _at_peak(self, relation: Relation, ours: int, theirs: int) -> int:
        """What the prediction has more for this at the peak.

        Two births that changed places at a death cancel each other out over the whole run.
        """
        if relation in (Relation.PARTNER, Relation.ORDER):
            return 0
        return _alive(self.other, theirs, self.peak_other) - _alive(self.mine, ours, self.peak)


def _alive(line: Line, number: int, at: int) -> int:
    if number == FOREIGN or line.births[number] > at:
        return 0
    death = line.deaths[number]
    return line.size(line.births[number]) if death < 0 or death > at else 0


def _peak(line: Line) -> tuple[int, int]:
    """The event at which most is alive, in blocks, and how much that is."""
    changes = (round_size(token >> 1) * (1 if token & 1 else -1) for token in line.tokens)
    sums = list(accumulate(changes))
    peak = max(sums, default=0)
    return (sums.index(peak), peak) if sums else (-1, 0)
