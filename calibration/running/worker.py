"""Running one case in this process: what happens is told as it happens.

A worker lives for one case, so allocator, context and libraries are fresh. It sends messages (plain
dictionaries) as soon as there is something to say: whatever ends it, what was measured until then
is with the runner already.

    {"kind": "environment", "environment": {...}}
    {"kind": "phase", "phase": "forward 1 1"}
    {"kind": "built", "parameters": 1, "trainable": 1}
    {"kind": "reading", "reading": {...}}         a moment: start, context, matmul, model, end, oom
    {"kind": "step", "step": {...}}               an optimizer step is over
    {"kind": "remark", "remark": "..."}           what went wrong and did not end the run
    {"kind": "end", "status": "ok", "failure": {...}, "events": "..."}
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from memest.calibration.measurement import (
    MOST_TEXT,
    MemoryReading,
    Status,
    StepReading,
    failure_of,
    is_out_of_memory,
)

__all__ = ["Send", "Worker", "perform"]

Send = Callable[[dict[str, Any]], None]


class Worker(ABC):
    """What both kinds of worker do: phases, and messages.

    Args:
        case: what to run; None to describe the device alone.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        send: takes messages.
        events: where the allocator's history goes.
        command: the command line of the campaign, for the record.

    Attributes:
        phase: of the run.
    """

    def __init__(self, case: Any, device: str, send: Send, events: str, command: str) -> None:
        self.case = case
        self._device = device
        self.send = send
        self._events = events
        self._command = command
        self.phase = "start"

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.send({"kind": "phase", "phase": phase})

    def _reading(self, reading: MemoryReading) -> None:
        self.send({"kind": "reading", "reading": _slim(reading)})

    def _step(self, reading: StepReading) -> None:
        self.send({"kind": "step", "step": _slim(reading)})

    def _remark(self, text: str) -> None:
        """Something went wrong that does not end the run."""
        self.send({"kind": "remark", "remark": text[:MOST_TEXT]})

    def _build(self) -> Any:
        from memest.calibration.running.material import make_material

        self._enter("build")
        material = make_material(self.case.model, self.case.setup)
        self.send(
            {"kind": "built", "parameters": material.parameters, "trainable": material.trainable}
        )
        return material

    @abstractmethod
    def open(self) -> Any:
        """Report the environment of the device."""

    @abstractmethod
    def run(self) -> str:
        """Run the case; returns the file of the allocator's history, empty without one."""

    def out_of_memory(self) -> str:
        """Tell what there is to tell after an out-of-memory error; returns as :meth:`run` does."""
        return ""


def perform(worker: Worker) -> None:
    """Have a worker run its case, or tell of its device; every way it can end is a message."""
    end: dict[str, Any] = {"kind": "end", "status": Status.OK, "events": ""}
    try:
        if worker.case is None:
            worker.open()
        else:
            end["events"] = worker.run()
    except Exception as error:  # noqa: BLE001 - whatever a training script raises is a result
        out = is_out_of_memory(error)
        end |= {"status": Status.OOM if out else Status.FAILED}
        end["failure"] = dataclasses.asdict(failure_of(error, worker.phase))
        if out:
            with contextlib.suppress(Exception):
                end["events"] = worker.out_of_memory()
    worker.send(end)


def _slim(reading: Any) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(reading).items() if v is not None}
