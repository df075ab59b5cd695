"""What every worker does, whatever its device: it tells its phase and what it has read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from memest.calibration.measurement import Failure, Reading, StepReading

__all__ = ["Send", "Watching", "failure_of"]

Send = Callable[[dict[str, Any]], None]
_MESSAGE = 2000


def failure_of(error: BaseException, phase: str) -> dict[str, Any]:
    """An error as the message that ends a case."""
    text = (str(error).strip() or "no message")[:_MESSAGE]
    return dataclasses.asdict(Failure(kind=type(error).__name__, message=text, phase=phase))


class Watching:
    """What both kinds of run do: phases, and messages."""

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

    def _reading(self, reading: Reading) -> None:
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


def _slim(reading: Any) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(reading).items() if v is not None}
