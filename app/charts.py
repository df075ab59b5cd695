"""Charts of answers, with the same facts in words for whoever does not see them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import streamlit as st
from altair.utils import schemapi

from memest.report.layers import PhaseRow
from memest.report.parts import PART_COLOURS, parts_of
from memest.report.result import Estimate
from memest.units import GIB, format_size

__all__ = [
    "Chart",
    "breakdown_chart",
    "breakdown_rows",
    "disable_validation",
    "timeline_chart",
    "to_chart",
]

_GREY = "#8a94a0"
_INK = "#4d5663"
_ABOVE = alt.Axis(
    labelAlign="left",
    labelBaseline="bottom",
    labelPadding=0,
    labelOffset=-20,
    labelLimit=320,
    ticks=False,
    domain=False,
)
"""Names above their bars: beside them they take the room that a phone does not have."""
_LEVEL_PHASES = 9
"""Phases up to which the names below them lie level."""
_NAMED_PHASES = 30
"""Phases beside each other up to which each has its name below it."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as Vega-Lite, and what it shows, in words."""

    spec: dict[str, Any]
    words: str


def to_chart(chart: alt.TopLevelMixin, words: str) -> Chart:
    """A chart to show; not checked against Vega-Lite's schema, which the tests do."""
    return Chart(chart.to_dict(validate=False) | {"config": _config()}, words)


def _config() -> dict[str, Any]:
    """Inks of axes and legends: Streamlit's own grey is not AA on white."""
    if st.context.theme.type == "dark":
        return {}
    inks = {"labelColor": _INK, "titleColor": _INK}
    return {"axis": inks, "legend": inks}


def disable_validation() -> None:
    """Make charts without checking each part against the schema, which takes most of the time."""
    schemapi.disable_debug_mode()
    alt.theme.enable("none")


def breakdown_rows(estimate: Estimate) -> list[dict[str, Any]]:
    """What the device peak is made of: categories alive at the allocated peak, then the rest."""
    whole = estimate.peak.device_bytes
    return [
        {
            "part": part.name,
            "bytes": part.bytes,
            "size": format_size(part.bytes),
            "share": part.bytes / whole,
        }
        for part in parts_of(estimate)
    ]


def breakdown_chart(runs: Sequence[tuple[str, Estimate]]) -> Chart:
    """Stacked bars of runs, the range of the device peak as a band."""
    rows = [
        {"run": name, "order": place, "GiB": row["bytes"] / GIB, **row}
        for name, estimate in runs
        for place, row in enumerate(breakdown_rows(estimate))
        if row["bytes"] > 0
    ]
    sized = {row["part"]: f"{row['part']} {row['size']}" for row in rows if len(runs) == 1}
    for row in rows:
        row |= {"category": row["part"], "part": sized.get(row["part"], row["part"])}
    parts = _parts_in((row["part"] for row in rows), sized)
    names = [name for name, _ in runs]
    y = alt.Y("run:N", sort=names, title=None, axis=_ABOVE)
    bars = (
        alt.Chart(alt.Data(values=rows))
        .mark_bar(size=28)
        .encode(
            y=y,
            x=alt.X("GiB:Q", stack="zero", title="GiB", axis=alt.Axis(format="~f", tickCount=6)),
            color=alt.Color(
                "part:N",
                scale=parts,
                legend=alt.Legend(
                    orient="bottom",
                    columns=alt.ExprRef("width < 440 ? 1 : width < 700 ? 2 : 4"),
                    title=None,
                    symbolType="square",
                    labelLimit=220,
                ),
            ),
            order=alt.Order("order:Q"),
            tooltip=[alt.Tooltip("run:N"), alt.Tooltip("category:N"), alt.Tooltip("size:N")],
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
            x2=alt.X2("high:Q"),
            tooltip=[alt.Tooltip("range:N", title="range of the device peak")],
        )
    )
    chart = alt.layer(bars, band).properties(height=alt.Step(70))
    words = "; ".join(_bar_words(name, estimate) for name, estimate in runs)
    return to_chart(chart, f"Stacked bar of memory by category. {words}.")


def _bar_words(name: str, estimate: Estimate) -> str:
    parts = ", ".join(f"{row['part']} {row['size']}" for row in breakdown_rows(estimate))
    low, high = estimate.interval.low_bytes, estimate.interval.high_bytes
    return (
        f"{name}: {parts}; together {format_size(estimate.peak.device_bytes)}, range "
        f"{format_size(low)} to {format_size(high)}"
    )


