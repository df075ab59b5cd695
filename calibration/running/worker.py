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
import ctypes
import dataclasses
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from memest.calibration.measurement import Failure, MemoryReading, Status, StepReading

__all__ = ["Send", "Worker", "die_with_parent", "failure_of", "perform"]

Send = Callable[[dict[str, Any]], None]
_MESSAGE = 2000
_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)


def die_with_parent() -> None:
    """Ask Linux for a signal when the parent is gone; elsewhere a closed pipe has to do."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def failure_of(error: BaseException, phase: str) -> dict[str, Any]:
    """An error as the message that ends a case."""
    text = (str(error).strip() or "no message")[:_MESSAGE]
    return dataclasses.asdict(Failure(kind=type(error).__name__, message=text, phase=phase))


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
        self._case = case
        self._device = device
        self._send = send
        self._events = events
        self._command = command
        self.phase = "start"

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._send({"kind": "phase", "phase": phase})

    def _reading(self, reading: MemoryReading) -> None:
        self._send({"kind": "reading", "reading": _slim(reading)})

    def _step(self, reading: StepReading) -> None:
        self._send({"kind": "step", "step": _slim(reading)})

    def _remark(self, text: str) -> None:
        """Something went wrong that does not end the run."""
        self._send({"kind": "remark", "remark": text[:_MESSAGE]})

    def _build(self) -> Any:
        from memest.calibration.running.material import make_material

        self._enter("build")
        material = make_material(self._case.model, self._case.setup)
        self._send(
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


def perform(worker: Worker, send: Send) -> None:
    """Have a worker run its case; every way it can end is a message."""
    end: dict[str, Any] = {"kind": "end", "status": Status.OK, "events": ""}
    try:
        end["events"] = worker.run()
    except Exception as error:  # noqa: BLE001 - whatever a training script raises is a result
        out = _out_of_memory(error)
        end |= {"status": Status.OOM if out else Status.FAILED}
        end["failure"] = failure_of(error, worker.phase)
        if out:
            with contextlib.suppress(Exception):
                end["events"] = worker.out_of_memory()
    send(end)


def _out_of_memory(error: BaseException) -> bool:
    if type(error).__name__ == "OutOfMemoryError":
        return True
    # libraries that allocate on their own say it in their way
    return any(message in str(error) for message in _OUT_OF_MEMORY)


def _slim(reading: Any) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(reading).items() if v is not None}
