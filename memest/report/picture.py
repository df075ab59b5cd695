"""An estimate as a picture, drawn by matplotlib: what fills the card, and memory over the run."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from memest.errors import MissingDependencyError
from memest.events import CATEGORY_ORDER
from memest.report.figure import new_figure, png_of
from memest.report.parts import COLOURS, Part, parts_of
from memest.report.phases import PhaseRow, phase_rows
from memest.report.words import interval_text, moment_text, setup_items, verdict_sentence
from memest.result import Estimate, GpuFit
from memest.units import GIB, format_size

__all__ = ["check_picture", "draw_picture", "render_picture"]

_DPI = 110
_WIDTH = 11.0
_LINE = 0.22
_LETTERS = 130
_LETTER = 0.0078
"""Width of a letter of 8 points, as part of the bar's."""
"""Letters of a line of 10 points."""
_MOST_PHASES = 60
"""Phases that find room beside each other."""
_INK, _GREY, _PEAK = "#1f2328", "#8a94a0", "#cf222e"
_CARDS = ("#cf222e", "#8250df", "#9a6700", "#1a7f37", "#0969da", "#bf3989")


def check_picture() -> None:
    """Refuse a picture before anything slow.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "An estimate as PNG needs matplotlib: pip install 'memest[plot]'. One as .html needs "
            "nothing."
        ) from error


def render_picture(estimate: Estimate) -> bytes:
    """Draw an estimate; the same estimate has the same bytes.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    check_picture()
    return png_of(draw_picture(estimate))


