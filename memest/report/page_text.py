"""A page of headings, paragraphs, tables and figures for a terminal or a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from io import StringIO

from memest.report.page import Block, Figure, Heading, Items, Table, Text

__all__ = ["as_text"]

_NARROW, _WIDE = 40, 160


def as_text(blocks: Iterable[Block], *, width: int = 100, ascii_only: bool = False) -> str:
    """The page as plain text; figures are told in words.

    Args:
        blocks: parts of the page.
        width: columns; what is less than 40 is taken for 40.
        ascii_only: whether other characters are written as ``?``.
    """
    width = min(max(width, _NARROW), _WIDE)
    text = "\n\n".join(_text(block, width) for block in blocks) + "\n"
    return text.encode("ascii", "replace").decode() if ascii_only else text


def _text(block: Block, width: int) -> str:
    if isinstance(block, Heading):
        said = _flat(block.text)
        return f"{said}\n{('=' if block.level == 1 else '-') * min(len(said), width)}"
    if isinstance(block, Text):
        return textwrap.fill(_flat(block.text), width)
    if isinstance(block, Items):
        return "\n".join(
            textwrap.fill(_flat(text), width, initial_indent="- ", subsequent_indent="  ")
            for text in block.texts
        )
    if isinstance(block, Figure):
        return textwrap.fill(f"{_flat(block.caption)}. {_flat(block.words)}", width)
    return _table(block, width)


def _table(block: Table, width: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

    table = RichTable(box=box.ASCII2, show_edge=False, pad_edge=False, expand=False)
    for at, name in enumerate(block.head):
        words = at < block.words
        table.add_column(
            RichText(_flat(name)), justify="left" if words else "right", overflow="fold",
            min_width=None if words else min(len(name), 8),
        )  # fmt: skip
    for row in block.rows:
        table.add_row(*(RichText(_flat(cell)) for cell in row))
    out = StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join([textwrap.fill(_flat(block.caption), width), *lines])


def _flat(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
