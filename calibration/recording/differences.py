"""What differs between two aligned lines.

Every event is counted once, by the way it found its counterpart. Differences are told of what lies
at their root: a birth that is missing is one, its death is a consequence.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2

from memest.calibration.recording.alignment import FOREIGN, Line, Pair

__all__ = ["EventMatch", "MatchCounts", "Relation"]

_NEAR = 64  # matched events between the two places of a birth that moved
_MANY = 60  # births of one gap that are paired by size; more are paired in order
_SKIP = 3.0  # bits: a birth with no partner costs as much as two of an 8-fold size


class Relation(enum.StrEnum):
    """How a prediction differs from a recording."""

    MISSING = "missing in prediction"
    EXTRA = "extra in prediction"
    SIZE = "other size"
    MOVED = "made at another place"
    EARLIER = "freed earlier in prediction"
    LATER = "freed later in prediction"
    KEPT = "not freed in prediction"
    DROPPED = "freed in prediction only"
    PARTNER = "another one freed"
    ORDER = "freed in another order"


class _Kind(enum.IntEnum):
    """What became of one event."""

    ALONE = 0
    EQUAL = 1
    SIZE = 2
    PARTNER = 3
    MOVED = 4
    ORDER = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchCounts:
    """Events of both sides, each counted once.

    Attributes:
        recorded: compared events of the recording.
        predicted: compared events of the prediction.
        matched: at the same place of the sequence, of the same size, with the same partner.
        other_size: pairs at the same place, births and deaths, of another size.
        other_partner: pairs of deaths at the same place, of the same size, that end different
            births.
        reordered: pairs of deaths that end the same birth between the same two births, in another
            order: it hardly matters, and hash tables of addresses make it so (autocast's cache).
        moved: pairs that are the same at different places.
        only_recorded: events of the recording without counterpart.
        only_predicted: events of the prediction without counterpart.
    """

    recorded: int
    predicted: int
    matched: int
    other_size: int
    other_partner: int
    reordered: int
    moved: int
    only_recorded: int
    only_predicted: int

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.matched == self.recorded == self.predicted


class EventMatch:
    """What two aligned lines have in common beyond the alignment.

    Args:
        recorded: one line.
        predicted: the other.
        pairs: equal events, ascending on both sides.

    Attributes:
        recorded: one line.
        predicted: the other.
        pairs: aligned events, ascending.
        partner: for each recorded event its counterpart, -1 for none.
        back: for each predicted event its counterpart, -1 for none.
        births: recorded birth number to predicted one.
        counts: the events counted.
        differences: at their roots: relation, recorded event or -1, predicted event or -1.
    """

    def __init__(self, recorded: Line, predicted: Line, pairs: list[Pair]) -> None:
        self.recorded, self.predicted, self.pairs = recorded, predicted, pairs
        self.partner = [-1] * len(recorded)
        self.back = [-1] * len(predicted)
        self.births: dict[int, int] = {}
        self.differences: list[tuple[Relation, int, int]] = []
        self._kinds = bytearray(len(recorded))
        self._aligned_recorded = [i for i, _ in pairs]
        self._aligned_predicted = [j for _, j in pairs]
        self._match()
        kinds = [self._kinds.count(kind) for kind in _Kind]
        self.counts = MatchCounts(
            recorded=len(recorded),
            predicted=len(predicted),
            matched=kinds[_Kind.EQUAL],
            other_size=kinds[_Kind.SIZE],
            other_partner=kinds[_Kind.PARTNER],
            reordered=kinds[_Kind.ORDER],
            moved=kinds[_Kind.MOVED],
            only_recorded=kinds[_Kind.ALONE],
            only_predicted=self.back.count(-1),
        )

    def _match(self) -> None:
        for i, j in self.pairs:
            if self.recorded.is_birth(i):
                self._join(i, j, _Kind.EQUAL)
        self._moved_births()
        self._other_sizes()
        self._lonely_births()
        deaths = [(i, j) for i, j in self.pairs if not self.recorded.is_birth(i)]
        for i, j in deaths:
            if self._same_birth(i, j):
                self._join(i, j, _Kind.EQUAL)
        self._reordered_deaths()
        for i, j in deaths:
            if self.partner[i] < 0 and self.back[j] < 0:
                self._join(i, j, _Kind.PARTNER)
                self.differences.append((Relation.PARTNER, i, j))
        self._other_deaths()

    def _join(self, i: int, j: int, kind: _Kind) -> None:
        self.partner[i], self.back[j], self._kinds[i] = j, i, kind
        if self.recorded.is_birth(i):
            self.births[self.recorded.numbers[i]] = self.predicted.numbers[j]

    def _gap_mine(self, i: int) -> int:
        return bisect_left(self._aligned_recorded, i)

    def _gap_other(self, j: int) -> int:
        return bisect_left(self._aligned_predicted, j)

    def _open_births(self, line: Line, partners: Sequence[int]) -> Iterator[int]:
        return (event for event in line.births if partners[event] < 0)

    def _moved_births(self) -> None:
        """Births of one size that are not far apart."""
        waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for j in self._open_births(self.predicted, self.back):
            waiting[self.predicted.size(j)].append((self._gap_other(j), j))
        for i in self._open_births(self.recorded, self.partner):
            candidates = waiting.get(self.recorded.size(i))
            if not candidates:
                continue
            gap = self._gap_mine(i)
            nearest = min(candidates, key=lambda candidate: abs(candidate[0] - gap))
            if abs(nearest[0] - gap) <= _NEAR:
                candidates.remove(nearest)
                self._join(i, nearest[1], _Kind.MOVED)
                self.differences.append((Relation.MOVED, i, nearest[1]))

    def _other_sizes(self) -> None:
        """Births between the same neighbours."""
        gaps: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for i in self._open_births(self.recorded, self.partner):
            gaps[self._gap_mine(i)][0].append(i)
        for j in self._open_births(self.predicted, self.back):
            gaps[self._gap_other(j)][1].append(j)
        for mine, others in gaps.values():
            for i, j in self._by_size(mine, others):
                self._join(i, j, _Kind.SIZE)
                self.differences.append((Relation.SIZE, i, j))

    def _by_size(self, mine: list[int], others: list[int]) -> list[Pair]:
        """Pairs in order whose sizes are least apart, in bits."""
        if len(mine) > _MANY or len(others) > _MANY:
            return list(zip(mine, others, strict=False))
        a = [log2(self.recorded.size(i) or 1) for i in mine]
        b = [log2(self.predicted.size(j) or 1) for j in others]
        cost = [[_SKIP * (x + y) for y in range(len(b) + 1)] for x in range(len(a) + 1)]
        for x, first in enumerate(a, 1):
            for y, second in enumerate(b, 1):
                skip_cost = min(cost[x - 1][y], cost[x][y - 1]) + _SKIP
                cost[x][y] = min(cost[x - 1][y - 1] + abs(first - second), skip_cost)
        out, x, y = [], len(a), len(b)
        while x and y:
            if cost[x][y] == cost[x - 1][y - 1] + abs(a[x - 1] - b[y - 1]):
                x, y = x - 1, y - 1
                out.append((mine[x], others[y]))
            elif cost[x][y] == cost[x - 1][y] + _SKIP:
                x -= 1
            else:
                y -= 1
        return out

    def _lonely_births(self) -> None:
        lonely = self._open_births(self.recorded, self.partner)
        self.differences.extend((Relation.MISSING, i, -1) for i in lonely)
        extra = self._open_births(self.predicted, self.back)
        self.differences.extend((Relation.EXTRA, -1, j) for j in extra)

    def _same_birth(self, i: int, j: int) -> bool:
        """Whether two deaths end births that belong together."""
        ours, theirs = self.recorded.numbers[i], self.predicted.numbers[j]
        if FOREIGN in (ours, theirs):
            return ours == theirs
        return self.births.get(ours) == theirs

    def _reordered_deaths(self) -> None:
        """Deaths between the same two births, each of the same birth."""
        last_mine, last_other = _last_births(self.recorded), _last_births(self.predicted)
        for i, number in enumerate(self.recorded.numbers):
            if self.partner[i] >= 0 or number == FOREIGN:
                continue
            theirs = self.births.get(number, FOREIGN)
            j = -1 if theirs == FOREIGN else self.predicted.deaths[theirs]
            if j < 0 or self.back[j] >= 0 or self.recorded.tokens[i] != self.predicted.tokens[j]:
                continue
            if self.births.get(last_mine[i]) == last_other[j]:
                self._join(i, j, _Kind.ORDER)
                self.differences.append((Relation.ORDER, i, j))

    def _other_deaths(self) -> None:
        """Deaths that stand alone: most follow from what became of their births."""
        mine, other = self.recorded, self.predicted
        for i in range(len(mine)):
            if self.partner[i] >= 0 or mine.is_birth(i):
                continue
            number = mine.numbers[i]
            theirs = self.births.get(number)
            if theirs is None:
                if number == FOREIGN:
                    self.differences.append((Relation.KEPT, i, -1))
                continue
            j = other.deaths[theirs]
            if j < 0 or self.back[j] >= 0:
                self.differences.append((Relation.KEPT, i, -1))
                continue
            resized = mine.size(i) != other.size(j)
            ahead = self._gap_other(j) - self._gap_mine(i)
            if resized and not ahead:
                self._join(i, j, _Kind.SIZE)
                continue
            self._join(i, j, _Kind.MOVED)
            relation = Relation.LATER if ahead > 0 or (not ahead and j > i) else Relation.EARLIER
            self.differences.append((relation, i, j))
        matched_births = set(self.births.values())
        for j in range(len(other)):
            lonely = self.back[j] < 0 and not other.is_birth(j)
            if lonely and (other.numbers[j] in matched_births or other.numbers[j] == FOREIGN):
                self.differences.append((Relation.DROPPED, -1, j))


def _last_births(line: Line) -> list[int]:
    """For each event the number of the last birth up to it."""
    out, last = [], FOREIGN
    for event, number in enumerate(line.numbers):
        if line.is_birth(event):
            last = number
        out.append(last)
    return out
