"""A predicted stream laid beside the recorded history of the same run.

Compared is what the allocator was asked: births and deaths in their order, requested sizes, and
which birth each death ends. Peaks come from replays: the prediction's from an empty allocator, the
recording's address by address.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memest.calibration.recording.alignment import (
    FOREIGN,
    Line,
    align,
    anchors,
    common_marks,
    predicted_line,
    recorded_line,
    settle,
)
from memest.calibration.recording.causes import Difference, Naming, group
from memest.calibration.recording.differences import Counts, Relation, match
from memest.calibration.recording.recorded import History, HistoryMark
from memest.errors import ReplayError
from memest.replay.replay import replay
from memest.replay.retrace import replay_snapshot
from memest.steps.stream import Stream

__all__ = ["Comparison", "Peaks", "compare"]

_START = 32  # events by which the beginning of a history without marks is found


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Highest values since the history began, bytes; None where a replay is not possible.

    Attributes:
        recorded_allocated: of the recording, replayed address by address.
        predicted_allocated: of the prediction, from an empty allocator.
        recorded_reserved: as above.
        predicted_reserved: as above.
    """

    recorded_allocated: int | None
    predicted_allocated: int | None
    recorded_reserved: int | None
    predicted_reserved: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a prediction and a recording have in common, and where they differ.

    Attributes:
        name: of the run.
        counts: events of both sides.
        peaks: by replay.
        differences: by cause, the largest at the peak first.
        begin: index of the first event of the stream that was compared.
        end: index of the first that was not.
        complete: whether the history lost nothing.
        exact_replay: whether the recording replays to the address; None where it does not replay.
        notes: what else there is to say.
    """

    name: str
    counts: Counts
    peaks: Peaks
    differences: tuple[Difference, ...]
    begin: int
    end: int
    complete: bool
    exact_replay: bool | None
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all events are the recorded ones."""
        return self.counts.equal

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "counts": asdict(self.counts),
            "peaks": asdict(self.peaks),
            "differences": [difference.to_dict() for difference in self.differences],
            "begin": self.begin,
            "end": self.end,
            "complete": self.complete,
            "exact_replay": self.exact_replay,
            "notes": list(self.notes),
        }

    @staticmethod
    def table_head() -> str:
        """The head of a table whose rows :meth:`row` gives."""
        names = (
            "recording | events | matched | allocated peak, recorded | predicted − recorded "
            "| reserved peak, recorded | predicted − recorded"
        )
        return f"| {names} |\n|---|{'---:|' * 6}"

    def row(self) -> str:
        """One row of that table."""
        peaks = self.peaks
        cells = (
            self.name,
            _grouped(self.counts.recorded),
            _grouped(self.counts.matched),
            _grouped(peaks.recorded_allocated),
            _offset(peaks.predicted_allocated, peaks.recorded_allocated),
            _grouped(peaks.recorded_reserved),
            _offset(peaks.predicted_reserved, peaks.recorded_reserved),
        )
        return f"| {' | '.join(cells)} |"

    def to_markdown(self, *, most: int = 20) -> str:
        """The comparison as a page's section.

        Args:
            most: differences that are listed; the rest is counted.
        """
        lines = [f"### {self.name}", "", self.table_head(), self.row(), ""]
        counts = self.counts
        if not self.equal:
            lines.append(
                f"Predicted {_grouped(counts.predicted)} events. Of another size: "
                f"{counts.other_size}; another one freed: {counts.other_partner}; in another "
                f"order: {counts.reordered}; at another place: {counts.moved}; only recorded: "
                f"{counts.only_recorded}; only predicted: {counts.only_predicted}.\n"
            )
        lines += [f"{note}." for note in self.notes]
        if self.notes:
            lines.append("")
        if not self.differences:
            return "\n".join([*lines, "No event differs.", ""])
        lines += [
            "| difference | operator, module | recorded at | times | bytes | at the peak | first |",
            "|---|---|---|---:|---:|---:|---|",
            *(_difference_row(difference) for difference in self.differences[:most]),
        ]
        rest = len(self.differences) - most
        if rest > 0:
            lines += ["", f"{rest} more kinds of differences are smaller."]
        return "\n".join([*lines, ""])


