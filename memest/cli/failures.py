"""What went wrong, as a kind, one paragraph and an exit code."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from memest.cli.argv import ALL, ESTIMATING, SWITCHED_OFF, closest_flags
from memest.cli.exit_codes import (
    HOST_MEMORY,
    OPERATING_SYSTEM,
    UNEXPECTED,
    USAGE,
    ExitCode,
    kind_of,
)
from memest.config.meant import what_says
from memest.config.options import HARMLESS_ARGUMENTS
from memest.config.packages import pinned
from memest.errors import MemestError, MissingDependencyError, closest

__all__ = ["error_document", "explain"]

_MODEL_FLAGS = frozenset({"--model", "--model-name", "--model-name-or-path"})


def _explain_usage(error: Any, typed: Sequence[str]) -> str:
    """One paragraph of what Typer's parser has to say."""
    path = getattr(getattr(error, "ctx", None), "command_path", "")
    if not path:  # the parser itself knows no command
        path = " ".join(["memest", *(word for word in typed[:1] if word in ESTIMATING)])
    estimating = path.rpartition(" ")[2] in ESTIMATING
    message = error.format_message().strip()
    flag = getattr(error, "option_name", "")
    if message.startswith("No such option"):
        message = _no_such_option(flag, error.ctx, estimating=estimating)
    elif message.startswith("Got unexpected extra argument"):
        words = message.partition("(s) (")[2].removesuffix(")").split()
        message = _too_many(words, typed, estimating=estimating)
    elif message.endswith("requires an argument.") and flag:
        message = f"{flag} needs a value."
    elif message and message[-1] not in ".?!":
        message += "."
    return f"{message} `{path} --help{f' {ALL}' if estimating else ''}` has all options."


def _too_many(words: Sequence[str], typed: Sequence[str], *, estimating: bool) -> str:
    """What to say of words behind all that a command takes."""
    problem = f"{words[0]} is more than the command takes."
    if not estimating:
        return problem
    # which read files, as no other failure does
    from memest.catalog.gpus import find_gpu
    from memest.catalog.models import lookup

    for word in words:
        with suppress(MemestError):
            find_gpu(word)
            return f"{problem} A GPU is named by --gpu {word}."
    models = [word for word in typed[1:] if lookup(word) is not None]
    if len(models) > 1:
        return f"{problem} Models side by side: memest compare {' '.join(models)}."
    return f"{problem} Options begin with --, and a launch command stands behind --."


def _no_such_option(flag: str, context: Any, *, estimating: bool) -> str:
    """What to say of an option that is none."""
    if flag == SWITCHED_OFF:
        return "there is no such switch to be named with a word for false."
    problem = f"there is no option {flag}."
    if estimating and flag in _MODEL_FLAGS:
        return f"{problem} The model is named without one: {context.command_path} MODEL."
    if estimating and flag.lstrip("-").replace("-", "_") in HARMLESS_ARGUMENTS:
        part = next((name for name in ("save", "resume") if flag.startswith(f"--{name}")), "")
        asks = f". What a {part} takes, --with {part} says" if part else ""
        return f"{problem} It changes no memory of the steps: leave it out{asks}."
    if estimating and (says := what_says(flag)):
        return f"{problem} What says it: {says}."
    if others := _commands_with(flag, context):
        return f"{problem} {' and '.join(f'memest {name}' for name in others)} can be asked it."
    own = [spelling for each in context.command.get_params(context)
           for spelling in each.opts if not getattr(each, "hidden", False)]  # fmt: skip
    near = closest_flags(flag, own) if estimating else closest(flag, own)
    return f"{problem} Did you mean {' or '.join(near)}?" if near else problem


def _commands_with(flag: str, context: Any) -> list[str]:
    """The other commands that have an option."""
    commands = getattr(getattr(context.parent, "command", None), "commands", {})
    return [
        name
        for name, command in commands.items()
        if any(flag in each.opts for each in command.params if not getattr(each, "hidden", False))
    ]


def _explain_os(error: OSError) -> str:
    place = f" {error.filename}" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"no space left on the device{place}: free some, or write elsewhere."
    return f"the operating system refuses{place}: {error.strerror or error}."


def explain(error: BaseException, typed: Sequence[str] = ()) -> tuple[str, str, int]:
    """The kind of an error, its paragraph and its exit code.

    Args:
        error: that ended a command.
        typed: the command's words, where there is a line of them.
    """
    if isinstance(error, MemestError):
        return kind_of(error), str(error), error.exit_code
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return USAGE, _explain_usage(error, typed), ExitCode.USAGE
    if isinstance(error, OSError):
        return OPERATING_SYSTEM, _explain_os(error), ExitCode.FAILURE
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package not in ("", "memest"):
        message = f"the package {package} is not installed: pip install 'memest-gpu[all]'."
        message = pinned(message)
        return MissingDependencyError.__name__, message, ExitCode.MISSING
    if isinstance(error, MemoryError):
        message = "this machine's own memory ran out: try fewer --steps or --grad-accum."
        return HOST_MEMORY, message, ExitCode.FAILURE
    report = "please report it with the output of `memest env` and of this command with --debug"
    message = f"unexpected {type(error).__name__}: {error}. This is a bug in memest: {report}."
    return UNEXPECTED, message, ExitCode.FAILURE


def error_document(kind: str, message: str, code: int) -> dict[str, Any]:
    """What ``--json`` has in place of an answer."""
    return {
        "schema_version": 1,
        "error": {"kind": kind, "message": message, "exit_code": int(code)},
    }
