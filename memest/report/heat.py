"""A heat map before it is drawn: cells, colours and words, the same for HTML and for a picture."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from memest.result import Verdict
from memest.units import format_delta, format_size

__all__ = ["EDGES", "HeatCell", "HeatMap", "HeatPanel", "Mark", "colour", "ink"]


class Mark(enum.StrEnum):
    """What is said under the number of a cell."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"
    NONE = ""
    NO_ANSWER = "no answer"

    @classmethod
    def of(cls, verdict: Verdict | None) -> Mark:
        """The mark of a verdict, None for a point without an answer."""
        if verdict is None:
            return cls.NO_ANSWER
        return cls.NONE if verdict is Verdict.UNKNOWN else cls(verdict.value)


EDGES = {Mark.TIGHT: "#9a6700", Mark.DOES_NOT_FIT: "#cf222e"}
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
    mark: Mark
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
    at = min(max(part, 0.0), 1.0) * (len(stops) - 1)
    index = min(int(at), len(stops) - 2)
    rest = at - index
    first, second = (
        [int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops[index : index + 2]
    )
    mixed = (round(a + (b - a) * rest) for a, b in zip(first, second, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def colour(value: int, bounds: tuple[int, int], signed: bool) -> str:
    """The colour of ``value`` bytes on a scale between ``bounds``."""
    low, high = bounds
    if signed:
        far = max(abs(low), abs(high), 1)
        return _mix(_MISSING if value < 0 else _SPARE, abs(value) / far)
    return _mix(_RISING, (value - low) / (high - low) if high > low else 0.5)


def _light(background: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink(background: str) -> str:
    """Black or white, whichever reads better on ``background``."""
    light = _light(background)
    return "#000000" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "#ffffff"
