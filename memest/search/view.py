"""A sweep arranged for people: the table's rows, the heat map's panels, and the sentences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import JustifyMethod, RenderableType
from rich.padding import Padding
from rich.text import Text

from memest.config.options import find_option
from memest.errors import ConfigError
from memest.report.heatmap import (
    HeatCell,
    HeatMap,
    HeatMark,
    HeatPanel,
    draw_heat_map,
    render_fragment,
    render_page,
)
from memest.report.plots import png_of
from memest.report.result import Verdict
from memest.report.terminal import (
    VERDICT_STYLES,
    Page,
    bullets,
    render,
    room_for_bar,
    section,
)
from memest.report.terminal import Grid as TextGrid
from memest.search.grid import Grid, json_value
from memest.search.points import METRICS, Sweep, SweepPoint
from memest.units import format_delta, format_size

__all__ = ["check_metric", "failure_notes", "heat_map", "summary", "sweep_parts"]

_LONGEST_BAR = 30
_METERS = {
    "device": "device peak, as nvidia-smi shows it for the process",
    "allocated": "allocated peak, torch.cuda.max_memory_allocated()",
    "reserved": "reserved peak, torch.cuda.max_memory_reserved()",
    "headroom": "headroom, what the run leaves of the GPU",
}
_VERDICTS = (
    (Verdict.FITS, "fits", "fit"),
    (Verdict.RELEASES_CACHE, "fits by releasing cache", "fit by releasing cache"),
    (Verdict.TIGHT, "is tight", "are tight"),
    (Verdict.CANNOT_SAY, "cannot be said", "cannot be said"),
    (Verdict.DOES_NOT_FIT, "does not fit", "do not fit"),
)


def check_metric(metric: str, *, has_gpu: bool) -> str:
    """The metric, if it is one and there can be numbers of it.

    Raises:
        ConfigError: for an unknown metric, or headroom without a GPU.
    """
    if metric not in METRICS:
        raise ConfigError(f"--metric {metric!r} is not known. Legal: {', '.join(METRICS)}.")
    if metric == "headroom" and not has_gpu:
        raise ConfigError(
            "--metric headroom is what a run leaves of a GPU: name one with --gpu, for example "
            "--gpu rtx-4090."
        )
    return metric


def _label(name: str) -> str:
    return find_option(name).flags[0].removeprefix("--")


def _text(value: Any) -> str:
    """A value as people write it."""
    plain = json_value(value)
    if plain is None:
        return "left out"
    if isinstance(plain, bool):
        return "on" if plain else "off"
    if isinstance(plain, list):
        return ", ".join(map(str, plain))
    return f"{plain:g}" if isinstance(plain, float) else str(plain)


def _phrase(name: str, value: Any) -> str:
    """One option: ``batch 4``, ``fp16``, ``no padded``."""
    if isinstance(value, bool):
        return _label(name) if value else f"no {_label(name)}"
    return f"{_label(name)} {_text(value)}"


def _point_label(sweep: Sweep, point: SweepPoint) -> str:
    """What tells a point from the others."""
    names = {axis.name for axis in sweep.axes}
    model = [point.model] if len(sweep.models) > 1 or not names else []
    phrases = (_phrase(name, value) for name, value in point.options if name in names)
    return ", ".join([*model, *phrases])


def failure_notes(sweep: Sweep) -> tuple[str, ...]:
    """Each reason for a point without an answer once, with the first point that has it."""
    first_points: dict[str, SweepPoint] = {}
    counts: dict[str, int] = {}
    for point in sweep.failures:
        reason = point.error or ""
        first_points.setdefault(reason, point)
        counts[reason] = counts.get(reason, 0) + 1
    notes = []
    for reason, point in first_points.items():
        num_others = counts[reason] - 1
        others = f" (and {num_others} more point{'s' * (num_others > 1)})" if num_others else ""
        notes.append(f"{_point_label(sweep, point)}{others}: {reason}")
    return tuple(notes)


def _gpu_names(sweep: Sweep) -> list[str]:
    return list(dict.fromkeys(p.gpu_name for p in sweep.points if p.gpu_name is not None))


def summary(sweep: Sweep) -> str:
    """The result in one sentence."""
    num_points = len(sweep.points)
    title = _title(sweep)
    sentence = f"{num_points} point{'s' * (num_points != 1)} of {title}"
    cards = _gpu_names(sweep)
    if cards:
        sentence += f" on {cards[0]}" if len(cards) == 1 else f" on {len(cards)} GPUs"
    parts = []
    for verdict, singular, plural in _VERDICTS:
        count = sum(point.verdict is verdict for point in sweep.points)
        if count:
            parts.append(f"{count} {singular if count == 1 else plural}")
    device_peaks = [p.peak.device_bytes for p in sweep.points if p.peak is not None]
    if not parts and device_peaks:
        low, high = format_size(min(device_peaks)), format_size(max(device_peaks))
        names = {axis.name for axis in sweep.axes} | {name for name, _ in sweep.fixed}
        each = " on each GPU" if "num_gpus" in names else ""
        parts.append(f"{low if low == high else f'{low} to {high}'} of GPU memory{each}")
    if sweep.failures:
        parts.append(f"{len(sweep.failures)} without an answer")
    return f"{sentence}: {', '.join(parts)}." if parts else f"{sentence}."


def _title(sweep: Sweep) -> str:
    return sweep.models[0] if len(sweep.models) == 1 else f"{len(sweep.models)} models"


def _subtitle(sweep: Sweep) -> str:
    """What is the same at every point."""
    phrases = [_phrase(a.name, a.values[0]) for a in sweep.axes if len(a.values) == 1]
    phrases += [_phrase(name, value) for name, value in sweep.fixed]
    return ", ".join(phrases)


def sweep_parts(sweep: Sweep, page: Page, *, metric: str = "device") -> Iterator[RenderableType]:
    """The table on a terminal, one row a point.

    Args:
        sweep: what to show.
        page: where it is written.
        metric: what the bars show.
    """
    check_metric(metric, has_gpu=_has_gpu(sweep))
    yield Text(summary(sweep), style="bold")
    subtitle = _subtitle(sweep)
    if subtitle:
        yield Text(subtitle, style="dim")
    yield Padding(_table(sweep, page, metric), (1, 0, 0, 0))
    notes = failure_notes(sweep)
    if notes:
        yield section("Without an answer", bullets(notes, page))


def _table(sweep: Sweep, page: Page, metric: str) -> TextGrid:
    axes = [axis for axis in sweep.axes if len(axis.values) > 1]
    names = {axis.name for axis in axes}
    several = len(sweep.models) > 1 or not axes
    with_gpu = any(point.verdict not in (None, Verdict.UNKNOWN) for point in sweep.points)
    labels = ["model"] * several + [axis.label for axis in axes]
    head = [*labels, "allocated", "reserved", "device"]
    head += ["headroom", "verdict"] * with_gpu
    cells = []
    for point in sweep.points:
        line = [point.model] * several
        line += [_text(value) for name, value in point.options if name in names]
        line += [_size(point.measure(peak)) for peak in ("allocated", "reserved", "device")]
        if with_gpu:
            headroom = point.headroom_bytes
            line += [
                "" if headroom is None else format_delta(headroom),
                HeatMark.of(point.verdict).value,
            ]
        cells.append(line)
    sides: list[JustifyMethod] = ["left"] * len(labels)
    sides += ["right"] * (len(head) - len(sides))
    if with_gpu:
        sides[-1] = "left"
    # the bar stands beside its number and takes what is left of the width
    bar_width = room_for_bar(page, (head, *cells), _LONGEST_BAR)
    bar_at = head.index(metric) + 1 if metric in head else len(head)
    largest = max((point.measure(metric) or 0 for point in sweep.points), default=0)
    if bar_width:
        head.insert(bar_at, "")
        sides.insert(bar_at, "left")
    table = TextGrid(*sides, head=head, folds=True)
    for line, point in zip(cells, sweep.points, strict=True):
        texts = [Text(cell) for cell in line]
        if with_gpu and point.verdict is not None:
            texts[-1].stylize(VERDICT_STYLES[point.verdict])
        if bar_width:
            bar = page.glyphs.bar(point.measure(metric) or 0, largest, bar_width)
            texts.insert(bar_at, Text(bar, style="cyan"))
        table.add_row(*texts)
    return table


def _size(size: int | None) -> str:
    return "?" if size is None else format_size(size)


def render_sweep(sweep: Sweep) -> str:
    """The table as text, a little wider than other reports."""
    return render(sweep, width=100)


def sweep_rows(sweep: Sweep) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The rows of a frame, one a point, and the names of its columns."""
    columns = sweep.columns
    return [dict(zip(columns, point.to_row(), strict=True)) for point in sweep.points], columns


