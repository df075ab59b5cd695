"""Figures of matplotlib that a notebook shows without pyplot, with the same bytes each time."""

from __future__ import annotations

import functools
import io
from typing import Any

from memest.errors import MissingDependencyError

__all__ = ["new_figure", "png_of"]


def new_figure(width: float, height: float, dpi: int = 110) -> Any:
    """An empty ``matplotlib.figure.Figure``, in inches.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    return _figure_class()(figsize=(width, height), dpi=dpi, facecolor="white")


def png_of(figure: Any) -> bytes:
    """The figure as PNG; neither date nor version is in it."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


@functools.cache
def _figure_class() -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "a plot needs matplotlib, which is not installed: pip install 'memest[plot]'."
        ) from error

    class ShownFigure(Figure):
        """A figure that IPython can show by itself."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            FigureCanvasAgg(self)

        def _repr_png_(self) -> bytes:
            return png_of(self)

    return ShownFigure
