"""A heat map as HTML: inline SVG, no scripts, nothing loaded from anywhere.

Every number stands in its cell as text. For readers who do not see the picture, each SVG says in
words what it shows and a table of the same numbers follows.
"""

from __future__ import annotations

from html import escape

from memest.report.heat import EDGES, HeatCell, HeatMap, HeatPanel, Mark, colour, ink
from memest.report.page import html_document

__all__ = ["render_fragment", "render_page"]

_WIDE, _HIGH, _GAP = 96, 42, 2
_HEAD = 46
_LETTER = 7.2
"""Pixels of a letter of 12 px, generously."""
_STYLE = (
    "body{margin:2em auto;padding:0 1em;max-width:90em;background:#fff;color:#1f2328}"
    "h1{font-size:1.4em}h2{font-size:1.05em;margin-bottom:.3em}"
)


def render_page(heat: HeatMap) -> str:
    """A whole page."""
    return html_document(f"{heat.title}: {heat.metric}", _STYLE, render_fragment(heat))


def render_fragment(heat: HeatMap) -> str:
    """What goes into a page or a notebook."""
    parts = [
        f"<h1>{escape(heat.title)}</h1>",
        f"<p><b>{escape(heat.summary)}</b></p>",
        f"<p>{escape(heat.subtitle)}</p>" if heat.subtitle else "",
        f"<p>Numbers and colours: {escape(heat.metric)}.</p>",
        _scale(heat),
    ]
    parts.append('<div style="display:flex;flex-wrap:wrap;gap:0.5em 2em">')
    for panel in heat.panels:
        title = f"<h2>{escape(panel.title)}</h2>" if panel.title else ""
        parts.append(f'<div style="overflow-x:auto">{title}{_svg(heat, panel)}</div>')
    parts.append("</div>")
    if heat.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in heat.notes)
        parts.append(f"<p>Without an answer:</p><ul>{items}</ul>")
    tables = "\n".join(_table(heat, panel) for panel in heat.panels)
    parts.append(f"<details><summary>The numbers as tables</summary>{tables}</details>")
    body = "\n".join(part for part in parts if part)
    return f'<div style="font-family:sans-serif">\n{body}\n</div>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", **style: object) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _left(heat: HeatMap) -> int:
    """Pixels that the names of rows take."""
    longest = max((len(name) for name in (*heat.row_names, heat.row_label)), default=0)
    return round(longest * _LETTER) + 14


def _width(heat: HeatMap) -> int:
    """Pixels of a column: a number, or the name of its column if that is longer."""
    longest = max((len(name) for name in heat.column_names), default=0)
    return max(_WIDE, round(longest * _LETTER) + 12)


def _svg(heat: HeatMap, panel: HeatPanel) -> str:
    left, wide, bounds = _left(heat), _width(heat), heat.bounds()
    width = left + wide * len(heat.column_names) + _GAP
    height = _HEAD + _HIGH * len(heat.row_names) + _GAP
    drawn = [
        _text(left + wide * len(heat.column_names) / 2, 14, heat.column_label, font_weight="bold"),
        _text(left - 8, _HEAD - 8, heat.row_label, anchor="end", font_weight="bold"),
    ]
    for column, name in enumerate(heat.column_names):
        drawn.append(_text(left + wide * (column + 0.5), _HEAD - 8, name))
    for row, name in enumerate(heat.row_names):
        drawn.append(_text(left - 8, _HEAD + _HIGH * (row + 0.5) + 4, name, anchor="end"))
        for column, cell in enumerate(panel.cells[row]):
            x, y, fill = left + wide * column, _HEAD + _HIGH * row, heat.fill(cell, bounds)
            drawn.append(_cell(heat, cell, x, y, wide, fill))
    name = ", ".join(filter(None, (f"{heat.metric} of {heat.title}", panel.title)))
    return (
        f'<svg role="img" aria-label="{escape(name)}" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="#1f2328"><title>{escape(name)}</title>'
        f"<desc>{escape(_words(heat, panel))}</desc>{''.join(drawn)}</svg>"
    )


