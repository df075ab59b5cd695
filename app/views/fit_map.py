"""Fit map: batch against length on each GPU, and the largest batch at every length."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import streamlit as st

from memest.app import answers, waiting
from memest.app.asking import AXES
from memest.app.labels import in_page_words
from memest.app.link import (
    FIRST_PAGE,
    asked,
    change,
    go,
    linked,
    page_value,
    set_page_value,
)
from memest.app.map_chart import CELL, map_chart
from memest.app.question import ExplorerQuestion
from memest.app.widgets import download, gpu_label
from memest.app.words import plain
from memest.errors import MemestError
from memest.report.heatmap import check_picture
from memest.report.max_batch_table import limit_sentence
from memest.report.result import Estimate
from memest.report.words import short_name
from memest.search.axes import parse_axis
from memest.search.points import METRICS, Sweep, SweepPoint
from memest.search.view import heat_map, summary

__all__ = ["show"]

_BATCHES = tuple(2**power for power in range(11))
_TOKENS = tuple(2**power for power in range(5, 18))
_SIDES = tuple(range(64, 1056, 32))
_SECONDS = (1, 2, 5, 10, 15, 20, 30, 60)
_MOST_VALUES = 6
_LENGTHS: dict[str, tuple[str, str, tuple[int, ...], str]] = {
    "seq_len": ("seq_lens", "Lengths", _TOKENS, "tokens"),
    "image_size": ("image_sizes", "Image sides", _SIDES, "pixels"),
    "audio_seconds": ("clips", "Seconds of sound", _SECONDS, "seconds"),
}
"""What the second axis may be: its name in the URL and on the page, its stops, what it counts."""


def show(question: ExplorerQuestion) -> None:
    """The page."""
    answer = waiting.attempt(partial(answers.estimate, question), f"Working out {question.model}")
    if answer is None:
        return
    axis = _length_axis(answer)
    name, label, stops, unit = _LENGTHS[axis]
    left, middle, right = st.container(key="axes").columns(3, gap="medium")
    with left:
        batches = _range("batches", "batch", "Batches", _BATCHES, _spread(_BATCHES, 1, 64))
    with middle:
        own = int(getattr(answer.setup, axis))
        highest = own if axis == "image_size" else max(own, stops[4] if axis == AXES[0] else own)
        lowest = own if axis == "image_size" else min(own, 128)
        lengths = _range(name, axis, label, stops, _spread(stops, lowest, highest))
    metric = right.segmented_control(
        "Number in a cell, GiB",
        METRICS,
        required=True,
        **linked("metric", METRICS[0], METRICS),
        help="The colour of a cell is its verdict.",
    )
    base = question.without("batch", axis)
    if not base.gpus and "gpu_memory" not in base.place:
        st.info("Name a GPU above: the map says what fits on it.")
        return
    axes = (("batch", batches), (axis, lengths))
    sweep = waiting.attempt(partial(answers.sweep, base, axes), f"Sweeping {base.model}")
    if sweep is None:
        return
    st.markdown(f"**{plain(in_page_words(summary(sweep)))}** Click a cell to ask about it.")
    places = _maps(sweep, axis, metric or METRICS[0], unit)
    _notes(sweep)
    _files(sweep, metric or METRICS[0])
    _frontier(base, axis, lengths, unit, places)


def _length_axis(answer: Estimate) -> str:
    """Which option is the length of this model's samples."""
    return next((name for name in _LENGTHS if getattr(answer.setup, name) is not None), AXES[0])


# -- ranges ---------------------------------------------------------------------------------------


def _range(name: str, option: str, label: str, stops: Sequence[int], default: str) -> str:
    """A slider over stops, with two ends; returns values as ``memest sweep --over`` takes them.

    A link may name other values than a slider can: they hold until it is moved.
    """
    text = str(page_value(name, default))
    values: list[float] = [stops[0], stops[-1]]
    with contextlib.suppress(MemestError):  # said by the map
        values = [float(value) for value in parse_axis(f"{option}={text}")[1]]
    ends = tuple(min(stops, key=lambda stop: abs(stop - end)) for end in (values[0], values[-1]))
    key = f"range {name}"
    st.session_state[key] = ends
    take = {"on_change": _take_range, "args": (name, key, tuple(stops))}
    st.select_slider(label, stops, ends, key=key, **take)  # its value says that it has two ends
    return text


