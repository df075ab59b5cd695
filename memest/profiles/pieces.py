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
from memest.events import (
    ALLOC,
    CALL,
    FREE,
    MARK,
    OF_MODULES,
    Cue,
    CueKind,
    Seam,
    SeamKind,
    Trace,
)

__all__ = ["MAX_REPEATS", "JoinedTraces", "Pieces", "Span", "join", "pair_up", "splice"]

MAX_REPEATS = 3
"""Repetitions of a micro-step that are played. The allocator is deterministic: once a repetition
begins with the free blocks that an earlier one began with, all later ones are copies. Mostly that
is so from the second on, or two states take turns, as where the loss changes places with the loss
before it. It is no law: where 7B weights train in float32, free blocks may never be the same
twice, and later repetitions wander among blocks that are much alike. There 16 micro-steps reserved
0.8 % less to 0.7 % more than 4 (12 replays of Mistral 7B at six batches); of 72 replays of five
other models one moved, by 0.05 %."""

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
    first = at[SeamKind.UPDATE, 1]
    spans = {(SeamKind.OPTIMIZER_MADE, 0): (begin, first)}
    for step in (1, 2):
        spans[SeamKind.UPDATE, step] = at[SeamKind.UPDATE, step], at[SeamKind.UPDATED, step]
    _check_kept(updates, begin, spans.values())
    both = join([micro_steps, updates]).trace
    out = replace(
        both,
        events=array("q"),
        seams=[],
        sizes=micro_steps.sizes + [size + place_offset for size in updates.sizes],
        weights=micro_steps.weights,
        attention_choices=micro_steps.attention_choices,
        micro_steps=micro_steps.micro_steps,
        landmarks=micro_steps.landmarks,
        counts=micro_steps.counts,
    )
    behind = len(micro_steps.events)
    last, moves = 0, [(0, 0)]
    more: list[Cue] = []
    for seam in micro_steps.seams:
        out.events.extend(micro_steps.events[last : seam.position])
        last = seam.position
        out.seams.append(Seam(len(out.events), seam.kind, seam.step, seam.index))
        start, stop = spans.get((seam.kind, seam.step), (0, 0))
        if start < stop:
            more += [
                Cue(cue.position - start + len(out.events), cue.kind, cue.index, cue.allocation)
                for cue in updates.cues
                if start <= cue.position <= stop
            ]
            out.events.extend(both.events[behind + start : behind + stop])
            moves.append((seam.position, moves[-1][1] + stop - start))
    out.events.extend(micro_steps.events[last:])
    out.cues = sorted([*_shift_cues(micro_steps.cues, moves), *more], key=lambda cue: cue.position)
    return out


def _check_kept(updates: Trace, begin: int, spans: Iterable[Span]) -> None:
    """Refuse an optimizer that lets go of its inputs, which are made before ``begin``."""
    inputs = {value >> 2 for value in updates.events[:begin] if value & 3 == ALLOC}
    for span in spans:
        if any(v & 3 == FREE and v >> 2 in inputs for v in updates.events[slice(*span)]):
            raise TraceError(
                "The optimizer lets go of weights or gradients during its step, which memest "
                "cannot compose. Please report it with the output of `memest env`."
            )


def _shift_cues(cues: list[Cue], moves: list[tuple[int, int]]) -> list[Cue]:
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
        position = cue.position + moves[place][1]
        out.append(Cue(position, cue.kind, cue.index, cue.allocation))
    return out


@dataclass(slots=True)
class JoinedTraces:
    """Several traces as one.

    Attributes:
        trace: all events, one trace after the other.
        first_events: of each trace.
        first_allocations: likewise.
        first_modules: for each trace, where its module names are in the joint list.
    """

    trace: Trace
    first_events: list[int]
    first_allocations: list[int]
    first_modules: list[list[int]]


