"""What went wrong, as one paragraph and an exit code."""

from __future__ import annotations

import errno
from typing import Any

from memest.cli.argv import ESTIMATING, SWITCHED_OFF, closest_flags
from memest.errors import MemestError

__all__ = ["FAILURE", "error_document", "explain"]

FAILURE, _USAGE, _MISSING = 1, 2, 6


def error_document(message: str, code: int) -> dict[str, Any]:
    """What ``--json`` has in place of an answer."""
    return {"schema_version": 1, "error": {"message": message, "exit_code": code}}


def _explain_usage(error: Any) -> str:
    """One paragraph of what Typer's parser has to say."""
    path = getattr(getattr(error, "ctx", None), "command_path", "") or "memest"
    message = error.format_message().strip()
    flag = getattr(error, "option_name", "")
    if message.startswith("No such option"):
        estimating = path.rpartition(" ")[2] in ESTIMATING
        suggestions = closest_flags(flag) if estimating else error.possibilities or []
        message = f"there is no option {flag}."
        if flag == SWITCHED_OFF:
            message = "there is no such switch to be named with a word for false."
            suggestions = []
        if suggestions:
            message += f" Did you mean {' or '.join(suggestions)}?"
    elif message and message[-1] not in ".?!":
        message += "."
    if message.startswith("No such command"):
        message += " A model is named after a command: memest estimate MODEL."
    return f"{message} `{path} --help` has all options."


def _explain_os(error: OSError) -> str:
    place = f" {error.filename}" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"no space left on the device{place}: free some, or write elsewhere."
    return f"the operating system refuses{place}: {error.strerror or error}."


def explain(error: BaseException) -> tuple[str, int]:
    """The paragraph and the exit code for an error."""
    if isinstance(error, MemestError):
        return str(error), error.exit_code
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return _explain_usage(error), _USAGE
    if isinstance(error, OSError):
        return _explain_os(error), FAILURE
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package not in ("", "memest"):
        return f"the package {package} is not installed: pip install 'memest[all]'.", _MISSING
    if isinstance(error, MemoryError):
        return "this machine's own memory ran out: try fewer --steps or --grad-accum.", FAILURE
    report = "please report it with the output of `memest env` and of this command with --debug"
    message = f"unexpected {type(error).__name__}: {error}. This is a bug in memest: {report}."
    return message, FAILURE