def compare(
    history: History, stream: Stream, *, begin: int | None = None, end: int | None = None,
    without: Collection[str] = (), name: str = "",
) -> Comparison:  # fmt: skip
    """Lay a predicted stream beside a recorded history.

    A history may begin and end in the middle of a run: marks that both sides have tell where, else
    the first events do.

    Args:
        history: what was recorded.
        stream: what was predicted for the same run.
        begin: index of the first event of the stream to compare, None to find it.
        end: index of the first not to compare, None to find it.
        without: names of workspaces that the process had before, such as ``cuBLAS workspace``.
        name: of the run, by default as the history says.
    """
    common = common_marks(history.marks, stream)
    notes: list[str] = []
    mine = recorded_line(history.events, _recorded_end(history, stream))
    if begin is None:
        begin = 0 if _from_empty(history, mine) else _begin(mine, stream, common)
    if end is None:
        end = _end(history, stream)
    other = predicted_line(stream, begin, end, without=without)
    cuts = [
        (bisect_left(mine.places, mark.position), bisect_left(other.places, position))
        for mark, index in common
        if (position := stream.mark_positions[index]) >= begin
    ]
    pairs = align(mine.tokens, other.tokens, anchors(mine, other, cuts))
    if _ooms(history) and pairs and pairs[-1][1] + 1 < len(other):
        # the run went no further
        end = other.places[pairs[-1][1] + 1]
        other = predicted_line(stream, begin, end, without=without)
        notes.append(f"The run was out of memory at event {_ooms(history)[0]} of the history")
    left = _afterlife(mine, other, pairs)
    if left:
        mine = recorded_line(history.events, mine.places[len(mine) - left])
        notes.append(f"{left} frees after the last event of the prediction are not compared")
    found = match(mine, other, settle(mine, other, pairs))
    if not history.complete:
        notes.append(f"The history is not complete: {history.lost or 'some'} events were lost")
    peaks, exact = _peaks(history, stream, begin, end, notes)
    return Comparison(
        name=name or history.run or str(history.case.get("id", "")) or "a recorded run",
        counts=found.counts,
        peaks=peaks,
        differences=tuple(group(found, _naming(history, stream, mine, other))),
        begin=begin,
        end=end,
        complete=history.complete,
        exact_replay=exact,
        notes=tuple(notes),
    )


# -- which parts ----------------------------------------------------------------------------------


def _from_empty(history: History, mine: Line) -> bool:
    """Whether nothing was allocated when the history began."""
    if not history.complete or FOREIGN in mine.numbers:
        return False
    alive = sum(b.state == "active_allocated" for s in history.segments for b in s.blocks)
    actions = [event.action for event in history.events]
    return alive == actions.count("alloc") - actions.count("free_requested")


def _begin(mine: Line, stream: Stream, common: Sequence[tuple[HistoryMark, int]]) -> int:
    """Where in the stream the history begins."""
    if common:
        mark, index = common[0]
        before = bisect_left(mine.places, mark.position)
        # in front of the first mark of a run there is nothing to predict
        return max(stream.mark_positions[index] - before, 0) if index else 0
    whole = predicted_line(stream)
    start = mine.tokens[:_START]
    for at in range(len(whole) - len(start) + 1 if start else 0):
        if whole.tokens[at : at + len(start)] == start:
            return whole.places[at]
    return 0


def _end(history: History, stream: Stream) -> int:
    """The first step of the prediction that the history has not, else its end."""
    last = max((mark.step for mark in history.marks), default=None)
    for mark, position in zip(stream.marks, stream.mark_positions, strict=True):
        if last is not None and mark.step > last:
            return position
    return len(stream.events)


