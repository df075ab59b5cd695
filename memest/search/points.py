"""The answers of a sweep: frozen points, and the documents made from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memest.errors import ConfigError
from memest.files.texts import write_as
from memest.report.answer import Answer, register
from memest.report.result import Peak, Spot, Verdict
from memest.search.axes import Axis
from memest.search.grid import json_value

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
    "allocated_bytes",
    "reserved_bytes",
    "device_bytes",
    "low_bytes",
    "high_bytes",
    "gpu_name",
    "verdict",
    "usable_bytes",
    "headroom_bytes",
    "error",
)
"""Columns of CSV after the model and the options."""


register(
    "Sweep",
    {
        "text": "memest.search.view.render_sweep",
        "parts": "memest.search.view.sweep_parts",
        "html": "memest.search.view.sweep_html",
        "page": "memest.search.view.sweep_page",
        "rows": "memest.search.view.sweep_rows",
        "plot": "memest.search.view.plot_sweep",
        "png": "memest.search.view.sweep_png",
    },
)


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
            "options": {name: json_value(value) for name, value in self.options},
            "peak": None if peak is None else peak.to_dict(),
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
        """The cells under :attr:`Sweep.columns`; empty where there is nothing."""
        peak = self.peak
        peaks = (None, None, None) if peak is None else peak.to_dict().values()
        options = [json_value(value) for _, value in self.options]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(Answer):
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
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of CSV and of a frame, options by their keywords."""
        names = [axis.name for axis in self.axes] + [name for name, _ in self.fixed]
        return ("model", *names, *_MEASURES)

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
                {"name": axis.name, "values": [json_value(value) for value in axis.values]}
                for axis in self.axes
            ],
            "options": {name: json_value(value) for name, value in self.fixed},
            "points": [point.to_dict() for point in self.points],
        }

    def to_jsonl(self) -> str:
        """One line of JSON a point, in order."""
        return "".join(f"{point.to_json()}\n" for point in self.points)

    def to_csv(self) -> str:
        """A header and one row a point, in order; sizes in bytes."""
        text: str = self._render("csv")
        return text

    def plot(self, metric: str = "device") -> Any:
        """The heat map as a ``matplotlib.figure.Figure``.

        Args:
            metric: ``device``, ``allocated``, ``reserved`` or ``headroom``.

        Raises:
            MissingDependencyError: without matplotlib.
        """
        return self._render("plot", metric)

    def to_html(self, metric: str = "device") -> str:
        """A page with a heat map of ``device``, ``allocated``, ``reserved`` or ``headroom``."""
        page: str = self._render("page", metric)
        return page

    def to_png(self, metric: str = "device") -> bytes:
        """The heat map as a picture.

        Raises:
            MissingDependencyError: without matplotlib.
        """
        picture: bytes = self._render("png", metric)
        return picture

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
