"""A launch command after ``--``, as an option that Typer takes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

__all__ = ["with_launch"]

_COMMANDS = ("estimate", "fits", "max-batch", "compare", "sweep", "stages", "advise", "explain-oom")


def with_launch(words: Sequence[str]) -> list[str]:
    """What follows ``--`` as the value of ``--launch``, where it is a command.

    One word alone stays what it always was: a model whose name looks like an option.

    Example:
        >>> with_launch(["estimate", "--json", "--", "torchrun", "train.py"])
        ['estimate', '--json', '--launch=torchrun train.py']
    """
    words = list(words)
    if not words or words[0] not in _COMMANDS or "--" not in words:
        return words
    at = words.index("--")
    if len(words) - at <= 2:
        return words
    return [*words[:at], f"--launch={shlex.join(words[at + 1 :])}"]
