"""``memest calibrate``: the commands, put together."""

from __future__ import annotations

import typer

from memest.cli.calibrate_fit import fit, report
from memest.cli.calibrate_records import export, import_, merge, show
from memest.cli.calibrate_run import run, verify

__all__ = ["calibrate"]


def calibrate() -> typer.Typer:
    """The group of commands."""
    group = typer.Typer(
        name="calibrate",
        help="Measure real training steps on this machine, and fit what theory leaves open.",
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    for name, function in (
        ("run", run), ("verify", verify), ("fit", fit), ("report", report), ("show", show),
        ("export", export), ("import", import_), ("merge", merge),
    ):  # fmt: skip
        group.command(name)(function)
    return group
