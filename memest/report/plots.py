"""Plots of answers by matplotlib: the same answer has the same bytes, in files and notebooks.

An estimate is one picture: what fills the card, and memory over the run.
"""

from __future__ import annotations

import functools
import io
import itertools
import textwrap
from collections.abc import Sequence
from typing import Any

from memest.errors import MissingDependencyError
from memest.events import CATEGORY_ORDER
from memest.report.findings import Advice, Comparison, Plan
from memest.report.layers import PhaseRow, phase_rows
from memest.report.max_batch_result import MaxBatch
from memest.report.parts import COLOURS, PART_COLOURS, MemoryPart, parts_of
from memest.report.result import Estimate
from memest.report.stages_result import StageTable
from memest.report.words import interval_text, moment_text, setup_items, verdict_sentence
from memest.units import GIB, format_size

__all__ = ["INK", "check_matplotlib", "new_figure", "plain", "png_of"]

INK = "#1f2328"
_DPI = 110
_WIDTH = 11.0
_LINE = 0.22
_LETTERS = 130
"""Letters of a line of 10 points."""
_COLUMNS = 3
"""Of a legend."""
_PHASES_INCHES = 4.2
_MOST_PHASES = 60
"""Phases that find room beside each other."""
_GREY, _PEAK = "#8a94a0", "#cf222e"
_CARDS = ("#cf222e", "#8250df", "#9a6700", "#1a7f37", "#0969da", "#bf3989")
_LINES = ("#0969da", "#1a7f37", "#8250df", "#9a6700", "#cf222e", "#bf3989")
_BAR_INCHES, _BARS_WIDTH = 0.42, 10.0


def check_matplotlib(what: str) -> None:
    """Refuse a picture before anything slow.

    Args:
        what: the picture, as a sentence begins.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"{what} as PNG needs matplotlib: pip install 'memest-gpu[plot]'. One as .html needs "
            "nothing."
        ) from error


def new_figure(width: float, height: float, dpi: int = _DPI) -> Any:
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
            "a plot needs matplotlib, which is not installed: pip install 'memest-gpu[plot]'."
        ) from error

    class ShownFigure(Figure):
        """A figure that IPython can show by itself."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            FigureCanvasAgg(self)

        def _repr_png_(self) -> bytes:
            return png_of(self)

    return ShownFigure


def plain(text: str) -> str:
    """Text in which dollar signs are no formula."""
    return text.replace("$", r"\$")


def _bare(axes: Any, *sides: str) -> None:
    """Small figures at the axes, no lines at some sides."""
    for side in sides:
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=INK, length=2)


