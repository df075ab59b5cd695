"""``memest calibrate fit`` and ``report``: what measurements say of predictions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from memest.cli.calibrate_run import StoreOption, open_store
from memest.cli.console import Output, emit, silence, write_document, write_out
from memest.cli.flags import shows, value_flag
from memest.errors import ConfigError
from memest.files.texts import write_text
from memest.units import format_size

if TYPE_CHECKING:
    from memest.calibration.fitting.prediction import Pair
    from memest.calibration.measurement import Measurement
    from memest.estimation.calibration import Calibration

__all__ = ["fit", "report"]

FromOption = Annotated[
    list[Path] | None,
    value_flag("--from", "FILE", "Records that export wrote, in place of a store; repeatable."),
]
GpuOption = Annotated[
    str | None,
    value_flag("--gpu", "NAME", "Runs of this GPU alone, by a part of its name; cpu too."),
]


@shows(without=("ascii_only",))
def fit(
    *,
    output: Output,
    store: StoreOption = None,
    records: FromOption = None,
    gpu: GpuOption = None,
    out: Annotated[
        Path | None,
        value_flag(
            "--out -o",
            "FILE",
            "Where the profile goes; left out, the user's folder, where estimates for this "
            "GPU find it by themselves.",
        ),
    ] = None,
) -> int:
    """Fit what predictions leave open to what was measured, and write a calibration.

    For example: memest calibrate fit --out calibration.json, then
    memest estimate gpt2 --gpu local --calibration calibration.json
    """
    from memest.calibration.fitting.fit import fit_calibration
    from memest.estimation.calibration_files import write_calibration

    with silence(debug=output.debug):
        pairs = _pairs(_measurements(store, records, gpu), output)
        calibration = fit_calibration(pairs)
    target = out or _own_place(calibration)
    write_error: ConfigError | None = None  # told when the fit is out
    try:
        write_calibration(calibration, target)
    except ConfigError as error:
        write_error = error
    if output.as_json:
        write_document(calibration.to_dict())
    else:
        for line in _summary(calibration):
            write_out(f"{line}\n")
    if write_error is not None:
        raise write_error
    emit(f"memest: written to {target}.")
    return 0


@shows(without=("as_json", "ascii_only"))
def report(
    *,
    output: Output,
    store: StoreOption = None,
    records: FromOption = None,
    gpu: GpuOption = None,
    profile: Annotated[
        Path | None,
        value_flag("--calibration", "FILE", "Show what this calibration corrects; else none."),
    ] = None,
    out: Annotated[
        list[Path] | None,
        value_flag(
            "--out -o", "FILE", "FILE.html or FILE.md, repeatable; left out, Markdown on stdout."
        ),
    ] = None,
) -> int:
    """Predicted against measured: errors, worst cases, coverage of the ranges.

    For example: memest calibrate report --calibration calibration.json --out report.html
    """
    from memest.calibration.fitting.report import html_report, markdown_report
    from memest.estimation.calibration_files import read_calibration

    for path in out or ():
        if path.suffix.lower() not in (".html", ".htm", ".md"):
            raise ConfigError(f"--out {path}: write FILE.html or FILE.md.")
    calibration = None if profile is None else read_calibration(profile)
    with silence(debug=output.debug):
        pairs = _pairs(_measurements(store, records, gpu), output)
        for path in out or ():
            html = path.suffix.lower() != ".md"
            text = html_report(pairs, calibration) if html else markdown_report(pairs, calibration)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
            emit(f"memest: written to {path}.")
        if not out:
            write_out(markdown_report(pairs, calibration))
    return 0


def _measurements(
    store: Path | None, records: list[Path] | None, gpu: str | None
) -> list[Measurement]:
    if records and store is not None:
        raise ConfigError("--store and --from both say where measurements are: drop one.")
    measurements: list[Measurement] = []
    if records:
        from memest.calibration.exchange import read_measurements

        for path in records:
            file_measurements, problems = read_measurements(path)
            measurements += file_measurements
            for problem in problems:
                emit(f"memest: {path}: {problem}; passed over.")
    else:
        with open_store(store) as measurement_store:
            measurements = measurement_store.measurements()
    return _of_gpu(measurements, gpu)


def _of_gpu(measurements: list[Measurement], gpu: str | None) -> list[Measurement]:
    names = sorted({m.environment.gpu for m in measurements if m.environment is not None})
    if gpu is None:
        if "cpu" in names and len(names) > 1:
            # a CPU has no allocator and no context: its runs say nothing of a GPU's
            emit("memest: runs on a CPU are left out; --gpu cpu takes them alone.")
            return [m for m in measurements if m.environment is None or m.environment.gpu != "cpu"]
        return measurements
    pattern = re.sub(r"[^a-z0-9]", "", gpu.lower())
    matches = [
        m
        for m in measurements
        if m.environment and pattern in re.sub(r"[^a-z0-9]", "", m.environment.gpu.lower())
    ]
    if not matches:
        raise ConfigError(
            f"--gpu {gpu!r}: no run was measured on it. Measured: {', '.join(names) or 'nothing'}."
        )
    return matches


def _pairs(measurements: list[Measurement], output: Output) -> list[Pair]:
    """Predictions beside measurements; progress on a terminal."""
    from memest.calibration.fitting.prediction import pair

    if not measurements:
        raise ConfigError("nothing was measured yet: `memest calibrate run` does it.")
    pairs = []
    with output.progress() as progress:
        for number, measurement in enumerate(measurements, start=1):
            if progress is not None:
                progress(f"predicting {number} of {len(measurements)}: {measurement.case.id}")
            pairs.append(pair(measurement))
    for note in _other_software(measurements):
        emit(f"memest: {note}")
    for pair_of_run in pairs:
        if pair_of_run.failure:
            emit(f"memest: {pair_of_run.measurement.case.id}: no prediction: {pair_of_run.failure}")
    return pairs


def _other_software(measurements: list[Measurement]) -> list[str]:
    """What to say where predictions are made with other code than the measured runs ran."""
    from memest.config.installed import release

    notes = []
    for package in ("torch", "transformers"):
        installed_release = release(package)
        measured_releases = {
            getattr(m.environment, package).partition("+")[0]
            for m in measurements
            if m.environment is not None
        } - {"", installed_release}
        if installed_release is not None and measured_releases:
            notes.append(
                f"{package} {installed_release} predicts what "
                f"{', '.join(sorted(measured_releases))} ran: models whose code changed in between "
                "may be off. Fit where it was measured."
            )
    return notes


def _own_place(calibration: Calibration) -> Path:
    from memest.files.folders import user_folder

    names = "-".join(calibration.provenance.gpus)
    slug = re.sub(r"[^a-z0-9]+", "-", names.lower()).strip("-")[:80]
    return user_folder() / "profiles" / f"{slug}.json"


def _summary(calibration: Calibration) -> list[str]:
    """What was fitted, in lines."""
    cross_validation = calibration.validation
    gpus = ", ".join(calibration.provenance.gpus)
    lines = [f"{gpus}: {cross_validation.cases} runs of {cross_validation.models} models"]
    factors = {name: value for name, value in calibration.factors.items() if value != 1}
    if factors or calibration.other_factor != 1:
        words = [f"{name} x {value:.4f}" for name, value in factors.items()]
        words.append(f"others x {calibration.other_factor:.4f}")
        lines.append(f"tensors: {', '.join(words)}")
    else:
        lines.append("tensors: as predicted, no correction earned its place")
    lines += [
        f"context and kernels: {_process(calibration, part)} on {part.gpu}"
        for part in calibration.process
    ]
    lines.append(_band(calibration))
    lines += [f"note: {note}" for note in calibration.provenance.notes]
    return lines


def _process(calibration: Calibration, part: Any) -> str:
    text = format_size(part.constant_bytes)
    if calibration.per_kernel_bytes:
        text += f" and {format_size(round(calibration.per_kernel_bytes))} for each kind of kernel"
    return text


def _band(calibration: Calibration) -> str:
    band = calibration.band
    if band.level is None:
        return "range: no claim, there are too few models to leave one out"
    words = "of the peak" if band.scale == "proportional" else ""
    if band.scale == "proportional":
        sizes = f"{band.low:+.2%} to {band.high:+.2%} {words}"
    else:
        sizes = f"{format_size(round(band.low))} to {format_size(round(band.high))}"
    return f"range of the {band.metric} peak: {sizes}, for {band.level:.0%} of runs"
