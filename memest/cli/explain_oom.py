"""``memest explain-oom``: what a message of PyTorch means, and what would have fitted."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

from memest.cli.console import Output
from memest.cli.flags import VERDICT_ALONE, argument, shows
from memest.cli.parameters import with_options
from memest.errors import ConfigError

__all__ = ["explain_oom"]


def _text(log: str) -> str:
    from memest.report.oom_elsewhere import ran_out_elsewhere
    from memest.search.explain_oom import read_log

    if log != "-":
        # a message can be given as it is, in quotes
        is_message = "out of memory" in log.lower() or ran_out_elsewhere(log) is not None
        there = os.path.isfile(log)  # noqa: PTH113
        if not there and not is_message and ": " in log:
            raise ConfigError(
                f"{log!r} is no file, and there is no out-of-memory message in this text: give the "
                "log, or the message itself, 'CUDA out of memory. Tried to allocate ...'."
            )
        return log if is_message and not there else read_log(log)
    if sys.stdin.isatty():
        raise ConfigError(
            "memest explain-oom - reads standard input, and nothing is sent there: memest "
            "explain-oom - < run.log, or name the log."
        )
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")


@with_options
@shows(quiet=VERDICT_ALONE)
def explain_oom(
    log: Annotated[
        str,
        argument(
            "LOG",
            "A log with the message of PyTorch, - for standard input, or the message itself "
            "in quotes.",
        ),
    ] = "-",
    model: Annotated[
        str | None,
        argument(
            "MODEL",
            "What was trained, as for memest estimate, with the options of the run; left "
            "out, the message is explained alone.",
        ),
    ] = None,
    *,
    options: dict[str, Any],
    output: Output,
) -> int:
    """Explain an out-of-memory message: whose memory it was, what fits.

    For example: memest explain-oom slurm-123.out gpt2 --batch 32 --seq-len 1024 --fp16
    """
    from memest.search.explain_oom import explain_oom as explain

    for name in ("gpu_memory", "device_context", "calibration"):
        if options.pop(name, None) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} has no place here: how much memory there was is what the message tells."
            )
    log_text = _text(log)
    with output.working() as progress:
        answer = explain(log_text, model, progress=progress, **options)
    output.put(answer, lambda: (answer.relation or answer.accounts[0]).sentences)
    return 0
