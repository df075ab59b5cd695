"""Charts of predictions beside measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from memest.app.charts import Chart, drawn_as
from memest.units import GIB, format_size

__all__ = ["against_chart", "residual_chart"]


def _values(runs: Sequence[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    return [
        {
            "measured": run["measured_bytes"] / GIB,
            "predicted": run["predicted_bytes"] / GIB,
            "error": run["error"],
            "group": run[field],
            "run": f"{run['model']}, {run['run']}",
        }
        for run in runs
    ]


def _colour() -> alt.Color:
    return alt.Color(
        "group:N", legend=alt.Legend(orient="bottom", title=None, columns=2, labelLimit=180)
    )


_TIP = [
    alt.Tooltip("run:N"),
    alt.Tooltip("measured:Q", format=".2f"),
    alt.Tooltip("predicted:Q", format=".2f"),
    alt.Tooltip("error:Q", format="+.2%"),
]


def against_chart(runs: Sequence[dict[str, Any]], field: str) -> Chart:
    """Predicted over measured; on the line both are the same."""
    values = _values(runs, field)
    most = max((max(v["measured"], v["predicted"]) for v in values), default=1.0)
    line = [{"measured": 0, "predicted": 0}, {"measured": most, "predicted": most}]
    points = (
        alt.Chart(alt.Data(values=values))
        .mark_point(filled=True, size=55, opacity=0.8)
        .encode(
            x=alt.X("measured:Q", title="measured, GiB"),
            y=alt.Y("predicted:Q", title="predicted, GiB"),
            color=_colour(),
            tooltip=_TIP,
        )
    )
    same = (
        alt.Chart(alt.Data(values=line))
        .mark_line(strokeDash=[4, 4], color="#8a94a0")
        .encode(x="measured:Q", y="predicted:Q")
    )
    chart = alt.layer(same, points).properties(height=360)
    return drawn_as(chart, f"Predicted over measured memory of {len(values)} runs: {_words(runs)}.")


def residual_chart(runs: Sequence[dict[str, Any]], field: str) -> Chart:
    """The relative error over the measured figure."""
    values = _values(runs, field)
    points = (
        alt.Chart(alt.Data(values=values))
        .mark_point(filled=True, size=55, opacity=0.8)
        .encode(
            x=alt.X("measured:Q", title="measured, GiB"),
            y=alt.Y("error:Q", title="error of the prediction", axis=alt.Axis(format="+.0%")),
            color=_colour(),
            tooltip=_TIP,
        )
    )
    zero = (
        alt.Chart(alt.Data(values=[{"error": 0}]))
        .mark_rule(strokeDash=[4, 4], color="#8a94a0")
        .encode(y="error:Q")
    )
    chart = alt.layer(zero, points).properties(height=360)
    return drawn_as(chart, f"Errors of {len(values)} runs: {_words(runs)}.")


def _words(runs: Sequence[dict[str, Any]]) -> str:
    return "; ".join(
        f"{run['model']} on {run['gpu']}, {run['run']}: measured "
        f"{format_size(run['measured_bytes'])}, predicted {format_size(run['predicted_bytes'])}"
        for run in runs
    )
