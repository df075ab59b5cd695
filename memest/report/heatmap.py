"""A heat map: cells, colours and words, drawn as HTML and as a picture.

HTML is inline SVG, no scripts, nothing loaded from anywhere. Every number stands in its cell as
text. For readers who do not see the picture, each SVG says in words what it shows and a table of
the same numbers follows.
"""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from memest.errors import ConfigError
from memest.report.page import html_document
from memest.report.plots import INK, check_matplotlib, new_figure, plain
from memest.report.result import Verdict
from memest.units import format_delta, format_size

__all__ = [
    "EDGES",
    "MAX_CELLS",
    "HeatCell",
    "HeatMap",
    "HeatMark",
    "HeatPanel",
    "check_picture",
    "colour",
    "draw_heat_map",
    "ink",
    "render_fragment",
    "render_page",
]


class HeatMark(enum.StrEnum):
    """What is said under the number of a cell."""

    FITS = "fits"
    RELEASES_CACHE = "fits by releasing cache"
    TIGHT = "tight"
    CANNOT_SAY = "cannot say"
    DOES_NOT_FIT = "does not fit"
    NONE = ""
    NO_ANSWER = "no answer"

    @classmethod
    def of(cls, verdict: Verdict | None) -> HeatMark:
        """The mark of a verdict, None for a point without an answer."""
        if verdict is None:
            return cls.NO_ANSWER
        return cls.NONE if verdict is Verdict.UNKNOWN else cls(verdict.value)


EDGES = {
    HeatMark.RELEASES_CACHE: "#9a6700",
    HeatMark.TIGHT: "#9a6700",
    HeatMark.CANNOT_SAY: "#57606a",
    HeatMark.DOES_NOT_FIT: "#cf222e",
}
"""Frames of cells, in the colours of the verdicts; the words stand in the cell as well."""

