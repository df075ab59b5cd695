"""Accuracy: what memest says beside what was measured."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st

from memest.app import waiting
from memest.app.link import linked
from memest.app.published import outcomes, stale
from memest.app.question import ExplorerQuestion
from memest.app.records import draw_blocks, measurements, report_of, sources
from memest.calibration.validation import Errors
from memest.catalog.gpus import find_gpu
from memest.errors import UnknownGpuError
from memest.report.error_plots import Point, against_measured, error_plot, error_words
from memest.report.page import Block, Figure
from memest.report.words import short_name
from memest.units import format_size

__all__ = ["show"]

_WORST = 10
_RUNS = ("Published runs", "Measured campaigns")
_ALSO_UNSCORED = (
    "Readings that lie in the range that memest told of them, without calibration. They are not "
    "the runs with a score: no range is told for a moment inside a step, and a reading whose "
    "context was not published has no score."
)
_BY = {"GPU": "gpu", "family": "family", "model": "model", "set": "set"}


def show(question: ExplorerQuestion) -> None:  # noqa: ARG001 - pages share one signature
    """The page."""
    st.markdown("#### Predicted against measured")
    runs = st.segmented_control(
        "Runs",
        _RUNS,
        **linked("runs", _RUNS[0], _RUNS),
        required=True,
        label_visibility="collapsed",
    )
    if runs == _RUNS[1]:
        _campaigns()
    else:
        _published_runs()


def _published_runs() -> None:
    all_runs = outcomes()
    if not all_runs:
        st.info(
            "No predictions of published runs come with this installation: tools/published.py of "
            "the repository makes them."
        )
        return
    all_runs = [run | {"gpu": _card(run["gpu"])} for run in all_runs]
    scored_runs = [run for run in all_runs if run["scored"]]
    claims = [run for run in all_runs if run.get("inside") is not None]
    st.caption(
        "GPU memory of real training runs that others measured and published; nothing in memest "
        "is fitted to them."
    )
    others = stale(all_runs)
    if others:
        st.caption(
            f"{others} of {len(all_runs)} predictions were made by another state of memest than is "
            "installed, which may predict otherwise."
        )
    kind = st.segmented_control("By", list(_BY), required=True, **linked("by", "GPU", _BY))
    field = _BY[kind or "GPU"]
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in scored_runs:
        groups[run[field]].append(run)
    selection = st.multiselect(
        "Only", sorted(groups), **linked("only", [], groups), placeholder="all"
    )
    selected_runs = [run for run in scored_runs if not selection or run[field] in selection]
    _summary(selected_runs, [run for run in claims if not selection or run[field] in selection])
    if selected_runs:
        _figures(selected_runs)
    st.markdown(f"##### By {kind}")
    st.dataframe(
        [
            _errors(name, runs, [run for run in claims if run[field] == name])
            for name, runs in sorted(groups.items())
            if not selection or name in selection
        ],
        hide_index=True,
        column_config={
            "readings in range": st.column_config.TextColumn(help=_ALSO_UNSCORED),
            "runs": st.column_config.TextColumn(help="With a score."),
        },
        alt=f"Errors by {kind}",
    )
    st.markdown("##### Worst cases")
    worst = sorted(selected_runs, key=lambda run: -abs(run["error"]))[:_WORST]
    st.dataframe([_row(run) for run in worst], hide_index=True, alt="The worst cases")
    with st.expander(f"All {len(all_runs)} runs, those without a score too"):
        st.dataframe([_row(run) for run in all_runs], hide_index=True, alt="All published runs")


def _card(name: str) -> str:
    """A card by one name, however a source spells it."""
    with contextlib.suppress(UnknownGpuError):
        name = find_gpu(name).name
    return short_name(name)


def _figures(runs: list[dict[str, Any]]) -> None:
    """Predicted over measured, and the errors, as reports of the library draw them."""
    points = [
        Point(f"{run['model']}, {run['run']}", run["measured_bytes"], run["predicted_bytes"], None)
        for run in runs
    ]
    columns = st.columns(2)
    plots = (("Predicted against measured", against_measured), ("Errors", error_plot))
    for column, (caption, plot) in zip(columns, plots, strict=True):
        with column:
            draw_blocks([Figure(caption, plot(points, caption), "")])
    st.caption(error_words(points))  # of both


def _errors_of(runs: list[dict[str, Any]]) -> Errors | None:
    """As they were scored: a prediction within a figure's rounding is right."""
    return Errors.of_signed([run["error"] for run in runs if run["error"] is not None])


def _summary(runs: list[dict[str, Any]], claims: list[dict[str, Any]]) -> None:
    errors = _errors_of(runs)
    if errors is None:
        st.info("No run of these has a score.")
        return
    columns = st.columns(5)
    columns[0].metric("Runs", f"{errors.count}", border=True)
    columns[1].metric("Median error", f"{errors.median:.2%}", border=True)
    columns[2].metric("Worst", f"{errors.worst:+.2%}", border=True)
    columns[3].metric("Predicted too low", f"{errors.below:.0%}", border=True)
    columns[4].metric(
        "Readings in range",
        _inside(claims),
        border=True,
        help=f"{_ALSO_UNSCORED} Ranges of allocated and reserved "
        "memory were made from these very runs and memest's own: what was left out of them lies "
        "inside as often as docs/accuracy.md says.",
    )


def _inside(claims: list[dict[str, Any]]) -> str:
    """How many readings lie in the range told for them."""
    return f"{sum(run['inside'] for run in claims)} of {len(claims)}" if claims else "none told"


def _errors(name: str, runs: list[dict[str, Any]], claims: list[dict[str, Any]]) -> dict[str, str]:
    errors = _errors_of(runs)
    assert errors is not None
    return {
        "": name,
        "runs": f"{errors.count}",
        "median error": f"{errors.median:.2%}",
        "median, signed": f"{errors.median_signed:+.2%}",
        "worst": f"{errors.worst:+.2%}",
        "too low": f"{errors.below:.0%}",
        "readings in range": _inside(claims),
    }


def _row(run: dict[str, Any]) -> dict[str, Any]:
    predicted = run["predicted_bytes"]
    return {
        "model": run["model"],
        "GPU": run["gpu"],
        "run": run["run"],
        "measured": format_size(run["measured_bytes"]),
        "predicted": "" if predicted is None else format_size(predicted),
        "error": f"{run['error']:+.2%}" if run["scored"] else "",
        "range": _range(run),
        "remark": run["remark"] or run["peak_at"],
    }


def _range(run: dict[str, Any]) -> str:
    ends = run.get("range_bytes")
    return f"{format_size(ends[0])} to {format_size(ends[1])}" if ends else ""


def _campaigns() -> None:
    files = sources()
    if not files:
        st.info(
            "Nothing was measured yet: `memest calibrate run` measures real training steps on a "
            "GPU, and the page Calibration takes an export of another machine."
        )
        return
    name = st.selectbox(
        "Measurements", list(files), **linked("measurements", next(iter(files)), files)
    )
    blocks = waiting.attempt(partial(_report, files[name or next(iter(files))]), "Predicting runs")
    if blocks is not None:
        draw_blocks(blocks)


def _report(path: Path) -> list[Block]:
    runs, _ = measurements(path)
    return report_of(tuple(runs), waiting.say)
