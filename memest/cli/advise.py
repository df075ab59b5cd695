"""``memest advise``."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer

from memest.cli.answering import check_sizes, silenced
from memest.cli.console import Output, write_out
from memest.cli.estimate import ModelArgument
from memest.cli.parameters import (
    AsciiFlag,
    DebugFlag,
    JsonFlag,
    NoColorFlag,
    QuietFlag,
    with_options,
)
from memest.errors import ConfigError
from memest.report.result import Verdict

__all__ = ["advise"]

_EXIT_CODES = {Verdict.FITS: 0, Verdict.TIGHT: 3}
_DOES_NOT_FIT = 4


@with_options
def advise(
    model: ModelArgument,
    *,
    options: dict[str, Any],
    effective_batch: Annotated[
        Optional[str],  # noqa: UP045 - read at run time by every Typer we allow
        typer.Option(
            "--effective-batch",
            "-n",
            metavar="N",
            help="Samples of one optimizer step: micro-batch times accumulation.",
            rich_help_panel="Plan",
        ),
    ] = None,
    any_precision: Annotated[
        bool,
        typer.Option(
            "--any-precision",
            metavar="",
            help="Use bf16 or fp16 autocast wherever the GPU has it and it is faster. Otherwise "
            "the precision asked for is kept unless nothing surely fits with it.",
            rich_help_panel="Plan",
        ),
    ] = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
    no_color: NoColorFlag = False,
    ascii: AsciiFlag = False,  # noqa: A002 - the name of the option
    debug: DebugFlag = False,
) -> int:
    """Ways to train with an effective batch on a GPU: those that fit, the fastest first.

    Exit code 0: a plan fits, 3: the best one is tight, 4: nothing fits.
    For example: memest advise bert-large-uncased --gpu rtx-3090 --effective-batch 64
    """
    if effective_batch is None:
        raise ConfigError(
            "memest advise needs the samples of one optimizer step: add for example "
            "--effective-batch 64."
        )
    check_sizes(options)
    from memest.report.tables import advice_sentence
    from memest.search.advise import advise as plan

    output = Output(color=not no_color, ascii_only=ascii, quiet=quiet or json)
    with silenced(debug=debug), output.progress() as progress:
        answer = plan(
            model,
            effective_batch=effective_batch,
            any_precision=any_precision,
            progress=progress,
            **options,
        )
    if json:
        write_out(f"{answer.to_json()}\n")
    elif quiet:
        write_out(f"{advice_sentence(answer)}\n")
    else:
        output.report(answer)
    return _EXIT_CODES.get(answer.verdict, _DOES_NOT_FIT)
