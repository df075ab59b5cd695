"""A sweep built by hand, as table, CSV, JSON, page and picture."""

import csv
import io
import json
import re
import struct
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from memest.errors import ConfigError
from memest.report.heatmap import EDGES, HeatMark, colour, ink
from memest.report.result import Peak, Verdict
from memest.report.terminal import render
from memest.search.axes import Axis
from memest.search.points import METRICS, Sweep, SweepPoint
from memest.search.view import heat_map, summary
from memest.units import GIB, MIB, format_delta, format_size

USABLE = 15 * GIB
LONG = "--seq-len 1024 is longer than the 512 positions of this model. Use --seq-len 512 or less."


def build(models=("bert-base-uncased",), *, gpus=("t4",), batches=(1, 4, 16), lengths=(128, 1024)):
    """Points by a formula, so that every number can be told from the others."""
    axes = [Axis(name="batch", values=batches), Axis(name="seq_len", values=lengths)]
    fixed = [("fp16", True)]
    if len(gpus) > 1:
        axes.append(Axis(name="gpu", values=gpus))
    elif gpus:
        fixed.append(("gpu", gpus[0]))
    points = []
    for number, model in enumerate(models):
        for batch in batches:
            for length in lengths:
                for gpu in gpus or (None,):
                    points.append(
                        _point(len(points), model, number, batch, length, gpu, gpus, fixed)
                    )
    return Sweep(models=models, axes=tuple(axes), fixed=tuple(fixed), points=tuple(points))


def _point(index, model, number, batch, length, gpu, gpus, fixed):
    options = [("batch", batch), ("seq_len", length)]
    options += [("gpu", gpu)] if len(gpus) > 1 else []
    values = {"index": index, "model": model, "options": (*options, *fixed)}
    if length == 1024 and batch == 4:
        return SweepPoint(**values, error=LONG)
    device = GIB + batch * length * MIB + number * 7 * MIB
    spare = USABLE - device
    verdict = Verdict.UNKNOWN
    if gpu is not None:
        verdict = Verdict.FITS if spare > 2 * GIB else Verdict.TIGHT
        verdict = verdict if spare > 0 else Verdict.DOES_NOT_FIT
    return SweepPoint(
        **values,
        peak=Peak(
            allocated_bytes=device - 800 * MIB, reserved_bytes=device - 500 * MIB,
            device_bytes=device,
        ),
        low_bytes=device - 225 * MIB, high_bytes=device + 225 * MIB, verdict=verdict,
        gpu_name=None if gpu is None else f"NVIDIA {gpu}",
        usable_bytes=None if gpu is None else USABLE,
        headroom_bytes=None if gpu is None else spare,
    )  # fmt: skip


SAMPLES = {
    "gpu": build(),
    "no_gpu": build(gpus=()),
    "models": build(("bert-base-uncased", "gpt2 <&>"), gpus=("t4", "a100"), lengths=(128, 512)),
    "row": build(batches=(2,)),
    "one": build(batches=(2,), lengths=(128,)),
    "failed": build(batches=(4,), lengths=(1024,)),
}


@pytest.fixture(params=sorted(SAMPLES))
def answers(request):
    return SAMPLES[request.param]


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", ["gpu", "no_gpu"])
def test_golden_table(name, width, golden):
    text = render(SAMPLES[name], width=width)
    assert max(map(len, text.splitlines())) <= width
    golden(f"sweep_{name}_{width}.txt", text)


def test_golden_ascii(golden):
    text = render(SAMPLES["models"], width=100, metric="headroom", ascii_only=True)
    assert text.isascii()
    golden("sweep_ascii.txt", text)


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "html"])
def test_golden_files(suffix, golden, tmp_path):
    SAMPLES["gpu"].save(tmp_path / f"grid.{suffix}")
    golden(f"sweep.{suffix}", (tmp_path / f"grid.{suffix}").read_text(encoding="utf-8"))


def test_printing_is_the_table(answers):
    assert str(answers) == render(answers, width=100)
    assert str(answers).startswith(summary(answers)[:60])


def test_summaries():
    assert summary(SAMPLES["gpu"]) == (
        "6 points of bert-base-uncased on NVIDIA t4: 4 fit, 1 does not fit, 1 without an answer."
    )
    assert summary(SAMPLES["no_gpu"]) == (
        "6 points of bert-base-uncased: 1.12 GiB to 17.00 GiB of GPU memory, 1 without an answer."
    )
    assert summary(SAMPLES["failed"]) == "1 point of bert-base-uncased: 1 without an answer."
    assert "2 models on 2 GPUs" in summary(SAMPLES["models"])


def test_every_number_is_in_the_table(answers):
    text = str(answers)
    for point in answers.points:
        for metric in METRICS:
            size = point.measure(metric)
            if size is not None:
                shown = format_delta(size) if metric == "headroom" else format_size(size)
                assert shown in text
    assert text.count("Without an answer") == bool(answers.failures)


def test_csv_reads_back(answers):
    rows = list(csv.DictReader(io.StringIO(answers.to_csv())))
    assert len(rows) == len(answers.points)
    for row, point in zip(rows, answers.points, strict=True):
        assert row["model"] == point.model
        for name, value in point.options:
            assert row[name] == str(value)
        for metric in METRICS:
            value = point.measure(metric)
            assert row[f"{metric}_bytes"] == ("" if value is None else str(value))
        assert row["verdict"] == ("" if point.verdict is None else point.verdict.value)
        assert row["error"] == (point.error or "")


