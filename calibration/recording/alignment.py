"""Recorded and predicted events in one form, and which of them belong together.

The alignment is Myers' greedy one: a shortest script of events to leave out on either side. Its
cost grows with the square of the differences between two anchors, so anchors are set where both
sides have the same mark and agree around it, and a part with too many differences is taken in
bites.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memest.calibration.recording.recorded import HistoryMark
from memest.profiles.stream import Stream
from memest.replay.snapshot import TraceEvent

__all__ = [
    "FOREIGN",
    "Line",
    "Pair",
    "align",
    "anchors",
    "common_marks",
    "predicted_line",
    "recorded_line",
    "settle",
]

FOREIGN = -1
"""The number of allocations that were there before the compared part began."""
_BITE = 800  # differences looked at together: the square of it are steps of a loop
_AGREEMENT = 8  # equal events beside a mark make an anchor of it
_REACH = 48  # how far from its mark a phase may begin
_MOST_CHOICES = 200_000
_ROUNDS = 4
_INNER = frozenset(("batch", "forward", "backward"))
"""Phases that micro-steps have; loops count them differently for the others."""

Pair = tuple[int, int]


@dataclass(slots=True)
class Line:
    """Births and deaths in order.

    Attributes:
        tokens: what is compared: twice the requested size, and 1 for a birth.
        numbers: the birth that an event is or ends, counted from 0; FOREIGN for earlier ones.
        places: where the event is in what it was taken from.
        births: index of the event, by number.
        deaths: the same, -1 for what outlives the line.
        sources: number in the stream (predicted), place of the birth (recorded), by number.
    """

    tokens: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    births: list[int] = field(default_factory=list)
    deaths: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def is_birth(self, event: int) -> bool:
        """Whether an event is a birth."""
        return bool(self.tokens[event] & 1)

    def size(self, event: int) -> int:
        """Requested bytes of an event."""
        return self.tokens[event] >> 1

    def add_birth(self, place: int, size: int, source: int) -> int:
        """Append a birth; its number is returned."""
        number = len(self.births)
        self.births.append(len(self.tokens))
        self.deaths.append(-1)
        self.sources.append(source)
        self._add(place, size << 1 | 1, number)
        return number

    def add_death(self, place: int, size: int, number: int) -> None:
        """Append a death."""
        if number != FOREIGN:
            self.deaths[number] = len(self.tokens)
        self._add(place, size << 1, number)

    def _add(self, place: int, token: int, number: int) -> None:
        self.tokens.append(token)
        self.numbers.append(number)
        self.places.append(place)


def recorded_line(events: Iterable[TraceEvent], end: int | None = None) -> Line:
    """Allocations and frees of a recording, without the driver's calls.

    Args:
        events: of one device.
        end: index of the first event that does not count, None for all.
    """
    line = Line()
    alive: dict[int, int] = {}
    for place, event in enumerate(events):
        if end is not None and place >= end:
            break
        if event.action == "alloc":
            alive[event.address] = line.add_birth(place, event.size, place)
        elif event.action == "free_requested":
            line.add_death(place, event.size, alive.pop(event.address, FOREIGN))
    return line


def predicted_line(
    stream: Stream, begin: int = 0, end: int | None = None, *, without: Collection[str] = ()
) -> Line:
    """The same for a part of a predicted stream.

    Args:
        stream: as composed.
        begin: index of the first event that counts.
        end: index of the first that does not, None for all.
        without: names of workspaces to leave out, such as ``cuBLAS workspace``.
    """
    line = Line()
    numbers: dict[int, int] = {}
    skipped_labels = {
        index
        for index, label in enumerate(stream.label_names)
        if label.rpartition(": ")[2] in without
    }
    for place in range(begin, len(stream.events) if end is None else end):
        value = stream.events[place]
        source = value if value >= 0 else ~value
        size = stream.sizes[source]
        if not size or stream.labels[source] in skipped_labels:
            continue  # a request for nothing never reaches the allocator
        if value >= 0:
            numbers[source] = line.add_birth(place, size, source)
        else:
            line.add_death(place, size, numbers.get(source, FOREIGN))
    return line


# -- anchors --------------------------------------------------------------------------------------


def common_marks(recorded: Sequence[HistoryMark], stream: Stream) -> list[tuple[HistoryMark, int]]:
    """Marks that both sides have, in order: the recorded one, and the index of the other."""
    ours = [_key(mark.phase, mark.step, mark.micro_step) for mark in recorded]
    theirs = [_key(mark.phase.value, mark.step, mark.micro_step) for mark in stream.marks]
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    return [
        (recorded[block.a + i], block.b + i)
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    ]


def _key(phase: str, step: int, micro_step: int) -> tuple[str, int, int]:
    return phase, step, micro_step if phase in _INNER else 0


def anchors(recorded: Line, predicted: Line, pairs: Iterable[Pair]) -> list[Pair]:
    """Places where both lines can be cut.

    Args:
        recorded: one line.
        predicted: the other.
        pairs: where marks lie, as indices of events of both lines.

    Returns:
        Ascending pairs of indices; both sides agree around each.
    """
    out: list[Pair] = []
    for mine, other in pairs:
        pair = _anchor(recorded.tokens, predicted.tokens, mine, other)
        if pair is not None and (not out or (pair[0] > out[-1][0] and pair[1] > out[-1][1])):
            out.append(pair)
    return out


def _anchor(a: Sequence[int], b: Sequence[int], i: int, j: int) -> Pair | None:
    for distance in range(_REACH + 1):
        for at in (j + distance, j - distance):
            if 0 <= at <= len(b) and _agree(a, b, i, at):
                return i, at
    return None


def _agree(a: Sequence[int], b: Sequence[int], i: int, j: int) -> bool:
    after = a[i : i + _AGREEMENT]
    if len(after) == _AGREEMENT and after == b[j : j + _AGREEMENT]:
        return True
    before = a[max(i - _AGREEMENT, 0) : i]
    return len(before) == _AGREEMENT and before == b[max(j - _AGREEMENT, 0) : j]


# -- alignment ------------------------------------------------------------------------------------


def align(a: Sequence[int], b: Sequence[int], cuts: Sequence[Pair] = ()) -> list[Pair]:
    """Pairs of indices of equal tokens, ascending on both sides.

    Args:
        a: tokens.
        b: tokens.
        cuts: where both can be cut, ascending.
    """
    pairs: list[Pair] = []
    i = j = 0
    for next_i, next_j in (*cuts, (len(a), len(b))):
        _align_part(a, b, (i, next_i), (j, next_j), pairs)
        i, j = next_i, next_j
    return pairs


def _align_part(
    a: Sequence[int], b: Sequence[int], span_a: Pair, span_b: Pair, pairs: list[Pair]
) -> None:
    (i, end_a), (j, end_b) = span_a, span_b
    tail: list[Pair] = []
    while end_a > i and end_b > j and a[end_a - 1] == b[end_b - 1]:
        end_a, end_b = end_a - 1, end_b - 1
        tail.append((end_a, end_b))
    while i < end_a and j < end_b:
        i, j = _bite(a, b, (i, end_a), (j, end_b), pairs)
    pairs.extend(reversed(tail))


def _bite(
    a: Sequence[int], b: Sequence[int], span_a: Pair, span_b: Pair, pairs: list[Pair]
) -> Pair:
    """Align up to the end, or as far as so many differences lead; returns where that is.

    ``furthest[k]`` is how far in ``a`` one comes on diagonal k = x - y; E. Myers, "An O(ND)
    difference algorithm and its variations", 1986.
    """
    (i, end_a), (j, end_b) = span_a, span_b
    n, m = end_a - i, end_b - j
    furthest = {1: 0}
    ways: dict[int, _Way | None] = {1: None}
    for d in range(min(n + m, _BITE) + 1):
        now: dict[int, int] = {}
        ways_now: dict[int, _Way | None] = {}
        for k in range(-d + 2 * max(0, d - m), d - 2 * max(0, d - n) + 1, 2):
            down = k == -d or (k != d and furthest.get(k - 1, -1) < furthest.get(k + 1, -1))
            before = k + 1 if down else k - 1
            start = x = furthest[before] + (not down)
            while x < n and x - k < m and a[i + x] == b[j + x - k]:
                x += 1
            now[k] = x
            ways_now[k] = _Way(ways[before], start, x, k) if x > start else ways[before]
            if x >= n and x - k >= m:
                pairs.extend(_pairs_along(ways_now[k], i, j))
                return end_a, end_b
        furthest, ways = now, ways_now
    # too different: what lies furthest ahead is as good as anything
    k = max(furthest, key=lambda k: 2 * furthest[k] - k)
    pairs.extend(_pairs_along(ways[k], i, j))
    return i + furthest[k], j + furthest[k] - k


class _Way(NamedTuple):
    """Equal events of ``a`` from ``start`` to ``stop`` on one diagonal, and the way there."""

    before: _Way | None
    start: int
    stop: int
    diagonal: int


def _pairs_along(way: _Way | None, i: int, j: int) -> list[Pair]:
    out: list[Pair] = []
    while way is not None:
        out.extend((i + x, j + x - way.diagonal) for x in range(way.stop - 1, way.start - 1, -1))
        way = way.before
    out.reverse()
    return out


# -- runs of equal events -------------------------------------------------------------------------


def settle(mine: Line, other: Line, pairs: Sequence[Pair]) -> list[Pair]:
    """Decide which of several equal neighbours has no counterpart, by births and deaths.

    Of a hundred births of one size, one after the other, any may be the one that is missing: it is
    the one whose death is missing too. Otherwise all deaths would seem to end other births.

    Args:
        mine: one line.
        other: the other.
        pairs: as aligned.
    """
    partners, before = dict(pairs), None
    for _ in range(_ROUNDS):
        for births in (True, False):
            _Settling(mine, other, partners).settle(births=births)
        if partners == before:
            break
        before = dict(partners)
    return sorted(partners.items())


class _Settling:
    def __init__(self, mine: Line, other: Line, partners: dict[int, int]) -> None:
        self.mine, self.other, self.partners = mine, other, partners
        self.before = sorted(partners.items())

    def settle(self, *, births: bool) -> None:
        """Go through all runs of births, or of deaths."""
        tokens, start, place, low = self.mine.tokens, 0, 0, 0
        while start < len(tokens):
            end = start + 1
            while end < len(tokens) and tokens[end] == tokens[start]:
                end += 1
            first = place
            while place < len(self.before) and self.before[place][0] < end:
                place += 1
            if place > first:
                if self.mine.is_birth(start) is births:
                    after = place < len(self.before)
                    high = self.before[place][1] if after else len(self.other)
                    self._settle_run(range(start, end), range(low, high))
                # behind what the run has now, which may be another counterpart than before
                low = max(low, 1 + max(self.partners.get(i, -1) for i in range(start, end)))
            start = end

    def _settle_run(self, run: range, span: range) -> None:
        token = self.mine.tokens[run.start]
        theirs = [j for j in span if self.other.tokens[j] == token]
        spare = abs(len(run) - len(theirs))
        few = min(len(run), len(theirs))
        if not spare or few * (spare + 1) > _MOST_CHOICES:
            return
        swap = len(run) > len(theirs)
        short, long = (theirs, list(run)) if swap else (list(run), theirs)

        def agree(x: int, y: int) -> bool:
            return self._agree(long[y], short[x]) if swap else self._agree(short[x], long[y])

        # best[x][s]: most agreement of the first x, when s of the longer side were left out
        best = [[0] * (spare + 1)]
        for x in range(few):
            row, most = [], -1
            for s in range(spare + 1):
                most = max(most, best[-1][s])
                row.append(most + agree(x, x + s))
            best.append(row)
        for i in run:
            self.partners.pop(i, None)
        s = spare
        for x in range(few, 0, -1):
            s = max(range(s + 1), key=lambda left: (best[x][left], -left))
            one, two = short[x - 1], long[x - 1 + s]
            i, j = (two, one) if swap else (one, two)
            self.partners[i] = j

    def _agree(self, i: int, j: int) -> bool:
        ours, theirs = self.mine.numbers[i], self.other.numbers[j]
        if FOREIGN in (ours, theirs):
            return ours == theirs
        if self.mine.is_birth(i):
            death, their_death = self.mine.deaths[ours], self.other.deaths[theirs]
            return death == their_death if death < 0 else self.partners.get(death) == their_death
        return self.partners.get(self.mine.births[ours]) == self.other.births[theirs]