def plot_sweep(sweep: Sweep, metric: str = "device") -> Any:
    """The heat map as a figure of matplotlib."""
    return draw_heat_map(heat_map(sweep, metric))


def sweep_png(sweep: Sweep, metric: str) -> bytes:
    """The heat map as a picture."""
    return png_of(plot_sweep(sweep, metric))


def sweep_page(sweep: Sweep, metric: str) -> str:
    """A page with the heat map."""
    return render_page(heat_map(sweep, metric))


def sweep_html(sweep: Sweep) -> str:
    """The heat map in a notebook."""
    return render_fragment(heat_map(sweep, "device"))


def _has_gpu(sweep: Sweep) -> bool:
    return Grid(axes=sweep.axes, fixed=sweep.fixed).has_gpu


def _note(sweep: Sweep, point: SweepPoint) -> str:
    """Everything about one point."""
    label = _point_label(sweep, point) or point.model
    if point.peak is None:
        return f"{label}: {point.error}"
    peak = point.peak
    phrases = [
        f"allocated {format_size(peak.allocated_bytes)}",
        f"reserved {format_size(peak.reserved_bytes)}",
        f"device {format_size(peak.device_bytes)}",
    ]
    if point.headroom_bytes is not None and point.verdict is not None:
        phrases.append(f"{point.verdict.value} on {point.gpu_name}")
        phrases.append(f"headroom {format_delta(point.headroom_bytes)}")
    return f"{label}: {', '.join(phrases)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dimension:
    """One direction in which a sweep varies, and how far apart its neighbours are."""

    label: str
    names: tuple[str, ...]
    numeric: bool
    stride: int


