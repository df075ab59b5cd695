"""From measured runs and their predictions to a calibration."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from memest.calibration.fitting.conformal import band_of, bounds, covers
from memest.calibration.fitting.parts import fit_gap, fit_process, fit_tensors
from memest.calibration.fitting.prediction import Pair
from memest.calibration.fitting.residuals import ResidualRow, Residuals, residuals, uncorrected_of
from memest.calibration.fitting.robust import MIN_GROUPS, group_folds, need_sklearn
from memest.calibration.measurement import CPU, Environment, Measurement
from memest.config.installed import DISTRIBUTION
from memest.errors import ConfigError
from memest.estimation.calibration import (
    FACTS,
    LEVEL,
    Band,
    Calibration,
    CrossValidation,
    MeasuredOn,
    ProcessPart,
    Provenance,
)
from memest.estimation.calibration_files import MAX_TEXT
from memest.estimation.correction import Correction, correct

__all__ = ["Evaluation", "dataset_digest", "evaluate", "fit_calibration"]

FEW_MODELS = 8
"""Models below which the promise of a range is qualified."""
DEVICE, RESERVED, ALLOCATED = "device", "reserved", "allocated"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A run, corrected by a calibration that has not seen its model.

    Attributes:
        row: the run.
        correction: figures and range.
        side: -1 where the measured peak lies below the range, 0 inside, 1 above; None where it
            was not measured or there was no other model to make a range from.
    """

    row: ResidualRow
    correction: Correction
    side: int | None


def fit_calibration(pairs: Iterable[Pair]) -> Calibration:
    """Fit a calibration.

    Args:
        pairs: measurements and predictions; runs that were not completed count as statuses only.

    Raises:
        ConfigError: there is nothing to fit.
        MissingDependencyError: scikit-learn is not installed.
    """
    need_sklearn()
    pairs = tuple(pairs)
    data = residuals(pairs)
    rows, notes = _rows_to_fit(data)
    cross = _cross_fit(rows)
    band = cross.band(range(len(rows)))
    calibration = _calibration(rows, _measured_on(rows), band)
    evaluations = _evaluations(cross)
    return replace(
        calibration,
        process=tuple(_with_spread(part, cross) for part in calibration.process),
        validation=_validation(cross, evaluations),
        provenance=_provenance(pairs, data, rows, [*notes, *_notes(data, cross, band)]),
    )


def evaluate(pairs: Iterable[Pair]) -> tuple[Evaluation, ...]:
    """Every run corrected by a calibration fitted without its model, with that calibration's range.

    Raises:
        ConfigError: there is nothing to fit.
        MissingDependencyError: scikit-learn is not installed.
    """
    need_sklearn()
    rows, _ = _rows_to_fit(residuals(pairs))
    return tuple(_evaluations(_cross_fit(rows)))


