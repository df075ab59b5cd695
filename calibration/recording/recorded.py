"""The allocator's history of one run, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memest.calibration.device import Device
from memest.replay.conf import AllocatorConf
from memest.replay.snapshot import RecordedSegment, Snapshot, TraceEvent

__all__ = ["History", "HistoryMark", "RecordedDevice"]


@dataclass(frozen=True, slots=True)
class HistoryMark:
    """A phase begins: in front of which event, and in which step and micro-step (from 1)."""

    position: int
    phase: str
    step: int
    micro_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDevice(Device):
    """Where a history was recorded: what a prediction of it has to know.

    Attributes:
        index: of the device in its process.
        torch: release.
        transformers: release.
        cuda: CUDA that torch was built for.
    """

    index: int = 0
    torch: str = ""
    transformers: str = ""
    cuda: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the caching allocator of one device did during a run.

    Attributes:
        events: oldest first, with addresses; sizes are as requested.
        sites: for each event the index of its frame, -1 where none is known.
        frames: Python code that allocates, innermost first: ``modeling_bert.py:123 forward``.
        marks: where phases begin, by position.
        segments: after the last event.
        conf: the allocator's options.
        settings: the options as torch states them.
        device: where it was recorded.
        lost: events that the ring buffer dropped, as far as that is known.
        complete: whether all events since the start of the recording are there.
        run: of the measurement.
        case: what ran, as :meth:`memest.calibration.case.Case.to_dict` writes it, with its id.
    """

    events: tuple[TraceEvent, ...]
    sites: Sequence[int]
    frames: tuple[str, ...] = ()
    marks: tuple[HistoryMark, ...] = ()
    segments: tuple[RecordedSegment, ...] = ()
    conf: AllocatorConf = field(default_factory=AllocatorConf)
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: RecordedDevice = field(default_factory=RecordedDevice)
    lost: int = 0
    complete: bool = True
    run: str = ""
    case: Mapping[str, Any] = field(default_factory=dict)

    def snapshot(self) -> Snapshot:
        """What :func:`memest.replay.replay_snapshot` takes."""
        traces = ((),) * self.device.index + (self.events,)
        return Snapshot(conf=self.conf, traces=traces, segments=self.segments)

    def frame(self, index: int) -> str:
        """The Python code behind an event, empty where none is known."""
        site = self.sites[index]
        return self.frames[site] if site >= 0 else ""
