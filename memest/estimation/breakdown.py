"""From a stream and its replay to what an estimate says: peaks, breakdown, layers, timeline."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memest.events import CATEGORY_ORDER, Category, Mark, Phase
from memest.profiles.stream import Stream
from memest.replay.replay import Replay
from memest.report.result import Layer, PeakMoment, Row, TimePoint

__all__ = [
    "Alive",
    "alive_at_end",
    "alive_at_peak",
    "breakdown",
    "layers",
    "logits_bytes",
    "moment",
    "moment_at",
    "timeline",
]

_LOSS = "aten._log_softmax"
"""The operator of cross entropies that have all logits."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The allocations alive at the allocated peak, in the order they were made."""

    numbers: tuple[int, ...]


def alive_at_peak(stream: Stream, replay: Replay) -> Alive:
    """What is alive right after the event that reaches the allocated peak."""
    alive: dict[int, None] = {}
    for event in stream.events[: replay.peak_allocated_index + 1]:
        if event >= 0:
            if stream.sizes[event]:
                alive[event] = None
        else:
            alive.pop(~event, None)
    return Alive(tuple(alive))


def breakdown(stream: Stream, replay: Replay, alive: Alive) -> tuple[Row, ...]:
    """Rows in the order of :class:`Category`; they add up to ``peak_allocated_bytes`` exactly."""
    requested: Counter[Category] = Counter()
    handed_out = 0
    for number in alive.numbers:
        requested[CATEGORY_ORDER[stream.categories[number]]] += stream.sizes[number]
        handed_out += replay.block_bytes[number]
    requested[Category.ROUNDING] = handed_out - sum(requested.values())
    rows = tuple(Row(category=c, bytes=requested[c]) for c in CATEGORY_ORDER if requested[c])
    assert sum(r.bytes for r in rows) == replay.peak_allocated_bytes
    return rows


def logits_bytes(stream: Stream, alive: Alive) -> int:
    """Logits, their copies and their gradients: what is as large as log-probabilities, or half."""
    labels = {index for index, name in enumerate(stream.label_names) if _LOSS in name}
    if not labels:
        return 0
    results = [CATEGORY_ORDER.index(c) for c in (Category.ACTIVATIONS, Category.TEMPORARIES)]
    whole = {
        size
        for size, label, category in zip(
            stream.sizes, stream.labels, stream.categories, strict=True
        )
        if label in labels and category in results
    }
    sizes = whole | {size // 2 for size in whole}
    return sum(
        stream.sizes[number]
        for number in alive.numbers
        if stream.sizes[number] in sizes and stream.categories[number] in results
    )


def layers(stream: Stream, alive: Alive) -> tuple[Layer, ...]:
    """Activations at the peak and parameters of every module that has any, in model order."""
    activations: Counter[int] = Counter()
    parameters: Counter[int] = Counter()
    for number in alive.numbers:
        category = CATEGORY_ORDER[stream.categories[number]]
        if category is Category.ACTIVATIONS:
            activations[stream.modules[number]] += stream.sizes[number]
    for number in _load_allocations(stream):
        if CATEGORY_ORDER[stream.categories[number]] is Category.PARAMETERS:
            parameters[stream.modules[number]] += stream.sizes[number]
    rows = []
    for index, name in enumerate(stream.module_names):
        if activations[index] or parameters[index]:
            rows.append(
                Layer(
                    module=name,
                    activation_bytes=activations[index],
                    parameter_bytes=parameters[index],
                )
            )
    return tuple(rows)


def _load_allocations(stream: Stream) -> list[int]:
    """The allocations that the load phase makes."""
    end = stream.mark_positions[1] if len(stream.mark_positions) > 1 else len(stream.events)
    return [event for event in stream.events[:end] if event >= 0]


def moment(stream: Stream, replay: Replay) -> PeakMoment:
    """When the allocated peak is reached, and by which operator of which module."""
    return moment_at(stream, replay.peak_allocated_index)


def moment_at(stream: Stream, index: int) -> PeakMoment:
    """When an event comes, and which operator of which module it is of."""
    mark = _mark_at(stream, index)
    event = stream.events[index]
    number = event if event >= 0 else ~event
    return PeakMoment(
        phase=mark.phase,
        step=mark.step,
        micro_step=mark.micro_step,
        module=stream.module_names[stream.modules[number]],
        op=stream.label_names[stream.labels[number]],
    )


def _mark_at(stream: Stream, index: int) -> Mark:
    position = bisect_right(stream.mark_positions, index) - 1
    return stream.marks[position] if position >= 0 else Mark(Phase.LOAD, 0, 0)


def timeline(stream: Stream, replay: Replay) -> tuple[TimePoint, ...]:
    """The highest allocated and reserved bytes within every phase; what was alive, and came, then.

    Needs a replay with curves.
    """
    allocated, reserved = replay.allocated_curve, replay.reserved_curve
    if allocated is None or reserved is None:
        return ()
    phases, highest = [], []
    ends = [*stream.mark_positions[1:], len(stream.events)]
    for mark, start, stop in zip(stream.marks, stream.mark_positions, ends, strict=True):
        if stop > len(allocated):
            break
        first = max(start - 1, 0)
        window = allocated[first : max(stop, first + 1)]
        if not window:
            continue
        most = max(window)
        index = first + window.index(most)
        # before the phase's own events: the most is what it began with, and no operator made it
        made_by = moment_at(stream, index) if index >= start else None
        phases.append((mark, most, max(reserved[first : max(stop, first + 1)]), made_by))
        highest.append(index)
    return tuple(
        TimePoint(
            step=mark.step,
            micro_step=mark.micro_step,
            phase=mark.phase,
            allocated_bytes=most,
            reserved_bytes=most_reserved,
            breakdown=rows,
            module=made_by.module if made_by else "",
            op=made_by.op if made_by else "",
        )
        for (mark, most, most_reserved, made_by), rows in zip(
            phases, _rows_at(stream, replay, highest), strict=True
        )
    )


def _rows_at(stream: Stream, replay: Replay, indices: Sequence[int]) -> Iterator[tuple[Row, ...]]:
    """The rows of what is alive after each of some events, which come in order."""
    sizes, categories, blocks = stream.sizes, stream.categories, replay.block_bytes
    requested = [0] * len(CATEGORY_ORDER)
    handed_out = position = 0
    for index in indices:
        for event in stream.events[position : index + 1]:
            if event >= 0:
                requested[categories[event]] += sizes[event]
                handed_out += blocks[event]
            else:
                requested[categories[~event]] -= sizes[~event]
                handed_out -= blocks[~event]
        position = max(position, index + 1)
        rows = dict(zip(CATEGORY_ORDER, requested, strict=True))
        rows[Category.ROUNDING] = handed_out - sum(requested)
        yield tuple(Row(category=category, bytes=size) for category, size in rows.items() if size)


def alive_at_end(stream: Stream) -> dict[Category, list[int]]:
    """Sizes of what is alive at the end of a stream."""
    numbers: dict[int, None] = {}
    for event in stream.events:
        if event >= 0:
            numbers[event] = None
        else:
            numbers.pop(~event, None)
    sizes: dict[Category, list[int]] = {}
    for number in numbers:
        category = CATEGORY_ORDER[stream.categories[number]]
        sizes.setdefault(category, []).append(stream.sizes[number])
    return sizes
