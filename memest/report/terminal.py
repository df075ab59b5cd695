"""What reports on a terminal are made of, and how an answer is printed or rendered as text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    RenderableType,
    RenderResult,
)
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memest.report.answer import Answer, renderer
from memest.report.life_result import HostVerdict
from memest.report.result import Verdict

__all__ = [
    "ASCII",
    "HOST_STYLES",
    "UNICODE",
    "VERDICT_STYLES",
    "Glyphs",
    "Grid",
    "Page",
    "bullets",
    "print_report",
    "render",
    "room_for_bar",
    "section",
    "text_as_html",
]

MAX_WIDTH = 104
_SHORTEST_BAR = 8
_LEAST_WORDS = 12
"""Columns in which words can be read."""
_FEW = 3
"""Columns below which a table is one on any page."""
NARROW = 78
"""Below this the columns that explain are left out."""
VERDICT_STYLES = {
    Verdict.FITS: "bold green",
    Verdict.RELEASES_CACHE: "bold yellow",
    Verdict.TIGHT: "bold yellow",
    Verdict.CANNOT_SAY: "bold magenta",
    Verdict.DOES_NOT_FIT: "bold red",
    Verdict.UNKNOWN: "bold",
}
HOST_STYLES = {
    HostVerdict.FITS: VERDICT_STYLES[Verdict.FITS],
    HostVerdict.TIGHT: VERDICT_STYLES[Verdict.TIGHT],
    HostVerdict.CANNOT_SAY: VERDICT_STYLES[Verdict.CANNOT_SAY],
    HostVerdict.DOES_NOT_FIT: VERDICT_STYLES[Verdict.DOES_NOT_FIT],
    HostVerdict.UNKNOWN: VERDICT_STYLES[Verdict.UNKNOWN],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What bars, separators and marks are made of.

    Attributes:
        steps: parts of a bar's last cell, from least to full.
        behind: fills the second part of a two-part bar.
        dot: between the phrases of a line.
        times: multiplication sign.
        bullet: opens an item of a list.
        rule: drawn above totals.
        mark: points at the row of the peak.
        more: stands for what was left out.
    """

    steps: str
    behind: str
    dot: str
    times: str
    bullet: str
    rule: str
    mark: str
    more: str

    def bar(self, part: int, whole: int, width: int) -> str:
        """A bar of ``part`` of ``whole``; anything above nothing shows at least a sliver.

        Example:
            >>> ASCII.bar(3, 4, 8)
            '######'
        """
        if part <= 0 or whole <= 0:
            return ""
        cells = len(self.steps)
        eighths = min(max(1, part * width * cells // whole), width * cells)
        full, rest = divmod(eighths, cells)
        return self.steps[-1] * full + (self.steps[rest - 1] if rest else "")

    def two_part_bar(self, inner: int, outer: int, whole: int, width: int) -> tuple[str, str]:
        """A bar of ``inner``, and what goes on behind it up to ``outer``."""
        first = self.bar(inner, whole, width)
        end = min(width, round(outer * width / whole)) if whole > 0 else 0
        return first, self.behind * max(0, end - len(first))


UNICODE = Glyphs(
    steps="▏▎▍▌▋▊▉█",
    behind="░",
    dot="·",
    times="×",
    bullet="•",
    rule="─",
    mark="◀ peak",
    more="…",
)
ASCII = Glyphs(
    steps="#", behind=".", dot="|", times="x", bullet="-", rule="-", mark="< peak", more="..."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a part of a report needs to know about where it is written."""

    width: int
    glyphs: Glyphs

    @property
    def narrow(self) -> bool:
        """Whether only the necessary columns have room."""
        return self.width < NARROW


def print_report(
    answer: Answer, console: Console, *, ascii_only: bool = False, **options: Any
) -> None:
    """Write the report of an answer to a console, as :func:`render` does."""
    width = max(40, min(console.width, MAX_WIDTH))
    page = Page(width=width, glyphs=ASCII if ascii_only else UNICODE)
    for part in renderer(answer, "parts")(answer, page, **options):
        console.print(part, width=width, highlight=False, markup=False)


def render(answer: Answer, *, width: int = 80, ascii_only: bool = False, **options: Any) -> str:
    """The report of an answer as plain text.

    Args:
        answer: what to show.
        width: columns.
        ascii_only: no characters beyond ASCII of our own.
        options: which part of the answer; each has its own.

    Returns:
        Lines without blanks at their ends, the last one ended too.
    """
    text = io.StringIO()
    # no environment: COLUMNS or FORCE_COLOR must not change what str() gives
    console = Console(file=text, width=width, color_system=None, force_terminal=False, _environ={})
    print_report(answer, console, ascii_only=ascii_only, **options)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def text_as_html(answer: Answer) -> str:
    """A report as it stands in a terminal, for a notebook."""
    return (
        '<pre style="font-family:ui-monospace,monospace;line-height:1.25;overflow-x:auto">'
        f"{escape(str(answer).rstrip())}</pre>"
    )


class Grid:
    """A table without lines, for a page of any width.

    Words fold, and what stands right stays on one line. Where a page has no room for the columns
    each row is a block: its first cell, and below it the others, with the names of their columns.

    Args:
        sides: of each column, ``left`` or ``right``.
        head: names of the columns.
        pad: blanks between columns.
        folds: whether what stands right may fold too.
    """

    def __init__(
        self, *sides: Any, head: Iterable[str] = (), pad: int = 2, folds: bool = False
    ) -> None:
        titles = tuple(head)
        self._sides = sides
        self._head = (*titles, *[""] * (len(sides) - len(titles))) if titles else ()
        self._pad, self._folds = pad, folds
        self._rows: list[tuple[Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row; cells that are left out are empty."""
        texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        texts += [Text("")] * (len(self._sides) - len(texts))
        self._rows.append(tuple(texts))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay it out in the columns that there are."""
        has_room = self._least_width() <= options.max_width
        yield (
            self._table()
            if has_room or len(self._sides) < _FEW
            else self._blocks(options.max_width)
        )

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """It takes what it can have."""
        return Measurement(1, options.max_width)

    def _least_width(self) -> int:
        lines = [*self._rows, *([tuple(map(Text, self._head))] if self._head else [])]
        if not lines:
            return 0
        widths = [
            max(self._least(text, side) for text in column)
            for side, column in zip(self._sides, zip(*lines, strict=True), strict=True)
        ]
        return sum(widths) + self._pad * (len(widths) - 1)

    def _least(self, text: Text, side: str) -> int:
        """Columns that a cell cannot do without."""
        if side == "right":
            parts = text.plain.split() if self._folds else text.plain.splitlines()
            return max(map(len, parts), default=0)
        return min(text.cell_len, _LEAST_WORDS)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, self._pad, 0, 0))
        for side in self._sides:
            no_wrap = side == "right" and not self._folds
            table.add_column(justify=side, overflow="fold", no_wrap=no_wrap)
        if self._head:
            table.add_row(*(Text(title, style="dim") for title in self._head))
        for row in self._rows:
            table.add_row(*row)
        return table

    def _blocks(self, width: int) -> Group:
        titles = self._head or ("",) * len(self._sides)
        lines: list[RenderableType] = []
        for row in self._rows:
            cells = [(t.strip(), x) for t, x in zip(titles, row, strict=True) if x.plain.strip()]
            if not any(char.isalnum() for _, text in cells for char in text.plain):
                continue  # a rule above totals
            (title, first), *others = cells
            depth = len(first.plain) - len(first.plain.lstrip())
            # a number says nothing without its name
            is_number = first.plain.replace(",", "").isdigit()
            lines.append(Text.assemble((f"{title} " if is_number and title else "", "dim"), first))
            below = depth + self._pad
            lines += [Padding(line, (0, 0, 0, below)) for line in _filled(others, width - below)]
        return Group(*lines)


def _filled(cells: Sequence[tuple[str, Text]], width: int) -> Iterator[Text]:
    """Lines of cells with their titles; a cell is torn where it is longer than a line alone."""
    line = Text()
    for number, (title, text) in enumerate(cells):
        last = number == len(cells) - 1
        words = Text(" ".join(text.plain.split()), style=text.style)
        item = Text.assemble((f"{title} " if title else "", "dim"), words, "" if last else ",")
        if line and len(line) + 1 + len(item) > width:
            yield line
            line = Text()
        line = Text.assemble(line, " " if line else "", item)
    if line:
        yield line


def room_for_bar(page: Page, lines: Sequence[Sequence[str]], longest: int) -> int:
    """Columns that a table leaves for a bar, 0 where they are too few.

    Args:
        page: where the table is written.
        lines: its cells.
        longest: columns of a bar that are enough.
    """
    table_width = sum(max(map(len, column)) + 2 for column in zip(*lines, strict=True))
    bar_width = min(longest, page.width - table_width - 2)
    return 0 if page.narrow or bar_width < _SHORTEST_BAR else bar_width


def section(title: str, body: RenderableType) -> RenderableType:
    """A title with what belongs to it below, indented."""
    return Padding(Group(Text(title, style="bold"), Padding(body, (0, 0, 0, 2))), (1, 0, 0, 0))


def bullets(sentences: Iterable[str], page: Page) -> Grid:
    """A list."""
    table = Grid("left", "left", pad=1)
    for sentence in sentences:
        table.add_row(page.glyphs.bullet, Text(sentence))
    return table
