"""Charts of answers, with the same facts in words for whoever does not see them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from memest.limits import MaxBatch
from memest.report.heat import EDGES, HeatMap, HeatPanel, ink
from memest.report.html import COLOURS
from memest.report.layers import Block
from memest.report.phases import PhaseRow
from memest.result import Estimate, GpuFit
from memest.units import GIB, format_size

__all__ = [
    "Chart",
    "breakdown_chart",
    "breakdown_rows",
    "frontier_chart",
    "heat_chart",
    "layers_chart",
    "phase_label",
    "timeline_chart",
]

CACHED, CONTEXT = "cached or fragmented", "context and kernels"
_BEYOND = {CACHED: "#e5e5e5", CONTEXT: "#bdbdbd"}
_GREY = "#8a94a0"
_ABOVE = alt.Axis(
    labelAlign="left", labelBaseline="bottom", labelPadding=0, labelOffset=-20, labelLimit=320,
    ticks=False, domain=False,
)  # fmt: skip
"""Names above their bars: beside them they take the room that a phone does not have."""
_LINES = ("#cf222e", "#8250df", "#9a6700", "#1a7f37", "#0969da", "#bf3989")


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart and what it shows, in words."""

    chart: Any
    words: str


def breakdown_rows(estimate: Estimate) -> list[dict[str, Any]]:
    """What the device peak is made of: categories alive at the allocated peak, then the rest."""
    peak = estimate.peak
    rows = [(row.category.value, row.bytes) for row in estimate.breakdown]
    rows += [
        (CACHED, peak.reserved_bytes - peak.allocated_bytes),
        (CONTEXT, peak.device_bytes - peak.reserved_bytes),
    ]
    return [
        {"part": name, "bytes": size, "size": format_size(size), "share": size / peak.device_bytes}
        for name, size in rows
    ]


def breakdown_chart(runs: Sequence[tuple[str, Estimate]], gpus: Iterable[GpuFit]) -> Chart:
    """Stacked bars of runs against the capacity of GPUs, the range of the device peak as a band."""
    colours = {category.value: colour for category, colour in COLOURS.items()} | _BEYOND
    rows = [
        {"run": name, "order": place, "GiB": row["bytes"] / GIB, **row}
        for name, estimate in runs
        for place, row in enumerate(breakdown_rows(estimate))
        if row["bytes"] > 0
    ]
    present = [name for name in colours if any(row["part"] == name for row in rows)]
    names = [name for name, _ in runs]
    y = alt.Y("run:N", sort=names, title=None, axis=_ABOVE)
    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(size=28)
        .encode(
            y=y,
            x=alt.X("GiB:Q", stack="zero", title="GiB", axis=alt.Axis(format="~g", tickCount=6)),
            color=alt.Color(
                "part:N",
                scale=alt.Scale(domain=present, range=[colours[name] for name in present]),
                legend=alt.Legend(
                    orient="bottom", columns=2, title=None, symbolType="square", labelLimit=150
                ),
            ),
            order=alt.Order("order:Q"),
            tooltip=[alt.Tooltip("run:N"), alt.Tooltip("part:N"), alt.Tooltip("size:N")],
        )
    )
    bands = [
        {
            "run": name,
            "low": estimate.interval.low_bytes / GIB,
            "high": estimate.interval.high_bytes / GIB,
            "range": f"{format_size(estimate.interval.low_bytes)} to "
            f"{format_size(estimate.interval.high_bytes)}",
        }
        for name, estimate in runs
    ]
    band = (
        alt.Chart(alt.Data(values=bands))
        .mark_bar(size=36, opacity=0.35, color=_GREY, stroke=_GREY, strokeWidth=1)
        .encode(
            y=y,
            x=alt.X("low:Q"),
            x2="high:Q",
            tooltip=[alt.Tooltip("range:N", title="range of the device peak")],
        )
    )
    layers = [bars, band, *_capacities(gpus)]
    chart = alt.layer(*layers).properties(height=alt.Step(70))
    words = "; ".join(_bar_words(name, estimate) for name, estimate in runs)
    return Chart(chart, f"Stacked bar of memory by category. {words}.")


