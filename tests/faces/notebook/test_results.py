"""Every result in a notebook: a frame, a plot, HTML, and a document."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import memest
from memest.errors import ConfigError, MissingDependencyError
from support.paths import ROOT

MODEL = (
    "bert-large-uncased?num_hidden_layers=2&hidden_size=64&intermediate_size=128"
    "&num_attention_heads=2&vocab_size=1000"
)
OOM = (
    "CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacity of 14.75 GiB of "
    "which 235.06 MiB is free. Of the allocated memory 14.06 GiB is allocated by PyTorch, and "
    "330.42 MiB is reserved by PyTorch but unallocated."
)
OPTIONS = {"seq_len": 32}


@pytest.fixture(scope="module")
def results():
    pytest.importorskip("transformers")
    return {
        "estimate": memest.estimate(MODEL, batch=2, gpu="t4", **OPTIONS),
        "sweep": memest.sweep(MODEL, {"batch": [2, 4], "fp16": [False, True]}, **OPTIONS),
        "max_batch": memest.max_batch(MODEL, gpu_memory="2GiB", gpu="t4", **OPTIONS),
        "comparison": memest.compare(MODEL, ["fp16", "batch=4"], batch=2, **OPTIONS),
        "advice": memest.advise(MODEL, gpu="t4", effective_batch=8, **OPTIONS),
        "stages": memest.stages(MODEL, num_gpus=2, batch=2, **OPTIONS),
        "oom": memest.explain_oom(OOM),
        "growth": memest.explain_growth(ROOT / "tests/support/memory.csv"),
    }


NAMES = ("estimate", "sweep", "max_batch", "comparison", "advice", "stages", "oom", "growth")


@pytest.mark.slow("estimate", "sweep", "max_batch")
@pytest.mark.parametrize("name", NAMES)
def test_documents_and_html(results, name):
    answer = results[name]

    assert json.loads(json.dumps(answer.to_dict()))["schema_version"] == 1
    html = answer._repr_html_()
    assert html.startswith("<")
    assert "<script" not in html
    assert not re.search(r"(src|href)=.?https?:|@import|url\(", html)


@pytest.mark.parametrize("name", NAMES)
def test_frames_have_whole_bytes(results, name):
    frame = results[name].to_frame()

    assert len(frame) > 0
    sizes = [column for column in frame.columns if column == "bytes" or column.endswith("_bytes")]
    assert sizes
    for column in sizes:
        for value in frame[column].dropna():
            assert value == int(value)


def test_frames_say_what_the_documents_say(results):
    estimate = results["estimate"]
    assert estimate.to_frame()["bytes"].sum() == estimate.peak.device_bytes
    layers = estimate.to_frame("layer")
    assert layers["parameter_bytes"].sum() == sum(row.parameter_bytes for row in estimate.layers)
    time = estimate.to_frame("time")
    assert time["allocated_bytes"].max() == estimate.peak.allocated_bytes
    assert len(results["sweep"].to_frame()) == len(results["sweep"].points)
    curve = results["max_batch"].to_frame()
    assert results["max_batch"].largest in set(curve["size"])
    assert results["comparison"].to_frame()["scenario"].iloc[0] == "base"
    assert len(results["advice"].to_frame()) == len(results["advice"].plans)


def test_a_table_that_there_is_not(results):
    with pytest.raises(ConfigError, match="Did you mean 'layer'"):
        results["estimate"].to_frame("layers")
    with pytest.raises(ConfigError, match="no plot of OomExplanation"):
        results["oom"].plot()


@pytest.mark.slow(
    but=(
        "max_batch",
        "advice",
    )
)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("oom", "growth")])
def test_plots_are_figures_that_a_notebook_shows(results, name):
    from matplotlib.figure import Figure

    figure = results[name].plot()
    assert isinstance(figure, Figure)
    picture = figure._repr_png_()
    assert picture.startswith(b"\x89PNG")
    assert results[name].plot()._repr_png_() == picture
    # no text lies outside: titles, names of scenarios
    texts = [text for axes in figure.axes for text in (axes.title, *axes.get_yticklabels())]
    renderer = figure.canvas.get_renderer()
    for text in filter(lambda text: text.get_text(), texts):
        assert text.get_window_extent(renderer).x0 >= -1, text.get_text()


@pytest.mark.parametrize(
    ("package", "call", "extra"),
    [("pandas", "to_frame", "notebook"), ("matplotlib", "plot", "plot")],
)
def test_what_is_missing_is_named_when_it_is_needed(package, call, extra):
    script = f"""
import sys
sys.modules[{package!r}] = None
import memest
from memest.report.findings import Advice
answer = Advice(model="m", gpu="g", usable_bytes=1, effective_batch=1, plans=(), closest=None,
               time_basis="")
try:
    answer.{call}()
except memest.MissingDependencyError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          check=True)  # fmt: skip
    assert f"memest-gpu[{extra}]" in done.stdout
    assert issubclass(MissingDependencyError, ImportError)
