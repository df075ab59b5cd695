"""Depth as a size: the trace of a model of any depth from one of few layers.

A :class:`Fold` says which rows of a shallow trace belong to one period of layers, and how what they
point at moves from one period to the next. The shallow trace has every such run of rows once;
:func:`unfold` writes them as often as the model has periods.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, pairwise

from memest.events import ALLOC, CALL, FREE, MARK, Cue, Landmarks, Seam, Trace
from memest.profiles.transcript import Stack, Template, Transcript, fill_in

__all__ = [
    "Fold",
    "FoldRun",
    "PointerRule",
    "begins_with",
    "check_fold",
    "compress",
    "unfold",
]


_MOST_PERIODS = 4096


@dataclass(frozen=True, slots=True)
class FoldRun:
    """Rows of one listing that every period of a stack has.

    Attributes:
        stack: number of the stack.
        start: its first row in the shallow trace.
        length: its rows.
    """

    stack: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PointerRule:
    """Where a pointer leads when there are more periods.

    Attributes:
        run: of the listing it leads to; -1 for a row that no period has, wherever that is then.
        from_end: it keeps its distance from the end of that run, else from its start.
        slope: runs that it moves on with each period of its own run.
    """

    run: int
    from_end: bool = False
    slope: int = 0


@dataclass(frozen=True, slots=True)
class Fold:
    """How a trace of few layers becomes one of many.

    Attributes:
        stacks: of the model.
        kept: periods of each stack that the shallow trace has besides the one that is repeated.
        runs: of each listing of the transcript.
        rules: distinct ones.
        rule_of: the rule of every pointer, in the order of listings and rows, as (how many, which).
        launches: kernels that a period adds behind each mark, by stack.
    """

    stacks: tuple[Stack, ...]
    kept: tuple[int, ...]
    runs: tuple[tuple[FoldRun, ...], ...]
    rules: tuple[PointerRule, ...]
    rule_of: tuple[tuple[int, int], ...]
    launches: tuple[tuple[int, ...], ...]
    growing: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Allocations as large as all weights, and by how many bytes a period of each stack makes them
    larger."""

    @property
    def depth_words(self) -> str:
        """Of how many layers how many were traced."""
        return " and ".join(
            f"{stack.depth_at(periods)} of {stack.depth} layers"
            for stack, periods in zip(self.stacks, self.periods, strict=True)
        )

    @property
    def periods(self) -> tuple[int, ...]:
        """Periods of each stack in the shallow trace."""
        return tuple(kept + 1 for kept in self.kept)

    def is_of(self, stacks: Sequence[Stack], kept: Sequence[int]) -> bool:
        """Whether it unfolds traces with so many periods of these stacks."""
        return self.stacks == tuple(stacks) and self.kept == tuple(kept)

    @property
    def repeats(self) -> tuple[int, ...]:
        """How often the model has what the shallow trace has once."""
        return tuple(stack.count - kept for stack, kept in zip(self.stacks, self.kept, strict=True))