def _parts_in(shown: Iterable[str], names: Mapping[str, str] | None = None) -> alt.Scale:
    """The colours of the parts that are there.

    Args:
        shown: what they are called.
        names: that by the parts' own names, where it is something else.
    """
    names = names or {}
    shown_set = set(shown)
    colours = {names.get(name, name): colour for name, colour in PART_COLOURS.items()}
    present = [name for name in colours if name in shown_set]
    return alt.Scale(domain=present, range=[colours[name] for name in present])


def timeline_chart(rows: Sequence[PhaseRow], peak_words: str) -> Chart:
    """What is alive by category at the highest moment of each phase, and what is reserved."""
    order = [row.label for row in rows]
    fullest = max(rows, key=lambda row: row.allocated_bytes, default=None)
    names = {
        part.category.value: f"{part.category.value} {format_size(part.bytes)}"
        for part in (() if fullest is None else fullest.breakdown)
    }
    live_parts = [
        {
            "phase": row.label,
            "order": place,
            "category": part.category.value,
            "part": names.get(part.category.value, part.category.value),
            "GiB": part.bytes / GIB,
            "size": format_size(part.bytes),
            "allocated": format_size(row.allocated_bytes),
            "reached by": row.made_by,
        }
        for row in rows
        for place, part in enumerate(row.breakdown)
        if part.bytes
    ]
    reserved_line = [
        {
            "phase": row.label,
            "GiB": row.reserved_bytes / GIB,
            "reserved": format_size(row.reserved_bytes),
            "line": "reserved",
        }
        for row in rows
    ]
    hidden = len(rows) > _NAMED_PHASES
    x = alt.X(
        "phase:N",
        sort=order,
        title=None,
        axis=alt.Axis(
            labelAngle=-60 if len(rows) > _LEVEL_PHASES else 0,
            labelLimit=130,
            labelOverlap=True if hidden else "greedy",
        ),
    )
    bars = (
        alt.Chart(alt.Data(values=live_parts))
        .mark_bar()
        .encode(
            x=x,
            y=alt.Y("GiB:Q", stack="zero", title="GiB"),
            color=alt.Color(
                "part:N",
                scale=_parts_in((str(row["part"]) for row in live_parts), names),
                legend=alt.Legend(
                    orient="bottom",
                    columns=alt.ExprRef("width < 340 ? 1 : width < 520 ? 2 : 4"),
                    title="at the fullest moment",
                    symbolType="square",
                    labelLimit=220,
                ),
            ),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("phase:N"),
                alt.Tooltip("category:N"),
                alt.Tooltip("size:N"),
                alt.Tooltip("allocated:N"),
                alt.Tooltip("reached by:N"),
            ],
        )
    )
    line = (
        alt.Chart(alt.Data(values=reserved_line))
        .mark_line(interpolate="step", strokeWidth=1.5)
        .encode(
            x=x,
            y=alt.Y("GiB:Q"),
            stroke=alt.Stroke(
                "line:N",
                scale=alt.Scale(domain=["reserved"], range=[_GREY]),
                legend=alt.Legend(orient="top", title=None),
            ),
            tooltip=[alt.Tooltip("phase:N"), alt.Tooltip("reserved:N")],
        )
    )
    peaks = [
        {
            "phase": row.label,
            "GiB": row.allocated_bytes / GIB,
            "peak": f"peak {format_size(row.allocated_bytes)}",
            "reached by": row.made_by,
        }
        for row in rows
        if row.is_peak
    ]
    mark = alt.Chart(alt.Data(values=peaks)).encode(
        x=x,
        y=alt.Y("GiB:Q"),
        tooltip=[alt.Tooltip("peak:N"), alt.Tooltip("phase:N"), alt.Tooltip("reached by:N")],
    )
    chart = alt.layer(
        bars,
        line,
        mark.mark_point(size=180, filled=True, color="#cf222e", shape="diamond"),
        mark.mark_text(dy=-14, color="#d9444f", fontSize=13, fontWeight="bold").encode(
            text=alt.Text("peak:N")
        ),
    ).properties(height=520)
    words = "; ".join(
        f"{row.label}: allocated {format_size(row.allocated_bytes)}, reserved "
        f"{format_size(row.reserved_bytes)}"
        for row in rows
    )
    return to_chart(
        chart,
        "Memory by category at the highest moment of each phase; the peak is "
        f"{peak_words}. {words}.",
    )