def draw_picture(estimate: Estimate) -> Any:
    """An estimate as a ``matplotlib.figure.Figure``.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    heads = textwrap.wrap(verdict_sentence(estimate), _LETTERS - 12)
    setup = textwrap.wrap(" · ".join(setup_items(estimate.setup)), _LETTERS)
    parts = [part for part in parts_of(estimate) if part.bytes > 0]
    rows = phase_rows(estimate.timeline, estimate.peak_at)
    shown = _around_peak(rows)
    labels = _labels(estimate)
    head = _LINE * (len(heads) + len(setup)) + 0.3
    legend = 0.24 * -(-len(parts) // 3)
    above = 0.18 * (len(labels) - 1)
    heights = (head, 1.1 + above, legend + 0.2, 3.0 if rows else 0.0, 1.15 if rows else 0.2)
    height = sum(heights)
    figure = new_figure(_WIDTH, height, _DPI)
    for index, line in enumerate((*heads, *setup)):
        figure.text(
            0.03, 1 - (_LINE * index + 0.28) / height, _plain(line), fontsize=10, va="center",
            color=_INK, weight="bold" if index < len(heads) else "normal",
        )  # fmt: skip
    bottom = height - head - above - 0.75
    bar: Any = figure.add_axes((0.03, bottom / height, 0.94, 0.42 / height))
    _draw_bar(bar, estimate, parts)
    for number, names in enumerate(reversed(labels)):
        for left, text, ink in names:
            bar.text(
                left, 1.2 + 0.43 * number, _plain(text), transform=bar.transAxes, fontsize=8,
                color=ink, va="bottom",
            )  # fmt: skip
    _draw_legend(figure, parts, bottom - 0.55, height)
    if rows:
        lines: Any = figure.add_axes(
            (0.075, heights[4] / height, 0.895, (heights[3] - 0.5) / height)
        )
        calibrated = estimate.calibration is not None
        said = "Highest memory in each phase" + (", before calibration" if calibrated else "")
        if len(shown) < len(rows):
            said += f" ({len(shown)} of {len(rows)} phases)"
        said += f"; line: reserved\nAllocated peak {moment_text(estimate)}"
        _draw_phases(lines, shown, said)
    return figure


def _plain(text: str) -> str:
    """Dollar signs are no formula."""
    return text.replace("$", r"\$")


def _bare(axes: Any) -> None:
    for name in ("top", "right", "left"):
        axes.spines[name].set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=_INK, length=2)


def _cards(estimate: Estimate) -> list[GpuFit]:
    """The GPUs that were asked about."""
    return [] if estimate.gpu is None else [estimate.gpu, *estimate.common_gpus]


def _labels(estimate: Estimate) -> list[list[tuple[float, str, str]]]:
    """Lines of names above the bar: where each starts (0 to 1), its text, its colour."""
    cards = _cards(estimate)
    said = [f"device {format_size(estimate.peak.device_bytes)}, {interval_text(estimate)} (grey)"]
    said += [
        f"{card.name.removeprefix('NVIDIA ')} {format_size(card.usable_bytes)}" for card in cards
    ]
    inks = [_INK, *(_CARDS[number % len(_CARDS)] for number in range(len(cards)))]
    lines: list[list[tuple[float, str, str]]] = [[]]
    left = 0.0
    for text, ink in zip(said, inks, strict=True):
        wide = len(text) * _LETTER
        if lines[-1] and left + wide > 1:
            lines.append([])
            left = 0.0
        lines[-1].append((left, text, ink))
        left += wide + 0.02
    return lines


def _around_peak(rows: list[PhaseRow]) -> list[PhaseRow]:
    """As many phases as find room, the one of the peak among them."""
    at = next((place for place, row in enumerate(rows) if row.is_peak), 0)
    first = max(0, min(at - _MOST_PHASES // 2, len(rows) - _MOST_PHASES))
    return rows[first : first + _MOST_PHASES]


def _draw_bar(axes: Any, estimate: Estimate, parts: Sequence[Part]) -> None:
    left = 0.0
    for part in parts:
        axes.barh(0, part.bytes / GIB, left=left, height=0.8, color=part.colour, linewidth=0)
        left += part.bytes / GIB
    low, high = estimate.interval.low_bytes / GIB, estimate.interval.high_bytes / GIB
    axes.barh(
        0, high - low, left=low, height=1.0, color=_GREY, alpha=0.35, edgecolor=_GREY, linewidth=1
    )
    cards = _cards(estimate)
    for number, card in enumerate(cards):
        axes.axvline(card.usable_bytes / GIB, color=_CARDS[number % len(_CARDS)], linewidth=2.2)
    axes.set_ylim(-0.55, 0.55)
    axes.set_xlim(0, max([left, high, *(card.usable_bytes / GIB for card in cards)]) * 1.02)
    axes.set_yticks([])
    axes.set_xlabel("GiB", fontsize=8, color=_INK, labelpad=1)
    _bare(axes)


def _draw_legend(figure: Any, parts: Sequence[Part], top: float, height: float) -> None:
    from matplotlib.patches import Rectangle

    for index, part in enumerate(parts):
        row, column = divmod(index, 3)
        x, y = 0.03 + 0.32 * column, (top - 0.24 * row) / height
        figure.add_artist(
            Rectangle(
                (x, y - 0.06 / height), 0.012, 0.12 / height, facecolor=part.colour,
                transform=figure.transFigure,
            )
        )  # fmt: skip
        text = f"{part.name} {format_size(part.bytes)}"
        figure.text(x + 0.018, y, text, fontsize=9, va="center", color=_INK)


def _draw_phases(axes: Any, rows: Sequence[PhaseRow], title: str) -> None:
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for category in CATEGORY_ORDER:
        sizes = [
            sum(part.bytes for part in row.breakdown if part.category is category) / GIB
            for row in rows
        ]
        if not any(sizes):
            continue
        axes.bar(places, sizes, bottom=bottom, width=0.86, color=COLOURS[category], linewidth=0)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    axes.step(
        places, [row.reserved_bytes / GIB for row in rows], where="mid", color=_INK, linewidth=1.1
    )
    for place, row in enumerate(rows):
        if row.is_peak:
            axes.plot(place, row.allocated_bytes / GIB, marker="D", color=_PEAK, markersize=6)
    axes.set_title(
        _plain(title), fontsize=9, loc="left", color=_INK,
    )  # fmt: skip
    axes.set_xticks(list(places), [row.label for row in rows], rotation=55, ha="right")
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylabel("GiB", fontsize=8, color=_INK)
    _bare(axes)
    axes.spines["left"].set_visible(True)
