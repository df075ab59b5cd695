"""What a fit does to predictions, as a chart: measured over predicted, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from memest.app.charts import Chart, to_chart
from memest.calibration.fitting.fit import Evaluation
from memest.units import format_size

__all__ = ["ratio_chart"]

BEFORE, AFTER = "as predicted", "corrected"
_COLOURS = ("#8a94a0", "#1590a5")
_MOST_NAMED = 40


def ratio_chart(evaluations: Sequence[Evaluation], title: str) -> Chart:
    """A dot around 1.0 for each run, before correction and after, with the range told for it.

    Args:
        evaluations: runs, each corrected by a fit that has not seen its model.
        title: what the runs are; of simulated ones it says so.
    """
    rows: list[dict[str, Any]] = []
    ranges: list[dict[str, Any]] = []
    for place, each in enumerate(evaluations):
        row, correction = each.row, each.correction
        reserved = row.prediction.reserved_bytes
        if row.device is None or reserved is None:
            continue
        raw = reserved + row.prediction.context_expected_bytes
        named = {"place": place + 1, "run": f"{row.model}, {row.case}"}
        for name, predicted in ((BEFORE, raw), (AFTER, correction.device_bytes)):
            ratio = row.device / predicted
            words = f"{format_size(row.device)} of {format_size(predicted)}"
            rows.append({**named, "which": name, "ratio": ratio, "words": words})
        low, high = correction.low_bytes, correction.high_bytes
        centre = correction.device_bytes
        ranges.append({**named, "low": low / centre, "high": high / centre})
    x = alt.X(
        "place:Q",
        title="runs",
        axis=alt.Axis(tickMinStep=1, format="d", grid=False),
        scale=alt.Scale(domain=[0, len(evaluations) + 1], nice=False),
    )
    y = alt.Y("ratio:Q", title="measured / predicted", scale=alt.Scale(zero=False, nice=True))
    band = (
        alt.Chart(alt.Data(values=ranges))
        .mark_rule(strokeWidth=6, opacity=0.4, color=_COLOURS[1])
        .encode(x=x, y=alt.Y("low:Q"), y2=alt.Y2("high:Q"))
    )
    one = (
        alt.Chart(alt.Data(values=[{"ratio": 1.0}]))
        .mark_rule(strokeDash=[4, 3], color=_COLOURS[0])
        .encode(y=y)
    )
    dots = (
        alt.Chart(alt.Data(values=rows))
        .mark_point(filled=True, size=34, opacity=0.95)
        .encode(
            x=x,
            y=y,
            color=alt.Color(
                "which:N",
                scale=alt.Scale(domain=[BEFORE, AFTER], range=list(_COLOURS)),
                legend=alt.Legend(orient="top", title=None),
            ),
            shape=alt.Shape(
                "which:N",
                scale=alt.Scale(domain=[BEFORE, AFTER], range=["diamond", "circle"]),
                legend=None,
            ),
            tooltip=[
                alt.Tooltip("run:N"),
                alt.Tooltip("which:N", title="figure"),
                alt.Tooltip("ratio:Q", format=".4f"),
                alt.Tooltip("words:N", title="measured"),
            ],
        )
    )
    chart = alt.layer(band, one, dots).properties(height=440, title=title)
    pairs = (f"{row['run']} {row['which']} {row['ratio']:.3f}" for row in rows[: 2 * _MOST_NAMED])
    return to_chart(chart, f"{title}. Measured over predicted: {'; '.join(pairs)}.")
