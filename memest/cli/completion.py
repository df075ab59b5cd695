"""``memest completion``: what a shell needs to complete commands, options and names."""

from __future__ import annotations

from typing import Annotated

import typer

from memest.cli.console import write_out
from memest.cli.parameters import DebugFlag
from memest.errors import ConfigError, closest

__all__ = ["completion"]

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_MEMEST_COMPLETE"
"""By its name Typer knows that a shell asks."""


def completion(
    shell: Annotated[
        str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)
    ],
    *,
    debug: DebugFlag = False,  # noqa: ARG001 - read before parsing
) -> int:
    """Print the completion script of a shell, to be put where it looks for such scripts.

    For example: memest completion bash > ~/.local/share/bash-completion/completions/memest
    """
    if shell not in _SHELLS:
        near = closest(shell, _SHELLS, limit=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"no completion for the shell {shell!r}.{hint} Legal: bash, zsh, fish.")
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name="memest", complete_var=_VARIABLE, shell=shell)
    write_out(f"{script}\n")
    return 0
