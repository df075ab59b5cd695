"""What one more period of layers adds to a trace, found out by comparing traces of few layers.

The traces have no, one and two periods more than the least. What one period adds must be whole runs
of rows, which the trace with two has twice; where each pointer leads must follow from where it
leads in all of them, by a rule with nothing left to choose; and what is written from the rules must
be every trace that was made, event for event. Otherwise there is no fold.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from memest.events import WARM_UP, Trace
from memest.profiles.fold import Fold, FoldRun, PointerRule, compress, unfold
from memest.profiles.transcript import Listing, Pointer, Stack, Transcript

__all__ = [
    "Depths",
    "FoldPlan",
    "NoFoldError",
    "depths_to_trace",
    "learn",
    "plans_for",
    "search_pays",
]

Depths = tuple[int, ...]
"""Periods of each stack beyond the least."""

_ONCE = PointerRule(-1)
_WITHOUT_LAYERS = (
    "calls",
    "op_names",
    "marks",
    "micro_steps",
    "managed_bytes",
    "notes",
    "unpriced",
    "counts",
    "unnoted_ops",
)


class NoFoldError(Exception):
    """The traces do not follow from each other; says why."""


def depths_to_trace(num_stacks: int) -> list[Depths]:
    """The traces that :func:`learn` needs; the one that is unfolded later comes last."""
    one_more = [tuple(int(n == s) for n in range(num_stacks)) for s in range(num_stacks)]
    two_more = [tuple(2 * each for each in depths) for depths in one_more]
    out = [(0,) * num_stacks, *one_more, *two_more]
    if num_stacks > 1:
        out.append((1,) * num_stacks)
    return out


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """Which stacks of a model are traced with fewer periods.

    Attributes:
        stacks: their numbers among the model's.
        kept: periods of each that the trace of the least has.
    """

    stacks: tuple[int, ...]
    kept: tuple[int, ...]

    def periods(self, depths: Depths) -> tuple[int, ...]:
        """Periods of each stack in one of the traces."""
        return tuple(kept + more for kept, more in zip(self.kept, depths, strict=True))

    @property
    def shallow(self) -> Depths:
        """The trace that is unfolded."""
        return (1,) * len(self.stacks)


_MOST_STACKS = 3
_TRACES_OF_A_FAMILY = 4
_LEAST = ((1, 1), (3, 1), (6, 2))
"""Layers and periods."""


def plans_for(stacks: Sequence[Stack], costs: Sequence[int]) -> list[FoldPlan]:
    """What to try, in this order; empty where tracing the whole model costs no more.

    One layer is the least for many. Where the first and the last do otherwise, it takes others
    between them; and some models add what a tower saw behind each of their first layers.

    Args:
        stacks: of the model.
        costs: of tracing a layer of each, in any unit.
    """
    whole = sum(stack.depth * cost for stack, cost in zip(stacks, costs, strict=True))
    least = _TRACES_OF_A_FAMILY * whole
    best: tuple[int, ...] = ()
    for size in range(1, min(_MOST_STACKS, len(stacks)) + 1):
        for chosen in combinations(range(len(stacks)), size):
            plans = _plans_of(stacks, chosen)
            cost = sum(_costs_of(plans[0], stacks, costs, whole)) if plans else least
            if cost < least:
                least, best = cost, chosen
    out, spent = [], 0
    for plan in _plans_of(stacks, best):
        search, further = _costs_of(plan, stacks, costs, whole)
        if spent + search + further >= _TRACES_OF_A_FAMILY * whole:
            break
        out.append(plan)
        spent += search
    return out


def search_pays(plan: FoldPlan, stacks: Sequence[Stack], costs: Sequence[int]) -> bool:
    """Whether a fold is found sooner than all layers are traced, once its least trace is there.

    Args:
        plan: of :func:`plans_for`, as are the other two.
        stacks: see above.
        costs: see above.
    """
    whole = sum(stack.depth * cost for stack, cost in zip(stacks, costs, strict=True))
    return sum(_search_costs(plan, stacks, costs, whole)[1:]) < whole


def _plans_of(stacks: Sequence[Stack], chosen: Sequence[int]) -> list[FoldPlan]:
    """The plans for some stacks, of few layers first."""
    by_layers = (
        tuple(max(-(-layers // stacks[number].period), periods) for number in chosen)
        for layers, periods in _LEAST
    )
    return [
        FoldPlan(tuple(chosen), kept)
        for kept in dict.fromkeys(by_layers)
        if chosen and all(stacks[n].count >= k + 3 for n, k in zip(chosen, kept, strict=True))
    ]


def _costs_of(
    plan: FoldPlan, stacks: Sequence[Stack], costs: Sequence[int], whole: int
) -> tuple[int, int]:
    """What it costs to find a fold, and to make a family of it."""
    costs_by_trace = _search_costs(plan, stacks, costs, whole)
    shallow = costs_by_trace[depths_to_trace(len(plan.stacks)).index(plan.shallow)]
    return sum(costs_by_trace), (_TRACES_OF_A_FAMILY - 1) * shallow


def _search_costs(
    plan: FoldPlan, stacks: Sequence[Stack], costs: Sequence[int], whole: int
) -> list[int]:
    """What each of :func:`depths_to_trace` costs."""
    return [
        whole
        - sum(
            (stacks[n].count - periods) * stacks[n].period * costs[n]
            for n, periods in zip(plan.stacks, plan.periods(depths), strict=True)
        )
        for depths in depths_to_trace(len(plan.stacks))
    ]


def learn(traces: Mapping[Depths, Trace], stacks: Sequence[Stack], kept: Sequence[int]) -> Fold:
    """The fold of the trace with one period of each stack more than the least.

    Args:
        traces: at :func:`depths_to_trace`.
        stacks: of the model.
        kept: periods of each stack in the trace with the least.

    Raises:
        NoFoldError: there is none.
    """
    search = _Search(traces, stacks, kept)
    shallow = traces[(1,) * len(stacks)]

    def made_up(*, by_layers: bool) -> Fold:
        fold = search.fold(by_layers=by_layers)
        for depths, trace in traces.items():
            if unfold(shallow, fold, depths) != trace:
                raise NoFoldError("what a period adds does not make up a deeper trace")
        return fold

    try:
        return made_up(by_layers=False)
    except NoFoldError:
        return made_up(by_layers=True)


@dataclass(frozen=True, slots=True)
class _Insertion:
    """Rows that each period of a stack puts into a listing.

    Attributes:
        stack: which.
        position: in the listing of the least.
        length: rows.
    """

    stack: int
    position: int
    length: int


@dataclass(frozen=True, slots=True)
class _Sight:
    """A row as one trace has it: the trace's depths, the copy of the row's run."""

    depths: Depths
    copy: int
    pointers: tuple[Pointer, ...]


class _Search:
    def __init__(
        self, traces: Mapping[Depths, Trace], stacks: Sequence[Stack], kept: Sequence[int]
    ) -> None:
        self._traces = traces
        self._stacks = tuple(stacks)
        self._kept = tuple(kept)
        vocabulary: dict[Hashable, int] = {}
        self._transcripts = {
            depths: Transcript(trace, stacks, vocabulary) for depths, trace in traces.items()
        }
        self._zero = (0,) * len(stacks)
        self._check_tables()
        self._insertions: list[list[_Insertion]] = []

    def _check_tables(self) -> None:
        """What has no layers in it must be the same at every depth."""
        first = self._traces[self._zero]
        for trace in self._traces.values():
            for name in _WITHOUT_LAYERS:
                if getattr(trace, name) != getattr(first, name):
                    raise NoFoldError(f"{name.replace('_', ' ')} depend on the depth")
        if len({len(t.listings) for t in self._transcripts.values()}) > 1:
            raise NoFoldError("a deeper model has other phases")

    def fold(self, *, by_layers: bool) -> Fold:
        """The fold, to be checked.

        Args:
            by_layers: runs begin where those of the layers that are added do, the last ones;
                else in the middle of where they can begin.
        """
        num_listings = len(self._transcripts[self._zero].listings)
        self._insertions = [
            self._insertions_in(number, by_layers=by_layers) for number in range(num_listings)
        ]
        rules: dict[PointerRule, int] = {}
        rule_of = [
            rules.setdefault(rule, len(rules))
            for number in range(len(self._stacks), num_listings)
            for rule in self._rules_in(number)
        ]
        return Fold(
            stacks=self._stacks,
            kept=self._kept,
            runs=tuple(map(self._runs_in, range(num_listings))),
            rules=tuple(rules),
            rule_of=compress(rule_of),
            launches=self._launches(),
            growing=self._growing(),
        )

    def _growing(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Allocations that are taken and given back for all weights together."""
        at, sizes = {}, {}
        for depths, trace in self._traces.items():
            found = [i for i, op in enumerate(trace.ops) if trace.op_names[op] == WARM_UP]
            at[depths], sizes[depths] = found, [trace.sizes[i] for i in found]
        one_more = [self._depths(stack, 1) for stack in range(len(self._stacks))]
        if len({len(found) for found in at.values()}) > 1:
            raise NoFoldError("a deeper model loads otherwise")
        shallow = at[(1,) * len(self._stacks)]
        return tuple(
            (allocation, tuple(sizes[d][n] - sizes[self._zero][n] for d in one_more))
            for n, allocation in enumerate(shallow)
        )

    def _launches(self) -> tuple[tuple[int, ...], ...]:
        least = self._traces[self._zero].launches
        return tuple(
            tuple(b - a for a, b in zip(least, self._of_stack(stack, 1).launches, strict=True))
            for stack in range(len(self._stacks))
        )

    def _depths(self, stack: int, periods: int) -> Depths:
        return tuple(periods if number == stack else 0 for number in range(len(self._stacks)))

    def _of_stack(self, stack: int, periods: int) -> Trace:
        return self._traces[self._depths(stack, periods)]

    # -- what a period adds

    def _insertions_in(self, number: int, *, by_layers: bool) -> list[_Insertion]:
        if number < len(self._stacks):
            layers = self._stacks[number]
            kept = layers.before + layers.period * self._kept[number]
            return [_Insertion(number, kept, layers.period)]
        least = self._transcripts[self._zero].listings[number].tokens
        out = []
        for stack in range(len(self._stacks)):
            one, two = (
                self._transcripts[self._depths(stack, periods)].listings[number].tokens
                for periods in (1, 2)
            )
            found = find_insertions(least, one, two)
            if found is None:
                raise NoFoldError("what a period adds is not the same each time")
            added = self._added_rows(number, stack) if by_layers else ()
            moved = 0
            for earliest, latest, length in found:
                position = _begin(earliest, latest, length, added[moved:])
                moved += length
                out.append(_Insertion(stack, position, length))
        return sorted(out, key=lambda each: each.position)

    def _added_rows(self, number: int, stack: int) -> list[bool]:
        """Which rows of a listing are about the layers of the period that is added to the least."""
        layers = self._stacks[stack]
        low = layers.before + layers.period * self._kept[stack]
        added = range(low, low + layers.period)
        listings = self._transcripts[self._depths(stack, 1)].listings

        def is_added(pointer: Pointer) -> bool:
            listing, row = pointer
            if listing < len(self._stacks):
                return listing == stack and row in added
            return any(map(is_added, listings[listing].pointers[row]))

        return [any(map(is_added, pointers)) for pointers in listings[number].pointers]

    def _starts(self, number: int, depths: Depths) -> list[int]:
        """Where the runs of a listing begin in a trace."""
        moved, out = 0, []
        for each in self._insertions[number]:
            out.append(each.position + moved)
            moved += depths[each.stack] * each.length
        return out

    def _runs_in(self, number: int) -> tuple[FoldRun, ...]:
        starts = self._starts(number, (1,) * len(self._stacks))
        return tuple(
            FoldRun(each.stack, start, each.length)
            for each, start in zip(self._insertions[number], starts, strict=True)
        )

    # -- where pointers lead

    def _rules_in(self, number: int) -> Iterator[PointerRule]:
        """The rules of a listing, in the order of its rows in the shallow trace."""
        least = self._transcripts[self._zero].listings[number].pointers
        last = 0
        for run, each in enumerate(self._insertions[number]):
            for row in range(last, each.position):
                yield from self._rules_of(self._sights_outside(number, row))
            last = each.position
            for row in range(each.length):
                yield from self._rules_of(self._sights_inside(number, run, row))
        for row in range(last, len(least)):
            yield from self._rules_of(self._sights_outside(number, row))

    def _listing(self, number: int, depths: Depths) -> Listing:
        return self._transcripts[depths].listings[number]

    def _sights_outside(self, number: int, row: int) -> list[_Sight]:
        if not self._listing(number, self._zero).pointers[row]:
            return []
        out = []
        for depths in self._traces:
            moved = sum(
                depths[each.stack] * each.length
                for each in self._insertions[number]
                if each.position <= row
            )
            pointers = self._listing(number, depths).pointers[row + moved]
            out.append(_Sight(depths, 0, pointers))
        return out

    def _sights_inside(self, number: int, run: int, row: int) -> list[_Sight]:
        each = self._insertions[number][run]
        out = []
        for depths in self._traces:
            for copy in range(depths[each.stack]):
                start = self._starts(number, depths)[run]
                pointers = self._listing(number, depths).pointers[start + copy * each.length + row]
                out.append(_Sight(depths, copy, pointers))
        return out if out[0].pointers else []

    def _rules_of(self, sights: list[_Sight]) -> Iterator[PointerRule]:
        if not sights:
            return
        for place in range(len(sights[0].pointers)):
            ways = [(sight.depths, sight.copy, *sight.pointers[place]) for sight in sights]
            yield self._rule(ways)

    def _rule(self, ways: Sequence[tuple[Depths, int, int, int]]) -> PointerRule:
        """The rule by which one pointer leads to all places it was seen to lead to.

        Args:
            ways: depths of the trace, copy of the row, listing and position that it leads to.
        """
        listing = ways[0][2]
        if any(way[2] != listing for way in ways):
            raise NoFoldError("a row is about something else at another depth")
        fixed = {self._fixed(listing, depths, position) for depths, _, _, position in ways}
        if len(fixed) == 1 and None not in fixed:
            return _ONCE
        for run, each in enumerate(self._insertions[listing]):
            for from_end in (False, True):
                for slope in (0, 1, -1):
                    distances = set()
                    for depths, copy, _, position in ways:
                        anchor = self._starts(listing, depths)[run]
                        if from_end:
                            anchor += depths[each.stack] * each.length
                        distances.add(position - anchor - slope * copy * each.length)
                    if len(distances) == 1:
                        return PointerRule(run, from_end, slope)
        raise NoFoldError("a period is about something that does not move with it")

    def _fixed(self, listing: int, depths: Depths, position: int) -> int | None:
        """The row of the least trace that stands at a place; None where a period stands there."""
        moved = 0
        for each in self._insertions[listing]:
            start = each.position + moved
            if position < start:
                break
            length = depths[each.stack] * each.length
            if position < start + length:
                return None
            moved += length
        return position - moved


