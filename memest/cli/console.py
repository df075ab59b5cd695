"""The two streams: data on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from memest.errors import MemestError
from memest.files.texts import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from memest.report.answer import Answer

__all__ = [
    "Output",
    "PipeClosedError",
    "begin",
    "emit",
    "has_written",
    "silence",
    "write_document",
    "write_out",
]

_SHOW_AFTER_SECONDS = 1.0
_PIPE_WIDTH = 1000


class PipeClosedError(Exception):
    """Whoever read stdout is gone; not an OSError, which Typer would take for its own."""


def emit(message: str) -> None:
    """Write one paragraph to stderr, where there is one."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"{printable(' '.join(message.split()))}\n")


_written = [False]
"""Whether data went to stdout since a command began."""


def begin() -> None:
    """Nothing was written yet: another command begins in this process."""
    _written[0] = False


def has_written() -> bool:
    """Whether any data was written to stdout by :func:`write_out`."""
    return _written[0]


def write_out(text: str) -> None:
    """Write data to stdout.

    Raises:
        PipeClosedError: if nobody reads it any more.
        MemestError: there is no stdout: the process was started with it closed.
    """
    if sys.stdout is None:
        raise _no_stdout()
    _written[0] = True
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise PipeClosedError from error


def write_document(document: dict[str, Any]) -> None:
    """Write one JSON document to stdout."""
    write_out(f"{json.dumps(document, indent=2)}\n")


def _no_stdout() -> MemestError:
    return MemestError(
        "stdout is closed, so the answer has nowhere to go: leave it open, or send it to a file "
        "with > FILE."
    )


@contextlib.contextmanager
def silence(*, debug: bool) -> Iterator[None]:
    """Keep warnings of other libraries off stderr: what matters comes back as a note."""
    if debug:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How a command shows things.

    Attributes:
        as_json: a document in place of a report.
        quiet: the least that answers.
        colorless: without colours; a terminal and NO_COLOR have their say too.
        ascii_only: plain characters; taken by itself where stdout is not UTF-8.
        debug: warnings of other libraries are shown.
    """

    as_json: bool = False
    quiet: bool = False
    colorless: bool = False
    ascii_only: bool = False
    debug: bool = False

    @property
    def silent(self) -> bool:
        """Whether stderr has no progress."""
        return self.quiet or self.as_json

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
        colorless = self.colorless or bool(os.environ.get("NO_COLOR"))
        console_options: dict[str, Any] = {"color_system": None} if colorless else {}
        return Stdout(highlight=False, soft_wrap=False, **console_options)

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

    def table(
        self,
        rows: Iterable[Sequence[str | Text]],
        head: Sequence[str] = (),
        sides: Sequence[str] = ("left", "left"),
    ) -> None:
        """Write rows as a table.

        Args:
            rows: cells, one for each column.
            head: names of the columns, if they have any.
            sides: where the cells of each column stand, ``left`` or ``right``.
        """
        from memest.report.terminal import Grid

        table = Grid(*sides, head=head)
        for row in rows:
            table.add_row(*row)
        self.show(table)

    def put(self, answer: Answer, sentences: Callable[[], Iterable[str]], **options: Any) -> None:
        """Write an answer as the flags say: a document, sentences alone, or the report.

        Args:
            answer: what was found out.
            sentences: makes what ``--quiet`` leaves.
            options: which part of the report is shown.
        """
        if self.as_json:
            self.document(answer.to_dict())
        elif self.quiet:
            write_out("".join(f"{sentence}\n" for sentence in sentences()))
        else:
            self.report(answer, **options)

    def document(self, document: dict[str, Any]) -> None:
        """Write the document of an answer to stdout."""
        write_document(document)

    def note(self, text: str) -> None:
        """Say on stderr what an answer leaves out."""
        emit(f"memest: {text}")

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
        if self.silent or sys.stderr is None or not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console as RichConsole
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        spinner = Spinner("line" if self.plain else "dots", style="status.spinner")
        # what is written to stdout meanwhile is data, and none of the terminal's
        live = Live(
            spinner,
            console=RichConsole(stderr=True, no_color=self.colorless),
            refresh_per_second=12.5,
            transient=True,
            redirect_stdout=False,
        )
        may_start = threading.Lock()  # free while there is something to show and it is not shown
        may_start.acquire()
        due = threading.Event()

        def start() -> None:
            if due.is_set() and may_start.acquire(blocking=False):
                live.start()

        def begin_showing() -> None:
            due.set()
            start()

        # what is said first may take the longest: it is shown although nothing follows it
        timer = threading.Timer(_SHOW_AFTER_SECONDS, begin_showing)
        timer.daemon = True
        timer.start()
        has_text = False

        def show(text: str) -> None:
            nonlocal has_text
            spinner.update(text=Text(text))
            if not has_text:
                has_text = True
                may_start.release()
            start()

        try:
            yield show
        finally:
            timer.cancel()
            due.clear()
            timer.join()
            live.stop()

    @contextlib.contextmanager
    def working(self) -> Iterator[Callable[[str], None] | None]:
        """:meth:`progress`, with other libraries silenced unless they are to be debugged."""
        with silence(debug=self.debug), self.progress() as progress:
            yield progress
