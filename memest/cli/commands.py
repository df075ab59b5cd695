"""The commands, put together as Typer wants them."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import typer

from memest.cli.advise import advise
from memest.cli.app import app
from memest.cli.cache import cache
from memest.cli.calibrate import calibrate
from memest.cli.compare import compare
from memest.cli.console import write_out
from memest.cli.env import env
from memest.cli.estimate import estimate, fits
from memest.cli.explain_growth import explain_growth
from memest.cli.explain_oom import explain_oom
from memest.cli.gpus import gpus
from memest.cli.help import completion, show_help
from memest.cli.help_pages import HelpCommand, HelpGroup
from memest.cli.max_batch import max_batch
from memest.cli.mcp import mcp
from memest.cli.models import models
from memest.cli.read import read
from memest.cli.replay import replay
from memest.cli.selftest import selftest
from memest.cli.stages import stages
from memest.cli.sweep import sweep
from memest.cli.validate import validate
from memest.config.installed import DISTRIBUTION

__all__ = ["build"]


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        write_out(f"memest {version(DISTRIBUTION)}\n")
        raise typer.Exit(0)


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            callback=_show_version,
            is_eager=True,
            help="Version of memest.",
        ),
    ] = False,
) -> None:
    """How much GPU memory a PyTorch training run will take, before it runs."""


@functools.cache
def build() -> Any:
    """The command as Typer makes it; once a process, because making it takes 0.2 s."""
    root = typer.Typer(
        name="memest",
        cls=HelpGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    root.callback()(_root)
    for function in (
        estimate,
        fits,
        max_batch,
        compare,
        advise,
        sweep,
        stages,
        explain_oom,
        explain_growth,
        read,
        replay,
        validate,
        models,
        gpus,
        app,
        mcp,
        cache,
        env,
        selftest,
        completion,
    ):
        name = function.__name__.replace("_", "-")
        root.command(name, cls=HelpCommand)(function)
    root.command("help", cls=HelpCommand)(show_help)
    root.add_typer(calibrate())
    return typer.main.get_command(root)