def join(traces: list[Trace]) -> JoinedTraces:
    """Put traces one behind the other: events, allocations, calls and marks are numbered on.

    Cues are those of wrappers; their weights keep the numbers that they have in their own trace.
    """
    out = JoinedTraces(Trace(), [], [], [])
    into = out.trace
    modules: dict[str, int] = {}
    ops: dict[str, int] = {}
    for trace in traces:
        offsets = {
            ALLOC: len(into.sizes),
            FREE: len(into.sizes),
            CALL: len(into.call_of_site),
            MARK: len(into.marks),
        }
        out.first_events.append(len(into.events))
        out.first_allocations.append(len(into.sizes))
        module_indices = [modules.setdefault(name, len(modules)) for name in trace.module_names]
        op_indices = [ops.setdefault(name, len(ops)) for name in trace.op_names]
        out.first_modules.append(module_indices)
        calls = len(into.calls)
        shifts = [offsets[kind] << 2 for kind in sorted(offsets)]
        into.events.extend(v + shifts[v & 3] for v in trace.events)
        into.sizes.extend(trace.sizes)
        into.categories.extend(trace.categories)
        into.modules.extend(module_indices[number] for number in trace.modules)
        into.ops.extend(op_indices[number] for number in trace.ops)
        into.call_of_site.extend(call + calls for call in trace.call_of_site)
        into.site_modules.extend(module_indices[number] for number in trace.site_modules)
        into.calls.extend(trace.calls)
        into.marks.extend(trace.marks)
        into.cues.extend(
            Cue(
                cue.position + out.first_events[-1],
                cue.kind,
                module_indices[cue.index] if cue.kind in OF_MODULES else cue.index,
                cue.allocation + (offsets[ALLOC] if cue.allocation >= 0 else 0),
            )
            for cue in trace.cues
            if cue.kind < CueKind.STAGE_INPUT or cue.kind is CueKind.OUTPUT_REACHED
        )
        into.launches.extend(trace.launches)
        into.attention_choices.extend(trace.attention_choices)
        into.weights += trace.weights
        into.managed_bytes += trace.managed_bytes
        into.notes.extend(note for note in trace.notes if note not in into.notes)
        into.unpriced.extend(each for each in trace.unpriced if each not in into.unpriced)
        into.unnoted_ops.extend(op for op in trace.unnoted_ops if op not in into.unnoted_ops)
    into.module_names, into.op_names = list(modules), list(ops)
    return out


