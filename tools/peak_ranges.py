"""How far measured peaks lie from predictions, by kind of run: ``data/peak_ranges.json``.

    python tools/peak_ranges.py            the bands, from what is kept, and their table
    python tools/peak_ranges.py --own      memest's own runs predicted anew before that: with torch
                                           and transformers as the runs had them (2.11, 5.17)

Published runs stand in ``data/accuracy/outcomes.jsonl`` (``tools/published.py``), memest's own in
``data/measurements``; what is predicted for the latter is kept in ``data/accuracy/own_runs.jsonl``.
The table of ``docs/accuracy.md`` says for each band how wide it is and how often bands of its kind
hold for runs that took no part in them: all runs of a model left out, all of a source left out.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from page_sections import write_sections

from memest.calibration.exchange import read_measurements
from memest.calibration.fitting.conformal import bounds, effective_count
from memest.calibration.fitting.prediction import pair
from memest.calibration.measurement import Measurement, Status
from memest.catalog.cuda_context import context_estimate
from memest.catalog.gpus import find_gpu
from memest.config.options import setup_from_options
from memest.estimation.calibration import LEVEL
from memest.estimation.peak_ranges import ErrorBand, RunKind, kind_of
from memest.files.code_digest import made_with
from memest.units import MIB

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "accuracy.md"
BANDS = ROOT / "data" / "peak_ranges.json"
OUTCOMES = ROOT / "data" / "accuracy" / "outcomes.jsonl"
REFERENCE = ROOT / "data" / "reference"
CONTEXTS = ROOT / "data" / "cuda_context.json"
OWN_RUNS = ROOT / "data" / "accuracy" / "own_runs.jsonl"
PEAKS = ("allocated", "reserved")
LEAST_GROUPS = 2
"""Groups below which leaving one out says nothing."""


@dataclass(frozen=True)
class Error:
    """One reading: ``measured / predicted - 1``, and what it is of."""

    kind: RunKind
    peak: str
    error: float
    model: str
    source: str


# -- what was measured ----------------------------------------------------------------------------


def published() -> Iterator[Error]:
    """Errors of published runs whose code, software and context are known."""
    setups: dict[str, dict[str, Any]] = {}
    for path in sorted(REFERENCE.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            setups[record["id"]] = record.get("setup", {})
    for line in OUTCOMES.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not row["scored"]:
            continue
        outcome, predicted = row["outcome"], row["predicted_bytes"]
        # of the device the part that is predicted: its context was read on the card
        predicted -= outcome["context_bytes"]
        measured = row["measured_bytes"] - outcome["context_bytes"]
        peak = "reserved" if row["metric"] in ("reserved", "device") else "allocated"
        setup = setup_from_options(**setups[row["id"]])
        kind = kind_of(setup, predicted, outcome["slack_bytes"])
        error = 0.0 if row["error"] == 0 else measured / predicted - 1
        yield Error(kind, peak, error, row["model"], row["set"])


def own_runs() -> Iterator[Error]:
    """Errors of memest's own runs."""
    for line in OWN_RUNS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for peak in PEAKS:
            measured, predicted = row[peak]
            kind, model = RunKind(row["kind"]), row["model"].partition("?")[0]
            yield Error(kind, peak, measured / predicted - 1, model, row["gpu"])


def predict_own_runs() -> None:
    """Predict every run of ``data/measurements`` that completed without running into a limit."""
    rows = []
    for path in sorted((ROOT / "data" / "measurements").glob("nvidia-*.jsonl.gz")):
        for measurement in read_measurements(path)[0]:
            row = _row(measurement)
            if row is not None:
                rows.append(row)
                print(
                    row["model"],
                    *(f"{a / b - 1:+.2%}" for a, b in (row["allocated"], row["reserved"])),
                )
    OWN_RUNS.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _row(measurement: Measurement) -> dict[str, Any] | None:
    was_short = any(step.retries or step.ooms for step in measurement.steps)
    if measurement.status is not Status.OK or measurement.case.cap_bytes is not None or was_short:
        return None
    found = pair(measurement)
    if found.prediction is None or measurement.environment is None:
        print(measurement.case.model, found.failure)
        return None
    predicted, setup = found.prediction, measurement.case.setup
    assert predicted.reserved_bytes is not None
    return {
        "run": measurement.run,
        "model": measurement.case.model,
        "gpu": measurement.environment.gpu,
        "kind": kind_of(setup, predicted.reserved_bytes, predicted.slack_bytes).value,
        "allocated": [measurement.allocated_bytes, predicted.allocated_bytes],
        "reserved": [measurement.reserved_bytes, predicted.reserved_bytes],
        "made_with": made_with(),
    }


