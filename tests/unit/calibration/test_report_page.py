"""The report: figures against their own meters, the same bytes for the same runs."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

pytest.importorskip("sklearn")

from memest.calibration.fitting.fit import fit_calibration
from memest.calibration.fitting.prediction import Pair
from memest.calibration.fitting.report import html_report, markdown_report
from memest.calibration.measurement import CPU, Failure, Status
from memest.report.page import Heading, Items, Table, Text, as_html, as_markdown
from memest.units import MIB
from support.simulated_runs import ended_run, simulate


@pytest.fixture(scope="module")
def campaign():
    pairs = simulate(models=8, each=4, factor=1.05, noise=0.005, process_noise=5 * MIB, shared=2)
    pairs += [ended_run(), ended_run(Status.FAILED, case=51)]
    return pairs, fit_calibration(pairs)


def rows(text, caption):
    """Cells of a Markdown table."""
    body = text.split(f"*{caption}.*", 1)[1].lstrip("\n").split("\n\n", 1)[0]
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.splitlines()]
    return [[cell.strip() for cell in line] for line in lines[2:]]


@pytest.mark.slow
def test_every_peak_is_scored_raw_and_corrected(campaign):
    text = markdown_report(*campaign)

    found = {
        (row[0], row[1]): row for row in rows(text, "Errors of each peak against its own meter")
    }
    assert list(found) == [
        (metric, figure)
        for metric in ("allocated", "reserved", "device")
        for figure in ("uncalibrated", "corrected")
    ]
    assert found["allocated", "uncalibrated"][2] == "32"
    assert found["device", "corrected"][2] == "30"
    error = {key: float(row[3].rstrip("%")) for key, row in found.items()}
    assert 4 < error["allocated", "uncalibrated"] < 6
    assert error["allocated", "corrected"] < 1


@pytest.mark.slow
def test_coverage_is_told_beside_the_level_claimed(campaign):
    pairs, profile = campaign

    text = markdown_report(pairs, profile)

    said = re.search(r"Of 30 measured peaks \(device\), (\d+) \(([\d.]+)%\) lie in the range", text)
    assert said is not None
    assert "90% are claimed" in text
    assert float(said[2]) / 100 == pytest.approx(profile.validation.coverage, abs=0.001)
    assert "out of fold" in text


@pytest.mark.slow
def test_groups_failures_and_provenance_are_there(campaign):
    text = markdown_report(*campaign)

    for fact in ("family", "precision", "loop", "optimizer"):
        assert rows(text, f"By {fact}")
    assert [row[0] for row in rows(text, "By precision")] == ["bf16", "fp32"]
    told = rows(text, "Out of memory and failed")
    assert [row[2] for row in told] == ["oom", "failed"]
    assert len(rows(text, "The 10 worst of device")) == 10
    assert "SHA-256" in text
    assert "570.1" in text
    assert "Beside other processes" in text


@pytest.mark.slow
def test_the_same_runs_make_the_same_report(campaign):
    pairs, profile = campaign

    for report in (markdown_report, html_report):
        assert report(pairs, profile) == report(list(reversed(pairs)), profile)


@pytest.mark.slow
def test_the_page_needs_nothing_else(campaign):
    page = html_report(*campaign)

    assert page.startswith("<!DOCTYPE html>")
    assert "<script" not in page
    without = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|src=|url\(", without)
    ET.fromstring(page.removeprefix("<!DOCTYPE html>\n").replace(
        '<meta charset="utf-8">', "").replace(
        '<meta name="viewport" content="width=device-width, initial-scale=1">', ""))  # fmt: skip


@pytest.mark.slow
def test_plots_have_words_and_stay_inside(campaign):
    page = html_report(*campaign)

    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 2
    for drawing in drawings:
        root = ET.fromstring(drawing)
        assert root.get("role") == "img"
        assert "errors from" in root.get("aria-label")
        space = "{http://www.w3.org/2000/svg}"
        dots = list(root.iter(f"{space}circle"))
        assert len(dots) == 31  # one of them in the legend
        for dot in dots:
            assert 0 <= float(dot.get("cx")) <= 640
            assert 0 <= float(dot.get("cy")) <= 360


def test_a_profile_of_other_runs_is_applied_as_it_is(campaign):
    _, profile = campaign
    others = simulate(models=3, each=2, seed=9, factor=1.05, first_model=50)

    text = markdown_report(others, profile)

    assert "Corrected figures are those of the profile given." in text
    assert "out of fold" not in text


def test_runs_beyond_what_was_measured_are_told_apart(campaign):
    _, profile = campaign
    others = [
        replace(p, prediction=replace(p.prediction, family="unheard of"))
        for p in simulate(models=3, each=2, seed=9, factor=1.05, first_model=50)
    ]

    assert "6 of them lie beyond what was measured" in markdown_report(others, profile)


def test_a_report_without_a_profile_or_without_runs():
    text = markdown_report(simulate(models=2, each=1))

    assert "No profile: nothing is corrected." in text
    assert "corrected" not in [
        row[1] for row in rows(text, "Errors of each peak against its own meter")
    ]
    assert "0 runs measured" in markdown_report([])
    assert "1 oom" in html_report([ended_run()])


def test_a_cpu_is_scored_by_its_allocations():
    pairs = simulate(models=6, each=4, gpus=(CPU,), factor=1.02, noise=0.002)
    text = markdown_report(pairs, fit_calibration(pairs))

    metrics = {row[0] for row in rows(text, "Errors of each peak against its own meter")}
    assert metrics == {"allocated"}
    assert "measured peaks (allocated)" in text
    assert "on CPU" in text


def test_what_others_wrote_is_no_markup(campaign):
    nasty = Failure(
        kind="Error", message='<script>alert("x")</script> | *a* \x1b[2J\nnew', phase=""
    )
    bad = ended_run(Status.CRASHED, case=60)
    pairs = [Pair(replace(bad.measurement, failure=nasty), None), *campaign[0]]

    page, text = html_report(pairs, campaign[1]), markdown_report(pairs, campaign[1])

    assert "<script" not in page
    assert "\x1b" not in page + text
    assert "&lt;script&gt;" in text
    (row,) = [r for r in rows(text, "Out of memory and failed") if r[2] == "crashed"]
    assert len(row) == 6


def test_blocks_in_both_forms():
    blocks = [
        Heading("A & B", 1), Text("one"), Items(["x | y"]), Table("T", ("a", "b"), [("c", "1")])
    ]  # fmt: skip

    assert as_markdown(blocks) == (
        "# A &amp; B\n\none\n\n- x \\| y\n\n*T.*\n\n| a | b |\n| --- | ---: |\n| c | 1 |\n"
    )
    assert "<h1>A &amp; B</h1>" in as_html(blocks)
    assert '<td class="w">c</td><td>1</td>' in as_html(blocks)


def test_the_report_needs_no_matplotlib():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from memest.calibration.fitting.report import html_report\n"
        "print(html_report([])[:15])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "<!DOCTYPE html>\n"
