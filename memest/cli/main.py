"""The command ``memest``: what was typed runs, errors turn into exit codes.

What the codes mean is told by :mod:`memest.cli.exit_codes`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from memest.cli.argv import as_typed, normalise, plain_question, refuse_launch, with_launch
from memest.cli.console import PipeClosedError, begin, emit, has_written, write_document
from memest.cli.dialogue import ask_question, on_terminal
from memest.cli.exit_codes import ExitCode
from memest.cli.failures import error_document, explain
from memest.errors import MemestError

__all__ = ["run"]


def _guard(work: Callable[[], Any], typed: Sequence[str], *, debug: bool, as_json: bool) -> int:
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
        kind, message, code = explain(error, typed)
        message = as_typed(message, typed)
        if debug:
            traceback.print_exception(error)
        emit(f"memest: {message}")
        if as_json and not has_written():  # else the answer is out, and stdout has one document
            with contextlib.suppress(OSError, ValueError, MemestError, PipeClosedError):
                write_document(error_document(kind, message, code))
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
    gc.set_threshold(2_000_000, 50, 1000)
    # nor at the end of the process, where Python looks through all of them several times
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    begin()
    _not_kept()  # of what ran in this process before
    code = _guard(
        lambda: _run(arguments),
        own_arguments,
        debug="--debug" in own_arguments,
        as_json="--json" in own_arguments,
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
    refuse_launch(arguments)
    from memest.cli.commands import build

    if words in ([], ["calibrate"]):
        words = [*words, "--help"]
    return build().main(args=words, prog_name="memest", standalone_mode=False)