def estimate_png(estimate: Estimate) -> bytes:
    """The picture of an estimate.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    check_matplotlib("An estimate")
    return png_of(plot_estimate(estimate))


def plot_estimate(estimate: Estimate) -> Any:
    """An estimate as a ``matplotlib.figure.Figure``.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    head = textwrap.wrap(verdict_sentence(estimate), _LETTERS)
    head += textwrap.wrap(" · ".join(setup_items(estimate.setup)), _LETTERS)
    parts = [part for part in parts_of(estimate) if part.bytes > 0]
    rows = phase_rows(estimate.timeline, estimate.peak_at)
    bar_inches = 1.5 + _LINE * -(-(len(parts) + len(estimate.named_gpus) + 1) // _COLUMNS)
    inches = [bar_inches, *([_PHASES_INCHES] if rows else [])]
    figure = new_figure(_WIDTH, sum(inches) + _LINE * len(head))
    figure.set_layout_engine("constrained")
    figure.suptitle(plain("\n".join(head)), x=0.01, ha="left", fontsize=10, color=INK)
    axes = figure.subplots(len(inches), 1, squeeze=False, height_ratios=inches).ravel()
    _draw_bar(axes[0], estimate, parts)
    if rows:
        visible_rows = _around_peak(rows)
        calibrated = estimate.calibration is not None
        title = "Highest memory in each phase" + (", before calibration" if calibrated else "")
        if len(visible_rows) < len(rows):
            title += f" ({len(visible_rows)} of {len(rows)} phases)"
        title += f"; line: reserved\nAllocated peak {moment_text(estimate)}"
        _draw_phases(axes[1], visible_rows, title)
    return figure


def _around_peak(rows: list[PhaseRow]) -> list[PhaseRow]:
    """As many phases as find room, the one of the peak among them."""
    peak_index = next((place for place, row in enumerate(rows) if row.is_peak), 0)
    first = max(0, min(peak_index - _MOST_PHASES // 2, len(rows) - _MOST_PHASES))
    return rows[first : first + _MOST_PHASES]


def _draw_bar(axes: Any, estimate: Estimate, parts: Sequence[MemoryPart]) -> None:
    left = 0.0
    for part in parts:
        size = part.bytes / GIB
        name = f"{part.name} {format_size(part.bytes)}"
        axes.barh(0, size, left=left, height=0.8, color=part.colour, linewidth=0, label=name)
        left += size
    low, high = estimate.interval.low_bytes / GIB, estimate.interval.high_bytes / GIB
    device = f"device {format_size(estimate.peak.device_bytes)}, {interval_text(estimate)}"
    style = {"color": _GREY, "alpha": 0.35, "edgecolor": _GREY, "linewidth": 1}
    axes.barh(0, high - low, left=low, height=1.0, label=device, **style)
    cards = estimate.named_gpus
    for fit, ink in zip(cards, itertools.cycle(_CARDS)):
        name = f"{fit.name.removeprefix('NVIDIA ')} {format_size(fit.usable_bytes)}"
        axes.axvline(fit.usable_bytes / GIB, color=ink, linewidth=2.2, label=name)
    axes.set_ylim(-0.55, 0.55)
    axes.set_xlim(0, max([left, high, *(card.usable_bytes / GIB for card in cards)]) * 1.02)
    axes.set_yticks([])
    axes.set_xlabel("GiB", fontsize=8, color=INK, labelpad=1)
    _bare(axes, "top", "right", "left")
    axes.legend(
        fontsize=9,
        loc="upper left",
        bbox_to_anchor=(0, -0.4),
        ncols=_COLUMNS,
        frameon=False,
        borderaxespad=0,
    )


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
        places, [row.reserved_bytes / GIB for row in rows], where="mid", color=INK, linewidth=1.1
    )
    for place, row in enumerate(rows):
        if row.is_peak:
            axes.plot(place, row.allocated_bytes / GIB, marker="D", color=_PEAK, markersize=6)
    axes.set_title(plain(title), fontsize=9, loc="left", color=INK)
    axes.set_xticks(list(places), [row.label for row in rows], rotation=55, ha="right")
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylabel("GiB", fontsize=8, color=INK)
    _bare(axes, "top", "right")


def plot_max_batch(max_batch: MaxBatch) -> Any:
    """The device peak over the size, with what each GPU has."""
    figure = new_figure(_BARS_WIDTH, 4.2)
    axes = figure.add_axes((0.08, 0.14, 0.6, 0.74))
    for number, answer in enumerate(max_batch.answers):
        ink = _LINES[number % len(_LINES)]
        sizes = [point.size for point in answer.curve]
        device = [point.device_bytes / GIB for point in answer.curve]
        axes.plot(sizes, device, marker="o", markersize=3, color=ink, label=f"{answer.gpu}: device")
        axes.axhline(
            answer.usable_bytes / GIB,
            color=ink,
            linestyle="--",
            linewidth=1,
            label=f"{answer.gpu}: {format_size(answer.usable_bytes)}",
        )
        if answer.largest:
            axes.axvline(
                answer.largest,
                color=ink,
                linestyle=":",
                linewidth=1,
                label=f"largest {max_batch.of.value}: {answer.largest}",
            )
    axes.set_xlabel(max_batch.of.value)
    _finish(axes, f"{max_batch.model}: the largest {max_batch.of.value}", "GiB", y=True)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def plot_comparison(comparison: Comparison) -> Any:
    """What fills the device in each scenario."""
    runs = [(scenario.name, scenario.estimate) for scenario in comparison.scenarios]
    return _stack_bars(runs, "What fills the device", None)


def plot_advice(advice: Advice) -> Any:
    """What fills the card in each plan."""
    plans = advice.plans or ((advice.closest,) if advice.closest is not None else ())
    runs = [(_plan_name(plan), plan.estimate) for plan in plans]
    title = f"{advice.model} on {advice.gpu}: {advice.effective_batch} samples a step"
    return _stack_bars(runs, title, advice.usable_bytes)


def _plan_name(plan: Plan) -> str:
    setup = plan.estimate.setup
    checkpointing = (
        "" if setup.checkpointing == "none" else f", checkpointing {setup.checkpointing}"
    )
    return f"{plan.batch} x {plan.grad_accum}, {setup.precision.value}{checkpointing}"


def plot_stages(table: StageTable) -> Any:
    """What fills the device at each stage."""
    runs = [(row.name, row.estimate) for row in table.rows if row.estimate is not None]
    return _stack_bars(runs, f"{table.model} on {table.num_gpus} GPUs", None)


def _stack_bars(runs: Sequence[tuple[str, Estimate]], title: str, usable: int | None) -> Any:
    """Bars of the parts of device peaks, the first run on top."""
    height = 1.6 + _BAR_INCHES * len(runs)
    figure = new_figure(_BARS_WIDTH, max(height, 3.2))
    axes = figure.add_axes((0.26, 0.16, 0.5, 0.7))
    bars: dict[str, Any] = {}
    for place, (_, estimate) in enumerate(runs):
        left = 0.0
        for part in parts_of(estimate):
            if part.bytes <= 0:
                continue
            width = part.bytes / GIB
            bars[part.name] = axes.barh(
                place, width, left=left, height=0.7, color=PART_COLOURS[part.name]
            )
            left += width
        axes.text(
            left,
            place,
            f" {format_size(estimate.peak.device_bytes)}",
            fontsize=8,
            va="center",
            color=INK,
        )
    if usable is not None:
        axes.axvline(usable / GIB, color="#cf222e", linewidth=1)
        axes.text(
            usable / GIB, -0.62, format_size(usable), fontsize=8, color="#cf222e", ha="center"
        )
    axes.set_yticks(range(len(runs)), [plain(name) for name, _ in runs])
    axes.set_ylim(len(runs) - 0.4, -0.8)
    axes.margins(x=0.14)
    axes.set_xlabel("GiB", fontsize=9)
    _finish(axes, title, "", y=False)
    axes.legend(
        list(bars.values()),
        list(bars),
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
    )
    return figure


def _finish(axes: Any, title: str, label: str, *, y: bool) -> None:
    axes.set_title(plain(title), fontsize=10, loc="left", color=INK)
    _bare(axes, "top", "right")
    if y:
        axes.set_ylabel(label, fontsize=9)
        axes.set_ylim(bottom=0)