def _capacities(gpus: Iterable[GpuFit]) -> list[Any]:
    limits = [
        {"GPU": fit.name.removeprefix("NVIDIA "), "GiB": fit.usable_bytes / GIB,
         "usable": format_size(fit.usable_bytes), "verdict": fit.verdict.value}
        for fit in gpus
    ]  # fmt: skip
    if not limits:
        return []
    names = [limit["GPU"] for limit in limits]
    rule = (
        alt.Chart(alt.Data(values=limits))
        .mark_rule(strokeWidth=2.5)
        .encode(
            x="GiB:Q",
            stroke=alt.Stroke(
                "GPU:N",
                scale=alt.Scale(domain=names, range=list(_LINES[: len(names)])),
                legend=alt.Legend(
                    orient="top", title="Usable memory of", columns=2, symbolType="stroke",
                    labelLimit=240,
                ),
            ),
            tooltip=[alt.Tooltip("GPU:N"), alt.Tooltip("usable:N"), alt.Tooltip("verdict:N")],
        )
    )  # fmt: skip
    return [rule]


def _bar_words(name: str, estimate: Estimate) -> str:
    parts = ", ".join(f"{row['part']} {row['size']}" for row in breakdown_rows(estimate))
    low, high = estimate.interval.low_bytes, estimate.interval.high_bytes
    return (
        f"{name}: {parts}; together {format_size(estimate.peak.device_bytes)}, range "
        f"{format_size(low)} to {format_size(high)}"
    )


def phase_label(row: PhaseRow) -> str:
    """A phase of the timeline as its axis calls it."""
    if not row.step:
        return row.phase.value
    micro = f".{row.micro_text}" if row.micro_text else ""
    return f"{row.step}{micro} {row.phase.value}"


def timeline_chart(rows: Sequence[PhaseRow], peak_words: str) -> Chart:
    """The highest memory within each phase, the phase of the peak named."""
    values = [
        {
            "place": place,
            "phase": phase_label(row),
            "kind": kind,
            "GiB": size / GIB,
            "size": format_size(size),
        }
        for place, row in enumerate(rows)
        for kind, size in (("reserved", row.reserved_bytes), ("allocated", row.allocated_bytes))
    ]
    order = [phase_label(row) for row in rows]
    x = alt.X("phase:N", sort=order, title=None, axis=alt.Axis(labelAngle=-60, labelLimit=130))
    lines = (
        alt.Chart(alt.Data(values=values))
        .mark_line(interpolate="step", point=True, strokeWidth=2)
        .encode(
            x=x,
            y=alt.Y("GiB:Q", title="GiB", scale=alt.Scale(zero=True)),
            color=alt.Color(
                "kind:N",
                scale=alt.Scale(domain=["allocated", "reserved"], range=["#0072b2", "#e69f00"]),
                legend=alt.Legend(orient="top", title=None),
            ),
            tooltip=["phase:N", "kind:N", "size:N"],
        )
    )
    peaks = [value for value, row in zip(values[1::2], rows, strict=True) if row.is_peak]
    for peak in peaks:
        peak["peak"] = f"peak {peak['size']}"
    mark = alt.Chart(alt.Data(values=peaks)).encode(x=x, y="GiB:Q", tooltip=["peak:N", "phase:N"])
    chart = alt.layer(
        lines,
        mark.mark_point(size=180, filled=True, color="#cf222e", shape="diamond"),
        mark.mark_text(dy=-14, color="#cf222e", fontWeight="bold").encode(text="peak:N"),
    ).properties(height=340)
    words = "; ".join(
        f"{phase_label(row)}: allocated {format_size(row.allocated_bytes)}, reserved "
        f"{format_size(row.reserved_bytes)}"
        for row in rows
    )
    return Chart(chart, f"Highest memory in each phase; the peak is {peak_words}. {words}.")


