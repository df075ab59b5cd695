"""``memest estimate`` and ``memest fits``."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from memest.cli.console import Output, write_out
from memest.cli.parameters import (
    AsciiFlag,
    DebugFlag,
    JsonFlag,
    NoColorFlag,
    QuietFlag,
    with_options,
)
from memest.errors import ConfigError
from memest.options import read_size, read_whole
from memest.setup import choose

if TYPE_CHECKING:
    from memest.report.text import By
    from memest.result import Estimate, GpuFit

__all__ = ["estimate", "fits", "silenced"]

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name of `memest models`, an id of the Hugging Face hub, a folder or config.json, "
        "or package.module:factory for any torch.nn.Module.",
        show_default=False,
    ),
]
_EXIT_CODES = {"fits": 0, "tight": 3, "does not fit": 4}


@contextlib.contextmanager
def silenced(*, debug: bool) -> Iterator[None]:
    """Keep warnings of other libraries off stderr: what matters comes back as a note."""
    if debug:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _answer(
    model: str, options: dict[str, Any], output: Output, *, debug: bool, max_batch: bool
) -> Estimate:
    # before anything slow: what can be wrong with the words themselves
    for name in ("gpu_memory", "device_context"):
        if name in options:
            read_size(name, options[name])
    from memest.estimator import estimate as predict

    with silenced(debug=debug), output.progress() as progress:
        return predict(model, max_batch=max_batch, progress=progress, **options)


def _depth(text: str | None, by: By | None) -> int | None:
    if text is None:
        return None
    depth = read_whole("--depth", text)
    if depth < 1:
        raise ConfigError(f"--depth {depth} is out of range: it must be at least 1.")
    if by is None or by.value != "layer":
        raise ConfigError("--depth is the depth of the tree of modules: add --by layer.")
    return depth


@with_options
def estimate(
    model: ModelArgument,
    *,
    options: dict[str, Any],
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
    json: JsonFlag = False,
    quiet: QuietFlag = False,
    no_color: NoColorFlag = False,
    ascii: AsciiFlag = False,  # noqa: A002 - the name of the option
    debug: DebugFlag = False,
) -> int:
    """Predict the GPU memory of a training run: peaks, breakdown, what fits.

    For example: memest estimate bert-large-uncased --batch 8 --fp16 --gpu rtx-3090
    """
    from memest.report.text import By, print_report, render
    from memest.report.words import verdict_sentence

    table: By | None = None if by is None else choose("--by", by, By)
    levels = _depth(depth, table)
    output = Output(color=not no_color, ascii_only=ascii, quiet=quiet or json)
    answer = _answer(model, options, output, debug=debug, max_batch=True)
    if json:
        write_out(f"{answer.to_json()}\n")
    elif quiet:
        write_out(f"{verdict_sentence(answer)}\n")
    else:
        console = output.console()
        if console.color_system is None:
            write_out(
                render(answer, by=table, depth=levels, width=console.width, ascii_only=output.plain)
            )
        else:
            print_report(answer, console, by=table, depth=levels, ascii_only=output.plain)
    return 0


def _asked(answer: Estimate) -> list[GpuFit]:
    assert answer.gpu is not None
    return [answer.gpu, *answer.common_gpus]


@with_options
def fits(
    model: ModelArgument,
    *,
    options: dict[str, Any],
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
    """
    if not options.get("gpu") and not options.get("gpu_memory"):
        raise ConfigError(
            "memest fits needs a GPU: name one, for example --gpu rtx-4090 (`memest gpus` lists "
            "them) or --gpu local, or give its memory, --gpu-memory 24GiB."
        )
    from memest.report.words import gpu_sentence, verdict_sentence

    output = Output(quiet=quiet or json)
    answer = _answer(model, options, output, debug=debug, max_batch=False)
    if json:
        write_out(f"{answer.to_json()}\n")
    elif not quiet:
        sentences = [verdict_sentence(answer)]
        sentences += [gpu_sentence(fit, answer.model.id) for fit in _asked(answer)[1:]]
        write_out("".join(f"{sentence}\n" for sentence in sentences))
    return max(_EXIT_CODES[fit.verdict.value] for fit in _asked(answer))
