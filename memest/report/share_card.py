"""An answer as one picture to post: model, card, bar, verdict, 1200 x 630 pixels."""

from __future__ import annotations

import textwrap
from typing import Any

from memest.report.html import VERDICT_COLOURS
from memest.report.memory_bar import VERDICT_WORDS, MemoryBar, memory_bar
from memest.report.plots import INK, new_figure, plain, png_of
from memest.report.result import Estimate
from memest.report.words import each_gpu, format_count, setup_items, short_name
from memest.units import format_size

__all__ = ["share_card"]

_WIDTH, _HEIGHT, _DPI = 1200, 630, 100
_LEFT, _RIGHT = 0.05, 0.95
_BAR_TOP, _BAR_HEIGHT = 0.53, 0.17
_NAMED = 0.125
"""Segments below this share of the bar have their names below it: no word is wider."""
_LETTERS = 96


def share_card(estimate: Estimate) -> bytes:
    """The picture as PNG.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    figure = new_figure(_WIDTH / _DPI, _HEIGHT / _DPI, _DPI)
    bar, gpu = memory_bar(estimate), estimate.gpu
    headline = VERDICT_WORDS[estimate.verdict]
    if gpu is not None:
        headline += f" on {short_name(gpu.name)}"
    model = estimate.model
    items = [f"{format_count(model.parameters)} parameters", *setup_items(estimate.setup)]
    _text(figure, _LEFT, 0.9, _short(model.id, 44), size=30, weight="bold")
    lines = textwrap.wrap(" · ".join(items), _LETTERS, max_lines=2, placeholder=" …")
    for place, line in enumerate(lines):
        _text(figure, _LEFT, 0.83 - 0.05 * place, line, size=14)
    _text(
        figure, _LEFT, 0.68, _short(headline, 48), size=26, weight="bold",
        color=VERDICT_COLOURS[estimate.verdict],
    )  # fmt: skip
    _bar(figure, bar)
    span = f"needs {format_size(bar.taken_bytes)}, range {format_size(bar.low_bytes)} to "
    span += format_size(bar.high_bytes) + each_gpu(estimate.setup)
    _text(figure, _LEFT, 0.31, span, size=16)
    if gpu is not None:
        has = f"{format_size(gpu.usable_bytes)} for PyTorch"
        _text(figure, _RIGHT, 0.31, has, size=16, ha="right")
    _small_parts(figure, bar)
    _text(figure, _LEFT, 0.06, "memest", size=18, weight="bold")
    _text(figure, 0.155, 0.06, "will it fit? GPU memory of PyTorch training", size=14)
    return png_of(figure)


def _text(figure: Any, x: float, y: float, text: str, *, size: int, **style: Any) -> None:
    figure.text(x, y, plain(text), fontsize=size, **{"color": INK, "va": "center"} | style)


def _short(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1].rstrip(' ·')}…"


def _bar(figure: Any, bar: MemoryBar) -> None:
    """Segments, what is free, the range, and where a card that is too small ends."""
    from matplotlib.patches import Rectangle

    bottom, width = _BAR_TOP - _BAR_HEIGHT + 0.03, _RIGHT - _LEFT

    def box(left: int, right: int, **style: Any) -> None:
        corner = _LEFT + width * bar.share(left), bottom
        size = width * bar.share(right - left), _BAR_HEIGHT
        figure.add_artist(Rectangle(corner, *size, transform=figure.transFigure, **style))

    box(0, bar.whole_bytes, facecolor="#eceef1", edgecolor="#9aa4af")
    start = 0
    named = [(s.name, s.bytes, s.colour, s.ink) for s in bar.segments]
    if bar.free_bytes is not None and bar.free_bytes > 0:
        named.append(("free", bar.free_bytes, "", INK))
    for name, size, colour, ink in named:
        if colour:
            box(start, start + size, facecolor=colour, edgecolor="white")
        if bar.share(size) >= _NAMED:
            # what is free begins beside the range, which may end beyond the device peak
            x = _LEFT + width * bar.share(start if colour else max(start, bar.high_bytes)) + 0.008
            lines = textwrap.wrap(name, int(bar.share(size) * 90), max_lines=2, placeholder="…")
            _text(figure, x, bottom + 0.12, "\n".join(lines), size=14, color=ink)
            words = format_size(size)
            _text(figure, x, bottom + 0.05, words, size=14, weight="bold", color=ink)
        start += size
    box(bar.low_bytes, bar.high_bytes, facecolor="none", edgecolor=INK, hatch="////", lw=0.8)
    if bar.usable_bytes is not None and bar.usable_bytes < bar.high_bytes:
        box(bar.usable_bytes, bar.whole_bytes, facecolor="none", edgecolor="#cf222e", lw=3)


def _small_parts(figure: Any, bar: MemoryBar) -> None:
    """Names of what is too narrow for them on the bar."""
    small = [s for s in bar.segments if bar.share(s.bytes) < _NAMED]
    words = " · ".join(f"{s.name} {format_size(s.bytes)}" for s in small)
    free = bar.free_bytes
    if free is not None and free < 0:
        words = f"{format_size(-free)} too little · {words}"
    _text(figure, _LEFT, 0.22, _short(words, _LETTERS), size=14)
