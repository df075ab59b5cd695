"""Clocks that jump by years: nothing is lost, blocked or deleted while somebody needs it."""

from __future__ import annotations

import os
import time

import pytest

from memest.calibration import store as stored
from memest.calibration.case import case_from_dict
from memest.calibration.measurement import Environment, Status
from memest.calibration.store import MeasurementStore
from memest.cli.main import run
from memest.profiles.cache import Store, digest_of

YEARS = 30 * 365 * 86_400
JUMPS = pytest.mark.parametrize("jump", [YEARS, -YEARS, 2**40], ids=["ahead", "back", "far"])


@JUMPS
def test_ages_of_cache_entries(jump, tmp_path, monkeypatch, capsys):
    """What a wrong clock stamped is listed, and what is written now outlives it by the rules."""
    monkeypatch.setenv("MEMEST_CACHE", str(tmp_path))
    store, content = Store(tmp_path), ["x" * 100] * 50
    for number in range(3):
        store.write(digest_of(number), "steps", [number, content], {"model": f"m{number}"})
    now = time.time()
    for file in (tmp_path / digest_of(0)).iterdir():
        os.utime(file, (now + jump, now + jump))

    for words in ((), ("--json",)):
        assert run(["cache", *words]) == 0
        assert "m0" in capsys.readouterr().out

    sizes = [entry.bytes for entry in store.entries()]
    monkeypatch.setenv("MEMEST_CACHE_LIMIT", str(sum(sizes) + 10))
    store.write(digest_of(3), "steps", [3, content], {"model": "m3"})
    left = {entry.key["model"] for entry in store.entries()}
    assert "m3" in left
    assert len(left) == 3
    # a stamp from the future counts as one of now from here on
    assert all(entry.used <= time.time() + 1 for entry in store.entries())


def _case(number=1):
    return case_from_dict({"model": "gpt2", "setup": {"batch": number}})


ENVIRONMENT = Environment(gpu="g")


@JUMPS
def test_a_run_of_another_machine_whose_clock_differs_blocks_nobody(jump, tmp_path, monkeypatch):
    """Its stamp says nothing: the case is taken, and an owner that lives loses nothing."""
    path = tmp_path / "runs.db"
    with MeasurementStore(path) as theirs, MeasurementStore(path) as ours:
        monkeypatch.setattr(stored, "_owner", lambda: "elsewhere:1:1")
        run = theirs.begin(_case(), ENVIRONMENT)
        run.hear({"kind": "step", "step": {"seconds": 0.5, "allocated_bytes": 1}})
        monkeypatch.undo()

        here = time.time()
        monkeypatch.setattr(stored.time, "time", lambda: here + jump)
        other = ours.begin(_case(), ENVIRONMENT)
        assert other is not None
        other.close(Status.OOM)
        monkeypatch.undo()

        # the owner lives: what it says after that, and what it said before, is kept
        monkeypatch.setattr(stored, "_owner", lambda: "elsewhere:1:1")
        run.hear({"kind": "step", "step": {"seconds": 0.5, "allocated_bytes": 7}})
        monkeypatch.undo()
        assert ours.running() == 1
        assert run.close(Status.OK).allocated_bytes == 7
        run.still_here()
        assert ours.running() == 0
        assert sorted(m.status for m in ours.measurements()) == [Status.OK, Status.OOM]


def test_an_owner_that_is_killed_after_a_jump_leaves_what_it_said(tmp_path, monkeypatch):
    path = tmp_path / "runs.db"
    with MeasurementStore(path) as theirs, MeasurementStore(path) as ours:
        monkeypatch.setattr(stored, "_owner", lambda: "elsewhere:1:1")
        run = theirs.begin(_case(), ENVIRONMENT)
        run.hear({"kind": "step", "step": {"seconds": 0.5, "allocated_bytes": 5}})
        real = time.time
        monkeypatch.setattr(stored.time, "time", lambda: real() + YEARS)
        assert ours.recover() == 1
        run.hear({"kind": "step", "step": {"seconds": 0.5, "allocated_bytes": 9}})
        monkeypatch.setattr(stored.time, "time", lambda: real() + 3 * YEARS)
        assert ours.recover() == 1
        (measurement,) = ours.measurements()
    assert measurement.status is Status.INTERRUPTED
    assert [step.allocated_bytes for step in measurement.steps] == [5, 9]


def test_a_run_here_is_told_by_its_process_whatever_the_clock_says(tmp_path, monkeypatch):
    path = tmp_path / "runs.db"
    with MeasurementStore(path) as store:
        run = store.begin(_case(), ENVIRONMENT)
        real = time.time
        for jump in (YEARS, -YEARS):
            monkeypatch.setattr(stored.time, "time", lambda jump=jump: real() + jump)
            assert store.begin(_case(), ENVIRONMENT) is None
            assert store.recover() == 0
        assert run.close(Status.OK).seconds < 3600
