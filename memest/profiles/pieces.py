"""How a run of any length is put together from a few traced micro-steps and two traced updates.

Traced are a first step of two micro-steps, a second step of one, and two updates (clipping and
optimizer) on their own. Every other run repeats these pieces: the same allocations in the same
order, on new memory. What a piece inherits and drops (the outputs before, say) it takes from
whatever was played before it: such allocations are matched by what they are.

That is enough because a loop has no other states: gradients are there or not (first or later
micro-step), what the previous step left behind is there or not (first or later step), and optimizer
states are there or not (first or later update).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from memest.errors import TraceError
from memest.events import ALLOC, CALL, FREE, MARK, Cue, Seam, SeamKind, Trace

__all__ = ["MAX_REPEATS", "Pieces", "Span", "paired", "splice"]

MAX_REPEATS = 3
"""Repetitions of a micro-step that are played. The allocator is deterministic: once a repetition
begins with the free blocks that an earlier one began with, all later ones are copies. The pool of
large blocks gets there with the second; in the small one the loss changes places with the loss
before it, so that two states take turns from the second on: the second and the third are all
there are."""

Span = tuple[int, int]
"""First event of a piece, and the event behind its last."""


def splice(micro_steps: Trace, updates: Trace | None, place_offset: int = 0) -> Trace:
    """Put the updates where the micro-steps leave room for them.

    Args:
        micro_steps: traced without optimizer.
        updates: traced by ``trace_updates``; None where no optimizer runs.
        place_offset: added to the sizes of the updates, where sizes are places in a table.

    Raises:
        TraceError: an optimizer that gives away weights or gradients.
    """
    if updates is None:
        return micro_steps
    at = {(s.kind, s.step): s.position for s in updates.seams}
    begin = at[SeamKind.OPTIMIZER_MADE, 0]
    renumber = _Renumber(micro_steps, updates, begin)
    first = at[SeamKind.UPDATE, 1]
    inserts = {(SeamKind.OPTIMIZER_MADE, 0): renumber.events(begin, first)}
    spans = {(SeamKind.OPTIMIZER_MADE, 0): (begin, first)}
    for step in (1, 2):
        span = at[SeamKind.UPDATE, step], at[SeamKind.UPDATED, step]
        inserts[SeamKind.UPDATE, step] = renumber.events(*span)
        spans[SeamKind.UPDATE, step] = span
    out = replace(micro_steps)
    out.events, out.seams = array("q"), []
    last, moves = 0, [(0, 0)]
    more: list[Cue] = []
    for seam in micro_steps.seams:
        out.events.extend(micro_steps.events[last : seam.position])
        last = seam.position
        out.seams.append(Seam(len(out.events), seam.kind, seam.step, seam.index))
        inserted = inserts.get((seam.kind, seam.step))
        if inserted:
            start, stop = spans[seam.kind, seam.step]
            more += [
                replace(cue, position=cue.position - start + len(out.events))
                for cue in updates.cues
                if start <= cue.position <= stop
            ]
            out.events.extend(inserted)
            moves.append((seam.position, moves[-1][1] + len(inserted)))
    out.events.extend(micro_steps.events[last:])
    out.cues = sorted([*_moved(micro_steps.cues, moves), *more], key=lambda cue: cue.position)
    out.sizes = micro_steps.sizes + [size + place_offset for size in updates.sizes]
    out.categories = micro_steps.categories + updates.categories
    out.modules = micro_steps.modules + renumber.modules(updates.modules)
    out.ops = micro_steps.ops + renumber.ops(updates.ops)
    calls = len(micro_steps.calls)
    out.call_of_site = micro_steps.call_of_site + array(
        "l", [call + calls for call in updates.call_of_site]
    )
    out.site_modules = micro_steps.site_modules + renumber.modules(updates.site_modules)
    out.calls = micro_steps.calls + updates.calls
    out.marks = micro_steps.marks + updates.marks
    out.launches = micro_steps.launches + updates.launches
    out.module_names, out.op_names = renumber.module_names, renumber.op_names
    out.managed_bytes = micro_steps.managed_bytes + updates.managed_bytes
    out.notes = [*micro_steps.notes, *(n for n in updates.notes if n not in micro_steps.notes)]
    out.unnoted = list(dict.fromkeys([*micro_steps.unnoted, *updates.unnoted]))
    return out


def _moved(cues: list[Cue], moves: list[tuple[int, int]]) -> list[Cue]:
    """Cues where they are after others were put between the events.

    Args:
        cues: in order.
        moves: (position, how far what lies behind it has moved), in order; what stood at the
            position itself stays in front of what was put there.
    """
    out, place = [], 0
    for cue in cues:
        while place + 1 < len(moves) and moves[place + 1][0] < cue.position:
            place += 1
        out.append(replace(cue, position=cue.position + moves[place][1]))
    return out


class _Renumber:
    """The updates' numbers behind those of the micro-steps."""

    def __init__(self, micro_steps: Trace, updates: Trace, begin: int) -> None:
        self._updates = updates
        self._offsets = {
            ALLOC: len(micro_steps.sizes),
            FREE: len(micro_steps.sizes),
            CALL: len(micro_steps.call_of_site),
            MARK: len(micro_steps.marks),
        }
        self._given = {value >> 2 for value in updates.events[:begin] if value & 3 == ALLOC}
        self.module_names, self._modules = _joined(micro_steps.module_names, updates.module_names)
        self.op_names, self._ops = _joined(micro_steps.op_names, updates.op_names)

    def events(self, start: int, stop: int) -> array[int]:
        out = array("q")
        for value in self._updates.events[start:stop]:
            kind, index = value & 3, value >> 2
            if kind == FREE and index in self._given:
                raise TraceError(
                    "The optimizer lets go of weights or gradients during its step, which memest "
                    "cannot compose. Please report it with the output of `memest env`."
                )
            out.append((index + self._offsets[kind]) << 2 | kind)
        return out

    def modules(self, numbers: Iterable[int]) -> array[int]:
        return array("l", [self._modules[number] for number in numbers])

    def ops(self, numbers: Iterable[int]) -> array[int]:
        return array("l", [self._ops[number] for number in numbers])


