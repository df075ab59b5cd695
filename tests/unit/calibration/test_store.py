"""The store: what was told to be kept is kept, whoever dies, and nobody measures twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from memest.calibration.case import case_from_dict, with_events
from memest.calibration.measurement import Environment, Failure, Status
from memest.calibration.store import MeasurementStore, default_store
from memest.errors import ConfigError, MemestError

CASE = case_from_dict({"model": "gpt2", "setup": {"batch": 2}})
HERE = Environment(gpu="NVIDIA Simulated", torch="2.13.0", cuda="13.0", driver="580.1")
STEP = {"seconds": 0.1, "allocated_bytes": 1000, "reserved_bytes": 2000}


@pytest.fixture
def store(tmp_path):
    with MeasurementStore(tmp_path / "deep" / "runs.db") as opened:
        yield opened


def _measured(store, case=CASE, environment=HERE, status=Status.OK):
    opened = store.begin(case, environment)
    opened.hear({"kind": "built", "parameters": 10, "trainable": 9})
    opened.hear({"kind": "phase", "phase": "forward 1 1"})
    opened.hear({"kind": "reading", "reading": {"name": "context", "device_used_bytes": 5}})
    opened.hear({"kind": "step", "step": STEP})
    return opened.close(status)


def test_what_a_worker_says_becomes_a_measurement(store):
    kept = _measured(store)

    (found,) = store.measurements()
    assert found == kept
    assert (found.parameters, found.trainable) == (10, 9)
    assert (found.allocated_bytes, found.reserved_bytes) == (1000, 2000)
    assert found.environment == HERE
    assert found.case == CASE


def test_a_result_is_not_measured_again_and_other_software_is(store):
    _measured(store)
    assert store.begin(CASE, HERE) is None
    assert store.result(CASE, HERE).allocated_bytes == 1000
    newer = Environment(gpu=HERE.gpu, torch="2.14.0", cuda="13.0", driver="580.1")
    assert store.begin(CASE, newer) is not None


@pytest.mark.parametrize(
    ("status", "again"),
    [(Status.OOM, False), (Status.FAILED, True), (Status.CRASHED, True), (Status.TIMEOUT, True),
     (Status.INTERRUPTED, True)],
)  # fmt: skip
def test_what_failed_is_tried_again_and_out_of_memory_is_a_result(store, status, again):
    _measured(store, status=status)
    assert (store.begin(CASE, HERE) is not None) is again


def test_a_result_without_the_history_that_is_asked_for_is_made_anew(store):
    _measured(store)
    assert store.begin(with_events(CASE), HERE) is not None


def test_a_case_under_way_is_left_to_its_owner(store):
    first = store.begin(CASE, HERE)
    assert store.begin(CASE, HERE) is None
    assert store.running() == 1
    assert store.measurements() == []
    first.close(Status.OK)
    assert store.running() == 0


OWNER = """
    import sys, time
    from pathlib import Path
    from memest.calibration.case import case_from_dict
    from memest.calibration.measurement import Environment
    from memest.calibration.store import MeasurementStore

    store = MeasurementStore(Path(sys.argv[1]))
    case = case_from_dict({"model": "gpt2", "setup": {"batch": 2}})
    run = store.begin(case, Environment(gpu="NVIDIA Simulated", torch="2.13.0", cuda="13.0",
                                        driver="580.1"))
    run.hear({"kind": "built", "parameters": 10, "trainable": 10})
    run.hear({"kind": "step", "step": {"seconds": 0.5, "allocated_bytes": 777}})
    print("heard", flush=True)
    time.sleep(60)
