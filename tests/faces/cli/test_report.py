"""Reports of estimates built by hand."""

import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from memest.events import Category
from memest.report.layers import biggest, blocks, phase_rows, tree, visible
from memest.report.memory_bar import memory_bar
from memest.report.parts import COLOURS
from memest.report.result import Interval, Layer, Verdict
from memest.report.terminal import ASCII, UNICODE, print_report, render
from memest.report.text import TableChoice
from memest.report.words import (
    batch_sentence,
    format_count,
    gpu_sentence,
    interval_text,
    moment_text,
    verdict_sentence,
)
from memest.units import MIB

SIZE = re.compile(r"([\d,]+) B\b")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_golden_report(sample, golden, width):
    name, estimate = sample
    golden(f"report_{name}_{width}.txt", render(estimate, width=width))


@pytest.mark.parametrize("by", list(TableChoice))
@pytest.mark.parametrize("width", [40, 80, 120])
def test_golden_tables(samples, golden, by, width):
    name = "accum" if by is TableChoice.TIME else "fits"
    golden(f"by_{by}_{width}.txt", render(samples[name], by=by, width=width))


def test_golden_ascii(samples, golden):
    text = render(samples["accum"], ascii_only=True) + render(
        samples["accum"], ascii_only=True, by=TableChoice.TIME, width=100
    )
    assert text.isascii()
    golden("ascii.txt", text)


def test_printed_rows_add_up(sample):
    _, estimate = sample
    table = render(estimate, by=TableChoice.CATEGORY, width=100).partition("Alive at")[2]
    sizes = [int(text.replace(",", "")) for text in SIZE.findall(table)]
    assert sum(sizes[:-1]) == sizes[-1] == estimate.peak.allocated_bytes
    assert len(sizes) == len(estimate.breakdown) + 1


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("by", [None, *TableChoice])
def test_no_line_is_wider_than_the_terminal(sample, width, by):
    _, estimate = sample
    text = render(estimate, by=by, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert all(line == line.rstrip() for line in text.splitlines())


def test_printing_does_not_depend_on_the_environment(samples, monkeypatch):
    before = str(samples["fits"])
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(samples["fits"]) == before == render(samples["fits"])


def test_colours_on_a_terminal(samples):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=100)
    print_report(samples["fits"], console)
    assert "\x1b[" in out.getvalue()


class TestWords:
    def test_count(self):
        assert format_count(999) == "999"
        assert format_count(1_800_000_000_000) == "1.80 trillion"

    def test_verdicts(self, samples):
        assert verdict_sentence(samples["fits"]).startswith("Fits: bert-large-uncased needs")
        assert verdict_sentence(samples["tight"]).startswith("Tight: ")
        assert verdict_sentence(samples["does_not_fit"]).endswith("too little.")
        assert " to train (" in verdict_sentence(samples["no_gpu"])
        for estimate in samples.values():
            sentence = verdict_sentence(estimate)
            assert "\n" not in sentence
            assert sentence.endswith(".")

    def test_tight_below_the_expected_need(self, samples, replace):
        fit = replace(samples["tight"].gpu, headroom_bytes=-MIB)
        assert "too close to call" in gpu_sentence(fit, "m")

    def test_largest_batch(self, samples, replace):
        fits = samples["fits"]
        assert batch_sentence(fits).startswith("21 expected, 20 is safe")
        assert batch_sentence(replace(fits, safe_batch=21)) == "21"
        assert batch_sentence(replace(fits, safe_batch=0)).startswith("21 expected, none is safe")
        assert batch_sentence(replace(fits, max_batch=None)) == ""
        assert batch_sentence(samples["no_gpu"]) == ""
        assert "not even a batch of 1" in batch_sentence(samples["does_not_fit"])

    def test_moment(self, samples):
        assert moment_text(samples["accum"]) == (
            "in the backward pass of step 2, micro-step 1, in "
            "bert.encoder.layer.23.attention.self, at aten.bmm"
        )

    def test_interval_with_a_level(self, samples, replace):
        interval = Interval(level=0.9, low_bytes=MIB, high_bytes=2 * MIB, basis="")
        assert interval_text(replace(samples["fits"], interval=interval)) == (
            "1 MiB to 2 MiB (90% interval)"
        )


class TestLayers:
    def test_the_tree_keeps_every_byte(self, samples):
        layers = samples["fits"].layers
        root = tree(layers)
        assert root.activation_bytes == sum(layer.activation_bytes for layer in layers)
        assert root.parameter_bytes == sum(layer.parameter_bytes for layer in layers)
        top = [node for level, node in visible(root) if level == 0]
        assert sum(node.total_bytes for node in top) == root.total_bytes

    def test_equal_layers_are_one_row(self, samples):
        names = [node.name for _, node in visible(tree(samples["fits"].layers))]
        assert "0-22" in names
        assert "23" in names
        assert "attention" not in names

    def test_depth(self, samples):
        root = tree(samples["fits"].layers)
        assert {level for level, _ in visible(root, 2)} == {0, 1}
        assert max(level for level, _ in visible(root, 99)) == 5

    def test_blocks_keep_every_byte(self, samples):
        layers = samples["fits"].layers
        assert sum(block.total_bytes for block in blocks(layers)) == sum(
            layer.activation_bytes + layer.parameter_bytes for layer in layers
        )

    def test_biggest_says_what_it_left_out(self, samples):
        rows, left_out = biggest(samples["fits"].layers, 2)
        assert [row.count for row in rows] == [23, 1]
        assert left_out == len(blocks(samples["fits"].layers)) - 2

    def test_top_level_layers_with_numbers(self):
        layers = [
            Layer(module=str(i), activation_bytes=MIB, parameter_bytes=0) for i in (0, 1, 2, 4)
        ]
        assert [block.name for block in blocks(layers)] == ["0-2", "4"]
        assert {node.name for _, node in visible(tree(layers))} == {"0-2", "4"}

    def test_no_layers(self):
        assert biggest((), 5) == ([], 0)
        assert list(visible(tree(()))) == []