def dataset_digest(measurements: Iterable[Measurement]) -> str:
    """SHA-256 over all measurements, whatever their order."""
    digest = hashlib.sha256()
    for text in sorted(json.dumps(m.to_dict(), sort_keys=True) for m in measurements):
        digest.update(text.encode("utf-8", "surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()


def _rows_to_fit(data: Residuals) -> tuple[list[ResidualRow], list[str]]:
    """The rows of GPUs; those of CPUs where there are no others."""
    rows = [row for row in data.rows if row.gpu != CPU]
    notes = []
    if not rows:
        rows = list(data.rows)
    elif len(rows) < len(data.rows):
        count = len(data.rows) - len(rows)
        notes.append(f"{count} runs on a CPU are left out: there are runs on GPUs.")
    if not rows:
        statuses = ", ".join(f"{count} {status}" for status, count in data.statuses.items())
        why = f" The first: {data.unpredicted_runs[0].failure}" if data.unpredicted_runs else ""
        raise ConfigError(
            f"There is nothing to fit: of the measured runs ({statuses or 'none'}), none was "
            f"completed and can be predicted.{why} Measure some cases with `memest calibrate run`."
        )
    return rows, notes


# -- models left out ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _CrossFit:
    """Runs corrected by fits that have not seen their models.

    Attributes:
        rows: the runs.
        folds: rows left out together, by index.
        calibrations: fitted to the others, without a range.
        corrections: of each row, by the calibration of its fold; None without any fold.
        metric: the highest peak that was measured.
        grouped: whether models were left out, and enough of them; else single cases were.
    """

    rows: Sequence[ResidualRow]
    folds: Sequence[Sequence[int]]
    calibrations: Sequence[Calibration]
    corrections: Sequence[Correction | None]
    metric: str
    grouped: bool

    def peaks(self, index: int) -> tuple[int, int] | None:
        """(measured, corrected) of a row, None where they cannot be compared."""
        row, correction = self.rows[index], self.corrections[index]
        if correction is None:
            return None
        if self.metric == ALLOCATED:
            return row.allocated, correction.allocated_bytes
        if row.gap is None or row.reserved is None:
            return None
        if self.metric == RESERVED:
            return row.reserved, correction.reserved_bytes
        # a GPU that only the left-out models ran on has a borrowed process part: no residual
        if row.device is None or not row.fits_device or correction.process_gpu != row.gpu:
            return None
        return row.device, correction.device_bytes

    def band(self, indices: Iterable[int]) -> Band:
        """How far off these rows are."""
        peaks_by_row = [(i, peaks) for i in indices if (peaks := self.peaks(i)) is not None]
        return band_of(
            self.metric,
            [measured - corrected for _, (measured, corrected) in peaks_by_row],
            [float(corrected) for _, (_, corrected) in peaks_by_row],
            [self.rows[i].model for i, _ in peaks_by_row] if self.grouped else None,
        )


def _cross_fit(rows: Sequence[ResidualRow]) -> _CrossFit:
    models = [row.model for row in rows]
    by_model = len(set(models)) > 1
    folds = group_folds(models if by_model else [row.case for row in rows])
    measured_on = _measured_on(rows)
    empty = band_of(DEVICE, (), ())
    calibrations = []
    corrections: list[Correction | None] = [None] * len(rows)
    for fit, out in folds:
        calibration = _calibration([rows[i] for i in fit], measured_on, empty)
        calibrations.append(calibration)
        for i in out:
            corrections[i] = correct(calibration, uncorrected_of(rows[i]))
    return _CrossFit(
        rows=rows,
        folds=[out for _, out in folds],
        calibrations=calibrations,
        corrections=corrections,
        metric=_metric(rows),
        grouped=len(set(models)) >= MIN_GROUPS,
    )


def _metric(rows: Sequence[ResidualRow]) -> str:
    if any(row.fits_device for row in rows):
        return DEVICE
    return RESERVED if any(row.gap is not None for row in rows) else ALLOCATED


def _evaluations(cross: _CrossFit) -> list[Evaluation]:
    """Ranges made without the models they are for, and where the measured peaks lie."""
    out = []
    for fold, calibration in zip(cross.folds, cross.calibrations, strict=True):
        left_out = set(fold)
        band = cross.band(i for i in range(len(cross.rows)) if i not in left_out)
        for i in fold:
            row = cross.rows[i]
            correction = correct(replace(calibration, band=band), uncorrected_of(row))
            out.append(Evaluation(row, correction, _side(cross, i, band, correction)))
    return sorted(out, key=lambda e: (e.row.gpu, e.row.model, e.row.case, e.row.run))


def _side(cross: _CrossFit, index: int, band: Band, correction: Correction) -> int | None:
    peaks = cross.peaks(index)
    if peaks is None or not cross.grouped or not band.cases:
        return None
    if cross.metric == DEVICE:
        return (peaks[0] > correction.high_bytes) - (peaks[0] < correction.low_bytes)
    return covers(band, peaks[0] - peaks[1], peaks[1])


# -- the calibration ------------------------------------------------------------------------------


def _calibration(rows: Sequence[ResidualRow], measured_on: MeasuredOn, band: Band) -> Calibration:
    """The models fitted to rows; where they are from is not said yet."""
    tensors, gap, process = fit_tensors(rows), fit_gap(rows), fit_process(rows)
    of = {row.gpu: row.environment for row in rows}
    return Calibration(
        tensors=tensors.name,
        factors=tensors.factors,
        other_factor=tensors.other,
        gap_bytes=gap,
        process_model=process.name,
        process=tuple(
            ProcessPart(
                gpu=_clean(gpu),
                constant_bytes=constant,
                low_bytes=0,
                high_bytes=0,
                cases=sum(row.gpu == gpu and row.fits_process for row in rows),
                capability=of[gpu].capability,
                sm_count=of[gpu].sm_count,
                total_bytes=of[gpu].total_bytes,
            )
            for gpu, constant in sorted(process.constants.items())
        ),
        per_kernel_bytes=process.per_kernel,
        precision_bytes=process.precision,
        band=band,
        measured=measured_on,
        validation=CrossValidation(),
        provenance=Provenance(gpus=tuple(sorted({_clean(row.gpu) for row in rows}))),
    )


def _measured_on(rows: Sequence[ResidualRow]) -> MeasuredOn:
    questions = [uncorrected_of(row) for row in rows]
    return MeasuredOn(
        allocated_bytes=max(q.allocated_bytes for q in questions),
        kernels=max(q.kernels for q in questions),
        slack_bytes=max(q.slack_bytes for q in questions),
        seen={
            fact: tuple(sorted({_clean(str(getattr(q, fact))) for q in questions}))
            for fact in FACTS
        },
        torch=tuple(sorted({q.torch for q in questions})),
        cuda=tuple(sorted({q.cuda for q in questions if q.cuda is not None})),
    )


def _with_spread(part: ProcessPart, cross: _CrossFit) -> ProcessPart:
    """How far readings of a GPU lie from what models left out were given."""
    rest = [
        float(row.process - correction.process_expected_bytes)
        for row, correction in zip(cross.rows, cross.corrections, strict=True)
        if correction is not None
        and row.process is not None
        and row.fits_process
        and _clean(row.gpu) == part.gpu == correction.process_gpu
    ]
    if not rest:
        return part
    low, high, _ = bounds(rest)
    return replace(part, low_bytes=round(min(low, 0.0)), high_bytes=round(max(high, 0.0)))


def _validation(cross: _CrossFit, evaluations: Sequence[Evaluation]) -> CrossValidation:
    pairs = [peaks for i in range(len(cross.rows)) if (peaks := cross.peaks(i)) is not None]
    raw = [_raw(cross.metric, e) for e in evaluations]
    sides = [e.side for e in evaluations if e.side is not None]
    tensors = [(e.row.allocated, e.correction) for e in evaluations]
    return CrossValidation(
        cases=len(cross.rows),
        models=len({row.model for row in cross.rows}),
        folds=len(cross.folds),
        raw_error=_error([pair for pair in raw if pair is not None]),
        error=_error(pairs),
        allocated_raw_error=_error([(m, c.before.allocated_bytes) for m, c in tensors]),
        allocated_error=_error([(m, c.allocated_bytes) for m, c in tensors]),
        coverage=_share([side == 0 for side in sides]),
        above=_share([side > 0 for side in sides]),
    )


def _raw(metric: str, evaluation: Evaluation) -> tuple[int, int] | None:
    row, correction = evaluation.row, evaluation.correction
    if metric == ALLOCATED:
        return row.allocated, correction.before.allocated_bytes
    if metric == RESERVED:
        return None if row.reserved is None else (row.reserved, correction.before.reserved_bytes)
    if row.device is None or not row.fits_device:
        return None
    return row.device, correction.before.device_bytes


def _error(pairs: Sequence[tuple[int, int]]) -> float | None:
    """Median absolute relative error of (measured, predicted)."""
    errors = [abs(predicted / measured - 1) for measured, predicted in pairs]
    return round(median(errors), 6) if errors else None


def _share(true: Sequence[bool]) -> float | None:
    return round(sum(true) / len(true), 6) if true else None


# -- where it is from -----------------------------------------------------------------------------


def _notes(data: Residuals, cross: _CrossFit, band: Band) -> list[str]:
    out = []
    cases, models = len(cross.rows), len({row.model for row in cross.rows})
    if models < MIN_GROUPS:
        out.append(
            f"Runs of {models} model{'s' * (models > 1)} only: tensors are not corrected, and the "
            f"range promises nothing. Measure {MIN_GROUPS} models at least."
        )
    elif models < FEW_MODELS:
        out.append(
            f"Only {models} models were measured: another one may lie further off than the level "
            "of the range says."
        )
    if band.level is None:
        out.append(f"No level is claimed for the range: 19 independent runs make {LEVEL:.0%}.")
    elif band.level < LEVEL:
        out.append(
            f"The {band.cases} residuals count as {band.draws:.0f} independent ones, for runs of "
            f"one model are alike: a {LEVEL:.0%} range needs 19. More models help most."
        )
    num_readings = sum(row.fits_process for row in cross.rows)
    if data.shared_cases:
        out.append(
            f"{len(data.shared_cases)} of {cases} runs shared their GPU with other processes and "
            "are left out of the process part."
        )
    if not num_readings and not data.shared_cases and cross.rows[0].gpu != CPU:
        out.append("No run has a reading of device memory: there is no process part.")
    num_limited = sum(row.limited for row in cross.rows)
    if num_limited:
        out.append(
            f"{num_limited} runs were short of memory: their reserved peaks are the limit's."
        )
    if data.repeats:
        out.append(f"{data.repeats} earlier runs of the same cases are left out.")
    if data.unpredicted_runs:
        out.append(f"{len(data.unpredicted_runs)} completed runs have no prediction.")
    return out


def _provenance(
    pairs: Sequence[Pair], data: Residuals, rows: Sequence[ResidualRow], notes: Sequence[str]
) -> Provenance:
    start_times = {pair.measurement.run: pair.measurement.started for pair in pairs}
    dates = sorted(_clean(start_times[row.run][:10]) for row in rows)
    environments = [row.environment for row in rows]
    return Provenance(
        gpus=tuple(sorted({_clean(row.gpu) for row in rows})),
        drivers=_distinct(e.driver for e in environments),
        first=dates[0],
        last=dates[-1],
        statuses=data.statuses,
        dataset_sha256=dataset_digest(pair.measurement for pair in pairs),
        versions=_versions(environments),
        notes=tuple(_clean(note) for note in notes),
    )


def _versions(environments: Sequence[Environment]) -> Mapping[str, str]:
    out = {
        "torch": ", ".join(_distinct(e.torch for e in environments)),
        "transformers": ", ".join(_distinct(e.transformers for e in environments)),
    }
    for package in ("torch", "transformers"):
        # predictions go by the code of the models that is installed here
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            out[f"{package} (predictions)"] = importlib.metadata.version(package)
    for package in (DISTRIBUTION, "scikit-learn", "numpy"):
        # a checkout that nobody installed has no version of its own
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            out[package] = importlib.metadata.version(package)
    return {name: _clean(text) for name, text in out.items()}


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({_clean(text) for text in texts if text}))


def _clean(text: str) -> str:
    """Text as a calibration may hold it: a driver's name for a card can be anything."""
    return "".join(c if c.isprintable() else " " for c in text)[:MAX_TEXT].strip()
