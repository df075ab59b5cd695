"""A heat map as a picture, drawn by matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from memest.errors import ConfigError, MissingDependencyError
from memest.report.figure import new_figure, png_of
from memest.report.heat import EDGES, HeatCell, HeatMap, HeatPanel, Mark, ink

__all__ = ["MAX_CELLS", "check_picture", "draw_heat_map", "render_png"]

MAX_CELLS = 2_000
"""Cells of one picture: more of them are too small to read, or the picture too large to open."""

_DPI = 110
_CELL_WIDTH, _CELL_HEIGHT = 0.95, 0.42
_LETTER = 0.078
"""Inches of a letter of 9 points, generously."""
_LINE, _BETWEEN = 0.2, 0.7
_PAGE, _NARROWEST = 14.0, 6.0
_NOTES = 4
"""Reasons for cells without an answer that find room below a picture."""


def check_picture(num_cells: int) -> None:
    """Refuse a picture before anything slow.

    Raises:
        MissingDependencyError: without matplotlib.
        ConfigError: for more cells than a picture can show.
    """
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "A heat map as PNG needs matplotlib: pip install 'memest[plot]'. One as .html needs "
            "nothing."
        ) from error
    if num_cells > MAX_CELLS:
        raise ConfigError(
            f"a picture of {num_cells:,} cells cannot be read, at most {MAX_CELLS:,} can: write "
            "the heat map as .html, or take fewer values."
        )


def render_png(heat: HeatMap) -> bytes:
    """Draw the panels one below the other.

    Raises:
        MissingDependencyError: without matplotlib.
        ConfigError: for more cells than a picture can show.
    """
    return png_of(draw_heat_map(heat))


def draw_heat_map(heat: HeatMap) -> Any:
    """The panels as a ``matplotlib.figure.Figure``.

    Raises:
        MissingDependencyError: without matplotlib.
        ConfigError: for more cells than a picture can show.
    """
    rows, columns = len(heat.row_names), len(heat.column_names)
    check_picture(rows * columns * len(heat.panels))
    cell_width = max(_CELL_WIDTH, _inches(heat.column_names) + 0.1)
    left = _inches((*heat.row_names, heat.row_label)) + 0.3
    titles = _inches(f"{panel.title}: {heat.column_label}" for panel in heat.panels)
    panel_width = left + max(cell_width * columns, titles) + 0.2
    panel_height = _CELL_HEIGHT * rows + _BETWEEN
    beside = max(1, min(len(heat.panels), int(_PAGE // panel_width)))
    width = max(panel_width * beside, _NARROWEST)
    said = [heat.title, heat.summary, heat.subtitle, f"Numbers and colours: {heat.metric}."]
    lines = _wrapped([text for text in said if text], width)
    feet = _wrapped([f"No answer: {note}" for note in heat.notes[:_NOTES]], width)
    header, footer = _LINE * len(lines) + 0.15, _LINE * len(feet) + 0.2
    height = header + panel_height * -(-len(heat.panels) // beside) + footer
    figure = new_figure(width, height, _DPI)
    for index, line in enumerate((*lines, *feet)):
        down = _LINE * index + 0.25
        if index >= len(lines):
            down = height - footer + _LINE * (index - len(lines)) + 0.2
        weight = "normal" if index else "bold"
        figure.text(
            0.15 / width, 1 - down / height, _plain(line), fontsize=9, va="center",
            color="#1f2328", weight=weight,
        )  # fmt: skip
    for index, panel in enumerate(heat.panels):
        down, right = divmod(index, beside)
        bottom = height - header - panel_height * (down + 1)
        axes: Any = figure.add_axes(
            (
                (left + panel_width * right) / width,
                bottom / height,
                cell_width * columns / width,
                _CELL_HEIGHT * rows / height,
            )
        )
        _draw(axes, heat, panel)
    return figure


def _inches(texts: Iterable[str]) -> float:
    """Width of the longest text."""
    return max(map(len, texts), default=0) * _LETTER


def _plain(text: str) -> str:
    """Dollar signs are no formula."""
    return text.replace("$", r"\$")


def _wrapped(texts: list[str], width: float) -> list[str]:
    """Lines of at most ``width`` inches."""
    letters = max(20, int(width / _LETTER))
    return [line for text in texts for line in textwrap.wrap(text, letters) or [""]]


def _draw(axes: Any, heat: HeatMap, panel: HeatPanel) -> None:
    rows, columns = len(heat.row_names), len(heat.column_names)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    style = {"length": 0, "labelsize": 9, "labelcolor": "#1f2328"}
    axes.tick_params(**style)
    axes.set_xticks([i + 0.5 for i in range(columns)], [_plain(n) for n in heat.column_names])
    axes.set_yticks([i + 0.5 for i in range(rows)], [_plain(n) for n in heat.row_names])
    label = f"{panel.title}: {heat.column_label}" if panel.title else heat.column_label
    axes.set_xlabel(_plain(label), fontsize=9, weight="bold", loc="left")
    axes.set_ylabel(_plain(heat.row_label), fontsize=9, weight="bold")
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

    dark = ink(fill)
    edge = EDGES.get(cell.mark)
    inset = 0.03 if edge else 0.012
    axes.add_patch(
        Rectangle(
            (x + inset, y + 2 * inset), 1 - 2 * inset, 1 - 4 * inset,
            facecolor=fill, edgecolor=edge or "none", linewidth=1.6 if edge else 0,
        )
    )  # fmt: skip
    where = {"ha": "center", "va": "center", "color": dark}
    if cell.mark is Mark.NONE:
        axes.text(x + 0.5, y + 0.5, number, fontsize=9, **where)
    else:
        axes.text(x + 0.5, y + 0.34, number, fontsize=9, **where)
        axes.text(x + 0.5, y + 0.72, cell.mark.value, fontsize=7, **where)
