"""Running a campaign: case after case, every result on disk before the next one begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memest.calibration.case import Case
from memest.calibration.measurement import (
    Environment,
    Failure,
    Measurement,
    Status,
    environment_from_dict,
)
from memest.calibration.running.attendant import Attendant
from memest.calibration.store import MeasurementStore, OpenRun

__all__ = [
    "CASE_SECONDS",
    "Bench",
    "Progress",
    "Summary",
    "events_folder",
    "run_cases",
]

CASE_SECONDS = 300.0
"""A case that takes longer hangs."""


@dataclass(slots=True)
class Progress:
    """How far a campaign is; made anew for every change.

    Attributes:
        number: of the case, from 1.
        total: cases of the campaign.
        case: the one that begins, or has just ended.
        measurement: its result; None when it begins.
        skipped: it was measured before, or another campaign is at it.
        seconds_left: guessed from the cases so far, None where there is nothing to guess from.
    """

    number: int
    total: int
    case: Case
    measurement: Measurement | None = None
    skipped: bool = False
    seconds_left: float | None = None


@dataclass(slots=True)
class Summary:
    """What a campaign did.

    Attributes:
        environment: where it ran.
        measurements: results of this campaign, in order.
        num_skipped: cases that were measured before, or that another campaign is at.
        num_left: cases that were not begun because the time was spent.
        seconds: wall clock.
    """

    environment: Environment
    measurements: list[Measurement] = field(default_factory=list)
    num_skipped: int = 0
    num_left: int = 0
    seconds: float = 0.0

    def count_good(self) -> int:
        """How many cases have a result: they completed, or ran out of memory."""
        return sum(1 for m in self.measurements if m.status in (Status.OK, Status.OOM))


def events_folder(store: Path) -> Path:
    """Where histories of a store's runs are kept."""
    return store.with_name(f"{store.name}.events")


def run_cases(
    cases: Sequence[Case],
    device: str,
    store: MeasurementStore,
    *,
    command: str = "",
    timeout: float = CASE_SECONDS,
    budget: float | None = None,
    tell: Callable[[Progress], None] = lambda _: None,
) -> Summary:
    """Measure all cases on one device; those that are in the store already are passed over.

    Args:
        cases: in the order to be run.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        store: where results go, each as soon as it is there.
        command: the command line, for the records.
        timeout: seconds after which a case is ended.
        budget: seconds after which no further case is begun, None = no limit.
        tell: hears of the progress.

    Returns:
        What was done. A case that fails, hangs or kills its worker is a result like any other.

    Raises:
        DeviceError: there is no such device.
        KeyboardInterrupt: the case under way is kept as interrupted.
    """
    began = time.monotonic()
    with Bench(device, store, command=command, timeout=timeout) as bench:
        summary = Summary(bench.environment)
        for number, case in enumerate(cases, start=1):
            elapsed = time.monotonic() - began
            if budget is not None and elapsed > budget:
                summary.num_left = len(cases) - number + 1
                break
            open_run = store.begin(case, bench.environment)
            seconds_left = _seconds_left(summary, len(cases) - number + 1)
            if open_run is None:
                summary.num_skipped += 1
                tell(Progress(number, len(cases), case, skipped=True, seconds_left=seconds_left))
                continue
            tell(Progress(number, len(cases), case, seconds_left=seconds_left))
            measurement = bench.run(open_run)
            summary.measurements.append(measurement)
            seconds_left = _seconds_left(summary, len(cases) - number)
            tell(
                Progress(
                    number, len(cases), case, measurement=measurement, seconds_left=seconds_left
                )
            )
        summary.seconds = round(time.monotonic() - began, 3)
        return summary


def _seconds_left(summary: Summary, remaining: int) -> float | None:
    """Seconds to go, if the cases to come take as long as those that are done."""
    case_seconds = [m.seconds for m in summary.measurements]
    return sum(case_seconds) / len(case_seconds) * remaining if case_seconds else None


class Bench:
    """One device to measure on, and the store that keeps the results.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        store: where results go.
        command: the command line, for the records.
        timeout: seconds after which a case is ended.

    Attributes:
        environment: of the device.

    Raises:
        DeviceError: there is no such device.
    """

    def __init__(
        self,
        device: str,
        store: MeasurementStore,
        *,
        command: str = "",
        timeout: float = CASE_SECONDS,
    ) -> None:
        self._device = device
        self._store = store
        self._timeout = timeout
        self._attendant = Attendant(command)
        store.recover()
        try:
            self.environment = environment_from_dict(self._attendant.describe(device))
        except BaseException:
            self._attendant.close()
            raise

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._attendant.close()

    def measure(self, case: Case) -> Measurement | None:
        """The result of a case, from the store or made now; None if another campaign is at it."""
        open_run = self._store.begin(case, self.environment)
        if open_run is None:
            return self._store.result(case, self.environment)
        return self.run(open_run)

    def run(self, open_run: OpenRun) -> Measurement:
        """Run a case that was taken from the store."""
        case, events = open_run.case, ""
        if case.record_events:
            folder = events_folder(self._store.path)
            folder.mkdir(parents=True, exist_ok=True)
            events = str(folder.resolve() / f"{open_run.run}.jsonl.gz")
        try:
            end = self._attendant.run(
                case,
                self._device,
                open_run.hear,
                timeout=self._timeout,
                events=events,
                alive=open_run.still_here,
            )
        except BaseException as error:
            kind = type(error).__name__
            reason = "the campaign was ended by hand" if kind == "KeyboardInterrupt" else str(error)
            open_run.close(Status.INTERRUPTED, Failure(kind=kind, message=reason or kind))
            raise
        return open_run.close(end.status, end.failure, end.events)
