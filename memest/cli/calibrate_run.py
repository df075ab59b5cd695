"""``memest calibrate run`` and ``verify``: training for real."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memest.cli.console import Output, emit, silence, write_document, write_out
from memest.cli.exit_codes import ExitCode
from memest.cli.flags import shows, switch, value_flag
from memest.config.option import check_pattern
from memest.errors import ConfigError
from memest.units import format_size

if TYPE_CHECKING:
    from memest.calibration.case import Case
    from memest.calibration.measurement import Measurement
    from memest.calibration.running.runner import Progress, Summary

__all__ = ["StoreOption", "open_store", "run", "verify"]

StoreOption = Annotated[
    Path | None,
    value_flag(
        "--store",
        "PATH",
        "The file of measurements; left out, MEMEST_STORE or one in the user's folder.",
    ),
]
DeviceOption = Annotated[
    str | None,
    value_flag("--device", "DEVICE", "cuda, cuda:1 or cpu. Default: cuda."),
]
OnlyOption = Annotated[
    str | None,
    value_flag("--only", "PATTERN", "Cases whose name matches, a regular expression."),
]
BudgetOption = Annotated[
    float | None,
    value_flag("--budget", "SECONDS", "Begin no further case after so long; a rerun goes on."),
]
TimeoutOption = Annotated[
    float, value_flag("--timeout", "SECONDS", "End a case that takes longer.", default=True)
]


def open_store(path: Path | None, *, create: bool = False) -> Any:
    """The store that an option names."""
    from memest.calibration.store import MeasurementStore, default_store

    return MeasurementStore(path or default_store(), create=create)


@shows(without=("ascii_only",))
def run(
    *,
    output: Output,
    campaign: Annotated[
        str,
        value_flag(
            "--campaign",
            "NAME",
            "smoke, quick (two minutes on an H200), standard (six), full, or a file of "
            "cases: JSON, JSON lines or TOML.",
            default=True,
        ),
    ] = "quick",
    device: DeviceOption = None,
    store: StoreOption = None,
    only: OnlyOption = None,
    record_events: Annotated[
        bool,
        switch("--record-events", "Keep the allocator's own history of every case."),
    ] = False,
    budget: BudgetOption = None,
    timeout: TimeoutOption = 300.0,
    ray: Annotated[
        str | None,
        typer.Option("--ray", hidden=True),
    ] = None,
) -> int:
    """Train the cases of a campaign and keep what was measured, each as soon as it is there.

    A run that was ended goes on where it stopped. For example:
    memest calibrate run --campaign standard
    """
    if ray is not None:
        raise ConfigError(
            "--ray is for sweeps: run the campaign on each machine, then bring its store into one "
            "with `memest calibrate merge STORE`."
        )
    from memest.calibration.campaign import read_campaign
    from memest.calibration.case import with_events
    from memest.calibration.running.runner import run_cases

    chosen_campaign = read_campaign(campaign)
    cases = _matching(chosen_campaign.cases, only)
    if record_events:
        cases = [with_events(case) for case in cases]
    with silence(debug=output.debug), open_store(store, create=True) as measurement_store:
        with _progress_lines(output) as tell:
            summary = run_cases(
                cases,
                _device(device),
                measurement_store,
                command=shlex.join(["memest", *sys.argv[1:]]),
                timeout=timeout,
                budget=budget,
                tell=tell,
            )
        path = measurement_store.path
    if output.as_json:
        document = {"schema_version": 1, "campaign": chosen_campaign.name, "store": str(path)}
        document |= {"runs": [_document(summary)]}
        write_document(document)
    else:
        write_out(f"{_sentence(summary)}\n")
        for remark in _remarks(summary):
            emit(f"memest: {remark}.")
        write_out(f"kept in {path}\n")
    return 0 if len(summary.measurements) == summary.count_good() else ExitCode.FAILURE


@shows(without=("ascii_only",))
def verify(
    *,
    output: Output,
    device: DeviceOption = None,
    store: StoreOption = None,
    only: OnlyOption = None,
    profile: Annotated[
        str | None,
        value_flag("--calibration", "FILE", "The calibration whose bounds count."),
    ] = None,
    max_batch: Annotated[
        int,
        value_flag(
            "--max-batch",
            "N",
            "How many setups are tried at their largest batch and at one more.",
            default=True,
        ),
    ] = 6,
    budget: BudgetOption = None,
    timeout: TimeoutOption = 300.0,
) -> int:
    """Do predictions keep their word: runs capped at their upper bound, and at smaller cards.

    Takes the cases of a store that were measured without running out of memory, and runs them
    again in no more memory than memest says they need at most; then at the sizes of smaller cards,
    where the verdict says what should happen; then some at their largest batch, and at one more.
    For example: memest calibrate verify --budget 600
    """
    from memest.calibration.running.verify import verify_store

    command = shlex.join(["memest", *sys.argv[1:]])
    with silence(debug=output.debug), open_store(store) as measurement_store:
        pattern = _pattern(only)
        with _progress_lines(output) as tell:
            outcome = verify_store(
                measurement_store,
                _device(device),
                pattern=pattern,
                profile=profile,
                boundaries=max_batch,
                command=command,
                timeout=timeout,
                budget=budget,
                tell=tell,
            )
    if output.as_json:
        write_document(outcome.to_dict())
    else:
        write_out(f"{outcome.text()}\n")
    return 0 if outcome.kept_its_word else ExitCode.FAILURE


def _device(name: str | None) -> str:
    """The device that was named; a GPU where none was, for that is what is to be calibrated."""
    if name is None:
        return "cuda"
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise ConfigError(f"--device {name!r} is not known: write cuda, cuda:1 or cpu.")
    return name


def _pattern(only: str | None) -> re.Pattern[str]:
    return check_pattern("--only", only or ".")


def _matching(cases: Sequence[Case], only: str | None) -> list[Case]:
    pattern = _pattern(only)
    matching = [case for case in cases if pattern.search(case.id) or pattern.search(case.model)]
    if not matching:
        names = ", ".join(case.id for case in cases[:3])
        raise ConfigError(f"--only {only!r} matches no case. Names look like: {names}.")
    return matching


_BEFORE = "measured before, or being measured"


@contextlib.contextmanager
def _progress_lines(output: Output) -> Iterator[Callable[[Progress], None]]:
    """A line for each case, on a terminal also the one under way and the time left; on stderr."""
    if output.silent:
        yield lambda _: None
        return
    skipped = 0
    with output.progress() as show:

        def tell(progress: Progress) -> None:
            nonlocal skipped
            skipped += progress.skipped
            last = progress.number == progress.total
            if skipped and (last or not progress.skipped):  # all in a row in one line
                over = progress.number if progress.skipped else progress.number - 1
                emit(f"{over}/{progress.total} cases: {skipped} {_BEFORE}")
                skipped = 0
            _line(progress)
            if show is not None:
                time_left = _time(progress.seconds_left)
                show(f"{progress.number}/{progress.total} {progress.case.id} {time_left}".rstrip())

        yield tell


def _line(progress: Progress) -> None:
    if progress.measurement is not None:
        time_left = f", {text}" if (text := _time(progress.seconds_left)) else ""
        emit(f"{progress.number}/{progress.total} {_outcome_line(progress.measurement)}{time_left}")


def _outcome_line(measurement: Measurement) -> str:
    """One case in one line."""
    text = f"{measurement.case.id}: {measurement.status.value}"
    peaks = [
        f"{name} {format_size(value)}"
        for name in ("allocated", "reserved", "device")
        if (value := getattr(measurement, f"{name}_bytes")) is not None
    ]
    if peaks:
        text += f", {', '.join(peaks)}"
    if measurement.failure is not None:
        first = (measurement.failure.message.splitlines() or [""])[0]
        text += f" ({measurement.failure.phase}: {first[:160]})"
    return f"{text}, {measurement.seconds:.1f} s"


def _time(seconds: float | None) -> str:
    if seconds is None or seconds < 1:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} left"


def _sentence(summary: Summary) -> str:
    environment = summary.environment
    counts = [
        f"{number} {word}"
        for status, word in _STATUS_WORDS
        if (number := sum(1 for m in summary.measurements if m.status.value == status))
    ]
    text = f"{environment.gpu}, torch {environment.torch}: "
    text += ", ".join(counts) if counts else "nothing new measured"
    if summary.num_skipped:
        text += f"; {summary.num_skipped} {_BEFORE}"
    if summary.num_left:
        text += f"; {summary.num_left} left for another time (--budget)"
    return f"{text}; {summary.seconds:.0f} s"


def _remarks(summary: Summary) -> list[str]:
    """What is special about the machine, and who else was on the card."""
    remarks = [note.rstrip(".") for note in summary.environment.notes]
    shared_readings = [
        (m, reading)
        for m in summary.measurements
        for reading in m.readings[-1:]
        if reading.other_processes
    ]
    if shared_readings:
        others = max(reading.other_processes or 0 for _, reading in shared_readings)
        size = max((reading.other_bytes or 0 for _, reading in shared_readings), default=0)
        remarks.append(
            f"{len(shared_readings)} runs had other processes beside them on the card (up to "
            f"{others}, {format_size(size)}): memory they take changes what fits, not what a run "
            "needs"
        )
    return remarks


_STATUS_WORDS = (
    ("ok", "measured"),
    ("oom", "out of memory, which is a result"),
    ("failed", "failed"),
    ("crashed", "crashed"),
    ("timeout", "took too long"),
    ("interrupted", "interrupted"),
)


def _document(summary: Summary) -> dict[str, Any]:
    import dataclasses

    return {
        "environment": dataclasses.asdict(summary.environment),
        "measured": [
            {
                "run": m.run,
                "case": m.case.id,
                "status": m.status.value,
                "allocated_bytes": m.allocated_bytes,
                "reserved_bytes": m.reserved_bytes,
                "device_bytes": m.device_bytes,
            }
            for m in summary.measurements
        ],
        "skipped": summary.num_skipped,
        "left": summary.num_left,
        "seconds": summary.seconds,
    }