def find_insertions(
    least: Sequence[int], one: Sequence[int], two: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    """Runs that are put into ``least`` to make ``one``, and put in twice to make ``two``.

    Where layers are alike, a run can be said to begin at any row of them. Those in the middle are
    farthest from the first and the last layer, which may be otherwise.

    Returns:
        The earliest and the latest positions in ``least``, and lengths; None where there are none
        that do.
    """
    total = len(one) - len(least)
    if total < 0 or len(two) - len(one) != total:
        return None
    latest = _insertions(least, one, two, 0, 0, 0)
    if latest is None:
        return None
    out, bound, moved = [], 0, 0
    for position, length in latest:
        run = one[position + moved : position + moved + length]
        moved += length
        earlier = 0
        while (
            position - earlier > bound
            and least[position - earlier - 1] == run[length - 1 - earlier % length]
        ):
            earlier += 1
        bound = position
        out.append((position - earlier, position, length))
    return out


def _begin(earliest: int, latest: int, length: int, added: Sequence[bool]) -> int:
    """Where a run begins: where most of its rows are of added layers, else in the middle.

    Args:
        earliest: position.
        latest: position.
        length: of the run.
        added: of each row of what has the run once, whether it is; empty where nobody knows.
    """
    middle = latest - (latest - earliest) // 2
    if not added:
        return middle
    sums = [0, *accumulate(added)]
    return max(
        range(earliest, latest + 1),
        key=lambda start: (sums[start + length] - sums[start], -abs(start - middle)),
    )


def _insertions(
    least: Sequence[int], one: Sequence[int], two: Sequence[int], a: int, b: int, c: int
) -> list[tuple[int, int]] | None:
    """The latest runs behind some rows of each that are the same."""
    while a < len(least) and b < len(one) and c < len(two) and least[a] == one[b] == two[c]:
        a, b, c = a + 1, b + 1, c + 1
    rest = (len(one) - b) - (len(least) - a)
    if rest == 0:
        return [] if a == len(least) else None
    # the longest first: layers of two kinds may do the same, and belong to one period all the same
    for length in range(rest, 0, -1):
        run = one[b : b + length]
        if two[c : c + length] != run or two[c + length : c + 2 * length] != run:
            continue
        if length == rest:
            if one[b + length :] == least[a:] == two[c + 2 * length :]:
                return [(a, length)]
            continue
        behind = _insertions(least, one, two, a, b + length, c + 2 * length)
        if behind is not None:
            return [(a, length), *behind]
    return None
