"""Phases of a trace, and how a run of many steps is composed from a few traced ones.

A trace holds two optimizer steps and at most three micro-steps of each. In a steady state every
further step (and every micro-step between the first and the last) repeats the last traced one:
the same allocations in the same order, on new memory. What the repeated part inherited from its
predecessor and dropped (the previous outputs, say) it inherits anew: those allocations are matched
with what it leaves behind itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from memest.errors import TraceError
from memest.events import ALLOC, FREE, MARK, Phase, Trace

__all__ = ["MAX_REPEATS", "Segment", "compose", "rotation"]

MAX_REPEATS = 6
"""Repetitions of a micro-step that are played. The allocator is deterministic: once a repetition
ends with the free blocks it began with, all later ones are its copies. That is reached after one
or two; six leave a margin and bound the cost of accumulating over hundreds of micro-steps."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the traced stream to be played.

    Attributes:
        start: first event.
        stop: event after the last.
        step: number of the optimizer step it stands for, from 1; 0 while loading.
        micro_shift: added to the micro-steps of its marks.
        repeats: (start, stop) of the traced part that this segment begins to repeat, else None.
    """

    start: int
    stop: int
    step: int
    micro_shift: int = 0
    repeats: tuple[int, int] | None = None


def compose(trace: Trace, *, num_steps: int, grad_accum: int) -> list[Segment]:
    """The segments that make up a run of ``num_steps`` optimizer steps.

    Args:
        trace: two traced steps at least, unless ``num_steps`` is 1.
        num_steps: optimizer steps of the run.
        grad_accum: micro-steps of each.
    """
    positions = [i for i, value in enumerate(trace.events) if value & 3 == MARK]
    step_starts: list[int] = []
    for mark, position in zip(trace.marks, positions, strict=True):
        if mark.step == len(step_starts) + 1:
            step_starts.append(position)
    bounds = [*step_starts, len(trace.events)]
    segments = [Segment(0, bounds[0], 0)]
    traced = len(step_starts)
    for step in range(1, num_steps + 1):
        source = min(step, traced)
        start, stop = bounds[source - 1], bounds[source]
        first = len(segments)
        segments.extend(_micro_steps(trace, positions, start, stop, step, grad_accum))
        if step > traced:
            head = segments[first]
            segments[first] = Segment(head.start, head.stop, step, head.micro_shift, (start, stop))
    return segments


def _micro_steps(
    trace: Trace, positions: list[int], start: int, stop: int, step: int, grad_accum: int
) -> list[Segment]:
    """One step, its second micro-step repeated until ``grad_accum`` are there."""
    opens: dict[int, int] = {}
    for mark, position in zip(trace.marks, positions, strict=True):
        if start <= position < stop and mark.phase in (Phase.BATCH, Phase.FORWARD):
            opens.setdefault(mark.micro_step, position)
    traced = max(opens)
    missing = grad_accum - traced
    if missing <= 0 or traced < 3:
        return [Segment(start, stop, step)]
    second, third = opens[2], opens[3]
    segments = [Segment(start, third, step)]
    segments += [
        Segment(second, third, step, shift, (second, third))
        for shift in range(1, min(missing, MAX_REPEATS) + 1)
    ]
    segments.append(Segment(third, stop, step, missing))
    return segments


def rotation(trace: Trace, start: int, stop: int) -> list[tuple[int, int]]:
    """What a repeated part inherits: pairs (inherited and dropped, left behind in its place).

    Raises:
        TraceError: the part does not return to the state it began in, so it cannot be repeated.
    """
    born: list[int] = []
    dropped: list[int] = []
    dead: set[int] = set()
    inside: set[int] = set()
    for value in trace.events[start:stop]:
        kind, index = value & 3, value >> 2
        if kind == ALLOC:
            born.append(index)
            inside.add(index)
        elif kind == FREE:
            dead.add(index)
            if index not in inside:
                dropped.append(index)
    left = [index for index in born if index not in dead]
    places: dict[tuple[int, int, int], list[int]] = {}
    for index in reversed(left):
        key = (trace.sizes[index], trace.ops[index], trace.modules[index])
        places.setdefault(key, []).append(index)
    pairs: list[tuple[int, int]] = []
    for index in sorted(dropped):
        key = (trace.sizes[index], trace.ops[index], trace.modules[index])
        candidates = places.get(key)
        if not candidates:
            break
        pairs.append((index, candidates.pop()))
    if len(pairs) != len(dropped) or len(pairs) != len(left):
        raise TraceError(
            "The training step does not return to the state it began in: memory grows from step "
            f"to step ({len(left)} allocations left behind, {len(dropped)} dropped). Something in "
            "the model keeps tensors of earlier steps."
        )
    return pairs