def _cell(heat: HeatMap, cell: HeatCell, x: float, y: float, wide: int, fill: str) -> str:
    dark = ink(fill)
    edge = EDGES.get(cell.mark)
    inset = _GAP / 2 + (1 if edge else 0)
    stroke = f' stroke="{edge}" stroke-width="2"' if edge else ""
    middle = y + _HIGH / 2
    parts = [
        f"<g><title>{escape(cell.note)}</title>",
        (
            f'<rect x="{x + inset:g}" y="{y + inset:g}" width="{wide - 2 * inset:g}" '
            f'height="{_HIGH - 2 * inset:g}" rx="2" fill="{fill}"{stroke}/>'
        ),
    ]
    if cell.mark is Mark.NONE:
        parts.append(_text(x + wide / 2, middle + 4, heat.number(cell.value), fill=dark))
    else:
        number = heat.number(cell.value)
        parts.append(_text(x + wide / 2, middle - 2, number, fill=dark))
        parts.append(_text(x + wide / 2, middle + 12, cell.mark.value, fill=dark, font_size="10"))
    return "".join((*parts, "</g>"))


def _words(heat: HeatMap, panel: HeatPanel) -> str:
    """The picture in words: its axes, its ends, and how many cells have which verdict."""
    cells = [cell for row in panel.cells for cell in row]
    values = [cell.value for cell in cells if cell.value is not None]
    axes = [
        f"{label or 'one'} from {names[0]} to {names[-1]}" if len(names) > 1 else ""
        for label, names in (
            (heat.row_label, heat.row_names), (heat.column_label, heat.column_names)
        )
    ]  # fmt: skip
    said = [f"{len(cells)} cells", *filter(None, axes)]
    if values:
        said.append(f"{heat.number(min(values))} to {heat.number(max(values))}")
    for mark in Mark:
        count = sum(cell.mark is mark for cell in cells)
        if count and mark is not Mark.NONE:
            said.append(f"{count} {mark.value}")
    return "; ".join(said) + "."


def _scale(heat: HeatMap) -> str:
    """The colours and what they stand for."""
    low, high = heat.bounds()
    if heat.signed:
        far = max(abs(low), abs(high))
        low, high = min(low, 0) and -far, max(high, 0) and far
    steps, width = 48, 360
    if low == high:
        return ""
    drawn = []
    for step in range(steps):
        value = low + (high - low) * step // (steps - 1)
        fill = colour(value, (low, high), heat.signed)
        x = width * step / steps
        drawn.append(
            f'<rect x="{x:g}" y="0" width="{width / steps + 0.5:g}" height="14" fill="{fill}"/>'
        )
    ends = (
        _text(0, 30, heat.number(low), anchor="start"),
        _text(width, 30, heat.number(high), anchor="end"),
    )
    label = f"colours from {heat.number(low)} to {heat.number(high)}"
    return (
        f'<svg role="img" aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {width} 34" width="{width}" height="34" font-family="sans-serif" '
        f'font-size="12" fill="#1f2328"><title>{escape(label)}</title>{"".join((*drawn, *ends))}'
        "</svg>"
    )


def _table(heat: HeatMap, panel: HeatPanel) -> str:
    side = 'style="text-align:right;padding:1px 12px 1px 0"'
    corner = " / ".join(filter(None, (heat.row_label, heat.column_label)))
    head = "".join(f'<th scope="col" {side}>{escape(name)}</th>' for name in heat.column_names)
    lines = [f"<tr><th {side}>{escape(corner)}</th>{head}</tr>"]
    for name, row in zip(heat.row_names, panel.cells, strict=True):
        cells = "".join(
            f'<td {side} data-bytes="{"" if cell.value is None else cell.value}">'
            f"{escape(', '.join(filter(None, (heat.number(cell.value), cell.mark.value))))}</td>"
            for cell in row
        )
        lines.append(f'<tr><th scope="row" {side}>{escape(name)}</th>{cells}</tr>')
    title = panel.title or heat.title
    return (
        '<table style="border-collapse:collapse;margin:0.6em 0">'
        f'<caption style="text-align:left"><b>{escape(title)}</b></caption>{"".join(lines)}</table>'
    )
