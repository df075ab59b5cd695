"""``memest validate``: predictions against measured runs."""

from __future__ import annotations

import contextlib
import json as json_module
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from memest.cli.answering import silenced
from memest.cli.console import Output, emit, write_out
from memest.cli.parameters import AsciiFlag, DebugFlag, JsonFlag, NoColorFlag
from memest.errors import ConfigError
from memest.files.texts import check_target

__all__ = ["validate"]

_FAILED = 1


def validate(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Case records, one JSON object a line; gzip where the name ends in .gz.",
            show_default=False,
        ),
    ],
    *,
    only: Annotated[
        str,
        typer.Option(
            "--only",
            metavar="TEXT",
            help="Records alone whose id, model, GPU, file or optimizer contains this.",
            show_default=False,
        ),
    ] = "",
    assume: Annotated[
        Optional[list[str]],  # noqa: UP045 - read at run time by every Typer we allow
        typer.Option(
            "--assume",
            metavar="FIELD=VALUE",
            help="Declare what records do not say, for example software.torch=2.1 or "
            "setup.seq_len=512; repeatable. The report names it.",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="Correct predictions with this calibration; else none is taken.",
            show_default=False,
        ),
    ] = None,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code",
            metavar="",
            help="Run the Python that records name for models, steps and losses of their own.",
            show_default=False,
        ),
    ] = False,
    out: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="FILE.html with plots, FILE.md or FILE.json, repeatable.",
            show_default=False,
        ),
    ] = None,
    json: JsonFlag = False,
    no_color: NoColorFlag = False,
    ascii: AsciiFlag = False,  # noqa: A002 - the name of the option
    debug: DebugFlag = False,
) -> int:
    """Score predictions on measured runs: errors, verdicts, worst cases with likely causes.

    Exit code 1 where no record could be scored. For example:
    memest validate measurements.jsonl --out report.html
    """
    from memest.calibration.validation.report import blocks
    from memest.calibration.validation.validate import SUFFIXES
    from memest.calibration.validation.validate import validate as score
    from memest.report.page import as_text

    for path in out or ():
        check_target(path, SUFFIXES)
    output = Output(color=not no_color, ascii_only=ascii, quiet=json)
    with silenced(debug=debug), _counter(output) as progress:
        validation_result = score(
            files,
            assume=_declared(assume or []),
            only=only,
            profile=None if profile is None else str(profile),
            trust_code=trust_code,
            progress=progress,
        )
    unwritten: OSError | None = None  # told when the scores are out
    for path in out or ():
        try:
            validation_result.save(path)
        except OSError as error:
            unwritten = unwritten or error
        else:
            emit(f"memest: written to {path}.")
    if json:
        write_out(f"{validation_result.to_json()}\n")
    elif not out or unwritten is not None:
        console = output.console()
        width = console.width if console.is_terminal else 100
        write_out(as_text(blocks(validation_result), width=width, ascii_only=output.plain))
    if unwritten is not None:
        raise unwritten
    return 0 if any(one.error is not None for one in validation_result.outcomes) else _FAILED


def _declared(texts: list[str]) -> dict[str, Any]:
    """Fields and values; a value that is JSON is taken as it is, anything else as text."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise ConfigError(
                f"--assume {text!r} declares nothing: write FIELD=VALUE, for example "
                "software.torch=2.1."
            )
        try:
            values[name.strip()] = json_module.loads(value)
        except ValueError:
            values[name.strip()] = value
        if name.startswith("software."):
            values[name.strip()] = value  # 2.10 is a version, and no number
    return values


@contextlib.contextmanager
def _counter(output: Output) -> Iterator[Callable[[int, int, str], None] | None]:
    """Says which record is at work, on a terminal."""
    if output.quiet or not sys.stderr.isatty():
        yield None
        return
    with output.progress() as show:
        assert show is not None
        yield lambda number, count, name: show(f"{number} of {count}: {name}")
