"""The verdict test: what is tried, under which limits, and how it is judged.

No run here is real: measurements are made up from memest's own predictions for a card, and a
stand-in for the bench lets a run complete where a replay under the same limit does.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import memest
from memest.calibration.case import case_from_dict
from memest.calibration.measurement import Environment, Measurement, Status, StepReading
from memest.calibration.running import verify
from memest.calibration.running.verify import (
    CARD_SIZES,
    Expectation,
    Trial,
    judge,
    trials_of,
    verify_store,
)
from memest.calibration.store import MeasurementStore
from memest.errors import ConfigError
from memest.estimation.profiler import Profiler
from memest.estimation.whole_run import steps_run
from memest.replay.conf import parse_alloc_conf
from memest.replay.replay import replay
from memest.units import GIB, MIB

A100 = Environment(
    gpu="NVIDIA A100-SXM4-80GB", total_bytes=84_974_239_744, capability=(8, 0), sm_count=108,
    max_threads_per_sm=2048, driver="580.1", cuda="13.0", torch="2.13.0", transformers="5.23.0",
)  # fmt: skip
CONTEXT = 600 * MIB
CASE = case_from_dict({
    "model": "gpt2?n_layer=2",
    "setup": {"batch": 24, "seq_len": 512, "loop": "plain", "dtype": "float32"},
})  # fmt: skip


@pytest.fixture(scope="module")
def measured():
    answer = memest.estimate(CASE.model, CASE.setup, gpu=A100.gpu, max_batch=False)
    step = StepReading(
        seconds=1.0, allocated_bytes=answer.peak.allocated_bytes,
        reserved_bytes=answer.peak.reserved_bytes, reserved_now_bytes=answer.peak.reserved_bytes,
        process_bytes=answer.peak.reserved_bytes + CONTEXT,
    )  # fmt: skip
    return Measurement(
        run="first", case=CASE, status=Status.OK, environment=A100, started="2026-01-01",
        seconds=3.0, steps=(step,),
    )  # fmt: skip


class FakeBench:
    """Runs complete where a replay of memest's own stream does: what a perfect model would see."""

    wrong = 0

    def __init__(self, device, store, **_):
        self.environment = A100
        self.ran = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def measure(self, case):
        self.ran.append(case)
        card = memest.estimation.gpu_target.target_gpu(A100.gpu, case.setup, (2, 13), None, None)
        found = steps_run(Profiler.of(case.model), case.setup, card.traits)
        stream = found.stream
        limit = case.cap_bytes - self.wrong
        result = replay(stream.events, stream.sizes, parse_alloc_conf(""), limit_bytes=limit)
        status = Status.OOM if result.num_ooms else Status.OK
        return Measurement(
            run=case.id, case=case, status=status, environment=A100, started="", seconds=1.0
        )


@pytest.fixture
def store(tmp_path, measured, monkeypatch):
    monkeypatch.setattr(verify, "Bench", FakeBench)
    with MeasurementStore(tmp_path / "runs.db") as opened:
        opened.add([measured])
        yield opened


def test_what_is_tried(measured):
    skipped = {}
    trials = list(trials_of(measured, skipped))

    kinds = [t.kind for t in trials]
    assert kinds == ["upper bound", "card", "card", "largest batch", "one more"]
    assert skipped == {}
    bound, below, above, largest, more = trials
    need = measured.device_bytes
    assert bound.memory_bytes > need
    assert bound.case.cap_bytes == bound.memory_bytes - CONTEXT
    assert below.memory_bytes < need <= above.memory_bytes
    assert {below.memory_bytes, above.memory_bytes} <= set(CARD_SIZES)
    assert (below.expected, above.expected) == ("out of memory", "completes")
    assert more.case.setup.batch == largest.case.setup.batch + 1
    assert (largest.expected, more.expected) == ("completes", "out of memory")
    assert largest.memory_bytes == more.memory_bytes == above.memory_bytes
    assert len({t.case.id for t in trials} | {CASE.id}) == 6, "trials are cases of their own"


def test_a_model_that_is_right_keeps_its_word(store):
    outcome = verify_store(store, "cuda", pattern=re.compile("."))

    assert outcome.kept_its_word, outcome.text()
    assert [m.status for _, m in outcome.trials] == [
        Status.OK, Status.OOM, Status.OK, Status.OK, Status.OOM,
    ]  # fmt: skip
    assert "upper bound: 1 of 1 as predicted" in outcome.text()
    document = outcome.to_dict()
    assert [t["right"] for t in document["trials"]] == [True] * 5


def test_a_model_that_is_wrong_is_said_to_be(store, monkeypatch):
    monkeypatch.setattr(FakeBench, "wrong", 2 * GIB)

    outcome = verify_store(store, "cuda", pattern=re.compile("gpt2"))

    assert not outcome.kept_its_word
    assert "completes was predicted, it ran out of memory" in outcome.text()


def test_time_that_is_spent_leaves_trials(store):
    outcome = verify_store(store, "cuda", pattern=re.compile("."), budget=0.0)
    assert (outcome.trials, outcome.num_left) == ([], 1)
    assert not outcome.kept_its_word
    assert "nothing was tried" in outcome.text()


def test_runs_without_a_reading_of_the_process_are_not_tried(measured):
    blind = replace(measured, steps=(replace(measured.steps[0], process_bytes=None),))
    skipped = {}
    assert list(trials_of(blind, skipped)) == []
    assert "was not read" in skipped[CASE.id]


def test_what_cannot_be_verified_is_said(store, tmp_path):
    with pytest.raises(ConfigError, match="memory of a CPU run cannot be capped"):
        verify_store(store, "cpu", pattern=re.compile("."))
    with pytest.raises(ConfigError, match="run `memest calibrate run` first"):
        verify_store(store, "cuda", pattern=re.compile("no such case"))


@pytest.mark.parametrize(
    ("expected", "status", "right"),
    [("completes", Status.OK, True), ("completes", Status.OOM, False),
     ("out of memory", Status.OOM, True), ("out of memory", Status.OK, False),
     ("either", Status.OOM, None), ("completes", Status.CRASHED, None)],
)  # fmt: skip
def test_judgement(measured, expected, status, right):
    trial = Trial(kind="card", case=CASE, memory_bytes=1, expected=Expectation(expected))
    assert judge(trial, replace(measured, status=status)) is right
