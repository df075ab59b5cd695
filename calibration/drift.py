"""Whether traces still say what the installed torch and transformers do: real steps on the CPU.

A trace runs the real code of a training step, so most changes of torch and transformers are in it
by themselves. What memest knows on its own (which operators run, what stays alive, when an
optimizer makes its states) can drift apart. The check runs a few small models really and lays the
peaks side by side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memest.calibration.campaign import read_campaign
from memest.calibration.fitting.prediction import pair
from memest.calibration.measurement import CPU, Measurement, Status
from memest.calibration.running.runner import Progress, run_cases
from memest.calibration.store import MeasurementStore
from memest.units import format_size

__all__ = ["TOLERANCE", "CheckedCase", "Drift", "check_drift"]

TOLERANCE = 0.005
"""Relative error of the allocated peak that real CPU steps of verified releases stay within."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCase:
    """One model that was run and predicted.

    Attributes:
        case: its name.
        measured_bytes: allocated peak of the real steps; None where they failed.
        predicted_bytes: of the trace; None where there is none.
        failure: why one of the two is missing.
    """

    case: str
    measured_bytes: int | None
    predicted_bytes: int | None
    failure: str = ""

    @property
    def error(self) -> float | None:
        """Signed relative error."""
        if self.predicted_bytes is None or not self.measured_bytes:
            return None
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def agrees(self) -> bool:
        """Whether the two are within the tolerance."""
        return self.error is not None and abs(self.error) <= TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """What a check found.

    Attributes:
        torch: release that ran.
        transformers: likewise.
        cases: every model.
    """

    torch: str
    transformers: str
    cases: tuple[CheckedCase, ...]

    @property
    def found(self) -> bool:
        """Whether anything differs from what was traced, or could not be compared."""
        return not self.cases or not all(case.agrees for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "torch": self.torch,
            "transformers": self.transformers,
            "tolerance": TOLERANCE,
            "drift": self.found,
            "cases": [
                asdict(one) | {"error": one.error, "agrees": one.agrees} for one in self.cases
            ],
        }

    def lines(self) -> list[tuple[str, str]]:
        """Rows for people: what, and what was found."""
        rows = []
        for one in self.cases:
            if one.failure:
                rows.append((one.case, f"not compared: {one.failure}"))
                continue
            verdict = "agrees" if one.agrees else "DIFFERS"
            trace_size, run_size = (
                format_size(n or 0) for n in (one.predicted_bytes, one.measured_bytes)
            )
            rows.append(
                (one.case, f"{verdict}: {trace_size} traced, {run_size} run, {one.error:+.3%}")
            )
        return rows


def check_drift(tell: Callable[[str], None] = lambda _: None) -> Drift:
    """Run small models on the CPU and compare them with their traces.

    Args:
        tell: called with a line for each model.

    Raises:
        DeviceError: torch cannot be run at all.
    """
    cases = read_campaign("check").cases

    def report_progress(progress: Progress) -> None:
        if progress.measurement is None:
            tell(f"{progress.number} of {progress.total}: {progress.case.model}")

    with (
        tempfile.TemporaryDirectory(prefix="memest-check-") as folder,
        MeasurementStore(Path(folder) / "check.db") as store,
    ):
        summary = run_cases(
            cases, CPU, store, command="memest selftest --full", tell=report_progress
        )
        checked_cases = tuple(map(_checked_case, summary.measurements))
        environment = summary.environment
    return Drift(
        torch=environment.torch, transformers=environment.transformers, cases=checked_cases
    )


def _checked_case(run: Measurement) -> CheckedCase:
    """A run beside its trace."""
    prediction_pair = pair(run)
    failure = prediction_pair.failure
    if run.status is not Status.OK:
        reason = f"{run.failure.kind}: {run.failure.message}" if run.failure else str(run.status)
        failure = " ".join(reason.split())[:200]
    return CheckedCase(
        case=run.case.id,
        measured_bytes=run.allocated_bytes if run.status is Status.OK else None,
        predicted_bytes=prediction_pair.prediction.allocated_bytes
        if prediction_pair.prediction
        else None,
        failure=failure,
    )