@dataclass(slots=True)
class Pieces:
    """The pieces of a spliced trace, and what passes from one to the next.

    Attributes:
        trace: the spliced trace.
        slots: allocations that one micro-step leaves and the next drops, the same one in each
            row: as the first micro-step of step 1 leaves it, as the second does, as the first of
            step 2 does.
        inheritance: (dropped by the second step, left by it for the next).
        totals: the running count of labels, as ``slots``; empty where none is kept.
        samples: tensors of a prefetched batch: first and second of step 1, first of step 2.
        additions: what the micro-step of each batch puts into it.
    """

    trace: Trace
    slots: list[tuple[int, int, int]] = field(default_factory=list)
    inheritance: list[tuple[int, int]] = field(default_factory=list)
    totals: list[tuple[int, int, int]] = field(default_factory=list)
    samples: tuple[list[int], list[int], list[int]] = ([], [], [])
    additions: tuple[list[int], list[int], list[int]] = ([], [], [])
    _at: dict[tuple[SeamKind, int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._at = {(s.kind, s.step, s.index): s.position for s in self.trace.seams}
        if self.trace.micro_steps not in ((2, 1), (1, 1)):
            raise ValueError(f"a trace of {self.trace.micro_steps} micro-steps has no pieces")
        if self.prefetches:
            self.samples = (
                list(self._allocations(self.piece(SeamKind.SAMPLE, 1, 1))),
                list(self._allocations(self.piece(SeamKind.SAMPLE, 1, 2))) if self.repeats else [],
                list(self._allocations(self.piece(SeamKind.SAMPLE, 2, 1))),
            )
        if self.repeats:
            if self.prefetches:
                self._match_additions()
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

    def piece(self, kind: SeamKind, step: int, index: int = 0) -> Span:
        """From a seam inside a step to the one behind it: a batch, its count, a micro-step."""
        seams = list(self._at)
        following = seams[seams.index((kind, step, index)) + 1]
        return self.position(kind, step, index), self._at[following]

    def ending(self, step: int) -> Span:
        """Clipping, optimizer, zero_grad."""
        return self.position(SeamKind.UPDATE, step), self.position(SeamKind.END, step)

    # -- what passes between them

    def _allocations(self, span: Span) -> Iterator[int]:
        return (v >> 2 for v in self.trace.events[slice(*span)] if v & 3 == ALLOC)

    def _frees(self, span: Span) -> Iterator[int]:
        return (v >> 2 for v in self.trace.events[slice(*span)] if v & 3 == FREE)

    def _survivors(self, span: Span) -> list[int]:
        frees = set(self._frees(span))
        return [index for index in self._allocations(span) if index not in frees]

    def _inherited_frees(self, span: Span) -> list[int]:
        own = set(self._allocations(span))
        return sorted(index for index in self._frees(span) if index not in own)

    def _match_additions(self) -> None:
        """What a micro-step puts into its batch goes with it, when the next batches are there."""
        trace, batch_tensors = self.trace, self._of_batches()
        releases = set(self._frees(self.piece(SeamKind.FETCHED, 2)))
        first = [i for i in self._survivors(self.piece(SeamKind.MICRO_STEP, 1, 1)) if i in releases]
        others = (self._survivors(self.piece(SeamKind.MICRO_STEP, *at)) for at in ((1, 2), (2, 1)))
        second, again = (
            _counterparts(trace, first, survivors, batch_tensors) for survivors in others
        )
        self.additions = first, second, again

    def _of_batches(self) -> set[int]:
        """All that lives as long as a prefetched batch does."""
        return {index for group in (*self.samples, *self.additions) for index in group}

    def _match_micro_steps(self) -> None:
        """What every micro-step takes over from the one before it."""
        trace, later = self.trace, self.piece(SeamKind.MICRO_STEP, 1, 2)
        batch_tensors = self._of_batches()
        old = [i for i in self._inherited_frees(later) if i not in batch_tensors]
        new = [i for i in self._survivors(later) if i not in batch_tensors]
        pairs = pair_up(trace, old, new)
        again = _counterparts(
            trace, old, self._survivors(self.piece(SeamKind.MICRO_STEP, 2, 1)), batch_tensors
        )
        self.slots = [(d, n, a) for (d, n), a in zip(pairs, again, strict=True)]
        if self.counts:
            count_span = self.piece(SeamKind.COUNT, 1, 2)
            earlier = self._inherited_frees(count_span)
            total = pair_up(trace, earlier, self._survivors(count_span))
            again = self._survivors(self.piece(SeamKind.COUNT, 2, 1))
            first = _counterparts(trace, earlier, again, set())
            self.totals = [(d, n, a) for (d, n), a in zip(total, first, strict=True)]

    def _match_steps(self) -> None:
        """What the second step takes over from the first, the third from the second."""
        span = self.position(SeamKind.STEP, 2), self.position(SeamKind.END, 2)
        matches = self._of_batches()
        for first, later, again in (*self.slots, *self.totals):
            matches.update((first, later, again))
        old = [i for i in self._inherited_frees(span) if i not in matches]
        new = [i for i in self._survivors(span) if i not in matches]
        self.inheritance = pair_up(self.trace, old, new)


def _key(trace: Trace, index: int) -> tuple[int, int, int]:
    return trace.sizes[index], trace.ops[index], trace.modules[index]


def pair_up(trace: Trace, old: list[int], new: list[int]) -> list[tuple[int, int]]:
    """Each old allocation that a repeated part drops, with the new one left in its place.

    Raises:
        TraceError: the part does not return to the state it began in, so it cannot be repeated.
    """
    places: dict[tuple[int, int, int], list[int]] = {}
    for index in reversed(new):
        places.setdefault(_key(trace, index), []).append(index)
    partners: dict[int, int] = {}
    for index in old:
        if candidates := places.get(_key(trace, index)):
            partners[index] = candidates.pop()
    # what the first update made with one operator, later ones may make with another
    by_size: dict[int, list[int]] = {}
    for index in sorted(set(new) - set(partners.values()), reverse=True):
        by_size.setdefault(trace.sizes[index], []).append(index)
    for index in old:
        if index not in partners and (candidates := by_size.get(trace.sizes[index])):
            partners[index] = candidates.pop()
    pairs = [(index, partners[index]) for index in old if index in partners]
    if len(pairs) != len(old) or len(pairs) != len(new):
        raise TraceError(
            "The training step does not return to the state it began in: memory grows from step "
            f"to step ({len(new)} allocations left behind, {len(old)} dropped). Something in "
            "the model keeps tensors of earlier steps."
        )
    return pairs


def _counterparts(
    trace: Trace, originals: list[int], left: list[int], besides: set[int]
) -> list[int]:
    """The same allocations among what another piece leaves, in the order of ``originals``.

    Raises:
        TraceError: it leaves others.
    """
    places: dict[tuple[int, int, int], list[int]] = {}
    for index in reversed([i for i in left if i not in besides]):
        places.setdefault(_key(trace, index), []).append(index)
    try:
        return [places[_key(trace, index)].pop() for index in originals]
    except (KeyError, IndexError):
        raise TraceError(
            "The first micro-step of a later step leaves other tensors behind than that of the "
            "first step, so steps cannot be composed. Something in the model changes with time."
        ) from None
