"""Charts are Vega-Lite by its schema, and say in words what they draw."""

from typing import Any

import altair as alt
import pytest
from altair.utils import schemapi

import memest
from memest.app import charts
from memest.report.layers import biggest, phase_rows
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


def test_a_bar_for_each_run_and_a_line_for_each_card(answer: Estimate) -> None:
    assert answer.gpu is not None
    runs = [("this run", answer), ("pinned", answer)]
    drawn = charts.breakdown_chart(runs, [answer.gpu, *answer.common_gpus])
    bars, band, cards = checked(drawn)["layer"]
    for name, run in runs:
        own = [row["bytes"] for row in bars["data"]["values"] if row["run"] == name]
        assert sum(own) == run.peak.device_bytes
    assert len(band["data"]["values"]) == 2
    assert len(cards["data"]["values"]) == 2
    assert format_size(answer.peak.device_bytes) in drawn.words
    checked(charts.breakdown_chart(runs[:1], []))


def test_bars_of_a_phase_reach_what_is_allocated(answer: Estimate) -> None:
    rows = phase_rows(answer.timeline, answer.peak_at)
    drawn = charts.timeline_chart(rows, moment_text(answer))
    bars, line, peak, name = checked(drawn)["layer"]
    for row in rows:
        own = [v["GiB"] for v in bars["data"]["values"] if v["phase"] == row.label]
        assert sum(own) * 2**30 == pytest.approx(row.allocated_bytes)
    assert len(line["data"]["values"]) == len(rows)
    assert len(peak["data"]["values"]) == len(name["data"]["values"]) == 1


@pytest.mark.slow
def test_the_other_charts(answer: Estimate) -> None:
    checked(charts.layers_chart(biggest(answer.layers, 12)[0]))
    largest = memest.max_batch(MODEL, gpu="t4", seq_len=64)
    checked(charts.frontier_chart([(64, largest)]))
