"""Fit map: batch against length on each GPU, and the largest batch at every length."""

from __future__ import annotations

from functools import partial

import streamlit as st

from memest.app import answers
from memest.app.charts import frontier_chart
from memest.app.link import linked
from memest.app.question import ExplorerQuestion
from memest.app.records import draw_blocks
from memest.app.widgets import download
from memest.app.words import plain
from memest.errors import MemestError
from memest.report.heatmap import HeatMap, check_picture, panel_figure
from memest.report.max_batch_result import MaxBatch
from memest.report.max_batch_table import limit_sentence
from memest.report.result import Estimate
from memest.search.axes import parse_axis
from memest.search.points import METRICS, Sweep
from memest.search.view import heat_map

__all__ = ["show"]

_BATCHES = "1:64:x2"
_LENGTHS = {
    "seq_len": ("Sequence lengths", "128,256,512", "tokens"),
    "image_size": ("Image sizes", "", "pixels"),
    "audio_seconds": ("Seconds of sound", "5,10,15", "seconds"),
}
"""What the second axis may be: its name on the page, its values, what it counts."""
_KEYS = {"seq_len": "seq_lens", "image_size": "image_sizes", "audio_seconds": "clips"}
_SYNTAX = "Values as after --over of memest sweep: 1,2,4 or 128:512:128 or 1:64:x2."


def show(question: ExplorerQuestion) -> None:
    """The page."""
    st.markdown("#### What fits, over batch and length")
    answer = answers.attempt(partial(answers.estimate, question), f"Working out {question.model}")
    if answer is None:
        return
    axis = _length_axis(answer)
    name, default_lengths, _ = _LENGTHS[axis]
    left, middle, right = st.columns([2, 2, 3])
    batches = left.text_input("Batch sizes", **linked("batches", _BATCHES), help=_SYNTAX)
    lengths = middle.text_input(
        name,
        **linked(_KEYS[axis], default_lengths or str(getattr(answer.setup, axis))),
        help=_SYNTAX,
    )
    metric = right.segmented_control(
        "Colour",
        list(METRICS),
        required=True,
        **linked("metric", METRICS[0], METRICS),
        help="What the number and the colour of a cell are; its verdict is written below it.",
    )
    base = question.without("batch", axis)
    if not base.gpus and "gpu_memory" not in base.place:
        st.info("Name a GPU above: the map says what fits on it.")
        return
    axes = (("batch", batches), (axis, lengths))
    sweep = answers.attempt(partial(answers.sweep, base, axes), f"Sweeping {base.model}")
    if sweep is None:
        return
    heat = _map(sweep, metric or METRICS[0])
    if heat is not None:
        _files(sweep, metric or METRICS[0])
    _frontier(base, axis, lengths)


def _length_axis(answer: Estimate) -> str:
    """Which option is the length of this model's samples."""
    return next((name for name in _LENGTHS if getattr(answer.setup, name) is not None), "seq_len")


def _map(sweep: Sweep, metric: str) -> HeatMap | None:
    try:
        heat = heat_map(sweep, metric)
    except MemestError as error:
        st.error(plain(error))
        return None
    st.markdown(f"**{plain(heat.summary)}**")
    st.caption(f"{heat.metric.capitalize()}. {heat.subtitle}")
    draw_blocks([panel_figure(heat, panel) for panel in heat.panels])
    for note in heat.notes:
        st.caption(plain(note))
    with st.expander("The same as a table"):
        st.dataframe(
            [
                {"": f"{panel.title} {heat.row_label} {name}".strip()}
                | {
                    f"{heat.column_label} {column}": f"{heat.number(cell.value)} {cell.mark.value}"
                    for column, cell in zip(heat.column_names, cells, strict=True)
                }
                for panel in heat.panels
                for name, cells in zip(heat.row_names, panel.cells, strict=True)
            ],
            hide_index=True,
            alt=heat.summary,
        )
    return heat


def _files(sweep: Sweep, metric: str) -> None:
    row = st.container(horizontal=True)
    download(row, "fit-map", "CSV", sweep.to_csv(), key="map_csv")
    download(row, "fit-map", "JSON", f"{sweep.to_json()}\n", key="map_json")
    try:
        check_picture(len(sweep.points))
    except MemestError as error:
        st.caption(plain(f"No PNG: {error}"))
    else:
        download(row, "fit-map", "PNG", partial(sweep.to_png, metric), key="map_png")


def _frontier(question: ExplorerQuestion, axis: str, lengths: str) -> None:
    st.markdown("#### The largest batch at each length")
    try:
        values = parse_axis(f"{axis}={lengths}")[1]
    except MemestError as error:
        st.error(plain(error))
        return
    unit = _LENGTHS[axis][2]
    frontier: list[tuple[float, MaxBatch]] = []
    for value in values:
        length_question = question.with_options(**{axis: value})
        answer = answers.attempt(
            partial(answers.largest, length_question), f"Largest batch at {value} {unit}"
        )
        if answer is None:
            return
        frontier.append((value, answer))
    chart = frontier_chart(frontier, unit)
    st.vega_lite_chart(spec=chart.spec, alt=chart.words, key="frontier_chart")
    st.dataframe(
        [
            {
                "GPU": largest.gpu,
                unit: length,
                "largest batch": largest.largest,
                "safe": largest.safe,
            }
            for length, answer in frontier
            for largest in answer.answers
        ],
        hide_index=True,
        alt=chart.words,
    )
    for _, answer in frontier:
        for largest in answer.answers:
            st.caption(limit_sentence(largest, answer.model, answer.of))
