"""A predicted stream laid beside the recorded history of the same run.

Compared is what the allocator was asked: births and deaths in their order, requested sizes, and
which birth each death ends. Peaks come from replays: the prediction's from an empty allocator, the
recording's address by address.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

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
from memest.calibration.recording.causes import Difference, group
from memest.calibration.recording.differences import EventMatch, MatchCounts
from memest.calibration.recording.recorded import History, HistoryMark
from memest.errors import ReplayError
from memest.profiles.stream import Stream
from memest.replay.replay import replay
from memest.replay.retrace import replay_snapshot

__all__ = ["Conformance", "RecordedPeaks", "compare"]

_START = 32  # events by which the beginning of a history without marks is found


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPeaks:
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
class Conformance:
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
    counts: MatchCounts
    peaks: RecordedPeaks
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


def compare(
    history: History,
    stream: Stream,
    *,
    begin: int | None = None,
    end: int | None = None,
    without: Collection[str] = (),
    name: str = "",
) -> Conformance:
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
    late_frees = _afterlife(mine, other, pairs)
    if late_frees:
        mine = recorded_line(history.events, mine.places[len(mine) - late_frees])
        notes.append(f"{late_frees} frees after the last event of the prediction are not compared")
    event_match = EventMatch(mine, other, settle(mine, other, pairs))
    if not history.complete:
        notes.append(f"The history is not complete: {history.lost or 'some'} events were lost")
    peaks, exact = _peaks(history, stream, begin, end, notes)
    return Conformance(
        name=name or history.run or str(history.case.get("id", "")) or "a recorded run",
        counts=event_match.counts,
        peaks=peaks,
        differences=tuple(group(event_match, history, stream)),
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
    if last_other + 1 < len(other) or any(mine.is_birth(i) for i in rest):
        return 0
    return len(rest)


# -- peaks ----------------------------------------------------------------------------------------


def _peaks(
    history: History, stream: Stream, begin: int, end: int, notes: list[str]
) -> tuple[RecordedPeaks, bool | None]:
    result = replay(
        stream.events[:end],
        stream.sizes,
        history.conf,
        total_bytes=history.device.total_bytes,
        curve=begin > 0,
    )
    allocated, reserved = result.peak_allocated_bytes, result.peak_reserved_bytes
    if begin and result.allocated_curve is not None and result.reserved_curve is not None:
        # what was at its highest before the history began is not in it
        allocated = max(result.allocated_curve[begin - 1 :], default=0)
        reserved = max(result.reserved_curve[begin - 1 :], default=0)
    try:
        (recording,) = replay_snapshot(
            history.snapshot(), total_bytes=history.device.total_bytes
        ) or (None,)
    except ReplayError as error:
        notes.append(f"The recording does not replay: {error}")
        recording = None
    return RecordedPeaks(
        recorded_allocated=None if recording is None else recording.peak_allocated_bytes,
        predicted_allocated=allocated,
        recorded_reserved=None if recording is None else recording.peak_reserved_bytes,
        predicted_reserved=reserved,
    ), None if recording is None else recording.is_exact