class TestPhases:
    def test_repeated_micro_steps_are_one_row(self, samples):
        rows = phase_rows(samples["accum"].timeline, samples["accum"].peak_at)
        assert [row.micro_text for row in rows if row.step == 1][:3] == ["1-4"] * 3
        assert [row.micro_text for row in rows if row.step == 2][:6] == ["1"] * 3 + ["2-4"] * 3
        assert [row.is_peak for row in rows].count(True) == 1

    def test_nothing_is_lost(self, samples):
        estimate = samples["accum"]
        rows = phase_rows(estimate.timeline, estimate.peak_at)
        assert sum(row.last_micro_step - row.micro_step + 1 for row in rows) == len(
            estimate.timeline
        )


class TestBars:
    @pytest.mark.parametrize("glyphs", [ASCII, UNICODE])
    def test_never_longer_than_its_width(self, glyphs):
        for part in range(0, 1001, 7):
            assert len(glyphs.bar(part, 1000, 10)) <= 10

    def test_ends(self):
        assert UNICODE.bar(0, 10, 8) == ""
        assert UNICODE.bar(10, 10, 8) == "█" * 8
        assert UNICODE.bar(1, 10**9, 8) == "▏"
        assert UNICODE.bar(1, 0, 8) == ""
        assert ASCII.two_part_bar(5, 10, 10, 10) == ("#####", ".....")


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


class TestHtml:
    def test_well_formed_and_without_scripts(self, sample):
        _, estimate = sample
        html = estimate._repr_html_()
        tags = Tags()
        tags.feed(html)
        assert tags.open == []
        assert "svg" in tags.seen
        assert not tags.seen & {"script", "link", "img", "iframe"}
        assert "http" not in html

    def test_the_bar_fills_the_card_as_every_other_picture_does(self, sample):
        _, estimate = sample
        bar, html = memory_bar(estimate), estimate._repr_html_()
        *parts, range_width = map(float, re.findall(r'<rect [^>]*width="([\d.]+)"', html))
        assert len(parts) == len(bar.segments)
        assert sum(parts) == pytest.approx(640 * bar.share(bar.taken_bytes), abs=0.2)
        span = bar.share(bar.high_bytes - bar.low_bytes)
        assert range_width == pytest.approx(640 * span, abs=0.1)
        edges = [float(x) for x in re.findall(r'<line x1="([\d.]+)"', html)]
        usable = [] if bar.usable_bytes is None else [640 * bar.share(bar.usable_bytes)]
        assert edges == pytest.approx(usable, abs=0.1)

    def test_names_are_escaped(self, samples, replace):
        model = replace(samples["fits"].model, id="<script>alert(1)</script>")
        assert "<script>" not in replace(samples["fits"], model=model)._repr_html_()

    def test_every_category_has_a_colour(self):
        assert set(COLOURS) == set(Category)
        assert len(set(COLOURS.values())) == len(COLOURS)


class TestJson:
    KEYS = frozenset({
        "schema_version", "model", "setup", "gpu", "peak", "interval", "ranges", "breakdown",
        "peak_at", "layers", "verdict", "verdict_reason", "notes",
    })  # fmt: skip
    MORE = frozenset(
        {"timeline", "context_bytes", "calibration", "common_gpus", "assumptions", "origins"}
    )

    def test_keys(self, sample):
        _, estimate = sample
        document = estimate.to_dict()
        expected = self.KEYS | self.MORE
        if estimate.gpu is not None:
            expected |= {"max_batch", "safe_batch"}
        assert set(document) == expected
        assert set(document["peak"]) == {
            "allocated_bytes", "reserved_bytes", "device_bytes", "managed_bytes",
            "device_with_managed_bytes",
        }  # fmt: skip
        assert set(document["interval"]) == {"level", "low_bytes", "high_bytes", "basis"}
        assert set(document["peak_at"]) == {"phase", "step", "micro_step", "module", "op"}
        assert {"id", "class", "parameters", "trainable_parameters"} <= set(document["model"])
        assert set(document["layers"][0]) == {"module", "activation_bytes", "parameter_bytes"}

    def test_breakdown_adds_up(self, sample):
        document = sample[1].to_dict()
        rows = sum(row["bytes"] for row in document["breakdown"])
        assert rows == document["peak"]["allocated_bytes"]

    def test_verdicts_are_words(self, samples):
        rarer = {Verdict.CANNOT_SAY, Verdict.RELEASES_CACHE}
        assert {e.to_dict()["verdict"] for e in samples.values()} == {
            verdict.value for verdict in set(Verdict) - rarer
        }
