"""The answers of a sweep on a terminal: one row a point."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memest.report.glyphs import ASCII, UNICODE, Glyphs
from memest.report.text import NARROW, VERDICT_STYLES, wide_enough
from memest.result import Verdict
from memest.units import format_delta, format_size

__all__ = ["GridRow", "GridTable", "print_grid", "render_grid"]

_NO_ANSWER = "no answer"
_SHORTEST_BAR = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRow:
    """One point.

    Attributes:
        names: values of what varies, one for each column of the table.
        allocated_bytes: peak of tensors, None without an answer.
        reserved_bytes: peak of segments, None without an answer.
        device_bytes: peak of the device, None without an answer.
        headroom_bytes: what is left of the GPU, None where none was named or without an answer.
        verdict: None without an answer.
        measure: bytes that the bar shows, None without an answer.
    """

    names: tuple[str, ...]
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    headroom_bytes: int | None
    verdict: Verdict | None
    measure: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GridTable:
    """A sweep in words and rows.

    Attributes:
        summary: the result in one sentence.
        subtitle: what is the same everywhere.
        columns: what varies.
        metric: what the bars show.
        rows: one a point.
        notes: reasons for points without an answer.
    """

    summary: str
    subtitle: str
    columns: tuple[str, ...]
    metric: str
    rows: tuple[GridRow, ...]
    notes: tuple[str, ...]


def render_grid(table: GridTable, *, width: int = 100, ascii_only: bool = False) -> str:
    """The table as plain text.

    Args:
        table: what to show.
        width: columns of the terminal; rows are never wider, cells fold instead.
        ascii_only: no characters beyond ASCII of our own.

    Returns:
        Lines without blanks at their ends, the last one ended too.
    """
    # no environment: COLUMNS or FORCE_COLOR must not change what str() gives
    out = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, _environ={}
    )
    print_grid(table, out, ascii_only=ascii_only)
    assert isinstance(out.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in out.file.getvalue().splitlines())


def print_grid(table: GridTable, console: Console, *, ascii_only: bool = False) -> None:
    """Write the table to a console, as :func:`render_grid` does."""
    glyphs = ASCII if ascii_only else UNICODE
    width = wide_enough(console.width)
    for part in _parts(table, glyphs, width):
        console.print(part, width=width, highlight=False, markup=False)


def _parts(table: GridTable, glyphs: Glyphs, width: int) -> Iterator[RenderableType]:
    yield Text(table.summary, style="bold")
    if table.subtitle:
        yield Text(table.subtitle, style="dim")
    yield Padding(_rows(table, glyphs, width), (1, 0, 0, 0))
    if table.notes:
        notes = Table.grid(padding=(0, 1, 0, 0))
        for note in table.notes:
            notes.add_row(Text(glyphs.bullet), Text(note))
        yield Padding(
            Group(Text("Without an answer", style="bold"), Padding(notes, (0, 0, 0, 2))),
            (1, 0, 0, 0),
        )


def _rows(table: GridTable, glyphs: Glyphs, width: int) -> Table:
    with_gpu = any(row.verdict not in (None, Verdict.UNKNOWN) for row in table.rows)
    head = [*table.columns, "allocated", "reserved", "device"]
    cells = [[*row.names, *map(_size, _peaks(row))] for row in table.rows]
    if with_gpu:
        head += ["headroom", "verdict"]
        for line, row in zip(cells, table.rows, strict=True):
            spare = row.headroom_bytes
            line += ["" if spare is None else format_delta(spare), _verdict(row)]
    taken = sum(max(len(line[i]) for line in (head, *cells)) + 2 for i in range(len(head)))
    sides: list[JustifyMethod] = ["left"] * len(table.columns)
    sides += ["right"] * (len(head) - len(sides))
    if with_gpu:
        sides[-1] = "left"
    # the bar stands beside its number and takes what is left of the width
    room = min(30, width - taken - 2)
    bar_at = head.index(table.metric) + 1 if table.metric in head else len(head)
    with_bar = width >= NARROW and room >= _SHORTEST_BAR
    largest = max((row.measure or 0 for row in table.rows), default=0)
    if with_bar:
        head.insert(bar_at, "")
        sides.insert(bar_at, "left")
    out = Table.grid(padding=(0, 2, 0, 0))
    for side in sides:
        out.add_column(justify=side, overflow="fold")
    out.add_row(*(Text(title, style="dim") for title in head))
    for line, row in zip(cells, table.rows, strict=True):
        shown = [Text(cell) for cell in line]
        if with_gpu and row.verdict is not None:
            shown[-1].stylize(VERDICT_STYLES[row.verdict])
        if with_bar:
            bar = Text(glyphs.bar(row.measure or 0, largest, room), style="cyan")
            shown.insert(bar_at, bar)
        out.add_row(*shown)
    return out


def _peaks(row: GridRow) -> tuple[int | None, int | None, int | None]:
    return row.allocated_bytes, row.reserved_bytes, row.device_bytes


def _size(size: int | None) -> str:
    return "?" if size is None else format_size(size)


def _verdict(row: GridRow) -> str:
    if row.verdict is None:
        return _NO_ANSWER
    return "" if row.verdict is Verdict.UNKNOWN else row.verdict.value
