"""What every answer can do: a document, text, HTML, a frame and a plot.

Answers are data. How each is shown is told by the functions named here, which know the answers,
not the other way round: they are imported when something is to be shown.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from memest.errors import ConfigError

__all__ = ["SCHEMA_VERSION", "Answer", "Document", "document", "register", "renderer"]

SCHEMA_VERSION = 1
"""Of the documents that answers are."""

_ANY = {
    "text": "memest.report.terminal.render",
    "html": "memest.report.terminal.text_as_html",
    "csv": "memest.report.frames.csv_of",
    "frame": "memest.report.frames.frame_of",
}
_RENDERERS: dict[str, Mapping[str, str]] = {
    "Estimate": {
        "parts": "memest.report.text.estimate_parts",
        "html": "memest.report.html.render_html",
        "page": "memest.report.html.render_page",
        "rows": "memest.report.frames.estimate_rows",
        "plot": "memest.report.plots.plot_estimate",
        "png": "memest.report.plots.estimate_png",
        "share": "memest.report.share_card.share_card",
    },
    "Comparison": {
        "parts": "memest.report.tables.comparison_parts",
        "rows": "memest.report.frames.comparison_rows",
        "plot": "memest.report.plots.plot_comparison",
    },
    "Advice": {
        "parts": "memest.report.tables.advice_parts",
        "rows": "memest.report.frames.advice_rows",
        "plot": "memest.report.plots.plot_advice",
    },
    "MaxBatch": {
        "parts": "memest.report.max_batch_table.max_batch_parts",
        "rows": "memest.report.frames.max_batch_rows",
        "plot": "memest.report.plots.plot_max_batch",
    },
    "OomExplanation": {
        "parts": "memest.report.oom.oom_parts",
        "rows": "memest.report.frames.oom_rows",
    },
    "GrowthExplanation": {
        "parts": "memest.report.growth.growth_parts",
        "rows": "memest.report.growth.growth_rows",
    },
    "Suggestions": {
        "parts": "memest.report.tables.suggestion_parts",
        "rows": "memest.report.frames.suggestion_rows",
    },
    "StageTable": {
        "parts": "memest.report.tables.stage_parts",
        "rows": "memest.report.frames.stage_rows",
        "plot": "memest.report.plots.plot_stages",
    },
}
"""For each answer the function that makes a form of it; rooms above :func:`register` theirs."""


def register(answer: str, forms: Mapping[str, str]) -> None:
    """Tell how an answer of another room is shown.

    Args:
        answer: name of its class.
        forms: for each form the function that makes it, with its module.
    """
    _RENDERERS[answer] = forms


def renderer(answer: object, form: str) -> Callable[..., Any]:
    """The function that shows an answer in a form.

    Args:
        answer: what is shown.
        form: ``text``, ``parts`` of a terminal's, ``html``, ``rows`` of a frame, ``plot`` ...

    Raises:
        ConfigError: there is no such form of this answer.
    """
    name = type(answer).__name__
    target = _RENDERERS.get(name, {}).get(form) or _ANY.get(form)
    if target is None:
        raise ConfigError(f"there is no {form} of {name}: to_dict() has its figures.")
    module, _, function = target.rpartition(".")
    renders: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return renders


def document(value: Any) -> Any:
    """Plain values for JSON: enumerations by value, tuples as lists, results field by field."""
    if isinstance(value, Document):
        return value.to_dict()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: document(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [document(each) for each in value]
    return value


class Document:
    """A frozen dataclass that has a part of a JSON document."""

    __slots__ = ()
    computed: ClassVar[tuple[str, ...]] = ()
    """Properties that stand in the document after the fields."""
    left_out: ClassVar[tuple[str, ...]] = ()
    """Fields that do not."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; sizes are bytes."""
        fields = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        names = (*(name for name in fields if name not in self.left_out), *self.computed)
        return {name: document(getattr(self, name)) for name in names}


class Answer(Document, abc.ABC):
    """A frozen result that prints itself, also in a notebook."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the version of their schema; sizes are bytes."""
        return {"schema_version": SCHEMA_VERSION, **super().to_dict()}

    def to_json(self) -> str:
        """:meth:`to_dict` as text, keys in order, two spaces of indent."""
        return json.dumps(self.to_dict(), indent=2)

    def to_frame(self) -> Any:
        """A ``pandas.DataFrame``, sizes in bytes.

        Raises:
            MissingDependencyError: without pandas.
            ConfigError: where there is no table of this answer.
        """
        return self._render("frame")

    def plot(self) -> Any:
        """A ``matplotlib.figure.Figure``.

        Raises:
            MissingDependencyError: without matplotlib.
            ConfigError: where there is no plot of this answer.
        """
        return self._render("plot")

    def __str__(self) -> str:
        text: str = self._render("text")
        return text

    def _repr_html_(self) -> str:
        html: str = self._render("html")
        return html

    def _render(self, form: str, *options: Any) -> Any:
        return renderer(self, form)(self, *options)
