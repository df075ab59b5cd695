"""Predicted against measured: the report of a campaign, as Markdown or as one page of HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from memest.calibration.fitting.fit import dataset_digest, evaluate
from memest.calibration.fitting.prediction import Pair
from memest.calibration.fitting.residuals import ResidualRow, Residuals, residuals, uncorrected_of
from memest.calibration.measurement import CPU
from memest.calibration.validation.scores import Errors
from memest.errors import MissingDependencyError
from memest.estimation.calibration import Calibration
from memest.estimation.correction import Correction, correct
from memest.report.error_plots import Point, against_measured, error_plot, error_words
from memest.report.page import (
    Block,
    Figure,
    Heading,
    Items,
    Table,
    Text,
    as_html,
    as_markdown,
)
from memest.units import format_size, plural

__all__ = ["html_report", "markdown_report", "report_blocks"]

WORST = 10
METRICS = ("allocated", "reserved", "device")
_FACTS: tuple[tuple[str, Callable[[ResidualRow], str]], ...] = (
    ("family", lambda row: row.prediction.family),
    ("precision", lambda row: row.facts.precision),
    ("loop", lambda row: row.facts.loop),
    ("optimizer", lambda row: row.facts.optimizer),
    ("checkpointing", lambda row: row.facts.checkpointing),
    ("attention", lambda row: row.facts.attention),
    ("GPU", lambda row: row.gpu),
)
_ALWAYS = ("family", "precision", "loop", "optimizer")
"""Facts whose table is there even where all runs are alike."""
_INSIDE = {-1: "below", 0: "inside", 1: "above", None: "-"}


@dataclass(frozen=True, slots=True)
class _Case:
    """A run with all figures."""

    row: ResidualRow
    correction: Correction | None
    side: int | None

    def figures(self, metric: str) -> tuple[int, int, int | None] | None:
        """(measured, predicted, corrected), None where it was not measured."""
        row, prediction, correction = self.row, self.row.prediction, self.correction
        if metric == "allocated":
            raw = prediction.allocated_bytes
            return row.allocated, raw, None if correction is None else correction.allocated_bytes
        if row.reserved is None or prediction.reserved_bytes is None or row.limited:
            return None
        if metric == "reserved":
            raw = prediction.reserved_bytes
            return row.reserved, raw, None if correction is None else correction.reserved_bytes
        if not row.fits_device or row.device is None:
            return None
        raw = prediction.reserved_bytes + prediction.context_expected_bytes
        return row.device, raw, None if correction is None else correction.device_bytes


def markdown_report(pairs: Iterable[Pair], calibration: Calibration | None = None) -> str:
    """The report as Markdown."""
    return as_markdown(report_blocks(pairs, calibration))


def html_report(pairs: Iterable[Pair], calibration: Calibration | None = None) -> str:
    """The report as one page of HTML that needs nothing else."""
    return as_html(report_blocks(pairs, calibration))


def report_blocks(pairs: Iterable[Pair], calibration: Calibration | None = None) -> list[Block]:
    """The report before it is written down; the same runs make the same report.

    Args:
        pairs: measurements and predictions.
        calibration: corrects the predictions. Where it was fitted to these very measurements, each
            run is corrected by a fit that left its model out, so that errors are those of models
            not seen.
    """
    pairs = tuple(pairs)
    data = residuals(pairs)
    cases, how = _cases(pairs, data, calibration)
    blocks: list[Block] = [Heading("Predicted against measured GPU memory", 1)]
    blocks += _opening(data, cases, how)
    top = next((m for m in reversed(METRICS) if any(c.figures(m) for c in cases)), METRICS[0])
    if cases:
        blocks += _errors(cases)
        blocks += _ranges(cases, calibration, top)
        blocks += _plots(cases, top)
        blocks += _by_fact(cases, top)
        blocks += _worst(cases, top)
    blocks += _incomplete_runs(data)
    return blocks + _origin(pairs, data, calibration)


def _cases(
    pairs: tuple[Pair, ...], data: Residuals, calibration: Calibration | None
) -> tuple[list[_Case], str]:
    """The runs, and how they were corrected."""
    if calibration is None:
        return [_Case(row, None, None) for row in data.rows], "No profile: nothing is corrected."
    if calibration.provenance.dataset_sha256 == dataset_digest(p.measurement for p in pairs):
        try:
            evaluations = {e.row.run: e for e in evaluate(pairs)}
            return [
                _Case(row, evaluations[row.run].correction, evaluations[row.run].side)
                if row.run in evaluations
                else _Case(row, None, None)
                for row in data.rows
            ], (
                "Corrected figures are out of fold: every run is corrected by a profile fitted "
                "without its model, so the errors are those of models not seen."
            )
        except MissingDependencyError:
            caution = " These runs are the ones it was fitted to: errors of other runs are larger."
    else:
        caution = ""
    cases = []
    for row in data.rows:
        correction = correct(calibration, uncorrected_of(row))
        side = None
        if row.fits_device and row.device is not None:
            side = (row.device > correction.high_bytes) - (row.device < correction.low_bytes)
        cases.append(_Case(row, correction, side))
    return cases, f"Corrected figures are those of the profile given.{caution}"


# -- parts of the page ----------------------------------------------------------------------------


def _opening(data: Residuals, cases: Sequence[_Case], how: str) -> list[Block]:
    total = sum(data.statuses.values())
    models = len({case.row.model for case in cases})
    gpus = sorted({"CPU" if c.row.gpu == CPU else c.row.gpu for c in cases})
    summary = f"{plural(total, 'run')} measured, {plural(len(cases), 'run')} of "
    summary += f"{plural(models, 'model')} compared"
    where = f" on {', '.join(gpus)}" if gpus else ""
    return [Text(f"{summary}{where}. {how}")]


def _errors(cases: Sequence[_Case]) -> list[Block]:
    rows = []
    for metric in METRICS:
        for name, errors in _both(cases, metric):
            rows.append(
                (
                    metric,
                    name,
                    str(errors.count),
                    f"{errors.median:.2%}",
                    f"{errors.mean:.2%}",
                    f"{errors.worst:+.2%}",
                    f"{errors.median_signed:+.2%}",
                    f"{errors.mean_signed:+.2%}",
                    f"{errors.below:.0%}",
                )
            )
    head = (
        "peak",
        "figure",
        "runs",
        "median |error|",
        "mean |error|",
        "worst",
        "median",
        "mean",
        "predicted too low",
    )
    return [Heading("Errors"), Table("Errors of each peak against its own meter", head, rows, 2)]


def _both(cases: Sequence[_Case], metric: str) -> list[tuple[str, Errors]]:
    """Errors of the uncalibrated and of the corrected figures."""
    figures = [f for case in cases if (f := case.figures(metric)) is not None]
    raw = Errors.of((measured, figure) for measured, figure, _ in figures)
    corrected = Errors.of((m, figure) for m, _, figure in figures if figure is not None)
    named_errors = (("uncalibrated", raw), ("corrected", corrected))
    return [(name, errors) for name, errors in named_errors if errors is not None]


def _ranges(cases: Sequence[_Case], calibration: Calibration | None, metric: str) -> list[Block]:
    if calibration is None:
        return []
    ranged_cases = [case for case in cases if case.side is not None]
    blocks: list[Block] = [Heading("Ranges")]
    if not ranged_cases:
        return [*blocks, Text("No range could be compared with a measured device peak.")]
    level = calibration.band.level
    nominal = "no level is claimed" if level is None else f"{level:.0%} are claimed"
    below, inside, above = (sum(c.side == side for c in ranged_cases) for side in (-1, 0, 1))
    blocks.append(
        Text(
            f"Of {plural(len(ranged_cases), 'measured peak')} ({metric}), {inside} "
            f"({inside / len(ranged_cases):.1%}) lie in the range ({nominal}), "
            f"{below} below it and {above} ({above / len(ranged_cases):.1%}) above it; "
            f"{_band_words(calibration)}."
        )
    )
    cases_with_level = [
        c for c in ranged_cases if c.correction is not None and c.correction.level is not None
    ]
    if metric == METRICS[-1] and len(cases_with_level) < len(ranged_cases):
        inside = sum(c.side == 0 for c in cases_with_level)
        blocks.append(
            Text(
                f"{len(ranged_cases) - len(cases_with_level)} of them lie beyond what was "
                "measured, where ranges are widened and claim no level; of the other "
                f"{len(cases_with_level)}, {inside} lie inside."
            )
        )
    return blocks


def _band_words(calibration: Calibration) -> str:
    band = calibration.band
    if band.scale == "proportional":
        return f"the range goes from {band.low:+.2%} to {band.high:+.2%} of the corrected peak"
    low, high = format_size(math.floor(band.low)), format_size(math.ceil(band.high))
    return f"the range goes from {low} to {high} around the corrected peak"


def _plots(cases: Sequence[_Case], metric: str) -> list[Block]:
    points = [
        Point(case.row.case, *figures)
        for case in cases
        if (figures := case.figures(metric)) is not None
    ]
    words = error_words(points)
    errors, against = f"Errors of the {metric} peak", f"Predicted over measured {metric} peak"
    return [
        Heading("Plots"),
        Figure(errors, error_plot(points, errors), words),
        Figure(against, against_measured(points, against), _biggest_words(points)),
    ]


def _biggest_words(points: Sequence[Point]) -> str:
    low, high = min(p.measured for p in points), max(p.measured for p in points)
    far = max(points, key=lambda p: (abs(p.best - p.measured), p.name))
    return (
        f"Measured peaks from {format_size(low)} to {format_size(high)}; farthest in bytes is "
        f"{far.name}: {format_size(far.best)} against {format_size(far.measured)} measured."
    )


def _by_fact(cases: Sequence[_Case], metric: str) -> list[Block]:
    blocks: list[Block] = [Heading("Errors by kind of run")]
    metrics = list(dict.fromkeys((METRICS[0], metric)))
    head = ["", "runs"]
    for name in metrics:
        head += [
            f"{name}: median |error|",
            f"{name}: worst",
            f"{name}, corrected: median |error|",
            f"{name}, corrected: worst",
        ]
    for fact, value in _FACTS:
        groups: dict[str, list[_Case]] = {}
        for case in cases:
            groups.setdefault(value(case.row) or "unknown", []).append(case)
        if len(groups) == 1 and fact not in _ALWAYS:
            continue
        rows = []
        for name in sorted(groups):
            cells = [name, str(len(groups[name]))]
            for peak_name in metrics:
                errors_by_figure = dict(_both(groups[name], peak_name))
                for which in ("uncalibrated", "corrected"):
                    errors = errors_by_figure.get(which)
                    cells += (
                        ["-", "-"]
                        if errors is None
                        else [f"{errors.median:.2%}", f"{errors.worst:+.2%}"]
                    )
            rows.append(cells)
        blocks.append(Table(f"By {fact}", [fact, *head[1:]], rows))
    return blocks


def _worst(cases: Sequence[_Case], metric: str) -> list[Block]:
    sentences = []
    for case in cases:
        figures = case.figures(metric)
        if figures is not None:
            measured, raw, corrected = figures
            best = raw if corrected is None else corrected
            sentences.append((abs(best / measured - 1), case, figures))
    sentences.sort(key=lambda item: (-item[0], item[1].row.case, item[1].row.run))
    rows = []
    for _, case, (measured, raw, corrected) in sentences[:WORST]:
        correction = case.correction
        has_range = correction is not None and metric == METRICS[-1]
        rows.append(
            (
                case.row.case,
                "CPU" if case.row.gpu == CPU else case.row.gpu,
                format_size(measured),
                format_size(raw),
                f"{raw / measured - 1:+.2%}",
                "-" if corrected is None else format_size(corrected),
                "-" if corrected is None else f"{corrected / measured - 1:+.2%}",
                f"{format_size(correction.low_bytes)} to {format_size(correction.high_bytes)}"
                if correction is not None and has_range
                else "-",
                _INSIDE[case.side],
            )
        )
    head = (
        "case",
        "GPU",
        "measured",
        "uncalibrated",
        "error",
        "corrected",
        "error then",
        "range",
        "measured lies",
    )
    return [Heading("Worst cases"), Table(f"The {len(rows)} worst of {metric}", head, rows, 2)]


def _incomplete_runs(data: Residuals) -> list[Block]:
    blocks: list[Block] = []
    if data.incomplete_runs:
        rows = []
        for pair in data.incomplete_runs:
            m, failure = pair.measurement, pair.measurement.failure
            predicted_text = ""
            if pair.prediction is not None:
                predicted_text = format_size(
                    pair.prediction.reserved_bytes or pair.prediction.allocated_bytes
                )
                if pair.prediction.oom is not None:
                    predicted_text += ", out of memory" if pair.prediction.oom else ", fits its cap"
            rows.append(
                (
                    m.case.id,
                    "" if m.environment is None else m.environment.gpu,
                    str(m.status),
                    "" if failure is None else failure.phase,
                    "" if failure is None else f"{failure.kind}: {failure.message}"[:200],
                    predicted_text or "-",
                )
            )
        head = ("case", "GPU", "status", "phase", "message", "predicted")
        blocks += [
            Heading("Runs that did not complete"),
            Text("They are results too: none of them is fitted."),
            Table("Out of memory and failed", head, rows, 6),
        ]
    if data.unpredicted_runs:
        blocks += [
            Heading("Runs without a prediction"),
            Items([f"{p.measurement.case.id}: {p.failure}" for p in data.unpredicted_runs]),
        ]
    return blocks


def _origin(pairs: Sequence[Pair], data: Residuals, calibration: Calibration | None) -> list[Block]:
    environments = [e for p in pairs if (e := p.measurement.environment) is not None]
    rows = sorted(
        {
            (
                e.gpu,
                e.driver or "-",
                e.cuda or "-",
                e.torch or "-",
                e.transformers or "-",
                e.meter,
                e.memest + (f" ({e.commit})" if e.commit else ""),
            )
            for e in environments
        }
    )
    dates = sorted(p.measurement.started[:10] for p in pairs)
    statuses = ", ".join(f"{count} {status}" for status, count in data.statuses.items())
    sentences = [f"Runs: {statuses or 'none'}."]
    if dates:
        sentences.append(f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.")
    if data.repeats:
        sentences.append(f"{data.repeats} earlier runs of the same cases count once.")
    if data.shared_cases:
        sentences.append(
            "Beside other processes, so not used for the process part: "
            f"{', '.join(data.shared_cases)}."
        )
    sentences.append(f"Measurements: SHA-256 {dataset_digest(p.measurement for p in pairs)}.")
    blocks: list[Block] = [Heading("Where this is from"), Items(sentences)]
    if rows:
        head = ("GPU", "driver", "CUDA", "torch", "transformers", "device meter", "memest")
        blocks.append(Table("Environments", head, rows, 7))
    return blocks if calibration is None else [*blocks, *_calibration_blocks(calibration)]


def _calibration_blocks(calibration: Calibration) -> list[Block]:
    factors = ", ".join(f"{part} x {factor:.4f}" for part, factor in calibration.factors.items())
    lines = [
        f"Tensors: {calibration.tensors}{f' ({factors})' if factors else ''}.",
        f"Reserved beyond the replay: {format_size(calibration.gap_bytes)}.",
    ]
    lines += [
        f"{part.gpu}: {format_size(part.constant_bytes)} of context and kernels "
        f"({format_size(part.low_bytes)} to {format_size(part.high_bytes)} around it, "
        f"{plural(part.cases, 'run')}), by {calibration.process_model}."
        for part in calibration.process
    ]
    if calibration.per_kernel_bytes:
        lines.append(f"{format_size(round(calibration.per_kernel_bytes))} more for each operator.")
    for kind, size in calibration.precision_bytes.items():
        lines.append(f"{format_size(size)} more with {kind}.")
    versions = ", ".join(f"{n} {v}" for n, v in calibration.provenance.versions.items() if v)
    lines.append(
        f"Fitted with {versions}; measurements {calibration.provenance.dataset_sha256[:16]}."
    )
    return [Heading("The profile"), Items([*lines, *calibration.provenance.notes])]
