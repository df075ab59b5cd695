"""``memest calibrate``: its commands put together; ``show``, ``export``, ``import``, ``merge``."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from memest.cli.calibrate_fit import fit, report
from memest.cli.calibrate_run import StoreOption, open_store, run, verify
from memest.cli.console import Output, emit, write_out
from memest.cli.parameters import DebugFlag, JsonFlag, NoColorFlag
from memest.errors import ConfigError
from memest.units import format_size

if TYPE_CHECKING:
    from memest.calibration.measurement import Measurement

__all__ = ["calibrate"]

_FAILED = 1


def show(
    *,
    store: StoreOption = None,
    status: Annotated[
        Optional[str],  # noqa: UP045 - read at run time by every Typer we allow
        typer.Option("--status", metavar="STATUS", help="ok, oom, failed, crashed, timeout, ..."),
    ] = None,
    json: JsonFlag = False,
    no_color: NoColorFlag = False,
    debug: DebugFlag = False,  # noqa: ARG001 - read before parsing
) -> int:
    """What was measured: a row for each run. For example: memest calibrate show --status oom."""
    from memest.calibration.measurement import Status
    from memest.config.setup import choose

    wanted = None if status is None else choose("--status", status, Status)
    with open_store(store) as kept:
        runs = [m for m in kept.measurements() if wanted is None or m.status is wanted]
        running, path = kept.running(), kept.path
    if json:
        document: dict[str, Any] = {"schema_version": 1, "store": str(path), "running": running}
        document["measurements"] = [m.to_dict() for m in runs]
        write_out(f"{json_module.dumps(document, indent=2)}\n")
        return 0
    _table(runs, Output(color=not no_color))
    emit(
        f"memest: {len(runs)} runs in {path}" + (f", {running} under way" if running else "") + "."
    )
    return 0


def _table(measurements: list[Measurement], output: Output) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for side in ("left", "left", "left", "right", "right", "right", "right"):
        table.add_column(justify=side, overflow="fold")
    head = ("case", "GPU", "status", "allocated", "reserved", "device", "s")
    table.add_row(*(Text(title, style="dim") for title in head))
    for m in measurements:
        sizes = [
            "" if value is None else format_size(value)
            for value in (m.allocated_bytes, m.reserved_bytes, m.device_bytes)
        ]
        gpu = m.environment.gpu if m.environment else "?"
        row = (m.case.id, gpu, m.status.value, *sizes, f"{m.seconds:.1f}")
        table.add_row(*map(Text, row))
    if measurements:
        output.show(table)


def export(
    *,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Where to write, gzip where it ends in .gz; left out, stdout.",
            show_default=False,
        ),
    ] = None,
    store: StoreOption = None,
    debug: DebugFlag = False,  # noqa: ARG001
) -> int:
    """All measurements as JSON lines: one case record for each counter of each run.

    Nothing is left out: failures and runs out of memory have their lines too. For example:
    memest calibrate export --out measurements.jsonl.gz
    """
    from memest.calibration.exchange import export_records, write_lines

    with open_store(store) as kept:
        measurements = kept.measurements()
    if out is None:
        for line in export_records(measurements):
            write_out(f"{line}\n")
        return 0
    count = write_lines(out, export_records(measurements))
    emit(f"memest: {len(measurements)} runs, {count} records written to {out}.")
    return 0


def import_(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="What export wrote.", show_default=False)
    ],
    *,
    store: StoreOption = None,
    debug: DebugFlag = False,  # noqa: ARG001
) -> int:
    """Take over measurements from files. For example: memest calibrate import other.jsonl.gz."""
    from memest.calibration.exchange import read_measurements

    bad = 0
    with open_store(store, create=True) as kept:
        for path in files:
            measurements, problems = read_measurements(path)
            bad += _added(path, kept.add(measurements), problems)
    return _FAILED if bad else 0


def merge(
    stores: Annotated[
        list[Path],
        typer.Argument(
            metavar="STORE...", help="Other stores, left as they are.", show_default=False
        ),
    ],
    *,
    store: StoreOption = None,
    debug: DebugFlag = False,  # noqa: ARG001
) -> int:
    """Take over the measurements of other stores. For example: memest calibrate merge node2.db."""
    bad = 0
    with open_store(store, create=True) as kept:
        for path in stores:
            if path.resolve() == kept.path.resolve():
                raise ConfigError(f"{path} is the store itself: name others.")
            with open_store(path) as other:
                measurements = other.measurements()
            bad += _added(path, kept.add(measurements), [])
    return _FAILED if bad else 0


def _added(path: Path, counts: tuple[int, int, list[str]], problems: list[str]) -> int:
    """Say what came of a file; returns how much of it was not taken."""
    new, same, contradictions = counts
    text = f"{path}: {new} new"
    if same:
        text += f", {same} there already"
    write_out(f"{text}\n")
    for run_id in contradictions:
        emit(f"memest: {path}: run {run_id} is there with another content; it was left as it is.")
    for problem in problems:
        emit(f"memest: {path}: {problem}; passed over.")
    return len(contradictions) + len(problems)


def calibrate() -> typer.Typer:
    """The group of commands."""
    group = typer.Typer(
        name="calibrate",
        help="Measure real training steps on this machine, and fit what theory leaves open.",
        rich_markup_mode="rich",
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
        group.command(name)(function)
    return group
