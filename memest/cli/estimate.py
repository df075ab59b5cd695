"""``memest estimate`` and ``memest fits``."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer

from memest.cli.answering import run_estimate, run_fits
from memest.cli.parameters import (
    AsciiFlag,
    DebugFlag,
    JsonFlag,
    NoColorFlag,
    QuietFlag,
    with_options,
)
from memest.readers.run_config import RunConfig

__all__ = ["ModelArgument", "estimate", "fits"]

ModelArgument = Annotated[
    Optional[str],  # noqa: UP045 - a configuration may name it
    typer.Argument(
        metavar="MODEL",
        help="A name of `memest models`, an id of the Hugging Face hub, a folder or config.json, "
        "or package.module:factory for any torch.nn.Module; or a configuration that names it.",
        show_default=False,
    ),
]


@with_options
def estimate(
    model: ModelArgument,
    *,
    options: dict[str, Any],
    run: RunConfig,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            metavar="",
            help="Every value with where it comes from: flag, command, file, model config or "
            "default; and what of configurations is ignored or not modelled.",
            rich_help_panel="Output",
        ),
    ] = False,
    by: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--by",
            metavar="TABLE",
            help="One table in place of the whole report: category, layer or time.",
            rich_help_panel="Output",
        ),
    ] = None,
    depth: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--depth",
            metavar="N",
            help="Levels of modules for --by layer; left out, down to the numbered layers.",
            rich_help_panel="Output",
        ),
    ] = None,
    out: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write a file besides; its suffix decides: .json, .csv (the parts of the device "
            "peak), .html or .png (a picture).",
            rich_help_panel="Output",
        ),
    ] = None,
    snapshot: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--snapshot",
            metavar="FILE",
            help="Write the predicted run besides as torch.cuda.memory._dump_snapshot would "
            "(.pickle, or .json): PyTorch's memory_viz and `memest replay` open it.",
            rich_help_panel="Output",
        ),
    ] = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
    no_color: NoColorFlag = False,
    ascii: AsciiFlag = False,  # noqa: A002 - the name of the option
    debug: DebugFlag = False,
) -> int:
    """Predict the GPU memory of a training run: peaks, breakdown, what fits.

    For example: memest estimate bert-large-uncased --batch 8 --fp16 --gpu rtx-3090, or with the
    configuration of the run, memest estimate run.yaml, or its launch command after --.
    """
    return run_estimate(
        str(model),
        options,
        run=run,
        explain=explain,
        by=by,
        depth=depth,
        out=out,
        snapshot=snapshot,
        json=json,
        quiet=quiet,
        no_color=no_color,
        ascii=ascii,
        debug=debug,
    )


@with_options
def fits(
    model: ModelArgument,
    *,
    options: dict[str, Any],
    run: RunConfig,
    fail_over: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--fail-over",
            metavar="SIZE",
            help="The device peak that the run may reach, for example 22GiB: as if it were the "
            "memory of a GPU, for the exit code. Needs no GPU, and counts besides one.",
            rich_help_panel="GPU",
        ),
    ] = None,
    json: JsonFlag = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", metavar="", help="The exit code alone.", rich_help_panel="Output"
        ),
    ] = False,
    no_color: NoColorFlag = False,  # noqa: ARG001 - the same options everywhere
    ascii: AsciiFlag = False,  # noqa: A002, ARG001 - a sentence is plain anyway
    debug: DebugFlag = False,
) -> int:
    """Whether a run fits a GPU: one sentence, and an exit code for scripts.

    Exit code 0: fits, 3: tight, 4: does not fit. Several GPUs: the worst of them.
    For example: memest fits gpt2 --batch 8 --gpu t4 --fail-over 12GiB || exit 1
    """
    return run_fits(
        str(model), options, run=run, fail_over=fail_over, json=json, quiet=quiet, debug=debug
    )
