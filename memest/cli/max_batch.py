"""``memest max-batch``."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer

from memest.cli.answering import silenced
from memest.cli.console import Output, write_out
from memest.cli.estimate import ModelArgument
from memest.cli.parameters import (
    AsciiFlag,
    DebugFlag,
    JsonFlag,
    NoColorFlag,
    with_options,
)

__all__ = ["max_batch"]

_NONE_FITS = 4


@with_options
def max_batch(
    model: ModelArgument,
    *,
    options: dict[str, Any],
    of: Annotated[
        str,
        typer.Option(
            "--of",
            metavar="SIZE",
            help="What to look for: batch, seq-len (the longest samples at the batch given) or "
            "image-size. Default: batch.",
            rich_help_panel="Search",
            show_default=False,
        ),
    ] = "batch",
    effective_batch: Annotated[
        Optional[str],  # noqa: UP045 - read at run time by every Typer we allow
        typer.Option(
            "--effective-batch",
            "-n",
            metavar="N",
            help="Samples of one optimizer step: say how many micro-steps of which micro-batch "
            "reach them.",
            rich_help_panel="Search",
        ),
    ] = None,
    json: JsonFlag = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            metavar="",
            help="The number alone, a line for each GPU.",
            rich_help_panel="Output",
        ),
    ] = False,
    no_color: NoColorFlag = False,
    ascii: AsciiFlag = False,  # noqa: A002 - the name of the option
    debug: DebugFlag = False,
) -> int:
    """The largest batch (or sequence length) that fits a GPU, and memory over sizes.

    Exit code 0: it is at least 1, 4: not even 1 runs. Several GPUs: the worst of them.
    For example: memest max-batch bert-large-uncased --fp16 --gpu rtx-3090
    """
    from memest.search.max_batch import max_batch as search

    output = Output(color=not no_color, ascii_only=ascii, quiet=quiet or json)
    with silenced(debug=debug), output.progress() as progress:
        answer = search(model, of=of, effective_batch=effective_batch, progress=progress, **options)
    if json:
        write_out(f"{answer.to_json()}\n")
    elif quiet:
        write_out("".join(f"{one.largest}\n" for one in answer.answers))
    else:
        output.report(answer)
    return _NONE_FITS if any(one.largest == 0 for one in answer.answers) else 0
