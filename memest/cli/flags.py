"""How options of commands are declared, and those that say how an answer is put out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from memest.cli.console import Output

__all__ = [
    "OUTPUT",
    "VERDICT_ALONE",
    "ModelArgument",
    "argument",
    "debuggable",
    "shows",
    "switch",
    "value_flag",
    "with_signature",
]

OUTPUT = "Output"
"""The panel of a help that has what is written and how."""
VERDICT_ALONE = "The verdict sentence alone."


def value_flag(
    flags: str, metavar: str, help_text: str, *, panel: str | None = None, default: bool = False
) -> Any:
    """An option with a value.

    Args:
        flags: its spellings, parted by blanks.
        metavar: what stands for the value.
        help_text: its help.
        panel: of the help.
        default: whether the help shows the default.
    """
    return typer.Option(
        *flags.split(),
        metavar=metavar,
        help=help_text,
        rich_help_panel=panel,
        show_default=default,
    )


def switch(flags: str, help_text: str, *, panel: str | None = None) -> Any:
    """An option without a value, as :func:`value_flag` declares one that has a value."""
    return typer.Option(*flags.split(), metavar="", help=help_text, rich_help_panel=panel)


def argument(metavar: str, help_text: str) -> Any:
    """What is named without a flag."""
    return typer.Argument(metavar=metavar, help=help_text, show_default=False)


ModelArgument = Annotated[
    str | None,  # a configuration may name it
    argument(
        "MODEL",
        "A name of `memest models` or the Hugging Face hub, or a script or configuration. A folder "
        "or config.json too, and package.module:factory for any torch.nn.Module.",
    ),
]
_FLAGS = {
    "as_json": ("--json", "One JSON document on stdout."),
    "quiet": ("--quiet -q", VERDICT_ALONE),
    "colorless": ("--no-color", "No colours; NO_COLOR does it too."),
    "ascii_only": ("--ascii", "Plain ASCII characters."),
    "debug": ("--debug", "Show the traceback of an error."),
}
"""Of each part of :class:`Output` its flag and its help."""


def shows(
    *, quiet: str | None = None, without: Sequence[str] = ()
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the flags of its output, as one parameter ``output``.

    Who calls the command from Python may give ``output`` in their place.

    Args:
        quiet: help of ``--quiet``; None where there is none.
        without: parts of :class:`Output` that have no flag here.
    """
    left_out = (*without, *(("quiet",) if quiet is None else ()))
    names = [name for name in _FLAGS if name not in left_out]

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        signature = inspect.signature(function, eval_str=True)

        def command(*, output: Output | None = None, **values: Any) -> int:
            given = {name: values.pop(name) for name in names}
            if "output" in signature.parameters:
                values["output"] = Output(**given) if output is None else output
            return function(**values)

        flags = []
        for name in names:
            spellings, help_text = _FLAGS[name]
            option = switch(
                spellings, quiet if name == "quiet" and quiet else help_text, panel=OUTPUT
            )
            kind = Annotated[bool, option]
            flags.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind
                )
            )
        parameters = [
            parameter for parameter in signature.parameters.values() if parameter.name != "output"
        ]
        return with_signature(
            command, function, signature.replace(parameters=[*parameters, *flags])
        )

    return decorate


debuggable = shows(without=("as_json", "colorless", "ascii_only"))
"""For a command that has no answer to put out; ``--debug`` is read before parsing."""


def with_signature(
    command: Callable[..., int], function: Callable[..., int], signature: inspect.Signature
) -> Callable[..., int]:
    """A command under another's name and help, with a signature of its own for Typer."""
    command.__signature__ = signature  # type: ignore[attr-defined]
    annotations = {p.name: p.annotation for p in signature.parameters.values()}
    command.__annotations__ = annotations | {"return": int}
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    return command
