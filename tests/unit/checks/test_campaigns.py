"""What is run by hand: its result is there, dated, and about the code that is here."""

from __future__ import annotations

import dataclasses
import re

import pytest

from support.paths import ROOT
from support.tools import load_tool

campaigns = load_tool("campaigns")


@pytest.mark.parametrize("campaign", campaigns.CAMPAIGNS, ids=lambda campaign: campaign.name)
def test_its_result_speaks_of_the_code_as_it_is(campaign):
    record = campaigns.records().get(campaign.name)
    assert not campaigns.stale(campaign, record)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    assert record["result"]
    assert (ROOT / campaign.page).is_file()


@pytest.mark.parametrize("campaign", campaigns.CAMPAIGNS, ids=lambda campaign: campaign.name)
def test_everything_that_it_speaks_of_is_there(campaign):
    for pattern in campaign.speaks_of:
        assert list(ROOT.glob(pattern)), pattern
    assert set(campaign.releases) <= set(campaigns.pinned_releases())
    assert (ROOT / campaign.command.split()[1]).exists()
    assert campaign.command in (ROOT / "docs/testing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ('"""Says more."""\nfrom house.room import b\n\n\ndef a():\n    return b  # why\n', False),
        ("from code import b\ndef a(): return b + 1\n", True),
        ("from code import c as b\ndef a(): return b\n", True),
    ],
    ids=["a move", "a change", "another name"],
)
def test_what_counts_is_what_code_does(tmp_path, changed, stale):
    file = tmp_path / "a.py"
    file.write_text("from code import b\ndef a(): return b\n")
    before = campaigns.code_of(file)
    file.write_text(changed)
    assert (campaigns.code_of(file) != before) is stale


def test_a_change_makes_it_stale_and_a_move_does_not(tmp_path):
    made = dataclasses.replace(
        campaigns.CAMPAIGNS[0], speaks_of=("code/**/*.py",), releases=("torch",)
    )
    (tmp_path / "code/deep").mkdir(parents=True)
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\nnumpy==2.4.6\n")
    (tmp_path / "code/a.py").write_text("a = 1\n")
    before = made.digest(tmp_path)

    (tmp_path / "constraints.txt").write_text("torch==2.13.0\nnumpy==3.0\n")
    (tmp_path / "code/a.py").rename(tmp_path / "code/deep/b.py")
    (tmp_path / "code/__pycache__").mkdir()
    (tmp_path / "code/__pycache__/left_behind.py").write_text("b = 2\n")
    assert made.digest(tmp_path) == before

    (tmp_path / "constraints.txt").write_text("torch==2.14.0\n")
    newer = made.digest(tmp_path)
    (tmp_path / "code/c.py").write_text("a = 1\n")
    assert len({before, newer, made.digest(tmp_path)}) == 3
