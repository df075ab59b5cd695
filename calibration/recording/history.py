"""The caching allocator's own history of a run, taken from torch and made small.

    start_history(4_000_000)
    marks.append(("forward", 1, 1, mark_counters()))     # wherever a phase begins
    history = take_history(0, marks)
    write_history(path, history)

A mark costs one look at the allocator's statistics: how many allocations and frees there were.
Which event that is, is worked out when the history is taken. Everything after the snapshot is plain
data, so all but three functions work without a GPU. Source of the fields: torch's
``memory_snapshot.cpp`` and ``torch/cuda/memory.py``, 2.1 to 2.13.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from memest.calibration.recording.history_file import MAX_DEVICES, read_history, write_history
from memest.calibration.recording.recorded import History, HistoryMark, RecordedDevice
from memest.config.installed import release
from memest.errors import ConfigError, DeviceError
from memest.replay.sites import sites_of
from memest.replay.snapshot import TraceEvent, read_content

__all__ = [
    "History",
    "HistoryCounters",
    "HistoryMark",
    "MarkNote",
    "RecordedDevice",
    "history_of",
    "mark_counters",
    "place_marks",
    "read_history",
    "start_history",
    "take_history",
    "write_history",
]

BIRTH, DEATH, END_OF_FREE = "alloc", "free_requested", "free_completed"


class HistoryCounters(NamedTuple):
    """How many allocations and frees a device's allocator has counted."""

    allocated: int
    freed: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.allocated + self.freed


MarkNote = tuple[str, int, int, HistoryCounters]
"""What is written down where a phase begins: its name, step, micro-step, and the counters."""


_recording: tuple[dict[int, HistoryCounters], int] | None = None
"""Counters of each device when it began, and the events that are kept; torch has one switch for
the whole process."""


# -- on a GPU -------------------------------------------------------------------------------------


def start_history(max_entries: int) -> None:
    """Begin to record, on all devices of the process; what was recorded before is dropped.

    Args:
        max_entries: events of each device that are kept, the last ones.

    Raises:
        DeviceError: this allocator does not record.
    """
    global _recording  # noqa: PLW0603
    import torch

    torch.cuda.init()  # there is no allocator to tell before
    record = torch.cuda.memory._record_memory_history
    # frames of C++ too would make the snapshot slow
    options: dict[str, Any] = {"context": "alloc", "stacks": "python", "max_entries": max_entries}
    if "clear_history" in inspect.signature(record).parameters:
        options["clear_history"] = True
    try:
        record("all", **options)
    except RuntimeError as error:
        raise DeviceError(f"the allocator keeps no history: {_line(error)}") from error
    begin_counters = {index: mark_counters(index) for index in range(torch.cuda.device_count())}
    _recording = begin_counters, max_entries


def mark_counters(device: int | None = None) -> HistoryCounters:
    """Where the allocator is now; to be kept with a mark.

    Args:
        device: index, None for the current one.
    """
    import torch

    stats = torch.cuda.memory.memory_stats_as_nested_dict(device)
    if not stats:
        return HistoryCounters(0, 0)
    allocations = stats["allocation"]["all"]
    return HistoryCounters(int(allocations["allocated"]), int(allocations["freed"]))


def take_history(
    device: int, marks: Sequence[MarkNote] = (), *, run: str = "", case: Any = None
) -> History:
    """End the recording and take what there is.

    Args:
        device: index of the device.
        marks: what was noted where phases began, in order.
        run: of the measurement.
        case: what ran, as :meth:`memest.calibration.case.Case.to_dict` writes it.

    Raises:
        DeviceError: torch gives no snapshot.
    """
    global _recording
    import torch

    torch.cuda.synchronize(device)
    end = mark_counters(device)
    (begin_counters, max_entries), _recording = _recording or ({}, None), None
    try:
        content = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
    except RuntimeError as error:
        raise DeviceError(f"the allocator gives no history: {_line(error)}") from error
    return history_of(
        content,
        device,
        marks=marks,
        begin=begin_counters.get(device),
        end=end,
        max_entries=max_entries,
        recorded_on=_recorded_device(device),
        run=run,
        case=case,
    )