_NO_DIMENSION = _Dimension(label="", names=("",), numeric=False, stride=0)


def _dimensions(sweep: Sweep) -> list[_Dimension]:
    """The directions that have more than one value, models first."""
    dimensions: list[_Dimension] = []
    stride = 1
    for axis in reversed(sweep.axes):
        if len(axis.values) > 1:
            numeric = all(isinstance(v, (int, float)) and v is not True for v in axis.values)
            names = tuple(map(_text, axis.values))
            dimensions.append(
                _Dimension(label=axis.label, names=names, numeric=numeric, stride=stride)
            )
        stride *= len(axis.values)
    if len(sweep.models) > 1:
        dimensions.append(
            _Dimension(label="model", names=sweep.models, numeric=False, stride=stride)
        )
    return dimensions[::-1]


def heat_map(sweep: Sweep, metric: str = "device") -> HeatMap:
    """The panels of a heat map.

    Columns are the last axis of numbers, rows the one before it; where there are fewer than two,
    the last of the others. What is left makes panels.

    Args:
        sweep: what to show.
        metric: ``device``, ``allocated``, ``reserved`` or ``headroom``.

    Raises:
        ConfigError: for an unknown metric, or headroom without a GPU.
    """
    check_metric(metric, has_gpu=_has_gpu(sweep))
    dimensions = _dimensions(sweep)
    by_rank = [dimension for dimension in dimensions if not dimension.numeric] + [
        dimension for dimension in dimensions if dimension.numeric
    ]
    column = by_rank.pop() if by_rank else _NO_DIMENSION
    row = by_rank.pop() if by_rank else _NO_DIMENSION
    outer = [dimension for dimension in dimensions if dimension not in (row, column)]
    panels = []
    for places in itertools.product(*(range(len(dimension.names)) for dimension in outer)):
        coordinates = list(zip(outer, places, strict=True))
        start = sum(dimension.stride * place for dimension, place in coordinates)
        title = ", ".join(
            f"{dimension.label} {dimension.names[place]}" for dimension, place in coordinates
        )
        cells = tuple(
            tuple(
                _cell(sweep, sweep.points[start + y * row.stride + x * column.stride], metric)
                for x in range(len(column.names))
            )
            for y in range(len(row.names))
        )
        panels.append(HeatPanel(title=title, cells=cells))
    return HeatMap(
        title=_title(sweep),
        subtitle=_subtitle(sweep),
        summary=summary(sweep),
        metric=_METERS[metric],
        signed=metric == "headroom",
        row_label=row.label,
        row_names=row.names,
        column_label=column.label,
        column_names=column.names,
        panels=tuple(panels),
        notes=failure_notes(sweep),
    )


def _cell(sweep: Sweep, point: SweepPoint, metric: str) -> HeatCell:
    return HeatCell(
        value=point.measure(metric), mark=HeatMark.of(point.verdict), note=_note(sweep, point)
    )
