"""What workers said, made into measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from memest.calibration.case import Case
from memest.calibration.measurement import Failure, Measurement, Status, measurement_from_dict

__all__ = ["measurements_of"]

Messages = Iterable[dict[str, Any]]


def measurements_of(
    run: str, case: Case, messages: Messages, status: Status, *, started: str, seconds: float,
    failure: Failure | None = None, events: str = "",
) -> list[Measurement]:  # fmt: skip
    """One measurement of each rank that said something; rank 0, which stands for the case, first.

    Args:
        run: of the case; that of rank 1 is ``<run>-r1``.
        case: what ran.
        messages: of all ranks; those of ranks above 0 name it.
        status: how the case ended, and any rank that did not say how it did itself.
        started: UTC, ISO 8601.
        seconds: from start to end.
        failure: what ended the case early.
        events: file of the allocator's history of rank 0.
    """
    ranks: dict[int, list[dict[str, Any]]] = {0: []}
    for message in messages:
        ranks.setdefault(int(message.get("rank", 0)), []).append(message)
    out: list[Measurement] = []
    for rank, said in sorted(ranks.items()):
        ending = _own_end(said) if rank else None
        how, why = ending or (status, failure)
        told, phase = _told(said)
        if why is not None and not why.phase:
            why = dataclasses.replace(why, phase=phase)
        # through the reader: what a worker says is checked as anybody's would be
        measurement = measurement_from_dict({
            "run": f"{run}-r{rank}" if rank else run, "case": case.to_dict(), "status": how,
            "started": started, "seconds": seconds, "rank": rank,
            "failure": None if why is None else dataclasses.asdict(why),
            "events": "" if rank else events, "environment": None, **told,
        })  # fmt: skip
        if measurement.environment is None and out:
            measurement = dataclasses.replace(measurement, environment=out[0].environment)
        out.append(measurement)
    return out


def _own_end(messages: list[dict[str, Any]]) -> tuple[Status, Failure | None] | None:
    for message in reversed(messages):
        if message["kind"] == "end":
            failure = message.get("failure")
            return Status(message["status"]), None if failure is None else Failure(**failure)
    return None


def _told(messages: Messages) -> tuple[dict[str, Any], str]:
    """The parts of a measurement's document that messages tell, and the last phase."""
    found: dict[str, Any] = {"readings": [], "steps": [], "remarks": []}
    phase = ""
    for message in messages:
        kind = message["kind"]
        if kind == "environment":
            found["environment"] = message["environment"]
        elif kind == "built":
            found |= {name: message[name] for name in ("parameters", "trainable")}
        elif kind in ("reading", "step", "remark"):
            found[f"{kind}s"].append(message[kind])
        elif kind == "phase":
            phase = message["phase"]
    return found, phase
