"""The answers of a sweep: frozen points, and the documents made from them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memest.errors import ConfigError
from memest.files import write_as
from memest.result import Peak, Verdict
from memest.search.axes import Axis
from memest.search.grid import shown

if TYPE_CHECKING:
    from memest.result import Spot

__all__ = [
    "METRICS",
    "SCHEMA_VERSION",
    "SUFFIXES",
    "Sweep",
    "SweepPoint",
]

SCHEMA_VERSION = 1
METRICS = ("device", "allocated", "reserved", "headroom")
"""What a heat map can show of a point."""
SUFFIXES = (".csv", ".jsonl", ".json", ".html", ".png")
"""Files that a sweep can be written to."""

_MEASURES = (
    "allocated_bytes", "reserved_bytes", "device_bytes", "low_bytes", "high_bytes", "gpu_name",
    "verdict", "usable_bytes", "headroom_bytes", "error",
)  # fmt: skip
"""Columns of CSV after the model and the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One point of a sweep: an answer, or the reason why there is none.

    Attributes:
        index: its place among all points.
        model: the model as it was named.
        options: what was asked, by the options' keywords: axes first, then what is fixed.
        peak: the three peaks in bytes, None without an answer.
        low_bytes: lower end of the range of the device peak, None without an answer.
        high_bytes: upper end of it, None without an answer.
        verdict: whether it fits the GPU, None without an answer.
        gpu_name: full name of the GPU, None where none was named or without an answer.
        usable_bytes: what PyTorch can have of that GPU, None as above.
        headroom_bytes: what is left of it (negative: missing), None as above.
        error: why there is no answer, None where there is one.
    """

    index: int
    model: str
    options: tuple[tuple[str, Any], ...]
    peak: Peak | None = None
    low_bytes: int | None = None
    high_bytes: int | None = None
    verdict: Verdict | None = None
    gpu_name: str | None = None
    usable_bytes: int | None = None
    headroom_bytes: int | None = None
    error: str | None = None

    @classmethod
    def of(
        cls, index: int, model: str, options: tuple[tuple[str, Any], ...], estimate: Spot
    ) -> SweepPoint:
        """The point of an estimate."""
        gpu = estimate.gpu
        return cls(
            index=index,
            model=model,
            options=options,
            peak=estimate.peak,
            low_bytes=estimate.interval.low_bytes,
            high_bytes=estimate.interval.high_bytes,
            verdict=estimate.verdict,
            gpu_name=None if gpu is None else gpu.name,
            usable_bytes=None if gpu is None else gpu.usable_bytes,
            headroom_bytes=None if gpu is None else gpu.headroom_bytes,
        )

    def measure(self, metric: str) -> int | None:
        """The bytes of ``allocated``, ``reserved``, ``device`` or ``headroom``, if there are any.

        Raises:
            ConfigError: for any other metric.
        """
        if metric == "headroom":
            return self.headroom_bytes
        if metric not in METRICS:
            raise ConfigError(f"metric {metric!r} is not known. Legal: {', '.join(METRICS)}.")
        value: int | None = None
        if self.peak is not None:
            value = getattr(self.peak, f"{metric}_bytes")
        return value

    def to_dict(self) -> dict[str, Any]:
        """The point for JSON: integers are bytes, null is what there is none of."""
        peak = self.peak
        return {
            "model": self.model,
            "options": {name: shown(value) for name, value in self.options},
            "peak": None
            if peak is None
            else {
                "allocated_bytes": peak.allocated_bytes,
                "reserved_bytes": peak.reserved_bytes,
                "device_bytes": peak.device_bytes,
            },
            "interval": None
            if peak is None
            else {"low_bytes": self.low_bytes, "high_bytes": self.high_bytes},
            "gpu": None
            if self.gpu_name is None
            else {"name": self.gpu_name, "usable_bytes": self.usable_bytes},
            "verdict": None if self.verdict is None else self.verdict.value,
            "headroom_bytes": self.headroom_bytes,
            "error": self.error,
        }

    def to_json(self) -> str:
        """:meth:`to_dict` on one line."""
        return json.dumps(self.to_dict())

    def to_row(self) -> list[Any]:
        """The cells under :func:`_columns`; empty where there is nothing."""
        peak = self.peak
        peaks = (
            (None, None, None)
            if peak is None
            else (peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)
        )
        options = [shown(value) for _, value in self.options]
        return [
            self.model,
            *(";".join(value) if isinstance(value, list) else value for value in options),
            *peaks,
            self.low_bytes,
            self.high_bytes,
            self.gpu_name,
            None if self.verdict is None else self.verdict.value,
            self.usable_bytes,
            self.headroom_bytes,
            self.error,
        ]


def _columns(options: Iterable[str]) -> list[str]:
    """Names of the columns, for options by their keywords."""
    return ["model", *options, *_MEASURES]


def _rows(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as text, each ended by a line feed."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a sweep answers: models, axes, and one point for each of their combinations.

    Attributes:
        models: as they were named.
        axes: what was varied; the last one runs fastest.
        fixed: options that are the same everywhere, by keyword.
        points: every point, models one after the other.
    """

    models: tuple[str, ...]
    axes: tuple[Axis, ...]
    fixed: tuple[tuple[str, Any], ...]
    points: tuple[SweepPoint, ...]

    @property
    def failures(self) -> tuple[SweepPoint, ...]:
        """The points without an answer."""
        return tuple(point for point in self.points if point.error is not None)

    def to_dict(self) -> dict[str, Any]:
        """The document that ``memest sweep --json`` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "models": list(self.models),
            "axes": [
                {"name": axis.name, "values": [shown(value) for value in axis.values]}
                for axis in self.axes
            ],
            "options": {name: shown(value) for name, value in self.fixed},
            "points": [point.to_dict() for point in self.points],
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as text, keys in order, two spaces of indent."""
        return json.dumps(self.to_dict(), indent=2)

    def to_jsonl(self) -> str:
        """One line of JSON a point, in order."""
        return "".join(f"{point.to_json()}\n" for point in self.points)

    def to_csv(self) -> str:
        """A header and one row a point, in order; sizes in bytes."""
        names = [axis.name for axis in self.axes] + [name for name, _ in self.fixed]
        return _rows([_columns(names), *(point.to_row() for point in self.points)])

    def to_frame(self) -> Any:
        """A ``pandas.DataFrame`` with the columns of :meth:`to_csv`, sizes in bytes.

        Raises:
            MissingDependencyError: without pandas.
        """
        from memest.report.notebook import frame_of

        columns = _columns([axis.name for axis in self.axes] + [name for name, _ in self.fixed])
        return frame_of(
            (dict(zip(columns, point.to_row(), strict=True)) for point in self.points), columns
        )

    def plot(self, metric: str = "device") -> Any:
        """The heat map as a ``matplotlib.figure.Figure``.

        Args:
            metric: ``device``, ``allocated``, ``reserved`` or ``headroom``.

        Raises:
            MissingDependencyError: without matplotlib.
        """
        from memest.report.heatmap_png import draw_heat_map
        from memest.search.view import heat_map

        return draw_heat_map(heat_map(self, metric))

    def to_html(self, metric: str = "device") -> str:
        """A page with a heat map of ``device``, ``allocated``, ``reserved`` or ``headroom``."""
        from memest.report.heatmap import render_page
        from memest.search.view import heat_map

        return render_page(heat_map(self, metric))

    def to_png(self, metric: str = "device") -> bytes:
        """The heat map as a picture.

        Raises:
            MissingDependencyError: without matplotlib.
        """
        from memest.report.heatmap_png import render_png
        from memest.search.view import heat_map

        return render_png(heat_map(self, metric))

    def save(self, path: str | Path, metric: str = "device") -> None:
        """Write a file; its suffix decides: .csv, .jsonl, .json, .html or .png.

        Args:
            path: where to; an existing file is overwritten.
            metric: what a heat map shows.

        Raises:
            ConfigError: for any other suffix.
            MissingDependencyError: for .png without matplotlib.
        """
        makers: dict[str, Callable[[], str | bytes]] = {
            ".csv": self.to_csv,
            ".jsonl": self.to_jsonl,
            ".json": lambda: f"{self.to_json()}\n",
            ".html": lambda: self.to_html(metric),
            ".png": lambda: self.to_png(metric),
        }
        write_as(path, makers)

    def __str__(self) -> str:
        from memest.report.grid import render_grid
        from memest.search.view import grid_table

        return render_grid(grid_table(self))

    def _repr_html_(self) -> str:
        from memest.report.heatmap import render_fragment
        from memest.search.view import heat_map

        return render_fragment(heat_map(self, "device"))
