"""The command ``memest``: what was typed runs, errors turn into exit codes.

What the codes mean is told by :mod:`memest.cli.exit_codes`.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from memest.cli.argv import (
    ALL,
    ESTIMATING,
    SWITCHED_OFF,
    closest_flags,
    normalise,
    plain_question,
    with_launch,
)
from memest.cli.console import PipeClosedError, begin, emit, has_written, write_document
from memest.cli.dialogue import ask_question, on_terminal
from memest.cli.exit_codes import (
    HOST_MEMORY,
    OPERATING_SYSTEM,
    UNEXPECTED,
    USAGE,
    ExitCode,
    kind_of,
)
from memest.config.options import HARMLESS_ARGUMENTS
from memest.errors import MemestError, MissingDependencyError, closest

__all__ = ["run"]

_MODEL_FLAGS = frozenset({"--model", "--model-name", "--model-name-or-path"})


def _explain_usage(error: Any) -> str:
    """One paragraph of what Typer's parser has to say."""
    path = getattr(getattr(error, "ctx", None), "command_path", "") or "memest"
    estimating = path.rpartition(" ")[2] in ESTIMATING
    message = error.format_message().strip()
    flag = getattr(error, "option_name", "")
    if message.startswith("No such option"):
        message = _no_such_option(flag, error.ctx, estimating=estimating)
    elif message and message[-1] not in ".?!":
        message += "."
    return f"{message} `{path} --help{f' {ALL}' if estimating else ''}` has all options."


def _no_such_option(flag: str, context: Any, *, estimating: bool) -> str:
    """What to say of an option that is none."""
    if flag == SWITCHED_OFF:
        return "there is no such switch to be named with a word for false."
    problem = f"there is no option {flag}."
    if estimating and flag in _MODEL_FLAGS:
        return f"{problem} The model is named without one: {context.command_path} MODEL."
    if estimating and flag.lstrip("-").replace("-", "_") in HARMLESS_ARGUMENTS:
        return f"{problem} It changes no memory: leave it out."
    own = [spelling for each in context.command.get_params(context)
           for spelling in each.opts if not getattr(each, "hidden", False)]  # fmt: skip
    near = closest_flags(flag, own) if estimating else closest(flag, own)
    return f"{problem} Did you mean {' or '.join(near)}?" if near else problem


def _explain_os(error: OSError) -> str:
    place = f" {error.filename}" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"no space left on the device{place}: free some, or write elsewhere."
    return f"the operating system refuses{place}: {error.strerror or error}."


def _explain(error: BaseException) -> tuple[str, str, int]:
    """The kind of an error, its paragraph and its exit code."""
    if isinstance(error, MemestError):
        return kind_of(error), str(error), error.exit_code
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return USAGE, _explain_usage(error), ExitCode.USAGE
    if isinstance(error, OSError):
        return OPERATING_SYSTEM, _explain_os(error), ExitCode.FAILURE
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package not in ("", "memest"):
        message = f"the package {package} is not installed: pip install 'memest-gpu[all]'."
        return MissingDependencyError.__name__, message, ExitCode.MISSING
    if isinstance(error, MemoryError):
        message = "this machine's own memory ran out: try fewer --steps or --grad-accum."
        return HOST_MEMORY, message, ExitCode.FAILURE
    report = "please report it with the output of `memest env` and of this command with --debug"
    message = f"unexpected {type(error).__name__}: {error}. This is a bug in memest: {report}."
    return UNEXPECTED, message, ExitCode.FAILURE


def _guard(work: Callable[[], Any], *, debug: bool, as_json: bool) -> int:
    """Run, and turn whatever happens into an exit code."""
    try:
        answer = work()
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        emit("memest: interrupted.")
        return ExitCode.INTERRUPTED
    except (PipeClosedError, BrokenPipeError):
        _forget_stdout()
        return ExitCode.PIPE_CLOSED
    except SystemExit as stop:
        # rich and Typer leave this way when the reader of a help page is gone
        _forget_stdout()
        return stop.code if isinstance(stop.code, int) else ExitCode.FAILURE
    except Exception as error:  # noqa: BLE001 - the last stop: every error gets its paragraph
        if type(error).__name__ == "Abort":
            emit("memest: interrupted.")
            return ExitCode.INTERRUPTED
        kind, message, code = _explain(error)
        if debug:
            traceback.print_exception(error)
        emit(f"memest: {message}")
        if as_json and not has_written():  # else the answer is out, and stdout has one document
            with contextlib.suppress(OSError, ValueError, MemestError, PipeClosedError):
                error_document = {"kind": kind, "message": message, "exit_code": code}
                write_document({"schema_version": 1, "error": error_document})
        if isinstance(error, OSError):
            _forget_stdout()
        return code
    return answer if isinstance(answer, int) else 0


def _forget_stdout() -> None:
    """Make sure that the flush at exit does not fail once more."""
    if sys.stdout is None:
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(argv: Sequence[str] | None = None) -> int:
    """The entry point.

    Args:
        argv: arguments after the program's name, those of the process if None.

    Returns:
        The exit code; nothing is raised.
    """
    _keep_streams_apart()
    arguments = list(sys.argv[1:] if argv is None else argv)
    own_arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # a path or a name may hold what the terminal's encoding has not
            reconfigure(errors="backslashreplace")
    # torch and transformers are a million objects, and looking through them for cycles takes longer
    # than a trace; this process ends soon
    gc.set_threshold(200_000, 50, 1000)
    begin()
    _not_kept()  # of what ran in this process before
    code = _guard(
        lambda: _run(arguments), debug="--debug" in own_arguments, as_json="--json" in own_arguments
    )
    if not {"-q", "--quiet"} & set(own_arguments):
        _tell_what_was_not_kept()
    return code


def _keep_streams_apart() -> None:
    """Take the numbers of streams that are closed: a file must not become stdout or stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one


def _not_kept() -> dict[Any, str]:
    """Caches that could not be written; nothing is loaded to tell."""
    store = sys.modules.get("memest.profiles.cache")
    return {} if store is None else store.take_unwritable_folders()


def _tell_what_was_not_kept() -> None:
    for folder, reason in _not_kept().items():
        emit(
            f"memest: the cache in {folder} could not be written ({reason}), so what was traced is "
            "traced again the next time. The answer is not touched by that; MEMEST_CACHE chooses "
            "another folder."
        )


def _run(arguments: Sequence[str]) -> Any:
    """The common questions at once, everything else by way of Typer."""
    words = normalise(with_launch(arguments))
    if not words and on_terminal():
        words = normalise(ask_question())
    command = plain_question(words)
    if command is not None:
        return command()
    from memest.cli.commands import build

    if words in ([], ["calibrate"]):
        words = [*words, "--help"]
    return build().main(args=words, prog_name="memest", standalone_mode=False)
