"""Real CPU steps beside their traces: agreement, a difference, and releases nobody looked at."""

from __future__ import annotations

import dataclasses
import json

import pytest

import memest
from memest.calibration import drift
from memest.calibration.campaign import Campaign, read_campaign
from memest.calibration.case import case_from_dict
from memest.cli import selftest
from memest.cli.main import run
from memest.config import installed

pytest.importorskip("transformers")
TINY = {"model": "prajjwal1/bert-tiny", "setup": {"batch": 2, "seq_len": 16, "loop": "plain"}}


pytestmark = pytest.mark.usefixtures("shared_workers")


@pytest.fixture
def one_case(monkeypatch):
    campaign = Campaign(name="check", cases=(case_from_dict(TINY),))
    monkeypatch.setattr(drift, "read_campaign", lambda _: campaign)


def test_the_check_has_every_loop_and_kinds_of_model():
    cases = read_campaign("check").cases
    assert {case.setup.loop.value for case in cases} == {"plain", "trainer", "accelerate"}
    assert len({case.model.partition("?")[0] for case in cases}) >= 6
    assert {case.setup.precision.value for case in cases} == {"fp32", "bf16"}
    assert any(case.setup.grad_accum > 1 for case in cases)


@pytest.mark.slow
def test_a_real_step_agrees_with_its_trace(one_case):
    told = []
    found = drift.check_drift(told.append)
    (case,) = found.cases
    assert not case.failure
    assert case.measured_bytes > 4_000_000
    assert case.agrees
    assert not found.found
    assert told == ["1 of 1: prajjwal1/bert-tiny"]


@pytest.mark.slow
def test_a_difference_is_found_and_is_the_exit_code(one_case, monkeypatch, capsys):
    real = drift.pair

    def off(measurement):
        found = real(measurement)
        more = found.prediction.allocated_bytes * 101 // 100
        prediction = dataclasses.replace(found.prediction, allocated_bytes=more)
        return dataclasses.replace(found, prediction=prediction)

    monkeypatch.setattr(drift, "pair", off)
    assert run(["selftest", "--full", "--json"]) == 1
    (case,) = json.loads(capsys.readouterr().out)["drift"]["cases"]
    assert case["agrees"] is False
    assert case["error"] == pytest.approx(0.01, rel=0.01)


@pytest.mark.slow
def test_a_model_that_cannot_run_is_told_and_is_drift(monkeypatch, capsys):
    broken = {**TINY, "setup": {**TINY["setup"], "seq_len": 100_000}}
    campaign = Campaign(name="check", cases=(case_from_dict(broken),))
    monkeypatch.setattr(drift, "read_campaign", lambda _: campaign)
    assert run(["selftest", "--full"]) == 1
    out = capsys.readouterr().out
    assert "not compared: " in out
    assert "Traceback" not in out


def test_other_releases_are_told_in_the_estimate(monkeypatch):
    monkeypatch.setattr(installed, "VERIFIED", {"torch": ("2.11", "2.13")})
    real = installed.installed_version
    monkeypatch.setattr(
        installed, "installed_version", lambda name: (9, 1) if name == "torch" else real(name)
    )
    assert installed.unverified_note() == (
        "traces were not verified with torch 9.1 (verified: 2.11, 2.13): `memest selftest --full` "
        "compares them with real steps here"
    )
    answer = memest.estimate("prajjwal1/bert-tiny", batch=2, seq_len=16, software="torch=2.13")
    assert any("not verified with torch 9.1" in line for line in answer.assumptions)


def test_a_declared_release_that_is_newer_than_the_traced_one_is_told():
    def told(software):
        asked = memest.estimate("prajjwal1/bert-tiny", batch=2, seq_len=16, software=software)
        return [line for line in asked.assumptions if line.startswith("traced ")]

    assert told("torch=2.4,transformers=4.44") == []
    (line,) = told("torch=2.4,transformers=5.99,cuda=13.3")
    assert line == (
        f"traced transformers 5.99 by the code of {installed.release('transformers')}: what "
        "changed in between is priced where memest knows it"
    )


def test_without_torch_nothing_is_checked_and_it_says_why(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "release", lambda name: None)
    assert run(["selftest", "--full"]) == 6
    said = capsys.readouterr()
    assert said.out == ""
    assert "need torch, and it is not installed: pip install" in said.err
