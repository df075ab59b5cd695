"""Two plots as SVG text: how far predictions are off, and predictions against measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from memest.units import GIB, MIB, format_size

__all__ = [
    "CORRECTED",
    "GRID",
    "INK",
    "Point",
    "against_measured",
    "error_plot",
    "error_words",
]

RAW, CORRECTED = "#d55e00", "#0072b2"
"""Orange and blue, told apart by colour-blind readers; shapes differ as well."""
_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 16, 34, 46
INK, GRID = "#1f2328", "#d0d7de"


@dataclass(frozen=True, slots=True)
class Point:
    """One run: bytes measured, predicted and corrected (None without a profile)."""

    name: str
    measured: int
    raw: int
    corrected: int | None

    @property
    def best(self) -> int:
        """What is said at last."""
        return self.raw if self.corrected is None else self.corrected


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values to pixels."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        return self.start + (self.stop - self.start) * part


def error_words(points: Sequence[Point]) -> str:
    """What the error plot shows, in a sentence."""
    sentences = []
    for name, field in (("Uncalibrated", "raw"), ("Corrected", "corrected")):
        values = sorted(_errors(points, field))
        if not values:
            continue
        within = sum(abs(v) <= 0.02 for v in values)
        sentences.append(
            f"{name}: {len(values)} runs, errors from {values[0]:+.2%} to {values[-1]:+.2%}, "
            f"{within} of them within 2 %."
        )
    return " ".join(sentences) or "No run."


def error_plot(points: Sequence[Point], title: str) -> str:
    """Relative error of each run over the measured peak."""
    errors = [*_errors(points, "raw"), *_errors(points, "corrected")]
    if not errors:
        return ""
    extent = max(0.01, *map(abs, errors)) * 1.08
    x = _sizes([p.measured for p in points])
    y = _Axis(-extent, extent, _HEIGHT - _BOTTOM, _TOP)
    step = _nice(extent / 3)
    shapes = [
        _line_at(y.at(k * step), f"{k * step:+.1%}" if k else "0 %", strong=k == 0)
        for k in range(-int(extent / step), int(extent / step) + 1)
    ]
    shapes += _size_ticks(x)
    for p in points:
        heights = [y.at(v / p.measured - 1) for v in (p.raw, p.best)]
        shapes += _marks(p, x.at(math.log2(p.measured)), *heights)
    shapes += _labels("measured peak", "predicted / measured - 1", points)
    return _svg(title, error_words(points), shapes)


def against_measured(points: Sequence[Point], title: str) -> str:
    """Predicted over measured peaks, both on scales of doublings; the diagonal is exact."""
    if not points:
        return ""
    x = _sizes([v for p in points for v in (p.measured, p.raw, p.corrected) if v])
    y = _Axis(x.low, x.high, _HEIGHT - _BOTTOM, _TOP)
    shapes = _size_ticks(x)
    shapes += [_line_at(y.at(math.log2(tick)), _size(tick)) for tick in _ticks(x)]
    shapes.append(
        f'<line x1="{x.start:.1f}" y1="{y.start:.1f}" x2="{x.stop:.1f}" y2="{y.stop:.1f}" '
        f'stroke="{INK}" stroke-dasharray="4 3"/>'
    )
    for p in points:
        heights = [y.at(math.log2(max(v, 1))) for v in (p.raw, p.best)]
        shapes += _marks(p, x.at(math.log2(p.measured)), *heights)
    shapes += _labels("measured peak", "predicted peak", points)
    return _svg(title, error_words(points), shapes)


def _errors(points: Sequence[Point], field: str) -> list[float]:
    """Relative errors of those that have the field."""
    values = ((getattr(p, field), p.measured) for p in points)
    return [value / measured - 1 for value, measured in values if value is not None]


def _sizes(sizes: Sequence[int]) -> _Axis:
    """The axis across, in doublings."""
    low, high = math.log2(min(sizes)), math.log2(max(sizes))
    margin = max((high - low) * 0.05, 0.1)
    return _Axis(low - margin, high + margin, _LEFT, _WIDTH - _RIGHT)


def _ticks(axis: _Axis) -> list[int]:
    """Powers of two inside an axis, at most eight."""
    powers = list(range(math.ceil(axis.low), math.floor(axis.high) + 1))
    stride = -(-len(powers) // 8) or 1
    ticks = [1 << max(power, 0) for power in powers[::stride]]
    return ticks or [_round_size(2 ** ((axis.low + axis.high) / 2))]


def _round_size(size: float) -> int:
    unit = GIB // 100 if size >= GIB else MIB
    return max(round(size / unit) * unit, 1)


def _size(tick: int) -> str:
    """A size on an axis: ``16 GiB``."""
    return format_size(tick).replace(".00 ", " ")


def _nice(step: float) -> float:
    power = 10 ** math.floor(math.log10(step))
    return float(power * next(n for n in (1, 2, 5, 10) if n * power >= step * 0.999))


def _size_ticks(x: _Axis) -> list[str]:
    lines = []
    for tick in _ticks(x):
        at = x.at(math.log2(tick))
        lines.append(
            f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_HEIGHT - _BOTTOM}" '
            f'stroke="{GRID}"/>{_words(at, _HEIGHT - _BOTTOM + 16, _size(tick), "middle")}'
        )
    return lines


def _line_at(height: float, text: str, *, strong: bool = False) -> str:
    colour = INK if strong else GRID
    return (
        f'<line x1="{_LEFT}" y1="{height:.1f}" x2="{_WIDTH - _RIGHT}" y2="{height:.1f}" '
        f'stroke="{colour}"/>{_words(_LEFT - 6, height + 4, text, "end")}'
    )


def _words(x: float, y: float, text: str, anchor: str, colour: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _marks(point: Point, x: float, raw: float, corrected: float) -> list[str]:
    """A square for what was predicted, a dot for what is corrected."""
    name = f"{point.name}: measured {format_size(point.measured)}"
    title = escape(f"{name}, predicted {format_size(point.raw)}")
    square = f'<rect x="{x - 3:.1f}" y="{raw - 3:.1f}" width="6" height="6" fill="none"'
    shapes = [f'{square} stroke="{RAW}"><title>{title}</title></rect>']
    if point.corrected is not None:
        title = escape(f"{name}, corrected {format_size(point.corrected)}")
        dot = f'<circle cx="{x:.1f}" cy="{corrected:.1f}" r="3" fill="{CORRECTED}"'
        shapes.append(f"{dot}><title>{title}</title></circle>")
    return shapes


def _labels(across: str, up: str, points: Sequence[Point]) -> list[str]:
    """What the axes and the marks are; no word of marks that are not there."""
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    labels = [
        _words((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, across, "middle"),
        f'<g transform="translate(14 {middle:.1f}) rotate(-90)">{_words(0, 0, up, "middle")}</g>',
        f'<rect x="{_LEFT}" y="14" width="6" height="6" fill="none" stroke="{RAW}"/>',
        _words(_LEFT + 12, 21, "uncalibrated", "start", RAW),
    ]
    if all(point.corrected is None for point in points):
        return labels
    return [
        *labels,
        f'<circle cx="{_LEFT + 105}" cy="17" r="3" fill="{CORRECTED}"/>',
        _words(_LEFT + 114, 21, "corrected", "start", CORRECTED),
    ]


def _svg(title: str, words: str, shapes: Sequence[str]) -> str:
    return (
        f'<svg role="img" aria-label="{escape(f"{title}. {words}")}" '
        f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'font-family="system-ui,sans-serif">{"".join(shapes)}</svg>'
    )