def compress(values: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Equal neighbours as (how many, which)."""
    return tuple((len(list(group)), value) for value, group in groupby(values))


def check_fold(trace: Trace, fold: Fold) -> None:
    """See that a fold is one of a trace, as far as that shows without unfolding.

    Raises:
        ValueError: it is not.
    """
    num_stacks = len(fold.stacks)
    listings = Transcript(trace, fold.stacks).listings
    pointers = sum(len(row) for listing in listings for row in listing.pointers)
    holds = (
        len(fold.kept) == len(fold.launches) == num_stacks > 0
        and all(
            0 < kept < stack.count <= _MOST_PERIODS and stack.period > 0
            for stack, kept in zip(fold.stacks, fold.kept, strict=True)
        )
        and len(fold.runs) == len(listings)
        and all(
            0 <= run.stack < num_stacks and run.length > 0 and run.start >= 0
            for runs in fold.runs
            for run in runs
        )
        and all(
            one.start + one.length <= two.start for runs in fold.runs for one, two in pairwise(runs)
        )
        and all(
            runs[-1].start + runs[-1].length <= len(listing.pointers)
            for runs, listing in zip(fold.runs[num_stacks:], listings[num_stacks:], strict=True)
            if runs
        )
        and all(many > 0 and 0 <= which < len(fold.rules) for many, which in fold.rule_of)
        and sum(many for many, _ in fold.rule_of) == pointers
        and all(len(launches) == len(trace.launches) for launches in fold.launches)
        and all(
            0 <= allocation < len(trace.sizes) and len(more) == num_stacks
            for allocation, more in fold.growing
        )
    )
    if not holds:
        raise ValueError("fold")


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows ``start`` to ``stop`` of a listing, written ``copies`` times."""

    start: int
    stop: int
    copies: int


def _parts(length: int, runs: Sequence[FoldRun], repeats: Sequence[int]) -> Iterator[_Part]:
    last = 0
    for run in runs:
        yield _Part(last, run.start, 1)
        last = run.start + run.length
        yield _Part(run.start, last, repeats[run.stack])
    yield _Part(last, length, 1)


class _Places:
    """Where rows of one listing are when its runs are repeated."""

    def __init__(self, runs: Sequence[FoldRun], repeats: Sequence[int]) -> None:
        self._runs = runs
        self._starts: list[int] = []
        self._moves: list[tuple[int, int]] = []
        moved = 0
        for run in runs:
            self._starts.append(run.start + moved)
            moved += (repeats[run.stack] - 1) * run.length
            self._moves.append((run.start + run.length, moved))
        self._repeats = repeats

    def follow(self, position: int, rule: PointerRule) -> tuple[int, int]:
        """Where a pointer of the first copy leads, and how far on that of each later one."""
        if rule.run < 0:
            moved = 0
            for end, by in self._moves:
                if position < end:
                    break
                moved = by
            return position + moved, 0
        run = self._runs[rule.run]
        place = self._starts[rule.run] + position - run.start
        if rule.from_end:
            place += (self._repeats[run.stack] - 1) * run.length
        return place, rule.slope * run.length


def unfold(
    trace: Trace,
    fold: Fold,
    repeats: Sequence[int] | None = None,
    grow: Callable[[int, int], int] = operator.add,
    num_events: int | None = None,
) -> Trace:
    """The trace of a deeper model.

    Args:
        trace: of the shallow one; its sizes may be places in a family's table.
        fold: of its structure.
        repeats: how often each stack has its period; None for the depth of the model.
        grow: the size, or its place, of an allocation that has so many more bytes.
        num_events: as many are asked for; the phases behind them are left out. None for all.
    """
    repeats = fold.repeats if repeats is None else repeats
    if fold.growing:
        sizes = list(trace.sizes)
        for allocation, by_stack in fold.growing:
            more = sum((r - 1) * each for r, each in zip(repeats, by_stack, strict=True))
            sizes[allocation] = grow(sizes[allocation], more)
        trace = replace(trace)
        trace.sizes = sizes
    return _Unfolding(trace, fold, repeats).trace(num_events)


def begins_with(trace: Trace, beginning: Trace) -> bool:
    """Whether a trace does at first what another one does, which ends behind one of its phases."""
    sites, births = len(beginning.call_of_site), len(beginning.ops)
    calls = [trace.calls[number] for number in trace.call_of_site[:sites]]
    ops = [trace.op_names[number] for number in trace.ops[:births]]
    return (
        all(
            getattr(trace, name)[: len(getattr(beginning, name))] == getattr(beginning, name)
            for name in _IN_ORDER
        )
        and trace.module_names == beginning.module_names
        and calls == [beginning.calls[number] for number in beginning.call_of_site]
        and ops == [beginning.op_names[number] for number in beginning.ops]
    )


_IN_ORDER = (
    "events",
    "sizes",
    "categories",
    "modules",
    "site_modules",
    "marks",
    "launches",
    "cues",
    "seams",
    "attention_choices",
)
"""What a trace writes down as it happens."""


class _Unfolding:
    def __init__(self, trace: Trace, fold: Fold, repeats: Sequence[int]) -> None:
        self._shallow = trace
        self._fold = fold
        self._repeats = repeats
        self._transcript = transcript = Transcript(trace, fold.stacks)
        places = [_Places(runs, repeats) for runs in fold.runs]
        rules = (fold.rules[which] for many, which in fold.rule_of for _ in range(many))
        # for each listing, for each row, where its pointers lead: (place, step) each
        self._targets: list[list[tuple[tuple[int, int], ...]]] = [
            [
                tuple(places[listing].follow(at, next(rules)) for listing, at in pointers)
                for pointers in each.pointers
            ]
            for each in transcript.listings
        ]

    def _rows(self, number: int) -> Iterator[tuple[int, int]]:
        """The rows of a listing as (row of the shallow one, number of the copy)."""
        length = len(self._transcript.listings[number].pointers)
        for part in _parts(length, self._fold.runs[number], self._repeats):
            for copy in range(part.copies):
                for row in range(part.start, part.stop):
                    yield row, copy

    def _texts(
        self, number: int, templates_of: Sequence[tuple[Template, ...]]
    ) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The rows of a table with the layers in their texts."""
        targets = self._targets[number]
        for row, copy in self._rows(number):
            layers = iter(targets[row])
            texts = []
            for template in templates_of[row]:
                place, step = next(layers) if template[1] >= 0 else (0, 0)
                texts.append(fill_in(template, place + copy * step))
            yield row, tuple(texts)

    def trace(self, num_events: int | None) -> Trace:
        shallow, transcript = self._shallow, self._transcript
        out = replace(shallow)
        number_of = transcript.listing
        modules = [(template,) for template in transcript.module_templates]
        out.module_names = [
            text for _, (text,) in self._texts(number_of(transcript.MODULES), modules)
        ]
        weights = [(template,) for template in transcript.weight_templates]
        out.weights = tuple(
            replace(shallow.weights[row], name=text)
            for row, (text,) in self._texts(number_of(transcript.WEIGHTS), weights)
        )
        out.attention_choices = [
            shallow.attention_choices[row] for row, _ in self._rows(number_of(transcript.CHOICES))
        ]
        out.landmarks = self._landmarks()
        out.launches = [
            launched
            + sum(
                (r - 1) * each[mark]
                for r, each in zip(self._repeats, self._fold.launches, strict=True)
            )
            for mark, launched in enumerate(shallow.launches)
        ]
        self._write_events(out, num_events)
        return out

    def _landmarks(self) -> Landmarks:
        transcript, own = self._transcript, self._shallow.landmarks
        kinds = list(own.kinds.values())
        number_of, template = transcript.listing, transcript.template
        kind_rows = [(name,) for name in transcript.kind_templates]
        unit_rows = [tuple(map(template, paths)) for paths, *_ in own.units]
        shared_rows = [(template(a), template(b)) for a, b in own.shared_paths.items()]
        return replace(
            own,
            kinds={
                t: kinds[row] for row, (t,) in self._texts(number_of(transcript.KINDS), kind_rows)
            },
            units=tuple(
                (texts, *own.units[row][1:])
                for row, texts in self._texts(number_of(transcript.UNITS), unit_rows)
            ),
            shared_paths={
                a: b for _, (a, b) in self._texts(number_of(transcript.SHARED), shared_rows)
            },
        )

    def _write_events(self, out: Trace, num_events: int | None) -> None:
        shallow, transcript = self._shallow, self._transcript
        # names of this function's own: the loop runs for each event of all layers
        events = out.events = array("q")
        sizes, categories = out.sizes, out.categories = list[int](), bytearray()
        modules, ops = out.modules, out.ops = array("l"), array("l")
        calls, call_modules = out.call_of_site, out.site_modules = array("l"), array("l")
        cues, seams = out.cues, out.seams = list[Cue](), list[Seam]()
        rows, seam_kind = transcript.rows, transcript.SEAM
        first, numbers = transcript.listing(transcript.EVENTS), self._numbers()
        for segment, start in enumerate(transcript.first_rows):
            if num_events is not None and len(events) >= num_events:
                break
            listing = first + segment
            pointers, targets = transcript.listings[listing].pointers, self._targets[listing]
            for row, copy in self._rows(listing):
                kind, index = rows[start + row]
                leads = targets[row]
                at = leads[0][0] + copy * leads[0][1] if leads else -1
                if kind == FREE:
                    events.append(numbers[pointers[row][0][0] - first][at] << 2 | FREE)
                elif kind == ALLOC:
                    events.append(len(sizes) << 2 | ALLOC)
                    sizes.append(shallow.sizes[index])
                    categories.append(shallow.categories[index])
                    modules.append(at)
                    ops.append(shallow.ops[index])
                elif kind == CALL:
                    events.append(len(calls) << 2 | CALL)
                    calls.append(shallow.call_of_site[index])
                    call_modules.append(at)
                elif kind == MARK:
                    events.append(index << 2 | MARK)
                elif kind == seam_kind:
                    seam = shallow.seams[index]
                    seams.append(Seam(len(events), seam.kind, seam.step, seam.index))
                else:
                    cue = shallow.cues[index]
                    allocation = -1
                    if cue.allocation >= 0:  # what it is about comes first, where that moves
                        place, step = leads[-1]
                        numbered = numbers[pointers[row][-1][0] - first]
                        allocation = numbered[place + copy * step]
                    about = at if transcript.owner_of(cue) else cue.index
                    cues.append(Cue(len(events), cue.kind, about, allocation))

    def _numbers(self) -> list[list[int]]:
        """The number that the allocation of each row gets, by segment and place; -1 for others."""
        transcript = self._transcript
        first = transcript.listing(transcript.EVENTS)
        counter = count()
        return [
            [
                next(counter) if transcript.rows[start + row][0] == ALLOC else -1
                for row, _ in self._rows(first + segment)
            ]
            for segment, start in enumerate(transcript.first_rows)
        ]