def _recorded_end(history: History, stream: Stream) -> int | None:
    """The first step of the history that the prediction has not, or the end of the training.

    Running out of memory ends it too: what follows is the end of the process.
    """
    last = max((mark.step for mark in stream.marks), default=None)
    ends = [
        mark.position
        for mark in history.marks
        if mark.phase == "end" or (last is not None and mark.step > last)
    ]
    return min([*ends, *_ooms(history)], default=None)


def _ooms(history: History) -> list[int]:
    return [index for index, event in enumerate(history.events) if event.action == "oom"]


def _afterlife(mine: Line, other: Line, pairs: Sequence[tuple[int, int]]) -> int:
    """Deaths after the last event that both have, if the prediction has none left.

    They belong to the end of the process, which is no part of a prediction.
    """
    last_mine, last_other = pairs[-1] if pairs else (-1, -1)
    rest = range(last_mine + 1, len(mine))
    if last_other + 1 < len(other) or any(mine.born(i) for i in rest):
        return 0
    return len(rest)


def _naming(history: History, stream: Stream, mine: Line, other: Line) -> Naming:
    def operator(number: int) -> str:
        return stream.label_names[stream.labels[other.sources[number]]]

    def module(number: int) -> str:
        return stream.module_names[stream.modules[other.sources[number]]]

    def frame(number: int) -> str:
        return history.frame(mine.sources[number])

    return Naming(operator=operator, module=module, frame=frame)


# -- peaks ----------------------------------------------------------------------------------------


def _peaks(
    history: History, stream: Stream, begin: int, end: int, notes: list[str]
) -> tuple[Peaks, bool | None]:
    result = replay(
        stream.events[:end], stream.sizes, history.conf,
        total_bytes=history.device.total_bytes, curve=begin > 0,
    )  # fmt: skip
    allocated, reserved = result.peak_allocated_bytes, result.peak_reserved_bytes
    if begin and result.allocated_curve is not None and result.reserved_curve is not None:
        # what was at its highest before the history began is not in it
        allocated = max(result.allocated_curve[begin - 1 :], default=0)
        reserved = max(result.reserved_curve[begin - 1 :], default=0)
    try:
        (recorded,) = replay_snapshot(
            history.snapshot(), total_bytes=history.device.total_bytes
        ) or (None,)
    except ReplayError as error:
        notes.append(f"The recording does not replay: {error}")
        recorded = None
    return Peaks(
        recorded_allocated=None if recorded is None else recorded.peak_allocated_bytes,
        predicted_allocated=allocated,
        recorded_reserved=None if recorded is None else recorded.peak_reserved_bytes,
        predicted_reserved=reserved,
    ), None if recorded is None else recorded.is_exact


# -- words ----------------------------------------------------------------------------------------


def _grouped(value: int | None) -> str:
    """Digits in groups of three; a narrow blank keeps them together."""
    return "–" if value is None else f"{value:,}".replace(",", " ")


def _offset(value: int | None, base: int | None) -> str:
    return "–" if value is None or base is None else _signed(value - base)


def _signed(value: int) -> str:
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{_grouped(abs(value))}"


def _difference_row(one: Difference) -> str:
    what = one.relation.value
    if one.relation is Relation.SIZE:
        what += f" (× {one.ratio:g})"
    where = f"`{one.operator}` {one.module}".strip() if one.operator else f"after {one.near}"
    sizes = " → ".join(str(size) for size in (one.recorded_bytes, one.predicted_bytes) if size)
    cells = (
        what,
        where,
        one.frame.replace("|", "\\|") or "–",
        str(one.count),
        _grouped(one.bytes),
        _signed(one.peak_bytes),
        f"event {one.recorded_event if one.recorded_event >= 0 else one.predicted_event}: {sizes}",
    )
    return f"| {' | '.join(cells)} |"
