"""``memest help`` and ``memest completion``: pages on topics, scripts for shells."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from memest.cli.console import write_out
from memest.cli.flags import argument, debuggable
from memest.cli.help_pages import contents
from memest.cli.layout import paragraph, rows, screen_width
from memest.cli.topics import TOPICS, find_topic
from memest.errors import ConfigError, closest, not_legal

__all__ = ["completion", "help_page", "show_help"]

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_MEMEST_COMPLETE"
"""By its name Typer knows that a shell asks."""


def help_page(root: Any, word: str | None) -> str:
    """The page of a topic, or the list of all.

    Args:
        root: the command line as Typer makes it.
        word: a topic, by any of its names; None for the list.

    Raises:
        ConfigError: no topic.
    """
    if word is None:
        return contents(root, "memest", with_topics=True)
    name = find_topic(word)
    if name is not None:
        topic, width = TOPICS[name], screen_width()
        parts = [
            paragraph(part, width) if isinstance(part, str) else rows(part, width)
            for part in topic.parts
        ]
        return "\n".join([paragraph(f"{name}: {topic.title}", width), *parts])
    words = [
        *root.commands,
        *(each for name, x in TOPICS.items() for each in (name, *x.also.split())),
    ]
    suggestions = closest(word, words)
    hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
    raise ConfigError(
        f"there is no command and no topic {word!r}.{hint} `memest help` lists them all."
    )


@debuggable
def show_help(
    context: typer.Context,
    topic: Annotated[
        str | None,
        argument("TOPIC", "A command, or a topic; left out, the list."),
    ] = None,
) -> int:
    """Pages on commands, and on ideas such as reserved, tight or ZeRO.

    For example: memest help estimate, memest help tight
    """
    root: Any = context.find_root().command
    if topic in root.commands:
        root.main(args=[topic, "--help"], prog_name="memest", standalone_mode=False)
    else:
        write_out(help_page(root, topic))
    return 0


@debuggable
def completion(
    shell: Annotated[str, argument("SHELL", "bash, zsh or fish.")],
) -> int:
    """Print the completion script of a shell. It is put where the shell looks for them.

    For example: memest completion bash > ~/.local/share/bash-completion/completions/memest
    """
    if shell not in _SHELLS:
        raise not_legal(f"the shell {shell!r}", shell, _SHELLS, state="has no completion here")
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name="memest", complete_var=_VARIABLE, shell=shell)
    write_out(f"{script}\n")
    return 0
