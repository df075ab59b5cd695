"""Ranges and descriptions: package and page say what the kept answers come to."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from memest.calibration.validation.records import parse_record
from support.tools import load_tool

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "accuracy.md"


def _section(name):
    text = PAGE.read_text(encoding="utf-8")
    return text.partition(f"<!-- begin {name} -->\n")[2].partition(f"\n<!-- end {name} -->")[0]


def test_bands_and_their_table_are_those_of_the_kept_errors():
    tool = load_tool("peak_ranges")
    errors = defaultdict(list)
    for error in (*tool.published(), *tool.own_runs()):
        errors[error.kind, error.peak].append(error)
    kinds = defaultdict(dict)
    for (kind, peak), some in errors.items():
        kinds[kind.value][peak] = asdict(tool.band_of(some))

    assert json.loads(tool.BANDS.read_text(encoding="utf-8"))["kinds"] == kinds
    assert "\n".join(tool.table(errors)) == _section("ranges")


def test_runs_that_took_no_part_lie_in_the_range_as_often_as_it_says():
    tool = load_tool("peak_ranges")
    plain = [
        error
        for error in (*tool.published(), *tool.own_runs())
        if error.kind is tool.RunKind.ONE_GPU and error.peak == "reserved"
    ]

    base = tool.band_of(plain)

    assert 0.88 <= tool.coverage(plain, "model", base) <= 0.97
    assert 0.88 <= tool.coverage(plain, "source", base) <= 0.97


def test_the_tables_of_descriptions_are_those_of_the_kept_answers():
    tool = load_tool("descriptions")
    lines = [json.loads(text) for text in tool.KEPT.read_text(encoding="utf-8").splitlines()]

    assert "\n".join(tool.scores(lines)) == _section("described")
    assert "\n".join(tool.costs(lines)) == _section("costs")


def test_a_description_has_the_stated_options_alone_and_lacks_the_rest():
    tool = load_tool("descriptions")
    setup = {"batch": 4, "seq_len": 128, "optim": "adamw_torch", "padded": True, "loop": "plain"}
    record = parse_record(
        {
            "id": "a", "set": "xmem", "model": "gpt2", "gpu": "RTX 3060", "metric": "reserved",
            "setup": {**setup, "precision": "fp32", "checkpointing": "none"},
            "software": {"torch": "2.6", "transformers": "4.51", "cuda": "12.4"},
            "measured_bytes": 1 << 30, "source": "here",
        },
        "line 1",
        "xmem",
    )  # fmt: skip
    described = tool.DESCRIPTIONS["xmem"].of(record)
    lacks = dict(tool.lacking(record, described))

    assert described.setup == {"batch": 4, "seq_len": 128, "loop": "plain"}
    assert described.software == {"torch": "2.6", "transformers": "4.51"}
    assert {"padded", "precision"} <= set(lacks)
    assert lacks["padded"].setup == {**described.setup, "padded": True}
    assert lacks[tool.SOFTWARE].software == record.software
