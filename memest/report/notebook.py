"""What results are in a notebook: frames of pandas, plots, and their text as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from memest.errors import MissingDependencyError
from memest.report.figure import new_figure
from memest.report.parts import PART_COLOURS, parts_of
from memest.result import Estimate
from memest.units import GIB, format_size

if TYPE_CHECKING:
    from memest.findings import Advice, Comparison, Plan
    from memest.limits import MaxBatch

__all__ = ["frame_of", "plot_advice", "plot_comparison", "plot_max_batch", "text_as_html"]

_INK, _LINES = "#1f2328", ("#0969da", "#1a7f37", "#8250df", "#9a6700", "#cf222e", "#bf3989")
_BAR_INCHES, _WIDTH = 0.42, 10.0


def frame_of(rows: Iterable[dict[str, Any]], columns: Sequence[str] | None = None) -> Any:
    """Rows as a ``pandas.DataFrame``; sizes stay whole numbers of bytes.

    Args:
        rows: one dict each.
        columns: their order; needed where there may be no row.

    Raises:
        MissingDependencyError: without pandas.
    """
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise MissingDependencyError(
            "to_frame() needs pandas, which is not installed: pip install 'memest[notebook]'. "
            "to_dict() has the same figures and needs nothing."
        ) from error
    return DataFrame(list(rows), columns=None if columns is None else list(columns))


def text_as_html(text: str) -> str:
    """A report as it stands in a terminal, for a notebook."""
    return (
        '<pre style="font-family:ui-monospace,monospace;line-height:1.25;overflow-x:auto">'
        f"{escape(text.rstrip())}</pre>"
    )


def plot_max_batch(found: MaxBatch) -> Any:
    """The device peak over the size, with what each GPU has."""
    figure = new_figure(_WIDTH, 4.2)
    axes = figure.add_axes((0.08, 0.14, 0.6, 0.74))
    for number, answer in enumerate(found.answers):
        ink = _LINES[number % len(_LINES)]
        sizes = [point.size for point in answer.curve]
        device = [point.device_bytes / GIB for point in answer.curve]
        axes.plot(sizes, device, marker="o", markersize=3, color=ink, label=f"{answer.gpu}: device")
        axes.axhline(
            answer.usable_bytes / GIB, color=ink, linestyle="--", linewidth=1,
            label=f"{answer.gpu}: {format_size(answer.usable_bytes)}",
        )  # fmt: skip
        if answer.largest:
            axes.axvline(answer.largest, color=ink, linestyle=":", linewidth=1,
                         label=f"largest {found.of.value}: {answer.largest}")  # fmt: skip
    axes.set_xlabel(found.of.value)
    _finish(axes, f"{found.model}: the largest {found.of.value}", "GiB", y=True)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def plot_comparison(found: Comparison) -> Any:
    """What fills the device in each scenario."""
    runs = [(scenario.name, scenario.estimate) for scenario in found.scenarios]
    return _stacked(runs, "What fills the device", None)


def plot_advice(found: Advice) -> Any:
    """What fills the card in each plan."""
    plans = found.plans or ((found.closest,) if found.closest is not None else ())
    runs = [(_plan_name(plan), plan.estimate) for plan in plans]
    title = f"{found.model} on {found.gpu}: {found.effective_batch} samples a step"
    return _stacked(runs, title, found.usable_bytes)


def _plan_name(plan: Plan) -> str:
    setup = plan.estimate.setup
    kept = "" if setup.checkpointing == "none" else f", checkpointing {setup.checkpointing}"
    return f"{plan.batch} x {plan.grad_accum}, {setup.precision.value}{kept}"


def _stacked(runs: Sequence[tuple[str, Estimate]], title: str, usable: int | None) -> Any:
    """Bars of the parts of device peaks, the first run on top."""
    height = 1.6 + _BAR_INCHES * len(runs)
    figure = new_figure(_WIDTH, max(height, 3.2))
    axes = figure.add_axes((0.26, 0.16, 0.5, 0.7))
    known: dict[str, Any] = {}
    for place, (_, estimate) in enumerate(runs):
        left = 0.0
        for part in parts_of(estimate):
            if part.bytes <= 0:
                continue
            wide = part.bytes / GIB
            known[part.name] = axes.barh(
                place, wide, left=left, height=0.7, color=PART_COLOURS[part.name]
            )
            left += wide
        axes.text(left, place, f" {format_size(estimate.peak.device_bytes)}", fontsize=8,
                  va="center", color=_INK)  # fmt: skip
    if usable is not None:
        axes.axvline(usable / GIB, color="#cf222e", linewidth=1)
        axes.text(usable / GIB, -0.62, format_size(usable), fontsize=8, color="#cf222e",
                  ha="center")  # fmt: skip
    axes.set_yticks(range(len(runs)), [name.replace("$", r"\$") for name, _ in runs])
    axes.set_ylim(len(runs) - 0.4, -0.8)
    axes.margins(x=0.14)
    axes.set_xlabel("GiB", fontsize=9)
    _finish(axes, title, "", y=False)
    axes.legend(
        list(known.values()), list(known), fontsize=8, loc="upper left",
        bbox_to_anchor=(1.01, 1.0), frameon=False,
    )  # fmt: skip
    return figure


def _finish(axes: Any, title: str, label: str, *, y: bool) -> None:
    axes.set_title(title.replace("$", r"\$"), fontsize=10, loc="left", color=_INK)
    axes.tick_params(labelsize=8, labelcolor=_INK, length=2)
    for name in ("top", "right"):
        axes.spines[name].set_visible(False)
    if y:
        axes.set_ylabel(label, fontsize=9)
        axes.set_ylim(bottom=0)
