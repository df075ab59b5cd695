"""``memest compare``."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer

from memest.cli.answering import check_sizes, silenced
from memest.cli.console import Output, write_out
from memest.cli.parameters import (
    AsciiFlag,
    DebugFlag,
    JsonFlag,
    NoColorFlag,
    with_options,
)
from memest.readers.run_config import RunConfig

__all__ = ["compare"]


@with_options
def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="One model to compare with itself under other options (--vs), or several models "
            "to compare under the same ones, or several configurations; references as for "
            "`memest estimate`.",
            show_default=False,
        ),
    ],
    *,
    options: dict[str, Any],
    runs: tuple[RunConfig, ...] = (),
    vs: Annotated[
        Optional[list[str]],  # noqa: UP045 - read at run time by every Typer we allow
        typer.Option(
            "--vs",
            metavar="CHANGES",
            help="What differs from the options: fp16, checkpointing=full, 'grad-accum=4 batch=2'. "
            "Repeatable; each one is a column.",
            rich_help_panel="Comparison",
        ),
    ] = None,
    json: JsonFlag = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", metavar="", help="One sentence a column.", rich_help_panel="Output"
        ),
    ] = False,
    no_color: NoColorFlag = False,
    ascii: AsciiFlag = False,  # noqa: A002 - the name of the option
    debug: DebugFlag = False,
) -> int:
    """Runs side by side: peaks, rows, what each change buys, and why.

    For example: memest compare bert-large-uncased --batch 4 --vs fp16 --vs 'batch=1 grad-accum=4'
    """
    check_sizes(options)
    from memest.report.tables import change_sentence
    from memest.search.compare import compare as set_side_by_side

    output = Output(color=not no_color, ascii_only=ascii, quiet=quiet or json)
    with silenced(debug=debug), output.progress() as progress:
        answer = set_side_by_side(
            list(runs or models), list(vs or ()), progress=progress, **options
        )
    if json:
        write_out(f"{answer.to_json()}\n")
        return 0
    if quiet:
        first, *others = answer.scenarios
        write_out("".join(f"{change_sentence(scenario, first)}\n" for scenario in others))
        return 0
    output.report(answer)
    return 0
