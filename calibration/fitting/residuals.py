"""From measured runs and their predictions to the rows that a fit sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from memest.calibration.fitting.prediction import Pair, Prediction
from memest.calibration.measurement import CPU, Environment, Measurement, Status, release_of
from memest.estimation.correction import UncorrectedEstimate
from memest.estimation.run_facts import RunFacts

__all__ = ["ResidualRow", "Residuals", "residuals", "uncorrected_of"]

_NO_READING = "the run has no reading of allocated memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualRow:
    """One completed run beside its prediction; bytes, None where it was not measured.

    Attributes:
        case: id of the case.
        run: id of the run.
        model: of the case; rows of one model are left out of a fit together.
        gpu: name, or ``cpu``.
        environment: where it ran.
        prediction: uncalibrated.
        allocated: measured peak.
        reserved: measured peak.
        device: measured peak of this process on the device.
        process: measured beside the segments: device less reserved.
        shared: other processes were on the card.
        limited: the allocator was short of memory, so its reserved peak is the limit's.
    """

    case: str
    run: str
    model: str
    gpu: str
    environment: Environment
    prediction: Prediction
    allocated: int
    reserved: int | None = None
    device: int | None = None
    process: int | None = None
    shared: bool = False
    limited: bool = False

    @property
    def facts(self) -> RunFacts:
        """What kind of run it is."""
        return self.prediction.facts

    @property
    def parts(self) -> Mapping[str, int]:
        """Predicted rows of the breakdown."""
        return self.prediction.parts

    @property
    def tensors(self) -> int:
        """Measured minus predicted allocated peak."""
        return self.allocated - self.prediction.allocated_bytes

    @property
    def gap(self) -> int | None:
        """What measured reserved is beyond allocated, minus what it is predicted to be.

        None where the allocator was short of memory: it then kept less than it would have.
        """
        predicted = self.prediction.reserved_bytes
        if self.reserved is None or predicted is None or self.limited:
            return None
        return (self.reserved - self.allocated) - (predicted - self.prediction.allocated_bytes)

    @property
    def fits_process(self) -> bool:
        """Whether its process part can be believed: others on the card must not be in it."""
        alone = not self.shared or self.environment.meter == "process"
        return self.process is not None and alone

    @property
    def fits_device(self) -> bool:
        """Whether its device peak can be compared with a corrected one."""
        return self.fits_process and self.device is not None and self.gap is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """The rows, and what is not among them.

    Attributes:
        rows: completed runs with a prediction, the last run of each case in each environment.
        statuses: all measurements by how they ended.
        incomplete_runs: those that were not completed.
        unpredicted_runs: completed runs without a prediction.
        repeats: earlier runs of a case, which count once.
        shared_cases: ids of cases that ran beside other processes which the driver did not tell
            apart.
    """

    rows: tuple[ResidualRow, ...]
    statuses: Mapping[str, int]
    incomplete_runs: tuple[Pair, ...]
    unpredicted_runs: tuple[Pair, ...]
    repeats: int
    shared_cases: tuple[str, ...]


def residuals(pairs: Iterable[Pair]) -> Residuals:
    """Sort measured runs into rows.

    Runs under a cap are verdict tests: what they say is whether they complete, so they make no
    rows.

    Args:
        pairs: measurements and predictions, in any order.
    """
    pairs_by_time = sorted(pairs, key=lambda p: (p.measurement.started, p.measurement.run))
    statuses = Counter(str(p.measurement.status) for p in pairs_by_time)
    incomplete_runs, unpredicted_runs, num_runs = [], [], 0
    rows: dict[tuple[str, str, int], ResidualRow] = {}
    for pair in pairs_by_time:
        if pair.measurement.status is not Status.OK:
            incomplete_runs.append(pair)
            continue
        if pair.measurement.case.cap_bytes is not None:
            continue
        row = _row(pair)
        if row is None:
            unpredicted_runs.append(pair if pair.failure else replace(pair, failure=_NO_READING))
            continue
        num_runs += 1
        rows[row.case, row.environment.key, pair.measurement.rank] = row
    last_rows = sorted(rows.values(), key=lambda r: (r.gpu, r.model, r.case, r.run))
    return Residuals(
        rows=tuple(last_rows),
        statuses=dict(sorted(statuses.items())),
        incomplete_runs=tuple(incomplete_runs),
        unpredicted_runs=tuple(unpredicted_runs),
        repeats=num_runs - len(last_rows),
        shared_cases=tuple(row.case for row in last_rows if row.shared and not row.fits_process),
    )


def _row(pair: Pair) -> ResidualRow | None:
    measurement, prediction = pair.measurement, pair.prediction
    environment, allocated = measurement.environment, measurement.allocated_bytes
    if environment is None or prediction is None or not allocated:
        return None
    on_gpu = environment.gpu != CPU
    return ResidualRow(
        case=measurement.case.id,
        run=measurement.run,
        model=measurement.case.model,
        gpu=environment.gpu,
        environment=environment,
        prediction=prediction,
        allocated=allocated,
        reserved=measurement.reserved_bytes if on_gpu else None,
        device=measurement.device_bytes if on_gpu else None,
        process=_process(measurement) if on_gpu else None,
        shared=any(reading.other_processes for reading in measurement.readings),
        limited=_was_short(measurement),
    )


def _was_short(measurement: Measurement) -> bool:
    return any(step.retries or step.ooms for step in measurement.steps)


def _process(measurement: Measurement) -> int | None:
    """What the process holds beside its segments; a reading below nothing is none."""
    process = measurement.process_bytes
    if process is None:
        device, reserved = measurement.device_bytes, measurement.reserved_bytes
        process = None if device is None or reserved is None else device - reserved
    return process if process is not None and process >= 0 else None


def uncorrected_of(row: ResidualRow) -> UncorrectedEstimate:
    """The uncalibrated estimate of a run, as corrections take it."""
    prediction, environment, facts = row.prediction, row.environment, row.facts
    reserved = prediction.reserved_bytes
    return UncorrectedEstimate(
        parts=prediction.parts,
        allocated_bytes=prediction.allocated_bytes,
        reserved_bytes=prediction.allocated_bytes if reserved is None else reserved,
        gpu=row.gpu,
        sm_count=environment.sm_count,
        capability=environment.capability,
        total_bytes=environment.total_bytes,
        torch=release_of(environment.torch) or (0, 0),
        cuda=release_of(environment.cuda),
        context_low_bytes=prediction.context_low_bytes,
        context_expected_bytes=prediction.context_expected_bytes,
        context_high_bytes=prediction.context_high_bytes,
        slack_bytes=prediction.slack_bytes,
        family=prediction.family,
        **asdict(facts),
    )
