"""``memest explain-oom``: what a message of PyTorch means, and what would have fitted."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Optional

import typer

from memest.cli.answering import silenced
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

__all__ = ["explain_oom"]


def _text(log: str) -> str:
    from memest.search.explain_oom import read_log

    if log != "-":
        # a message can be given as it is, in quotes
        return log if "out of memory" in log.lower() else read_log(log)
    if sys.stdin.isatty():
        raise ConfigError(
            "memest explain-oom - reads standard input, and nothing is sent there: memest "
            "explain-oom - < run.log, or name the log."
        )
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")


@with_options
def explain_oom(
    log: Annotated[
        str,
        typer.Argument(
            metavar="LOG",
            help="A log with the message of PyTorch, - for standard input, or the message itself "
            "in quotes.",
            show_default=False,
        ),
    ] = "-",
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="MODEL",
            help="What was trained, as for memest estimate, with the options of the run; left "
            "out, the message is explained alone.",
            show_default=False,
        ),
    ] = None,
    *,
    options: dict[str, Any],
    json: JsonFlag = False,
    quiet: QuietFlag = False,
    no_color: NoColorFlag = False,
    ascii: AsciiFlag = False,  # noqa: A002 - the name of the option
    debug: DebugFlag = False,
) -> int:
    """Explain an out-of-memory message: whose memory it was, where the run stopped, what fits.

    For example: memest explain-oom slurm-123.out gpt2 --batch 32 --seq-len 1024 --fp16
    """
    from memest.search.explain_oom import explain_oom as explain

    for name in ("gpu_memory", "device_context", "calibration"):
        if options.pop(name, None) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} has no place here: how much memory there was is what the message tells."
            )
    text = _text(log)
    output = Output(color=not no_color, ascii_only=ascii, quiet=quiet or json)
    with silenced(debug=debug), output.progress() as progress:
        answer = explain(text, model, progress=progress, **options)
    if json:
        write_out(f"{answer.to_json()}\n")
        return 0
    if quiet:
        relation = answer.relation
        sentences = answer.accounts[0].sentences if relation is None else relation.sentences
        write_out("".join(f"{sentence}\n" for sentence in sentences))
        return 0
    output.report(answer)
    return 0
