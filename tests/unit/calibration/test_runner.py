"""Campaigns with real workers that really train: whatever ends one of them, the rest is kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memest.calibration.case import case_from_dict
from memest.calibration.fitting.prediction import predict
from memest.calibration.measurement import CPU, Status
from memest.calibration.running.attendant import Attendant
from memest.calibration.running.runner import Bench, run_cases
from memest.calibration.store import MeasurementStore
from memest.cli.main import run

TINY = "prajjwal1/bert-tiny"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def _case(batch=2, model=TINY, **setup):
    options = {"batch": batch, "seq_len": 16, "loop": "plain", "dtype": "float32", **setup}
    return case_from_dict({"model": model, "setup": options})


LONG = _case(3, grad_accum=2000)


@pytest.fixture
def store(tmp_path):
    with MeasurementStore(tmp_path / "runs.db") as opened:
        yield opened


def _children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_what_is_measured_is_what_is_predicted(store, shared_workers):
    cases = [
        _case(),
        _case(loop="trainer", bf16=True, grad_accum=2),
        _case(loop="accelerate", max_grad_norm=1.0, checkpointing=True),
        _case(2, "gpt2?n_layer=2&n_embd=96&n_head=4", optim="sgd_momentum_loop"),
        _case(lora_r=4, use_dora=True),
        _case(loop="trainer", lora_r=4, dtype="bfloat16", lora_target_modules="all-linear"),
    ]
    told = []

    summary = run_cases(cases, "cpu", store, command="memest calibrate run", tell=told.append)

    assert [m.status for m in summary.measurements] == [Status.OK] * 6, summary.measurements
    assert store.measurements() == summary.measurements
    for measured in summary.measurements:
        assert len(measured.steps) == 4
        assert measured.environment.gpu == CPU
        assert measured.environment.command == "memest calibrate run"
        assert [r.name for r in measured.readings] == ["start", "model", "end"]
        assert measured.allocated_bytes > 2 * measured.parameters
        assert measured.reserved_bytes is None
        assert measured.device_bytes is None
        predicted = predict(measured).allocated_bytes
        assert abs(predicted - measured.allocated_bytes) < 0.003 * measured.allocated_bytes
    assert [p.number for p in told if p.measurement] == [1, 2, 3, 4, 5, 6]
    assert told[-1].seconds_left == 0

    again = run_cases(cases, "cpu", store)
    assert (again.num_skipped, again.measurements) == (6, [])


@pytest.mark.slow
def test_errors_of_a_case_are_its_result(store, shared_workers):
    cases = [
        _case(fp16=True),
        _case(1, "nobody/knows-this"),
        _case(seq_len=100_000),
        _case(checkpointing=True, model="microsoft/resnet-18", seq_len=None),
        _case(4),
    ]
    summary = run_cases(cases, "cpu", store)

    assert [m.status for m in summary.measurements] == [Status.FAILED] * 4 + [Status.OK]
    said = [m.failure.message for m in summary.measurements[:4]]
    assert "fp16 autocast is not measured on a CPU" in said[0]
    assert "nobody/knows-this" in said[1]
    assert "100000" in said[2].replace(",", "")
    assert [m.failure.phase for m in summary.measurements[:2]] == ["start", "build"]


@pytest.mark.slow
@LINUX
def test_a_killed_worker_loses_only_its_case(store):
    with Bench("cpu", store) as bench:
        opened = store.begin(LONG, bench.environment)
        nursery = bench._attendant._process.pid
        heard = []

        def hear(message):
            heard.append(message)
            if message["kind"] == "phase" and message["phase"].startswith("forward"):
                for worker in _children(nursery):
                    os.kill(worker, signal.SIGKILL)

        opened.hear = hear
        killed = bench.run(opened)
        after = bench.measure(_case())

    assert killed.status is Status.CRASHED
    assert "SIGKILL" in killed.failure.message
    assert after.status is Status.OK
    assert bench._attendant._process is None


@pytest.mark.slow
@LINUX
def test_a_killed_parent_of_workers_is_replaced(store, shared_workers):
    with Bench("cpu", store) as bench:
        opened = store.begin(LONG, bench.environment)
        nursery = bench._attendant._process.pid
        opened.hear = lambda _: os.kill(nursery, signal.SIGKILL) if _alive(nursery) else None
        lost = bench.run(opened)
        after = bench.measure(_case())

    assert lost.status is Status.CRASHED
    assert after.status is Status.OK


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@LINUX
def test_a_case_that_takes_too_long_is_ended(store, shared_workers):
    # time enough to build the model on a busy machine, and never to train it
    with Bench("cpu", store, timeout=12.0) as bench:
        nursery = bench._attendant._process.pid
        late = bench.measure(LONG)
    with Bench("cpu", store) as bench:
        after = bench.measure(_case())

    assert late.status is Status.TIMEOUT
    assert late.failure.phase.split()[0] in ("build", "batch", "forward", "backward")
    assert late.parameters is not None, "what it had said is kept"
    assert after.status is Status.OK
    assert not _alive(nursery)


def _all_with(word):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.mark.slow
def test_a_budget_leaves_the_rest_for_another_time(store, shared_workers):
    cases = [_case(n) for n in (2, 3, 4)]
    summary = run_cases(cases, "cpu", store, budget=0.0)
    assert (len(summary.measurements), summary.num_left) == (0, 3)
    assert len(run_cases(cases, "cpu", store, budget=600.0).measurements) == 3


@pytest.fixture
def campaign(tmp_path):
    path = tmp_path / "mine.json"
    entries = [_case(n).to_dict() for n in (2, 4)] + [LONG.to_dict(), _case(5).to_dict()]
    path.write_text(json.dumps(entries))
    return path


def _words(campaign, store, *more):
    return [
        "calibrate", "run", "--campaign", str(campaign), "--device", "cpu", "--store", str(store),
        *more,
    ]  # fmt: skip


def _command(campaign, store, *more):
    return [sys.executable, "-m", "memest", *_words(campaign, store, *more)]


def _started(campaign, store):
    """A campaign in a process of its own, once it is in its long case."""
    process = subprocess.Popen(
        _command(campaign, store), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if line.startswith("2/4"):
            break
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with MeasurementStore(store) as opened:
            if opened.running():
                return process
        time.sleep(0.05)
    raise AssertionError("the long case did not begin")


def _wait_for_the_model(store):
    """Until the worker that runs has said how large its model is."""
    said = (
        "SELECT 1 FROM messages JOIN runs USING (run) "
        "WHERE status = 'running' AND messages.document LIKE '%parameters%'"
    )
    deadline = time.monotonic() + 60
    with contextlib.closing(sqlite3.connect(store)) as database:
        while time.monotonic() < deadline:
            if database.execute(said).fetchone():
                return
            time.sleep(0.05)
    raise AssertionError("the model was not built")


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_ended_in_the_middle_a_campaign_goes_on_where_it_stopped(
    campaign, tmp_path, ending, shared_workers, capsys
):
    path = tmp_path / "runs.db"
    process = _started(campaign, path)
    _wait_for_the_model(path)
    process.send_signal(ending)
    process.wait(30)
    if ending is signal.SIGINT:
        assert process.returncode == 130
    time.sleep(0.5)
    nurseries = [pid for pid in _all_with("--nursery") if _parent(pid) == process.pid]
    assert nurseries == [], "workers do not outlive their campaign"

    # the long case again would take long: the others show that the rest goes on
    code = run(_words(campaign, path, "--only", "-b[245]-", "--json"))

    said = capsys.readouterr()
    assert code == 0, said.err
    (more,) = json.loads(said.out)["runs"]
    assert (more["skipped"], len(more["measured"])) == (2, 1)
    with MeasurementStore(path) as store:
        found = {m.case.setup.batch: m for m in store.measurements()}
    assert {n: m.status for n, m in found.items()} == {
        2: Status.OK, 4: Status.OK, 3: Status.INTERRUPTED, 5: Status.OK,
    }  # fmt: skip
    assert found[3].parameters is not None, "what the worker had said is kept"


@pytest.mark.slow
def test_a_device_that_is_not_there_is_said(attendant):
    from memest.errors import DeviceError

    with pytest.raises(DeviceError, match="--device cuda cannot be used"):
        attendant.describe("cuda")


@pytest.mark.slow("setup4-kernels of GPUs")
@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ({"loop": "trainer", "optim": "none"}, "--optim none is not what the trainer loop does"),
        ({"loop": "trainer", "zero_grad": "zero"}, "--zero-grad zero"),
        ({"loop": "accelerate", "dtype": "bfloat16", "master_weights": True}, "--master-weights"),
        ({"software": "torch=1.10"}, "runs with the software that is installed"),
        ({"sdpa_backend": "math", "attn_implementation": "sdpa"}, "kernels of GPUs"),
    ],
)
def test_what_a_run_would_not_do_is_refused_not_mismeasured(setup, said):
    from memest.calibration.running.nursery import work

    heard = []
    work(_case(**setup), "cpu", heard.append)
    end = heard[-1]
    assert end["status"] is Status.FAILED
    assert said in end["failure"]["message"]


@pytest.mark.slow(but=("setup4",))
@pytest.mark.parametrize(
    "setup",
    [
        {"optim": "adagrad_loop"},
        {"optim": "adagrad", "loop": "trainer"},
        {"optim": "rmsprop", "loop": "trainer"},
        {"dtype": "bfloat16", "master_weights": True},
        {"optim": "none"},
    ],
)
def test_what_optimizers_hold_from_the_start_is_measured_too(store, setup, shared_workers):
    with Bench("cpu", store) as bench:
        measured = bench.measure(_case(**setup))
    assert measured.status is Status.OK, measured.failure
    predicted = predict(measured).allocated_bytes
    assert abs(predicted - measured.allocated_bytes) < 0.004 * measured.allocated_bytes


@pytest.mark.slow
def test_workers_without_torch_say_what_to_install(monkeypatch, tmp_path):
    from memest.errors import MissingDependencyError

    # a folder of its own name that cannot be imported stands for a package that is not there
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        Attendant() as attendant,
        pytest.raises(
            MissingDependencyError, match=r"pip install 'memest-gpu\[calibration\]'"
        ) as error,
    ):
        attendant.describe("cpu")
    assert error.value.exit_code == 6


# a card that notes whoever wants a context of it
WATCHED_CARD = """
import torch

touched = []
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda._lazy_init = lambda: touched.append("a context was made")
from memest.calibration.running.nursery import _prepare

_prepare()
print(touched)
"""


def test_nothing_imported_before_the_first_case_touches_a_card():
    done = subprocess.run(
        [sys.executable, "-c", WATCHED_CARD], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
