"""The two streams: data on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from memest.errors import MemestError
from memest.files.texts import shown

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from memest.report.answer import Answer

__all__ = ["Output", "PipeClosedError", "emit", "write_out"]

_SHOW_AFTER_SECONDS = 1.0
_PIPE_WIDTH = 1000


class PipeClosedError(Exception):
    """Whoever read stdout is gone; not an OSError, which Typer would take for its own."""


def emit(message: str) -> None:
    """Write one paragraph to stderr, where there is one."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"{shown(' '.join(message.split()))}\n")


def write_out(text: str) -> None:
    """Write data to stdout.

    Raises:
        PipeClosedError: if nobody reads it any more.
        MemestError: there is no stdout: the process was started with it closed.
    """
    if sys.stdout is None:
        raise _no_stdout()
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise PipeClosedError from error


def _no_stdout() -> MemestError:
    return MemestError(
        "stdout is closed, so the answer has nowhere to go: leave it open, or send it to a file "
        "with > FILE."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How a command shows things.

    Attributes:
        color: whether colours are allowed; a terminal and NO_COLOR have their say too.
        ascii_only: plain characters; taken by itself where stdout is not UTF-8.
        quiet: the answer only, nothing on stderr.
    """

    color: bool = True
    ascii_only: bool = False
    quiet: bool = False

    @property
    def plain(self) -> bool:
        """Whether only ASCII may be written."""
        if sys.stdout is None:
            raise _no_stdout()
        encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
        return self.ascii_only or not encoding.startswith("utf")

    def console(self) -> Console:
        """A console for stdout."""
        from rich.console import Console as RichConsole

        if sys.stdout is None:
            raise _no_stdout()

        class Stdout(RichConsole):
            def on_broken_pipe(self) -> NoReturn:
                raise PipeClosedError

        # rich takes bold for no colour; NO_COLOR asks for text alone
        colorless = not self.color or bool(os.environ.get("NO_COLOR"))
        more: dict[str, Any] = {"color_system": None} if colorless else {}
        return Stdout(highlight=False, soft_wrap=False, **more)

    def show(self, table: RenderableType) -> None:
        """Write a table to stdout; into a pipe every row is one line."""
        from rich.console import Console as RichConsole

        console = self.console()
        if console.is_terminal:
            console.print(table, markup=False)
            return
        width = console.width if os.environ.get("COLUMNS") else _PIPE_WIDTH
        text = io.StringIO()
        RichConsole(file=text, width=width, color_system=None).print(table, markup=False)
        write_out("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))

    def report(self, answer: Answer, **options: Any) -> None:
        """Write the report of an answer to stdout.

        Args:
            answer: what was found out.
            options: which part of it is shown.
        """
        from memest.report.terminal import print_report, render

        console = self.console()
        if console.color_system is None:
            write_out(render(answer, width=console.width, ascii_only=self.plain, **options))
        else:
            print_report(answer, console, ascii_only=self.plain, **options)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str], None] | None]:
        """A callback that shows what is being done: on a terminal, after the first second."""
        if self.quiet or sys.stderr is None or not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console as RichConsole

        console = RichConsole(stderr=True, no_color=not self.color)
        status = console.status("", spinner="line" if self.plain else "dots")
        started = time.monotonic()
        running = False

        def show(text: str) -> None:
            nonlocal running
            status.update(text)
            if not running and time.monotonic() - started > _SHOW_AFTER_SECONDS:
                status.start()
                running = True

        try:
            yield show
        finally:
            if running:
                status.stop()
