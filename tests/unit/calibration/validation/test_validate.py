"""Records through the real estimate, in Python and on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest

import memest
from memest.catalog.cuda_context import loaded_kernels_later
from support.case_records import record

RESERVED, DEVICE = "reserved", "device"


def _perfect(truth, metric, **changes):
    return record(metric=metric, measured_bytes=getattr(truth.peak, f"{metric}_bytes"), **changes)


@pytest.mark.slow
def test_a_measurement_equal_to_the_estimate_has_no_error(written, truth):
    path = written(*(_perfect(truth, m, id=m) for m in ("allocated", RESERVED, DEVICE)))
    found = memest.validate(path)
    assert [(o.record.metric, o.error) for o in found.outcomes] == [
        ("allocated", 0), (RESERVED, 0), (DEVICE, 0),
    ]  # fmt: skip
    device = found.outcomes[2]
    assert device.floor_bytes == truth.interval.low_bytes
    assert device.bound_bytes == truth.interval.high_bytes
    assert device.inside is True
    names = [one.name for one in found.scores()]
    assert names == ["allocated", RESERVED, "device, context by the table"]


@pytest.mark.slow
def test_a_context_that_was_read_takes_the_place_of_the_tables(written, truth):
    context = 700 << 20
    whole = truth.peak.reserved_bytes + context
    path = written(record(metric=DEVICE, measured_bytes=whole, device_context_bytes=context))
    (one,) = memest.validate(path).outcomes
    later = loaded_kernels_later((2, 6))
    assert one.context_read
    assert later.expected_bytes > 0
    assert one.predicted_bytes == whole + later.expected_bytes
    assert [s.name for s in memest.validate(path).scores()] == ["device, context read on that GPU"]


def test_verdicts_by_the_limit_of_the_record(written, truth):
    reserved, allocated = truth.peak.reserved_bytes, truth.peak.allocated_bytes
    path = written(
        _perfect(truth, RESERVED, id="room", limit_bytes=4 * reserved),
        _perfect(truth, RESERVED, id="none", limit_bytes=allocated // 2, oom=True),
        _perfect(truth, RESERVED, id="lied", limit_bytes=allocated // 2),
    )
    found = memest.validate(path)
    test = found.verdicts()
    assert test.right == 2
    assert test.wrong == (("lied", "out of memory"),)
    assert (test.num_bounded, test.unproven) == (1, ())
    assert "predicted to go out of memory" in found.to_dict()["records"][2]["cause"]


@pytest.mark.slow
def test_bounds_of_lengths_are_predicted_at_both_ends(written, truth):
    setup = {"seq_len": None}
    (one,) = memest.validate(
        written(_perfect(truth, RESERVED, setup_=setup, seq_len_range=[8, 512]))
    ).outcomes
    assert one.low_bytes < truth.peak.reserved_bytes < one.predicted_bytes
    assert one.inside is True
    assert one.error is None


def test_what_cannot_be_predicted_fails_no_other(written, truth):
    path = written(
        record(id="model", model="no/such-model"),
        record(id="option", setup_={"optim": "adamw_tortch"}),
        record(id="gpu", gpu="RTX 9999"),
        _perfect(truth, RESERVED, id="good"),
    )
    found = memest.validate(path)
    failures = {o.record.id: o.failure for o in found.unpredicted()}
    assert set(failures) == {"model", "option", "gpu"}
    assert "adamw_torch" in failures["option"]
    assert [o.error for o in found.outcomes if not o.failure] == [0]


def _run(*arguments, env=None):
    return subprocess.run(
        [sys.executable, "-m", "memest", "validate", *map(str, arguments)],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.links = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href")]


@pytest.mark.slow
def test_the_command_writes_text_json_and_pages(written, truth, tmp_path):
    path = written(
        _perfect(truth, RESERVED), record(id="lacks", setup_={"optim": None}), "{",
        record(id="off", measured_bytes=2 * truth.peak.reserved_bytes),
    )  # fmt: skip
    told = _run(path)
    assert told.returncode == 0, told.stderr
    assert "Each counter against its own meter" in told.stdout
    assert "setup.optim" in told.stdout
    assert "runs.jsonl:3: no JSON" in told.stdout
    assert "-50.00%" in told.stdout
    assert max(map(len, told.stdout.splitlines())) <= 100

    page, words = tmp_path / "page.html", tmp_path / "page.md"
    both = _run(path, "--json", "--out", page, "--out", words)
    assert both.returncode == 0, both.stderr
    document = json.loads(both.stdout)
    assert document["schema_version"] == 1
    assert document["incomplete"] == [{"id": "lacks", "missing": ["setup.optim"]}]
    assert [r["error"] for r in document["records"]] == [0, -0.5]
    tags = _Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    assert tags.seen.count("svg") == 2
    assert not tags.links, "the page loads nothing"
    assert "script" not in tags.seen
    assert "| reserved | 2 |" in words.read_text(encoding="utf-8")


def test_nothing_scored_is_a_failure(written):
    told = _run(written(record(setup_={"batch": None})))
    assert told.returncode == 1
    assert "Incomplete records" in told.stdout
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.jsonl"], "none.jsonl does not exist"),
        (["RUNS", "--assume", "torch"], "declares nothing"),
        (["RUNS", "--assume", "torch=2.1"], "software.torch"),
        (["RUNS", "--out", "page.htm"], "page.html"),
    ],
)
def test_wrong_usage_is_told_in_a_paragraph(written, arguments, said):
    path = written(record())
    told = _run(*(path if a == "RUNS" else a for a in arguments))
    assert told.returncode == 2
    assert said in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.slow
def test_versions_that_look_like_numbers_stay_versions(written, truth):
    path = written(_perfect(truth, RESERVED, software_={"torch": None}))
    told = _run(path, "--json", "--assume", "software.torch=2.10")
    (one,) = json.loads(told.stdout)["records"]
    assert one["declared"] == ["software.torch=2.10"]