def _joined(first: list[str], second: list[str]) -> tuple[list[str], list[int]]:
    """Both lists of names as one, and where each name of the second is now."""
    known = {name: index for index, name in enumerate(first)}
    where = [known.setdefault(name, len(known)) for name in second]
    return list(known), where


@dataclass(slots=True)
class Pieces:
    """The pieces of a spliced trace, and what passes from one to the next.

    Attributes:
        trace: the spliced trace.
        slots: allocations that one micro-step leaves and the next drops, the same one in each
            row: as the first micro-step of step 1 leaves it, as the second does, as the first of
            step 2 does.
        inherited: (dropped by the second step, left by it for the next).
        totals: the running count of labels, as ``slots``; empty where none is kept.
        samples: tensors of a prefetched batch: first and second of step 1, first of step 2.
        added: what the micro-step of each of them puts into it.
    """

    trace: Trace
    slots: list[tuple[int, int, int]] = field(default_factory=list)
    inherited: list[tuple[int, int]] = field(default_factory=list)
    totals: list[tuple[int, int, int]] = field(default_factory=list)
    samples: tuple[list[int], list[int], list[int]] = ([], [], [])
    added: tuple[list[int], list[int], list[int]] = ([], [], [])
    _at: dict[tuple[SeamKind, int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._at = {(s.kind, s.step, s.index): s.position for s in self.trace.seams}
        if self.trace.micro_steps not in ((2, 1), (1, 1)):
            raise ValueError(f"a trace of {self.trace.micro_steps} micro-steps has no pieces")
        if self.prefetches:
            self.samples = (
                list(self._born(self.sample(1, 1))),
                list(self._born(self.sample(1, 2))) if self.repeats else [],
                list(self._born(self.sample(2, 1))),
            )
        if self.repeats:
            if self.prefetches:
                self._match_added()
            self._match_micro_steps()
        self._match_steps()

    # -- where the pieces are

    def has(self, kind: SeamKind, step: int, index: int = 0) -> bool:
        """Whether there is such a seam."""
        return (kind, step, index) in self._at

    def position(self, kind: SeamKind, step: int, index: int = 0) -> int:
        """The event behind a seam."""
        return self._at[kind, step, index]

    @property
    def repeats(self) -> bool:
        """Whether a second micro-step was traced."""
        return self.trace.micro_steps[0] == 2

    @property
    def prefetches(self) -> bool:
        """Whether a step begins by fetching all its batches."""
        return self.has(SeamKind.SAMPLE, 1, 1)

    @property
    def counts(self) -> bool:
        """Whether labels are counted before a step."""
        return self.has(SeamKind.COUNT, 1, 1)

    @property
    def load(self) -> Span:
        """Model, optimizer, and what the loop makes before its first step."""
        return 0, self.position(SeamKind.STEP, 1)

    def opening(self, step: int) -> Span:
        """From the beginning of a step to its first sample, or micro-step."""
        kind = SeamKind.SAMPLE if self.prefetches else SeamKind.MICRO_STEP
        return self.position(SeamKind.STEP, step), self.position(kind, step, 1)

    def sample(self, step: int, index: int) -> Span:
        """One prefetched batch."""
        start = self.position(SeamKind.SAMPLE, step, index)
        for kind, number in (
            (SeamKind.SAMPLE, index + 1),
            (SeamKind.COUNT, 1),
            (SeamKind.FETCHED, 0),
        ):
            if self.has(kind, step, number):
                return start, self.position(kind, step, number)
        raise AssertionError

    def count(self, step: int, index: int) -> Span:
        """The labels of one batch counted."""
        start = self.position(SeamKind.COUNT, step, index)
        if self.has(SeamKind.COUNT, step, index + 1):
            return start, self.position(SeamKind.COUNT, step, index + 1)
        return start, self.position(SeamKind.COUNTED, step)

    def counted(self, step: int) -> Span:
        """What is done with the count."""
        return self.position(SeamKind.COUNTED, step), self.position(SeamKind.FETCHED, step)

    def release(self, step: int) -> Span:
        """One old batch let go of."""
        return self.position(SeamKind.FETCHED, step), self.position(SeamKind.RELEASED, step)

    def released(self, step: int) -> Span:
        """From there to the first micro-step."""
        start = self.position(SeamKind.RELEASED, step)
        return start, self.position(SeamKind.MICRO_STEP, step, 1)

    def micro_step(self, step: int, index: int) -> Span:
        """Forward and backward of one micro-batch."""
        start = self.position(SeamKind.MICRO_STEP, step, index)
        if self.has(SeamKind.MICRO_STEP, step, index + 1):
            return start, self.position(SeamKind.MICRO_STEP, step, index + 1)
        return start, self.position(SeamKind.UPDATE, step)

    def ending(self, step: int) -> Span:
        """Clipping, optimizer, zero_grad."""
        return self.position(SeamKind.UPDATE, step), self.position(SeamKind.END, step)

    # -- what passes between them

    def _born(self, span: Span) -> Iterator[int]:
        return (v >> 2 for v in self.trace.events[slice(*span)] if v & 3 == ALLOC)

    def _freed(self, span: Span) -> Iterator[int]:
        return (v >> 2 for v in self.trace.events[slice(*span)] if v & 3 == FREE)

    def _left(self, span: Span) -> list[int]:
        freed = set(self._freed(span))
        return [index for index in self._born(span) if index not in freed]

    def _dropped(self, span: Span) -> list[int]:
        born = set(self._born(span))
        return sorted(index for index in self._freed(span) if index not in born)

    def _match_added(self) -> None:
        """What a micro-step puts into its batch goes with it, when the next batches are there."""
        trace, sampled = self.trace, self._of_batches()
        released = set(self._freed(self.release(2)))
        first = [i for i in self._left(self.micro_step(1, 1)) if i in released]
        others = (self._left(self.micro_step(*at)) for at in ((1, 2), (2, 1)))
        second, again = (_found(trace, first, left, sampled) for left in others)
        self.added = first, second, again

    def _of_batches(self) -> set[int]:
        """All that lives as long as a prefetched batch does."""
        return {index for group in (*self.samples, *self.added) for index in group}

    def _match_micro_steps(self) -> None:
        """What every micro-step takes over from the one before it."""
        trace, later = self.trace, self.micro_step(1, 2)
        sampled = self._of_batches()
        dropped = [i for i in self._dropped(later) if i not in sampled]
        left = [i for i in self._left(later) if i not in sampled]
        pairs = paired(trace, dropped, left)
        again = _found(trace, dropped, self._left(self.micro_step(2, 1)), sampled)
        self.slots = [(d, n, a) for (d, n), a in zip(pairs, again, strict=True)]
        if self.counts:
            earlier = self._dropped(self.count(1, 2))
            total = paired(trace, earlier, self._left(self.count(1, 2)))
            first = _found(trace, earlier, self._left(self.count(2, 1)), set())
            self.totals = [(d, n, a) for (d, n), a in zip(total, first, strict=True)]

    def _match_steps(self) -> None:
        """What the second step takes over from the first, the third from the second."""
        span = self.position(SeamKind.STEP, 2), self.position(SeamKind.END, 2)
        passed = self._of_batches()
        for first, later, again in (*self.slots, *self.totals):
            passed.update((first, later, again))
        dropped = [i for i in self._dropped(span) if i not in passed]
        left = [i for i in self._left(span) if i not in passed]
        self.inherited = paired(self.trace, dropped, left)


def _key(trace: Trace, index: int) -> tuple[int, int, int]:
    return trace.sizes[index], trace.ops[index], trace.modules[index]


def paired(trace: Trace, dropped: list[int], left: list[int]) -> list[tuple[int, int]]:
    """What a repeated part drops, each with what it leaves behind in its place.

    Raises:
        TraceError: the part does not return to the state it began in, so it cannot be repeated.
    """
    places: dict[tuple[int, int, int], list[int]] = {}
    for index in reversed(left):
        places.setdefault(_key(trace, index), []).append(index)
    taken: dict[int, int] = {}
    for index in dropped:
        if candidates := places.get(_key(trace, index)):
            taken[index] = candidates.pop()
    # what the first update made with one operator, later ones may make with another
    by_size: dict[int, list[int]] = {}
    for index in sorted(set(left) - set(taken.values()), reverse=True):
        by_size.setdefault(trace.sizes[index], []).append(index)
    for index in dropped:
        if index not in taken and (candidates := by_size.get(trace.sizes[index])):
            taken[index] = candidates.pop()
    pairs = [(index, taken[index]) for index in dropped if index in taken]
    if len(pairs) != len(dropped) or len(pairs) != len(left):
        raise TraceError(
            "The training step does not return to the state it began in: memory grows from step "
            f"to step ({len(left)} allocations left behind, {len(dropped)} dropped). Something in "
            "the model keeps tensors of earlier steps."
        )
    return pairs


def _found(trace: Trace, wanted: list[int], left: list[int], besides: set[int]) -> list[int]:
    """The same allocations among what another piece leaves, in the order of ``wanted``.

    Raises:
        TraceError: it leaves others.
    """
    places: dict[tuple[int, int, int], list[int]] = {}
    for index in reversed([i for i in left if i not in besides]):
        places.setdefault(_key(trace, index), []).append(index)
    try:
        return [places[_key(trace, index)].pop() for index in wanted]
    except (KeyError, IndexError):
        raise TraceError(
            "The first micro-step of a later step leaves other tensors behind than that of the "
            "first step, so steps cannot be composed. Something in the model changes with time."
        ) from None
