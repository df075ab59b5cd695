"""Charts are Vega-Lite by its schema, and say in words what they draw."""

import math
from typing import Any

import altair as alt
import pytest
from altair.utils import schemapi

import memest
from memest.app import charts
from memest.app.icicle import icicle_chart, node_at
from memest.app.map_chart import map_chart
from memest.report.layers import phase_rows, tree
from memest.report.result import Estimate
from memest.report.words import moment_text
from memest.units import format_size

MODEL = "bert-base-uncased"


@pytest.fixture(scope="module")
def answer() -> Estimate:
    return memest.estimate(MODEL, batch=4, grad_accum=2, gpu=["t4", "rtx-4090"])


@pytest.fixture(autouse=True)
def as_the_page_makes_them() -> Any:
    charts.disable_validation()
    yield
    schemapi.enable_debug_mode()


def checked(chart: charts.Chart) -> dict[str, Any]:
    """The spec, after the schema said yes."""
    with schemapi.debug_mode(True):
        alt.Chart.from_dict(chart.spec).to_dict()
    assert chart.words.endswith(".")
    return chart.spec


def test_a_bar_for_each_run(answer: Estimate) -> None:
    runs = [("this run", answer), ("pinned", answer)]
    drawn = charts.breakdown_chart(runs)
    bars, band = checked(drawn)["layer"]
    for name, run in runs:
        own = [row["bytes"] for row in bars["data"]["values"] if row["run"] == name]
        assert sum(own) == run.peak.device_bytes
    assert len(band["data"]["values"]) == 2
    assert format_size(answer.peak.device_bytes) in drawn.words
    checked(charts.breakdown_chart(runs[:1]))


def test_bars_of_a_phase_reach_what_is_allocated(answer: Estimate) -> None:
    rows = phase_rows(answer.timeline, answer.peak_at)
    drawn = charts.timeline_chart(rows, moment_text(answer))
    bars, line, peak, name = checked(drawn)["layer"]
    for row in rows:
        own = [v["GiB"] for v in bars["data"]["values"] if v["phase"] == row.label]
        assert sum(own) * 2**30 == pytest.approx(row.allocated_bytes)
    assert len(line["data"]["values"]) == len(rows)
    assert len(peak["data"]["values"]) == len(name["data"]["values"]) == 1


def test_a_bar_tells_which_operator_of_which_module_reached_its_height(answer: Estimate) -> None:
    rows = phase_rows(answer.timeline, answer.peak_at)
    (fullest,) = [row for row in rows if row.is_peak]
    assert (fullest.module, fullest.op) == (answer.peak_at.module, answer.peak_at.op)
    forward = next(row for row in rows if row.label == "1.1 forward")
    assert forward.made_by == f"{forward.op} of {forward.module}"
    # from the second step on an update adds nothing to what it finds
    assert (
        next(row for row in rows if row.label == "2 optimizer").made_by == "what was there before"
    )
    bars, _, peak, _ = checked(charts.timeline_chart(rows, moment_text(answer)))["layer"]
    told = {value["phase"]: value["reached by"] for value in bars["data"]["values"]}
    assert told == {row.label: row.made_by for row in rows}
    assert peak["data"]["values"][0]["reached by"] == fullest.made_by
    for layer in (bars, peak):
        assert "reached by" in [tip["field"] for tip in layer["encoding"]["tooltip"]]


def test_a_map_has_a_cell_for_each_point_in_the_colour_of_its_verdict() -> None:
    sweep = memest.sweep(MODEL, {"batch": "8,64", "seq_len": "128,512"}, gpu="t4")
    drawn = map_chart(sweep.points, "seq_len", "device", {128: 40, 512: 9})
    rects, numbers, line, words = checked(drawn)["layer"]
    assert words["encoding"]["text"]["field"] == "words"
    cells = rects["data"]["values"]
    assert [cell["verdict"] for cell in cells] == [
        "does not fit" if point.verdict.value == "does not fit" else "fits"
        for point in sweep.points
    ]  # fmt: skip
    colour = rects["encoding"]["color"]["scale"]
    assert len(set(colour["range"])) == len(colour["domain"])
    peaks = [f"{point.peak.device_bytes / 2**30:.1f}" for point in sweep.points]
    assert numbers["encoding"]["text"]["field"] == "text"
    assert [cell["text"].split()[0] for cell in cells] == peaks
    edges = {row["length"]: row["edge"] for row in line["data"]["values"]}
    assert edges == {"128": 40.5, "512": 9.5}


def test_the_words_of_the_largest_batch_stand_on_the_map() -> None:
    swept = memest.sweep("bert-large-uncased", {"batch": "8:64:x2", "seq_len": "128"}, gpu="t4")
    for largest in (8, 30, 88):  # at the bottom, within, at the top
        words = map_chart(swept.points, "seq_len", "device", {128: largest}).spec["layer"][-1]
        (row,) = words["data"]["values"]
        assert 8 / 2**0.5 < row["at"] < 64 * 2**0.5
        assert row["edge"] == largest + 0.5


@pytest.mark.parametrize("largest", [31, 33])
def test_the_line_strikes_no_number_through(largest: int) -> None:
    swept = memest.sweep("bert-large-uncased", {"batch": "32", "seq_len": "128"}, gpu="t4")
    _, numbers, line, _ = map_chart(swept.points, "seq_len", "device", {128: largest}).spec["layer"]
    assert numbers["encoding"]["y"]["field"] == "at"
    (cell,), (row,) = numbers["data"]["values"], line["data"]["values"]
    rows = abs(math.log2(cell["at"] / row["edge"]))
    assert 0.25 < rows < 0.5  # of a row: beside the line, and in its cell


def test_labels_are_legible_on_white(answer: Estimate) -> None:
    assert charts.breakdown_chart([("base", answer)]).spec["config"]["axis"]["labelColor"]


def test_an_icicle_is_as_wide_below_as_above(answer: Estimate) -> None:
    root = tree(answer.layers)
    rows = checked(icicle_chart(root, ""))["data"]["values"]
    for level in (1, 2):
        width = sum(row["right"] - row["left"] for row in rows if row["top"] == level)
        assert width == pytest.approx(1, abs=0.01)
    # what is all of the module around it stands in its row, and the layers are seen at once
    assert ("encoder.layer", "bert/encoder/layer") in {(row["name"], row["path"]) for row in rows}
    assert any(row["path"] == "bert/encoder/layer/0-10" for row in rows)
    inner = node_at(root, "bert/encoder")
    assert inner is not None
    below = checked(icicle_chart(inner, "bert/encoder"))["data"]["values"]
    assert below[0]["right"] == 1
    assert all(row["path"].startswith("bert/encoder") for row in below)
    assert node_at(root, "bert/nothing") is None