def _recorded_device(index: int) -> RecordedDevice:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return RecordedDevice(
        index=index,
        name=str(properties.name),
        total_bytes=int(properties.total_memory),
        capability=(int(properties.major), int(properties.minor)),
        sm_count=int(properties.multi_processor_count),
        # not told by releases before 2.3
        max_threads_per_sm=getattr(properties, "max_threads_per_multi_processor", None),
        torch=str(torch.__version__),
        transformers=release("transformers") or "",
        cuda=str(torch.version.cuda or ""),
    )


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


# -- without one ----------------------------------------------------------------------------------


def history_of(
    content: Any,
    device: int = 0,
    *,
    marks: Sequence[MarkNote] = (),
    begin: HistoryCounters | None = None,
    end: HistoryCounters | None = None,
    max_entries: int | None = None,
    recorded_on: RecordedDevice | None = None,
    run: str = "",
    case: Any = None,
) -> History:
    """The history in a snapshot.

    Args:
        content: what ``torch.cuda.memory._snapshot()`` returns, or a file of it holds.
        device: index of the device.
        marks: what was noted where phases began.
        begin: counters when the recording began, None if not known.
        end: counters when the snapshot was taken; marks need them.
        max_entries: as recorded with, None if not known.
        recorded_on: the device, described.
        run: of the measurement.
        case: what ran.

    Raises:
        ConfigError: the content is no snapshot, or has no such device.
    """
    try:
        if not 0 <= device < min(len(content["device_traces"]), MAX_DEVICES):
            raise ConfigError(f"the snapshot has no device {device}")
        snapshot = read_content(content)
        sites, frames = sites_of(content["device_traces"][device])
        settings = dict(content.get("allocator_settings") or {})
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"this is no snapshot of the allocator ({type(error).__name__}: {error})"
        ) from error
    events = snapshot.traces[device]
    num_lost = _num_lost(events, begin, end)
    full = max_entries is not None and len(events) >= max_entries
    return History(
        events=events,
        sites=sites,
        frames=frames,
        marks=place_marks(events, marks, end) if end is not None else (),
        segments=tuple(s for s in snapshot.segments if s.device == device),
        conf=snapshot.conf,
        settings=settings,
        device=recorded_on or RecordedDevice(index=device),
        lost=num_lost,
        complete=not num_lost and not full,
        run=run,
        case=dict(case or {}),
    )


def _num_lost(
    events: Iterable[TraceEvent], begin: HistoryCounters | None, end: HistoryCounters | None
) -> int:
    """Allocations and frees that were counted and are not among the events."""
    if begin is None or end is None:
        return 0
    num_recorded = sum(event.action in (BIRTH, DEATH) for event in events)
    # below 0 after a reset of the statistics: then nothing is known
    return max(end.total - begin.total - num_recorded, 0)


def place_marks(
    events: Sequence[TraceEvent], marks: Iterable[MarkNote], end: HistoryCounters
) -> tuple[HistoryMark, ...]:
    """Find the events that marks stand in front of.

    They are counted from the end, which is there whatever the ring buffer dropped.

    Args:
        events: of one device, oldest first.
        marks: with their counters.
        end: counters after the last event.

    Returns:
        The marks, less those that lie before the first event that is left.
    """
    behind = [0]  # behind[n]: the place right after allocation or free number n
    for index, event in enumerate(events):
        if event.action in (BIRTH, DEATH):
            behind.append(index + 1)
        elif event.action == END_OF_FREE and behind[-1] == index:
            behind[-1] = index + 1
    total = len(behind) - 1
    placed_marks = []
    for phase, step, micro_step, counters in marks:
        before = total - (end.total - counters.total)
        if 0 <= before <= total:
            placed_marks.append(HistoryMark(behind[before], phase, step, micro_step))
    return tuple(placed_marks)