"""


def test_nothing_that_was_heard_is_lost_when_the_owner_is_killed(tmp_path):
    path = tmp_path / "runs.db"
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), str(path)], stdout=subprocess.PIPE
    )
    assert owner.stdout.readline() == b"heard\n"
    with MeasurementStore(path) as store:
        assert store.begin(CASE, HERE) is None, "its owner is alive"
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()

        assert store.begin(CASE, HERE) is not None, "its owner is gone"
        (left,) = store.measurements()
    assert left.status is Status.INTERRUPTED
    assert left.allocated_bytes == 777
    assert left.parameters == 10
    assert left.environment == HERE


def _take(path, numbers, taken):
    with MeasurementStore(path) as store:
        for number in numbers:
            case = case_from_dict({"model": "gpt2", "setup": {"batch": number}})
            opened = store.begin(case, HERE)
            if opened is not None:
                opened.hear({"kind": "step", "step": STEP})
                opened.close(Status.OK)
                taken.put(number)


def test_campaigns_on_one_store_share_the_work_and_spoil_nothing(tmp_path):
    path = tmp_path / "runs.db"
    MeasurementStore(path).close()
    taken = multiprocessing.Queue()
    numbers = list(range(1, 41))
    workers = [
        multiprocessing.Process(target=_take, args=(path, order, taken))
        for order in (numbers, numbers[::-1], numbers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    done = sorted(taken.get(timeout=5) for _ in numbers)
    assert done == numbers, "each case once"
    with MeasurementStore(path) as store:
        assert len(store.measurements()) == 40
        assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


WRITER = """
    import sys
    from pathlib import Path
    from memest.calibration.case import case_from_dict
    from memest.calibration.measurement import Environment, Status
    from memest.calibration.store import MeasurementStore

    store = MeasurementStore(Path(sys.argv[1]))
    for number in range(1, 100000):
        case = case_from_dict({"model": "gpt2", "setup": {"batch": number}})
        run = store.begin(case, Environment(gpu="g"))
        if run is None:
            continue
        run.hear({"kind": "step", "step": {"seconds": 0.5, "allocated_bytes": number}})
        run.close(Status.OK)
        print(number, flush=True)
"""


@pytest.mark.parametrize("moment", [0.05, 0.2, 0.4])
def test_kill_at_any_moment_keeps_all_that_was_reported(tmp_path, moment):
    path = tmp_path / "runs.db"
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE
    )
    first = writer.stdout.readline()
    time.sleep(moment)
    os.kill(writer.pid, signal.SIGKILL)
    reported = [int(line) for line in (first + writer.stdout.read()).split()]
    writer.wait()
    with MeasurementStore(path) as store:
        kept = {m.allocated_bytes for m in store.measurements() if m.status is Status.OK}
    assert set(reported) <= kept
    assert len(kept) - len(reported) <= 1, "one may have been kept and not yet reported"


def test_of_several_ranks_the_first_stands_for_the_case(store):
    case = case_from_dict({"model": "gpt2", "parallel": "ddp", "processes": 2})
    opened = store.begin(case, HERE)
    opened.hear({"kind": "step", "step": STEP})
    opened.hear({"kind": "step", "step": STEP | {"allocated_bytes": 7}, "rank": 1})
    store._db.execute("UPDATE runs SET owner = 'elsewhere:1:', seen = 0")
    assert store.recover() == 1, "as earlier releases left them"
    (left,) = store.measurements()
    assert (left.allocated_bytes, len(left.steps)) == (1000, 1)
    store.add([replace(left, run="second", status=Status.OK, rank=1)])
    assert store.result(case, HERE) is None


def test_taking_over_is_exact_and_contradictions_are_said(store, tmp_path):
    one = _measured(store)
    with MeasurementStore(tmp_path / "other.db") as other:
        assert other.add([one]) == (1, 0, [])
        assert other.add([one]) == (0, 1, [])
        document = one.to_dict() | {"seconds": 99.0}
        from memest.calibration.measurement import measurement_from_dict

        assert other.add([measurement_from_dict(document)]) == (0, 0, [one.run])
        assert other.measurements() == [one]


def test_failures_say_in_which_phase(store):
    opened = store.begin(CASE, HERE)
    opened.hear({"kind": "phase", "phase": "backward 2 1"})
    kept = opened.close(Status.CRASHED, Failure(kind="Crashed", message="gone"))
    assert kept.failure.phase == "backward 2 1"


def test_other_files_are_refused_in_words(tmp_path):
    text = tmp_path / "notes.db"
    text.write_text("dear diary, " * 200)
    with pytest.raises(ConfigError, match="not a store of measurements"):
        MeasurementStore(text)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE theirs (x)")
    with pytest.raises(ConfigError, match="something else"):
        MeasurementStore(foreign)
    later = tmp_path / "later.db"
    MeasurementStore(later).close()
    with sqlite3.connect(later) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match="later release"):
        MeasurementStore(later)
    with pytest.raises(ConfigError, match="no store at"):
        MeasurementStore(tmp_path / "none.db", create=False)
    with pytest.raises(MemestError, match="cannot be"):
        MeasurementStore(text / "below.db")


def test_the_place_is_chosen_by_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMEST_HOME", str(tmp_path / "home"))
    assert default_store() == tmp_path / "home" / "calibration.db"
    monkeypatch.setenv("MEMEST_STORE", str(tmp_path / "mine.db"))
    assert default_store() == tmp_path / "mine.db"


def test_a_damaged_document_is_named(store):
    _measured(store)
    store._db.execute("UPDATE runs SET document = ?", (json.dumps({"run": "x"}),))
    with pytest.raises(ConfigError, match="'case' is missing"):
        store.measurements()