def layers_chart(blocks: Sequence[Block]) -> Chart:
    """Activations at the peak and parameters of the biggest parts of the model."""
    values = [
        {
            "layer": f"{block.name} ({block.count} ×)" if block.count > 1 else block.name,
            "kind": kind,
            "GiB": size * block.count / GIB,
            "size": format_size(size * block.count),
        }
        for block in blocks
        for kind, size in (
            ("activations", block.activation_bytes),
            ("parameters", block.parameter_bytes),
        )
    ]
    chart = (
        alt.Chart(alt.Data(values=values))
        .mark_bar()
        .encode(
            y=alt.Y("layer:N", sort=None, title=None, axis=alt.Axis(labelLimit=150)),
            x=alt.X("GiB:Q", title="GiB of all of them"),
            color=alt.Color(
                "kind:N",
                scale=alt.Scale(domain=["activations", "parameters"], range=["#d55e00", "#0072b2"]),
                legend=alt.Legend(orient="top", title=None),
            ),
            tooltip=["layer:N", "kind:N", "size:N"],
        )
        .properties(height=alt.Step(26))
    )
    words = "; ".join(f"{v['layer']} {v['kind']} {v['size']}" for v in values)
    return Chart(chart, f"Memory by layer. {words}.")


def heat_chart(heat: HeatMap, panel: HeatPanel) -> Chart:
    """A panel of a heat map: number and verdict in each cell."""
    bounds = heat.bounds()
    values = []
    for row, cells in zip(heat.row_names, panel.cells, strict=True):
        for column, cell in zip(heat.column_names, cells, strict=True):
            fill = heat.fill(cell, bounds)
            values.append(
                {
                    "row": row, "column": column, "fill": fill, "ink": ink(fill),
                    "edge": EDGES.get(cell.mark, fill), "number": heat.number(cell.value),
                    "mark": cell.mark.value, "note": cell.note,
                }
            )  # fmt: skip
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X(
            "column:N", sort=list(heat.column_names), title=heat.column_label or None,
            axis=alt.Axis(orient="top", labelAngle=0),
        ),
        y=alt.Y("row:N", sort=list(heat.row_names), title=heat.row_label or None),
        tooltip=[alt.Tooltip("note:N", title=" ")],
    )  # fmt: skip
    cells = base.mark_rect(strokeWidth=3, cornerRadius=3).encode(
        fill=alt.Fill("fill:N", scale=None), stroke=alt.Stroke("edge:N", scale=None)
    )
    number = base.mark_text(dy=-7, fontSize=11).encode(
        text="number:N", color=alt.Color("ink:N", scale=None)
    )
    mark = base.mark_text(dy=9, fontSize=10).encode(
        text="mark:N", color=alt.Color("ink:N", scale=None)
    )
    chart = alt.layer(cells, number, mark).properties(height=alt.Step(46))
    words = "; ".join(value["note"] for value in values)
    return Chart(chart, f"Heat map. {words}.")


def frontier_chart(found: Sequence[tuple[int, MaxBatch]]) -> Chart:
    """The largest batch over lengths, a line for each GPU."""
    values = [
        {"tokens": length, "batch": largest.largest, "safe": largest.safe,
         "GPU": largest.gpu.removeprefix("NVIDIA ")}
        for length, answer in found
        for largest in answer.answers
    ]  # fmt: skip
    chart = (
        alt.Chart(alt.Data(values=values))
        .mark_line(point=alt.OverlayMarkDef(size=60), strokeWidth=2)
        .encode(
            x=alt.X("tokens:Q", title="tokens of a sample"),
            y=alt.Y("batch:Q", title="largest batch"),
            color=alt.Color(
                "GPU:N", legend=alt.Legend(orient="top", title=None, columns=2, labelLimit=240)
            ),
            tooltip=["GPU:N", "tokens:Q", "batch:Q", "safe:Q"],
        )
        .properties(height=260)
    )
    words = "; ".join(f"{v['GPU']} at {v['tokens']} tokens: {v['batch']}" for v in values)
    return Chart(chart, f"Largest batch over sequence length. {words}.")