def _take_range(name: str, key: str, stops: tuple[int, ...]) -> None:
    set_page_value(name, _spread(stops, *st.session_state[key]))


def _spread(stops: Sequence[int], low: int, high: int) -> str:
    """Stops from one to another, not more than a map has room for; both ends are among them."""
    inside = [stop for stop in stops if low <= stop <= high] or [low]
    if stops is _BATCHES or len(inside) <= _MOST_VALUES:
        return ",".join(map(str, inside))
    step = (len(inside) - 1) / (_MOST_VALUES - 1)
    return ",".join(str(inside[round(step * place)]) for place in range(_MOST_VALUES))


# -- maps -----------------------------------------------------------------------------------------


def _by_gpu(sweep: Sweep) -> dict[str, list[SweepPoint]]:
    """The points of each GPU."""
    points: dict[str, list[SweepPoint]] = {}
    for point in sweep.points:
        gpu = dict(point.options).get("gpu", "")
        points.setdefault(str(gpu[0] if isinstance(gpu, (list, tuple)) else gpu), []).append(point)
    return points


def _maps(sweep: Sweep, axis: str, metric: str, unit: str) -> dict[str, Any]:
    """A map of each GPU; returns what draws them again with the largest batches."""
    draw: dict[str, Any] = {}
    groups = _by_gpu(sweep)
    for column, (gpu, points) in zip(
        st.columns(min(len(groups), 2)) * 3, groups.items(), strict=False
    ):
        column.markdown(f"**{plain(gpu_label(gpu))}**")
        place = column.empty()
        draw[gpu] = partial(_map, place, gpu, points, axis, metric, unit)
        draw[gpu]({})
    return draw


def _map(
    place: Any,
    gpu: str,
    points: list[SweepPoint],
    axis: str,
    metric: str,
    unit: str,
    frontier: dict[float, int],
) -> None:
    chart = map_chart(points, axis, metric, frontier, unit)
    key = f"map of {gpu}, {len(frontier)} largest"
    place.vega_lite_chart(
        spec=chart.spec,
        alt=chart.words,
        key=key,
        on_select=partial(_ask_cell, key, gpu, axis),
        selection_mode=CELL,
    )


def _ask_cell(key: str, gpu: str, axis: str) -> None:
    """Ask the question of the cell that was clicked."""
    cells = st.session_state[key].selection.get(CELL) or []
    if not cells:
        return
    length = float(cells[0]["length"])
    changes: dict[str, Any] = {
        "batch": int(cells[0]["batch"]),
        axis: length if axis == "audio_seconds" else int(length),
    }
    if gpu:
        changes["gpu"] = (gpu, *(other for other in asked().gpus if other != gpu))
    change(asked().with_options(**changes))
    go(FIRST_PAGE)


def _notes(sweep: Sweep) -> None:
    heat = heat_map(sweep, METRICS[0])
    for note in heat.notes:
        st.caption(plain(in_page_words(note)))
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


def _frontier(
    question: ExplorerQuestion, axis: str, lengths: str, unit: str, draw: dict[str, Any]
) -> None:
    """The largest batch at each length: drawn on the maps, and as a table."""
    rows = []
    captions = []
    frontiers: dict[str, dict[float, int]] = {}
    for value in parse_axis(f"{axis}={lengths}")[1]:
        length_question = question.with_options(**{axis: value})
        answer = waiting.attempt(
            partial(answers.largest, length_question), f"Largest batch at {value:g} {unit}"
        )
        if answer is None:
            return
        for gpu, largest in zip(draw, answer.answers, strict=False):
            frontiers.setdefault(gpu, {})[value] = largest.largest
            rows.append(
                {
                    "GPU": short_name(largest.gpu),
                    unit: value,
                    "largest batch": largest.largest,
                    "safe": largest.safe,
                }
            )
            captions.append(limit_sentence(answer, largest))
    for gpu, frontier in frontiers.items():
        draw[gpu](frontier)
    st.markdown("##### The largest batch at each length")
    words = "; ".join(f"{row['GPU']} at {row[unit]} {unit}: {row['largest batch']}" for row in rows)
    st.dataframe(rows, hide_index=True, alt=f"Largest batches. {words}.")
    with st.expander("What ends each of them"):
        for text in captions:
            st.caption(plain(in_page_words(text)))
