"""A page as headings, paragraphs, tables and figures, written as text, Markdown or HTML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO

__all__ = [
    "Block",
    "Figure",
    "Heading",
    "Items",
    "Table",
    "Text",
    "as_html",
    "as_markdown",
    "as_text",
    "html_document",
]


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading; level 1 is the title of the page."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        caption: what it shows.
        head: names of the columns.
        rows: texts, one for each column.
        words: how many columns from the left are words; the others are numbers and stand right.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture and the same in words.

    Attributes:
        caption: what it shows.
        svg: the picture.
        words: what there is to see in it, for those who do not see it, and for Markdown.
    """

    caption: str
    svg: str
    words: str


Block = Heading | Text | Items | Table | Figure


# -- text -----------------------------------------------------------------------------------------

_NARROW, _WIDE = 40, 160


def as_text(blocks: Iterable[Block], *, width: int = 100, ascii_only: bool = False) -> str:
    """The page as plain text; figures are told in words.

    Args:
        blocks: parts of the page.
        width: columns; what is less than 40 is taken for 40.
        ascii_only: whether other characters are written as ``?``.
    """
    width = min(max(width, _NARROW), _WIDE)
    text = "\n\n".join(_plain(block, width) for block in blocks) + "\n"
    return text.encode("ascii", "replace").decode() if ascii_only else text


def _plain(block: Block, width: int) -> str:
    if isinstance(block, Heading):
        title = _flat(block.text)
        return f"{title}\n{('=' if block.level == 1 else '-') * min(len(title), width)}"
    if isinstance(block, Text):
        return textwrap.fill(_flat(block.text), width)
    if isinstance(block, Items):
        return "\n".join(
            textwrap.fill(_flat(text), width, initial_indent="- ", subsequent_indent="  ")
            for text in block.texts
        )
    if isinstance(block, Figure):
        return textwrap.fill(f"{_flat(block.caption)}. {_flat(block.words)}", width)
    return _text_table(block, width)


def _text_table(block: Table, width: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

    table = RichTable(box=box.ASCII2, show_edge=False, pad_edge=False, expand=False)
    for index, name in enumerate(block.head):
        words = index < block.words
        table.add_column(
            RichText(_flat(name)),
            justify="left" if words else "right",
            overflow="fold",
            min_width=None if words else min(len(name), 8),
        )
    for row in block.rows:
        table.add_row(*(RichText(_flat(cell)) for cell in row))
    buffer = StringIO()
    Console(file=buffer, width=width, color_system=None, legacy_windows=False).print(table)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    return "\n".join([textwrap.fill(_flat(block.caption), width), *lines])


# -- Markdown -------------------------------------------------------------------------------------


def as_markdown(blocks: Iterable[Block]) -> str:
    """The page as Markdown; figures are told in words."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_cell(block.text)}"
    if isinstance(block, Text):
        return _cell(block.text)
    if isinstance(block, Items):
        return "\n".join(f"- {_cell(text)}" for text in block.texts)
    if isinstance(block, Figure):
        return f"*{_cell(block.caption)}.* {_cell(block.words)}"
    sides = ["---"] * block.words + ["---:"] * (len(block.head) - block.words)
    lines = [block.head, sides, *block.rows]
    table = "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
    return f"*{_cell(block.caption)}.*\n\n{table}"


def _cell(text: str) -> str:
    """Text in which nothing is markup: names and messages of other programs come in."""
    flat = _flat(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\|`*_\[\]])", r"\\\1", flat)


def _flat(text: str) -> str:
    return " ".join(_printable(text).split())


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


# -- HTML -----------------------------------------------------------------------------------------

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#1f2328;background:#fff;max-width:70em;"
    "margin:2em auto;padding:0 1em}table{border-collapse:collapse;margin:0.5em 0 1.5em}"
    "caption{text-align:left;font-weight:600;padding:0.3em 0}th,td{padding:0.2em 0.8em 0.2em 0;"
    "text-align:right;border-bottom:1px solid #d0d7de;vertical-align:top}"
    "th.w,td.w{text-align:left}figure{margin:1em 0}figcaption{font-weight:600}"
    ".wide{overflow-x:auto}svg{max-width:100%;height:auto}"
)


def as_html(blocks: Sequence[Block]) -> str:
    """The page as one HTML document: no scripts, nothing loaded from anywhere."""
    title = next((b.text for b in blocks if isinstance(b, Heading)), "report")
    return html_document(title, _STYLE, "\n".join(map(_html, blocks)))


def html_document(title: str, style: str, body: str) -> str:
    """A whole HTML document around a body that is HTML already.

    Args:
        title: as text.
        style: style sheet.
        body: what stands on the page.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n"
        "</body>\n</html>\n"
    )


def _text(text: str) -> str:
    return escape(_printable(text))


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{_text(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{_text(block.text)}</p>"
    if isinstance(block, Items):
        return "<ul>" + "".join(f"<li>{_text(text)}</li>" for text in block.texts) + "</ul>"
    if isinstance(block, Figure):
        return (
            f"<figure><figcaption>{_text(block.caption)}</figcaption>{block.svg}"
            f"<p>{_text(block.words)}</p></figure>"
        )
    head = "".join(
        f'<th scope="col"{_side(i, block)}>{_text(name)}</th>' for i, name in enumerate(block.head)
    )
    rows = "\n".join(f"<tr>{_cells(row, block)}</tr>" for row in block.rows)
    return (
        f'<div class="wide"><table><caption>{_text(block.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )


def _cells(row: Sequence[str], block: Table) -> str:
    return "".join(f"<td{_side(i, block)}>{_text(cell)}</td>" for i, cell in enumerate(row))


def _side(index: int, block: Table) -> str:
    return ' class="w"' if index < block.words else ""