# -- bands ----------------------------------------------------------------------------------------


def band_of(errors: Sequence[Error]) -> ErrorBand:
    """The conformal band of errors; runs of one model count for less than their number."""
    values = [error.error for error in errors]
    models = [error.model for error in errors]
    low, high, level = bounds(values, count=effective_count(values, models))
    return ErrorBand(
        low=round(min(low, 0.0), 6),
        high=round(max(high, 0.0), 6),
        level=round(level, 3) if level > 0 else None,
        runs=len(errors),
        models=len(set(models)),
    )


def coverage(errors: Sequence[Error], of: str, base: ErrorBand) -> float | None:
    """How often bands hold for all of a ``model``, or of a ``source``, left out of them.

    Args:
        errors: of a kind.
        of: what is left out together.
        base: band of plain runs, which the bands of few models are joined with.
    """
    groups: dict[str, list[Error]] = defaultdict(list)
    for error in errors:
        groups[getattr(error, of)].append(error)
    if len(groups) < LEAST_GROUPS:
        return None
    inside = 0
    for name, left_out in groups.items():
        band = band_of([error for error in errors if getattr(error, of) != name]).joined(base)
        inside += sum(band.low <= error.error <= band.high for error in left_out)
    return inside / len(errors)


def table(errors: dict[tuple[RunKind, str], list[Error]]) -> Iterator[str]:
    """The rows of a Markdown table."""
    yield (
        "| kind | peak | runs | models | range of measured / predicted | level | "
        "models left out | sources left out |"
    )
    yield "|---|---|---:|---:|---|---:|---:|---:|"
    for (kind, peak), some in sorted(errors.items()):
        base = band_of(errors[RunKind.ONE_GPU, peak])
        band = band_of(some).joined(base)
        level = "-" if band.level is None else f"{band.level:.0%}"
        shares = [coverage(some, of, base) for of in ("model", "source")]
        covered = ["-" if share is None else f"{share:.0%} inside" for share in shares]
        yield (
            f"| {kind} | {peak} | {band.runs} | {band.models} | {band.low:+.2%} to "
            f"{band.high:+.2%} | {level} | {covered[0]} | {covered[1]} |"
        ).replace("%", " %")


def context_rows() -> Iterator[str]:
    """The rows of readings of contexts and kernels under lazy loading, and what memest says."""
    readings = json.loads(CONTEXTS.read_text(encoding="utf-8"))["readings"]
    yield "| GPU | torch, CUDA | what | read, MiB | memest: context and kernels, MiB | source |"
    yield "|---|---|---|---:|---:|---|"
    for reading in readings:
        if reading["stage"] not in ("context", "kernels", "after use"):
            continue
        if reading["loading"] != "lazy":
            continue
        found = context_estimate(find_gpu(reading["gpu"]), (2, 13))
        ends = f"{found.low_bytes // MIB} to {found.high_bytes // MIB}"
        software = [".".join(map(str, reading[name] or "?")) for name in ("torch", "cuda")]
        yield (
            f"| {reading['gpu']} | {', '.join(software)} | {reading['stage']} | {reading['mib']} | "
            f"{found.expected_bytes // MIB} ({ends}) | {reading['source']} |"
        )


def main() -> None:
    """Make the bands and their tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--own", action="store_true", help="predict memest's own runs anew")
    if parser.parse_args().own:
        predict_own_runs()
    errors: dict[tuple[RunKind, str], list[Error]] = defaultdict(list)
    for error in (*published(), *own_runs()):
        errors[error.kind, error.peak].append(error)
    kinds: dict[str, dict[str, Any]] = defaultdict(dict)
    for (kind, peak), some in sorted(errors.items()):
        kinds[kind][peak] = asdict(band_of(some))
    about = f"made by tools/peak_ranges.py: conformal, {LEVEL:.0%} where there are runs enough"
    BANDS.write_text(json.dumps({"about": about, "kinds": kinds}, indent=1) + "\n", "utf-8")
    tables = {"ranges": "\n".join(table(errors)), "contexts": "\n".join(context_rows())}
    print("\n\n".join(tables.values()))
    write_sections(PAGE, tables)


if __name__ == "__main__":
    main()
