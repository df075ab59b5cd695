"""The fit map as a chart: colour is the verdict, a number memory, a line the largest batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from memest.app.charts import Chart, to_chart
from memest.report.result import Verdict
from memest.search.points import SweepPoint
from memest.units import GIB, format_delta, format_size

__all__ = ["CELL", "map_chart"]

CELL = "cell"
"""Name of the selection of a cell."""
_GROUPS = {
    Verdict.FITS: "fits",
    Verdict.RELEASES_CACHE: "tight",
    Verdict.TIGHT: "tight",
    Verdict.CANNOT_SAY: "cannot say",
    Verdict.UNKNOWN: "cannot say",
    Verdict.DOES_NOT_FIT: "does not fit",
}
_COLOURS = {
    "fits": "#3aa68a",
    "tight": "#f0d54a",
    "does not fit": "#e2763c",
    "cannot say": "#c59ad0",
    "no answer": "#b8bfc7",
}
"""Told apart by colour-blind readers, with black text that is AA on each of them."""
_MARKS = {"fits": "✓", "tight": "≈", "does not fit": "✕", "cannot say": "?", "no answer": ""}
_INK = "#111111"
_HALF = 2**0.5
_ROW, _BESIDE = 40, 110
"""Pixels of a row, and of legend and axis together."""
_NARROW = 130
"""Pixels of a cell that has room for its number and the words of a line."""
_WORDS_BESIDE = 2 ** (9 / _ROW)
"""From a line to its words, as a factor of the batch: 9 pixels."""
_NUMBER_BESIDE = 2 ** (11 / _ROW)
"""The same from a line to a number, which it would strike through."""


def map_chart(
    points: Sequence[SweepPoint],
    axis: str,
    metric: str,
    frontier: Mapping[float, int],
    unit: str = "tokens",
) -> Chart:
    """The map of one GPU.

    Args:
        points: batches by lengths.
        axis: keyword of the option that is the length.
        metric: whose GiB stand in the cells, as :data:`memest.search.points.METRICS` names it.
        frontier: the largest batch at each length, as far as it is known; 0 where none fits.
        unit: what a length counts.
    """
    cells = [_cell(point, axis, metric, frontier) for point in points]
    lengths = list(dict.fromkeys(cell["length"] for cell in cells))
    batches = sorted({cell["batch"] for cell in cells})
    groups = [name for name in _COLOURS if any(cell["verdict"] == name for cell in cells)]
    x = alt.X("length:O", sort=lengths, title=unit, axis=alt.Axis(labelAngle=0))
    scale = alt.Scale(type="log", base=2, domain=[batches[0] / _HALF, batches[-1] * _HALF])
    y_axis = alt.Axis(values=batches, format="d", grid=False)
    base = alt.Chart(alt.Data(values=cells)).encode(x=x)
    tooltip = [
        alt.Tooltip("batch:Q", format="d"),
        alt.Tooltip("length:O"),
        alt.Tooltip("verdict:N"),
        alt.Tooltip("device:N"),
        alt.Tooltip("headroom:N"),
    ]
    chosen = alt.selection_point(name=CELL, fields=["batch", "length"])
    rects = (
        base.mark_rect(stroke="white", strokeWidth=1.5, cursor="pointer")
        .encode(
            y=alt.Y("low:Q", scale=scale, title="batch", axis=y_axis),
            y2=alt.Y2("high:Q"),
            color=alt.Color(
                "verdict:N",
                scale=alt.Scale(domain=groups, range=[_COLOURS[name] for name in groups]),
                legend=alt.Legend(
                    orient="top", title=None, symbolType="square", symbolStrokeWidth=0
                ),
            ),
            tooltip=tooltip,
        )
        .add_params(chosen)
    )
    numbers = base.mark_text(color=_INK, fontSize=12).encode(
        y=alt.Y("at:Q", scale=scale), text=alt.Text("text:N"), tooltip=tooltip
    )
    layers = [rects, numbers, *_frontier(frontier, lengths, batches, x, scale)]
    chart = alt.layer(*layers).properties(height=_ROW * len(batches) + _BESIDE)
    words = "; ".join(
        f"batch {cell['batch']} at {cell['length']}: {cell['verdict']}, {cell['device']}"
        for cell in cells
    )
    return to_chart(chart, f"What fits over batch and {unit}. {words}.")


def _cell(
    point: SweepPoint, axis: str, metric: str, frontier: Mapping[float, int]
) -> dict[str, Any]:
    options = dict(point.options)
    batch, value = int(options["batch"]), point.measure(metric)
    group = "no answer" if point.verdict is None else _GROUPS[point.verdict]
    number = "" if value is None else f"{value / GIB:.1f} {_MARKS[group]}"
    at, edge = float(batch), frontier.get(options[axis], 0) + 0.5
    if edge / _NUMBER_BESIDE < batch < edge * _NUMBER_BESIDE:
        at = edge / _NUMBER_BESIDE if edge > batch else edge * _NUMBER_BESIDE
    return {
        "batch": batch,
        "length": f"{options[axis]:g}",
        "low": batch / _HALF,
        "high": batch * _HALF,
        "at": at,
        "verdict": group,
        "text": number.strip(),
        "device": "" if point.peak is None else format_size(point.peak.device_bytes),
        "headroom": "" if point.headroom_bytes is None else format_delta(point.headroom_bytes),
    }


def _frontier(
    frontier: Mapping[float, int], lengths: list[str], batches: list[int], x: Any, scale: Any
) -> list[Any]:
    """A line at the largest batch of each length, where it is on the map; its words are, too."""
    bottom, top = batches[0] / _HALF, batches[-1] * _HALF
    rows = []
    for length, largest in frontier.items():
        edge = largest + 0.5
        if f"{length:g}" in lengths and bottom < edge < top:
            at = edge / _WORDS_BESIDE if edge > bottom * _WORDS_BESIDE**2 else edge * _WORDS_BESIDE
            words = f"max {largest}"
            rows.append({"length": f"{length:g}", "edge": edge, "at": at, "words": words})
    if not rows:
        return []
    at_end = alt.X("length:O", sort=lengths, bandPosition=1)
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=x, y=alt.Y("edge:Q", scale=scale), tooltip=[alt.Tooltip("words:N", title="largest batch")]
    )
    # at the right end of a cell: its number stands in the middle, and takes all of a narrow one
    shown = alt.ExprRef(f"width < {_NARROW * len(lengths)} ? 0 : 1")
    style = {"dx": -4, "align": "right", "fontSize": 11, "fontWeight": "bold", "opacity": shown}
    return [
        base.mark_tick(thickness=4, color=_INK, bandSize=60),
        base.mark_text(color=_INK, **style).encode(
            x=at_end, y=alt.Y("at:Q", scale=scale), text=alt.Text("words:N")
        ),
    ]
