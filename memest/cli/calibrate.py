"""``memest calibrate``: its commands put together; ``show``, ``export``, ``import``, ``merge``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from memest.cli.calibrate_fit import fit, report
from memest.cli.calibrate_run import StoreOption, open_store, run, verify
from memest.cli.console import Output, emit, write_document, write_out
from memest.cli.exit_codes import ExitCode
from memest.cli.flags import argument, debuggable, shows, value_flag
from memest.cli.help_pages import HelpCommand, HelpGroup
from memest.errors import ConfigError
from memest.units import format_size

if TYPE_CHECKING:
    from memest.calibration.measurement import Measurement

__all__ = ["calibrate"]


@shows(without=("ascii_only",))
def show(
    *,
    output: Output,
    store: StoreOption = None,
    status: Annotated[
        str | None,
        value_flag("--status", "STATUS", "ok, oom, failed, crashed, timeout, ..."),
    ] = None,
) -> int:
    """What was measured: a row for each run. For example: memest calibrate show --status oom."""
    from memest.calibration.measurement import Status
    from memest.config.setup import choose

    wanted_status = None if status is None else choose("--status", status, Status)
    with open_store(store) as measurement_store:
        runs = [
            m
            for m in measurement_store.measurements()
            if wanted_status is None or m.status is wanted_status
        ]
        running, path = measurement_store.running(), measurement_store.path
    if output.as_json:
        document: dict[str, Any] = {"schema_version": 1, "store": str(path), "running": running}
        document["measurements"] = [m.to_dict() for m in runs]
        write_document(document)
        return 0
    _table(runs, output)
    emit(
        f"memest: {len(runs)} runs in {path}" + (f", {running} under way" if running else "") + "."
    )
    return 0


def _table(measurements: list[Measurement], output: Output) -> None:
    rows = [
        (
            m.case.id,
            m.environment.gpu if m.environment else "?",
            m.status.value,
            *(
                "" if value is None else format_size(value)
                for value in (m.allocated_bytes, m.reserved_bytes, m.device_bytes)
            ),
            f"{m.seconds:.1f}",
        )
        for m in measurements
    ]
    head = ("case", "GPU", "status", "allocated", "reserved", "device", "s")
    if rows:
        output.table(rows, head, ("left",) * 3 + ("right",) * 4)


@debuggable
def export(
    *,
    out: Annotated[
        Path | None,
        value_flag(
            "--out -o", "FILE", "Where to write, gzip where it ends in .gz; left out, stdout."
        ),
    ] = None,
    store: StoreOption = None,
) -> int:
    """All measurements as JSON lines: one case record for each counter of each run.

    Nothing is left out: failures and runs out of memory have their lines too. For example:
    memest calibrate export --out measurements.jsonl.gz
    """
    from memest.calibration.exchange import export_records, write_lines

    with open_store(store) as measurement_store:
        measurements = measurement_store.measurements()
    if out is None:
        for line in export_records(measurements):
            write_out(f"{line}\n")
        return 0
    count = write_lines(out, export_records(measurements))
    emit(f"memest: {len(measurements)} runs, {count} records written to {out}.")
    return 0


@shows(without=("colorless", "ascii_only"))
def import_(
    files: Annotated[list[Path], argument("FILE...", "What export wrote.")],
    *,
    output: Output,
    store: StoreOption = None,
) -> int:
    """Take over measurements from files. For example: memest calibrate import other.jsonl.gz."""
    from memest.calibration.exchange import read_measurements

    taken = []
    with open_store(store, create=True) as measurement_store:
        for path in files:
            measurements, problems = read_measurements(path)
            taken.append(_taken(path, measurement_store.add(measurements), problems))
            _tell(taken[-1], output)
        return _conclude(taken, measurement_store.path, output)


@shows(without=("colorless", "ascii_only"))
def merge(
    stores: Annotated[
        list[Path],
        argument("STORE...", "Other stores, left as they are."),
    ],
    *,
    output: Output,
    store: StoreOption = None,
) -> int:
    """Take over the measurements of other stores. For example: memest calibrate merge node2.db."""
    taken = []
    with open_store(store, create=True) as measurement_store:
        for path in stores:
            if path.resolve() == measurement_store.path.resolve():
                raise ConfigError(f"{path} is the store itself: name others.")
            with open_store(path) as other_store:
                measurements = other_store.measurements()
            taken.append(_taken(path, measurement_store.add(measurements), []))
            _tell(taken[-1], output)
        return _conclude(taken, measurement_store.path, output)


class _Taken(NamedTuple):
    """What came of a file or a store.

    Attributes:
        path: of it.
        new: runs that were taken over.
        known: runs that were there already.
        contradictions: runs that are there with another content, and were left as they are.
        problems: what could not be read, in words.
    """

    path: str
    new: int
    known: int
    contradictions: list[str]
    problems: list[str]


def _taken(path: Path, counts: tuple[int, int, list[str]], problems: list[str]) -> _Taken:
    new, known, contradictions = counts
    return _Taken(str(path), new, known, contradictions, problems)


def _tell(taken: _Taken, output: Output) -> None:
    """Say what came of a file."""
    path = taken.path
    if not output.as_json:
        known = f", {taken.known} there already" if taken.known else ""
        write_out(f"{path}: {taken.new} new{known}\n")
    for run_id in taken.contradictions:
        emit(f"memest: {path}: run {run_id} is there with another content; it was left as it is.")
    for problem in taken.problems:
        emit(f"memest: {path}: {problem}; passed over.")


def _conclude(taken: list[_Taken], store: Path, output: Output) -> int:
    """The document of all files, where one is asked for; returns the exit code."""
    if output.as_json:
        files = [one._asdict() for one in taken]
        write_document({"schema_version": 1, "store": str(store), "files": files})
    failed = any(one.contradictions or one.problems for one in taken)
    return ExitCode.FAILURE if failed else ExitCode.DONE


def calibrate() -> typer.Typer:
    """The group of commands."""
    group = typer.Typer(
        name="calibrate",
        help="Measure training steps here, and fit what theory leaves open.",
        cls=HelpGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    for name, function in (
        ("run", run),
        ("verify", verify),
        ("fit", fit),
        ("report", report),
        ("show", show),
        ("export", export),
        ("import", import_),
        ("merge", merge),
    ):
        group.command(name, cls=HelpCommand)(function)
    return group