_EMPTY = "#e5e5e5"
_RISING = ("#f7fcf0", "#ccebc5", "#7bccc4", "#2b8cbe", "#084081")
"""From little to much memory: one hue that darkens, so that a grey print keeps the order."""
_MISSING = ("#f7f7f7", "#fdb863", "#b35806")
_SPARE = ("#f7f7f7", "#b2abd2", "#542788")
"""Headroom below and above nothing: orange and purple, told apart by colour-blind readers too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatCell:
    """One point.

    Attributes:
        value: bytes, None without an answer.
        mark: the verdict.
        note: everything about the point, for whoever points at it.
    """

    value: int | None
    mark: HeatMark
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatPanel:
    """One rectangle of cells; rows from top to bottom."""

    title: str
    cells: tuple[tuple[HeatCell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Panels that share rows, columns and the scale of colours.

    Attributes:
        title: the models.
        subtitle: what is the same everywhere.
        summary: the result in one sentence.
        metric: what the numbers are.
        signed: whether the numbers are differences, which may be negative.
        row_label: the option that varies from row to row, empty for a single row.
        row_names: its values.
        column_label: the option that varies from column to column, empty for a single column.
        column_names: its values.
        panels: one for each combination of the other options.
        notes: reasons for cells without an answer.
    """

    title: str
    subtitle: str
    summary: str
    metric: str
    signed: bool
    row_label: str
    row_names: tuple[str, ...]
    column_label: str
    column_names: tuple[str, ...]
    panels: tuple[HeatPanel, ...]
    notes: tuple[str, ...]

    def cells(self) -> Iterator[HeatCell]:
        """Every cell."""
        for panel in self.panels:
            for row in panel.cells:
                yield from row

    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number, in bytes; zeros without any."""
        values = [cell.value for cell in self.cells() if cell.value is not None]
        return (min(values), max(values)) if values else (0, 0)

    def fill(self, cell: HeatCell, bounds: tuple[int, int]) -> str:
        """The colour of a cell on the scale of :meth:`bounds`."""
        return _EMPTY if cell.value is None else colour(cell.value, bounds, self.signed)

    def number(self, value: int | None) -> str:
        """The text of a number."""
        if value is None:
            return "?"
        return format_delta(value) if self.signed else format_size(value)


def _mix(stops: tuple[str, ...], part: float) -> str:
    """The colour at ``part`` (0 to 1) of the way through ``stops``."""
    position = min(max(part, 0.0), 1.0) * (len(stops) - 1)
    index = min(int(position), len(stops) - 2)
    fraction = position - index
    first, second = (
        [int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops[index : index + 2]
    )
    channels = (round(a + (b - a) * fraction) for a, b in zip(first, second, strict=True))
    return "#" + "".join(f"{part:02x}" for part in channels)


def colour(value: int, bounds: tuple[int, int], signed: bool) -> str:
    """The colour of ``value`` bytes on a scale between ``bounds``."""
    low, high = bounds
    if signed:
        extent = max(abs(low), abs(high), 1)
        return _mix(_MISSING if value < 0 else _SPARE, abs(value) / extent)
    return _mix(_RISING, (value - low) / (high - low) if high > low else 0.5)


def _luminance(background: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink(background: str) -> str:
    """Black or white, whichever reads better on ``background``."""
    luminance = _luminance(background)
    return "#000000" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "#ffffff"


# -- HTML -----------------------------------------------------------------------------------------

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
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{attributes}>{escape(text)}</text>'


def _row_label_width(heat: HeatMap) -> int:
    """Pixels that the names of rows take."""
    longest = max((len(name) for name in (*heat.row_names, heat.row_label)), default=0)
    return round(longest * _LETTER) + 14


def _column_width(heat: HeatMap) -> int:
    """Pixels of a column: a number, or the name of its column if that is longer."""
    longest = max((len(name) for name in heat.column_names), default=0)
    return max(_WIDE, round(longest * _LETTER) + 12)


def _svg(heat: HeatMap, panel: HeatPanel) -> str:
    left_width, column_width, bounds = _row_label_width(heat), _column_width(heat), heat.bounds()
    width = left_width + column_width * len(heat.column_names) + _GAP
    height = _HEAD + _HIGH * len(heat.row_names) + _GAP
    shapes = [
        _text(
            left_width + column_width * len(heat.column_names) / 2,
            14,
            heat.column_label,
            font_weight="bold",
        ),
        _text(left_width - 8, _HEAD - 8, heat.row_label, anchor="end", font_weight="bold"),
    ]
    for column, name in enumerate(heat.column_names):
        shapes.append(_text(left_width + column_width * (column + 0.5), _HEAD - 8, name))
    for row, name in enumerate(heat.row_names):
        shapes.append(_text(left_width - 8, _HEAD + _HIGH * (row + 0.5) + 4, name, anchor="end"))
        for column, cell in enumerate(panel.cells[row]):
            x, y, fill = (
                left_width + column_width * column,
                _HEAD + _HIGH * row,
                heat.fill(cell, bounds),
            )
            shapes.append(_svg_cell(heat, cell, x, y, column_width, fill))
    name = ", ".join(filter(None, (f"{heat.metric} of {heat.title}", panel.title)))
    return (
        f'<svg role="img" aria-label="{escape(name)}" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="#1f2328"><title>{escape(name)}</title>'
        f"<desc>{escape(_words(heat, panel))}</desc>{''.join(shapes)}</svg>"
    )


def _svg_cell(
    heat: HeatMap, cell: HeatCell, x: float, y: float, column_width: int, fill: str
) -> str:
    text_colour = ink(fill)
    edge = EDGES.get(cell.mark)
    inset = _GAP / 2 + (1 if edge else 0)
    stroke = f' stroke="{edge}" stroke-width="2"' if edge else ""
    middle = y + _HIGH / 2
    parts = [
        f"<g><title>{escape(cell.note)}</title>",
        (
            f'<rect x="{x + inset:g}" y="{y + inset:g}" width="{column_width - 2 * inset:g}" '
            f'height="{_HIGH - 2 * inset:g}" rx="2" fill="{fill}"{stroke}/>'
        ),
    ]
    if cell.mark is HeatMark.NONE:
        parts.append(
            _text(x + column_width / 2, middle + 4, heat.number(cell.value), fill=text_colour)
        )
    else:
        number = heat.number(cell.value)
        parts.append(_text(x + column_width / 2, middle - 2, number, fill=text_colour))
        parts.append(
            _text(
                x + column_width / 2, middle + 12, cell.mark.value, fill=text_colour, font_size="10"
            )
        )
    return "".join((*parts, "</g>"))


def _words(heat: HeatMap, panel: HeatPanel) -> str:
    """The picture in words: its axes, its ends, and how many cells have which verdict."""
    cells = [cell for row in panel.cells for cell in row]
    values = [cell.value for cell in cells if cell.value is not None]
    axes = [
        f"{label or 'one'} from {names[0]} to {names[-1]}" if len(names) > 1 else ""
        for label, names in (
            (heat.row_label, heat.row_names),
            (heat.column_label, heat.column_names),
        )
    ]
    phrases = [f"{len(cells)} cells", *filter(None, axes)]
    if values:
        phrases.append(f"{heat.number(min(values))} to {heat.number(max(values))}")
    for mark in HeatMark:
        count = sum(cell.mark is mark for cell in cells)
        if count and mark is not HeatMark.NONE:
            phrases.append(f"{count} {mark.value}")
    return "; ".join(phrases) + "."


def _scale(heat: HeatMap) -> str:
    """The colours and what they stand for."""
    low, high = heat.bounds()
    if heat.signed:
        extent = max(abs(low), abs(high))
        low, high = min(low, 0) and -extent, max(high, 0) and extent
    steps, width = 48, 360
    if low == high:
        return ""
    shapes = []
    for step in range(steps):
        value = low + (high - low) * step // (steps - 1)
        fill = colour(value, (low, high), heat.signed)
        x = width * step / steps
        shapes.append(
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
        f'font-size="12" fill="#1f2328"><title>{escape(label)}</title>{"".join((*shapes, *ends))}'
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


# -- PNG ------------------------------------------------------------------------------------------

MAX_CELLS = 2_000
"""Cells of one picture: more of them are too small to read, or the picture too large to open."""

_CELL_WIDTH, _CELL_HEIGHT = 0.95, 0.42
_LETTER_INCHES = 0.078
"""Inches of a letter of 9 points, generously."""
_LINE, _BETWEEN = 0.2, 0.8
_PAGE, _NARROWEST = 14.0, 6.0
_NOTES = 4
"""Reasons for cells without an answer that find room below a picture."""


def check_picture(num_cells: int) -> None:
    """Refuse a picture before anything slow.

    Raises:
        MissingDependencyError: without matplotlib.
        ConfigError: for more cells than a picture can show.
    """
    check_matplotlib("A heat map")
    if num_cells > MAX_CELLS:
        raise ConfigError(
            f"a picture of {num_cells:,} cells cannot be read, at most {MAX_CELLS:,} can: write "
            "the heat map as .html, or take fewer values."
        )


def draw_heat_map(heat: HeatMap) -> Any:
    """The panels as a ``matplotlib.figure.Figure``.

    Raises:
        MissingDependencyError: without matplotlib.
        ConfigError: for more cells than a picture can show.
    """
    rows, columns = len(heat.row_names), len(heat.column_names)
    check_picture(rows * columns * len(heat.panels))
    cells = max(_CELL_WIDTH, _inches(heat.column_names) + 0.1) * columns
    titles = _inches(f"{panel.title}: {heat.column_label}" for panel in heat.panels)
    panel_width = max(cells, titles) + _inches((*heat.row_names, heat.row_label)) + 0.5
    num_across = max(1, min(len(heat.panels), int(_PAGE // panel_width)))
    num_down = -(-len(heat.panels) // num_across)
    width = max(panel_width * num_across, _NARROWEST)
    head_texts = [heat.title, heat.summary, heat.subtitle, f"Numbers and colours: {heat.metric}."]
    head_lines = _wrap([text for text in head_texts if text], width)
    foot_lines = _wrap([f"No answer: {note}" for note in heat.notes[:_NOTES]], width)
    height = (
        (_CELL_HEIGHT * rows + _BETWEEN) * num_down + _LINE * len((*head_lines, *foot_lines)) + 0.4
    )
    figure = new_figure(width, height)
    figure.set_layout_engine("constrained")
    style = {"x": 0.01, "ha": "left", "fontsize": 9, "color": INK}
    figure.suptitle(plain("\n".join(head_lines)), **style)
    figure.supxlabel(plain("\n".join(foot_lines)), **style)
    grid = figure.subplots(num_down, num_across, squeeze=False).ravel()
    for axes, panel in zip(grid, heat.panels, strict=False):
        _draw(axes, heat, panel)
    for axes in grid[len(heat.panels) :]:
        axes.set_visible(False)
    return figure


def _inches(texts: Iterable[str]) -> float:
    """Width of the longest text."""
    return max(map(len, texts), default=0) * _LETTER_INCHES


def _wrap(texts: list[str], width: float) -> list[str]:
    """Lines of at most ``width`` inches."""
    letters = max(20, int(width / _LETTER_INCHES))
    return [line for text in texts for line in textwrap.wrap(text, letters) or [""]]


def _draw(axes: Any, heat: HeatMap, panel: HeatPanel) -> None:
    rows, columns = len(heat.row_names), len(heat.column_names)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    style = {"length": 0, "labelsize": 9, "labelcolor": INK}
    axes.tick_params(**style)
    axes.set_xticks([i + 0.5 for i in range(columns)], [plain(n) for n in heat.column_names])
    axes.set_yticks([i + 0.5 for i in range(rows)], [plain(n) for n in heat.row_names])
    label = f"{panel.title}: {heat.column_label}" if panel.title else heat.column_label
    axes.set_xlabel(plain(label), fontsize=9, weight="bold", loc="left")
    axes.set_ylabel(plain(heat.row_label), fontsize=9, weight="bold")
    for spine in axes.spines.values():
        spine.set_visible(False)
    bounds = heat.bounds()
    for y, row in enumerate(panel.cells):
        for x, cell in enumerate(row):
            _draw_cell(
                axes, cell, x, y, number=heat.number(cell.value), fill=heat.fill(cell, bounds)
            )


def _draw_cell(axes: Any, cell: HeatCell, x: int, y: int, *, number: str, fill: str) -> None:
    from matplotlib.patches import Rectangle

    text_colour = ink(fill)
    edge = EDGES.get(cell.mark)
    inset = 0.03 if edge else 0.012
    axes.add_patch(
        Rectangle(
            (x + inset, y + 2 * inset),
            1 - 2 * inset,
            1 - 4 * inset,
            facecolor=fill,
            edgecolor=edge or "none",
            linewidth=1.6 if edge else 0,
        )
    )
    style = {"ha": "center", "va": "center", "color": text_colour}
    if cell.mark is HeatMark.NONE:
        axes.text(x + 0.5, y + 0.5, number, fontsize=9, **style)
    else:
        axes.text(x + 0.5, y + 0.34, number, fontsize=9, **style)
        axes.text(x + 0.5, y + 0.72, cell.mark.value, fontsize=7, **style)