def test_json_lines_are_the_points_of_the_document(answers):
    lines = answers.to_jsonl().splitlines()
    document = json.loads(answers.to_json())
    assert [json.loads(line) for line in lines] == document["points"]
    assert document["models"] == list(answers.models)
    assert [axis["name"] for axis in document["axes"]] == [axis.name for axis in answers.axes]
    for line, point in zip(document["points"], answers.points, strict=True):
        assert line["options"] == dict(point.options)
        assert (line["peak"] is None) == (point.error is not None) == (line["error"] is not None)
        if point.peak is not None:
            assert line["peak"]["device_bytes"] == point.peak.device_bytes
            assert line["interval"]["low_bytes"] == point.low_bytes


class Page(HTMLParser):
    """Checks nesting and collects tables."""

    VOID = frozenset({"meta"})

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.tables, self.bytes = [], set(), [], []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        values = dict(attrs)
        assert not {"onload", "onclick", "href", "src"} & set(values)
        if "data-bytes" in values:
            self.bytes.append(values["data-bytes"])

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def svgs(html):
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["gpu", "models"])
def test_the_page_has_every_number(name, metric):
    answers = SAMPLES[name]
    html = answers.to_html(metric)
    page = Page()
    page.feed(html)
    assert page.open == []
    assert not page.seen & {"script", "link", "img", "iframe", "object"}
    wanted = [point.measure(metric) for point in answers.points]
    assert sorted(page.bytes) == sorted("" if v is None else str(v) for v in wanted)
    cells = [group for svg in svgs(html) for group in svg.iter(f"{SVG}g")]
    assert len(cells) == len(answers.points)
    write = format_delta if metric == "headroom" else format_size
    texts = sorted(group.find(f"{SVG}text").text for group in cells)
    assert texts == sorted("?" if value is None else write(value) for value in wanted)


def test_a_cell_stands_where_its_point_belongs():
    answers = SAMPLES["models"]
    heat = heat_map(answers)
    assert (heat.row_label, heat.column_label) == ("batch", "seq-len")
    assert len(heat.panels) == 4
    by_place = {
        (panel.title, row, column): cell
        for panel in heat.panels
        for row, line in zip(heat.row_names, panel.cells, strict=True)
        for column, cell in zip(heat.column_names, line, strict=True)
    }
    assert len(by_place) == len(answers.points)
    for point in answers.points:
        options = dict(point.options)
        title = f"model {point.model}, gpu {options['gpu']}"
        cell = by_place[title, str(options["batch"]), str(options["seq_len"])]
        assert cell.value == point.measure("device")
        assert cell.mark == HeatMark.of(point.verdict)


def test_a_page_says_in_words_what_it_shows(answers):
    html = answers.to_html()
    for svg in svgs(html):
        assert svg.get("role") == "img"
        assert svg.get("aria-label")
        assert svg.find(f"{SVG}title").text == svg.get("aria-label")
    assert '<html lang="en">' in html
    assert "<caption" in html
    assert 'scope="row"' in html
    if answers.failures:
        assert LONG in html
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")


def test_names_are_escaped():
    html = SAMPLES["models"].to_html()
    assert "gpt2 <&>" not in html
    assert "gpt2 &lt;&amp;&gt;" in html


def test_verdicts_are_words_and_frames():
    cells = [g for svg in svgs(SAMPLES["gpu"].to_html()) for g in svg.iter(f"{SVG}g")]
    frames = {
        tuple(text.text for text in group.iter(f"{SVG}text"))[1]: group.find(f"{SVG}rect").get(
            "stroke"
        )
        for group in cells
    }
    assert frames == {
        "fits": None, "does not fit": EDGES[HeatMark.DOES_NOT_FIT], "no answer": None,
    }  # fmt: skip


def test_text_reads_on_every_colour():
    def light(text):
        parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for signed in (False, True):
        for value in range(-100 if signed else 0, 101):
            fill = colour(value, (-100 if signed else 0, 100), signed)
            dark, bright = sorted((light(fill), light(ink(fill))))
            assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_more_memory_is_darker():
    fills = [colour(value, (0, 20), False) for value in range(21)]
    shades = [sum(int(fill[i : i + 2], 16) for i in (1, 3, 5)) for fill in fills]
    assert shades == sorted(shades, reverse=True)
    assert len(set(fills)) == 21


def test_a_picture_is_a_png_of_a_size_that_opens(answers):
    pytest.importorskip("matplotlib")
    picture = answers.to_png()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert 300 < width < 4000
    assert 100 < height < 4000
    assert picture == answers.to_png()


def test_more_panels_make_a_larger_picture():
    pytest.importorskip("matplotlib")

    def area(answers):
        width, height = struct.unpack(">II", answers.to_png()[16:24])
        return width * height

    assert area(SAMPLES["models"]) > area(SAMPLES["gpu"])


def test_a_picture_too_large_to_read_is_refused():
    pytest.importorskip("matplotlib")
    large = build(batches=tuple(range(1, 52)), lengths=tuple(range(1, 52)))
    with pytest.raises(ConfigError, match=r"2,601 cells cannot be read.*\.html"):
        large.to_png()
    assert large.to_html().count("<g>") == 2601


def test_wrong_metrics_and_suffixes(tmp_path):
    with pytest.raises(ConfigError, match="device, allocated, reserved, headroom"):
        SAMPLES["gpu"].to_html("vram")
    with pytest.raises(ConfigError, match="--gpu"):
        SAMPLES["no_gpu"].to_html("headroom")
    with pytest.raises(ConfigError, match=r"Did you mean .*grid\.jsonl"):
        SAMPLES["gpu"].save(tmp_path / "grid.jsonlines")
    assert list(tmp_path.iterdir()) == []
