"""``memest estimate`` and ``memest fits``."""

from __future__ import annotations

from typing import Annotated, Any

from memest.cli.answering import run_estimate, run_fits
from memest.cli.console import Output
from memest.cli.flags import OUTPUT, VERDICT_ALONE, ModelArgument, shows, switch, value_flag
from memest.cli.parameters import with_options
from memest.readers.run_config import RunConfig

__all__ = ["estimate", "fits"]


@with_options
@shows(quiet=VERDICT_ALONE)
def estimate(
    model: ModelArgument,
    *,
    options: dict[str, Any],
    run: RunConfig | None,
    output: Output,
    explain: Annotated[
        bool,
        switch(
            "--explain",
            "Every value, and where it comes from. Flag, command, file, model config or "
            "default; and what of configurations is ignored or not modelled.",
            panel=OUTPUT,
        ),
    ] = False,
    by: Annotated[
        str | None,
        value_flag(
            "--by",
            "TABLE",
            "One table alone: category, layer or time.",
            panel=OUTPUT,
        ),
    ] = None,
    depth: Annotated[
        str | None,
        value_flag(
            "--depth",
            "N",
            "Levels of modules for --by layer; left out, down to the numbered layers.",
            panel=OUTPUT,
        ),
    ] = None,
    out: Annotated[
        str | None,
        value_flag(
            "--out",
            "FILE",
            "Write a file besides: .json, .csv, .html or .png. CSV has the parts of the device "
            "peak, PNG is a picture.",
            panel=OUTPUT,
        ),
    ] = None,
    snapshot: Annotated[
        str | None,
        value_flag(
            "--snapshot",
            "FILE",
            "Write the predicted run besides as torch.cuda.memory._dump_snapshot would "
            "(.pickle, or .json): PyTorch's memory_viz and `memest replay` open it.",
            panel=OUTPUT,
        ),
    ] = None,
    no_tips: Annotated[
        bool,
        switch(
            "--no-tips",
            "Leave out what would make it fit, which is looked for where it does not.",
            panel=OUTPUT,
        ),
    ] = False,
) -> int:
    """The GPU memory of a training run: peaks, breakdown, what fits.

    For example: memest estimate bert-large-uncased --batch 8 --fp16 --gpu rtx-3090, or with the
    configuration of the run, memest estimate run.yaml, or its launch command after --.
    """
    return run_estimate(
        str(model),
        options,
        output,
        run=run,
        explain=explain,
        by=by,
        depth=depth,
        out=out,
        snapshot=snapshot,
        tips=not no_tips,
    )


@with_options
@shows(quiet=VERDICT_ALONE)
def fits(
    model: ModelArgument,
    *,
    options: dict[str, Any],
    run: RunConfig | None,
    output: Output,
    fail_over: Annotated[
        str | None,
        value_flag(
            "--fail-over",
            "SIZE",
            "The device peak that the run may reach: 22GiB. As if it were the memory of a GPU, for "
            "the exit code. Needs no GPU, and counts besides one.",
            panel="GPU",
        ),
    ] = None,
) -> int:
    """Whether a run fits a GPU, and an exit code for scripts.

    Exit code 0: fits, 3: tight, or by releasing cache, 4: does not fit, 7: cannot say, because
    something is not priced. Several GPUs: the worst of them.
    For example: memest fits gpt2 --batch 8 --gpu t4 --fail-over 12GiB || exit 1
    """
    return run_fits(str(model), options, output, run=run, fail_over=fail_over)
