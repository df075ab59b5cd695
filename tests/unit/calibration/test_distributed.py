"""Cases of several processes, trained for real with gloo."""

import os
import signal
import time

import pytest

from memest.calibration.case import case_from_dict
from memest.calibration.measurement import Status
from memest.calibration.running import distributed, runner
from memest.calibration.running.meters import count_devices
from memest.calibration.running.runner import run_cases
from memest.calibration.store import MeasurementStore

torch = pytest.importorskip("torch")

PARAMETERS = 4_386_178
WEIGHTS = 4 * PARAMETERS


def make_case(parallel="none", processes=1, **setup):
    setup = {"batch": 2, "seq_len": 32, "loop": "plain", "dtype": "float32", **setup}
    return case_from_dict(
        {"model": "prajjwal1/bert-tiny", "setup": setup, "parallel": parallel,
         "processes": processes}
    )  # fmt: skip


EMBEDDINGS = 4 * ((30522 + 512 + 2) * 128 + 2 * 128)
"""Bytes of the largest unit that FSDP gathers."""
CASES = {"alone": make_case(), "ddp": make_case("ddp", 2), "fsdp": make_case("fsdp", 2)}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with MeasurementStore(tmp_path_factory.mktemp("several") / "store.db") as kept:
        yield kept


@pytest.fixture(scope="module")
def ranks(store, sharing):
    """Measurements of each kind of run, by rank."""
    with sharing():
        summary = run_cases(list(CASES.values()), "cpu", store, timeout=60)
    assert [m.status for m in summary.measured] == [Status.OK] * 3, summary.measured
    everything = store.measurements()
    return {
        name: sorted((m for m in everything if m.case == case), key=lambda m: m.rank)
        for name, case in CASES.items()
    }


def loaded(measurement):
    return next(r.allocated_bytes for r in measurement.readings if r.name == "model")


@pytest.mark.slow
def test_every_rank_has_a_measurement(ranks):
    assert [len(found) for found in ranks.values()] == [1, 2, 2]
    for name in ("ddp", "fsdp"):
        first, second = ranks[name]
        assert (first.rank, second.rank) == (0, 1)
        assert second.run == f"{first.run}-r1"
        for one in (first, second):
            assert one.status is Status.OK
            assert one.parameters == PARAMETERS
            assert len(one.steps) == 4
            assert one.environment.gpu == "cpu"


@pytest.mark.slow
def test_ddp_holds_all_weights_and_buckets_for_their_gradients(ranks):
    alone = ranks["alone"][0]
    for one in ranks["ddp"]:
        assert loaded(one) == loaded(alone)
        # gloo lets go of tensors when its thread comes to it: on a busy machine of a bucket late
        expected = alone.allocated_bytes + WEIGHTS
        slack = 1 << 17
        assert expected - slack <= one.allocated_bytes <= expected + WEIGHTS + slack


@pytest.mark.slow
def test_fsdp_holds_a_shard(ranks):
    whole = loaded(ranks["alone"][0])
    for one, replica in zip(ranks["fsdp"], ranks["ddp"], strict=True):
        # an odd number of rows is padded
        assert loaded(one) == pytest.approx(whole / 2, rel=0.01)
        prompt = min(step.allocated_bytes for step in one.steps[1:])
        assert prompt < replica.allocated_bytes - WEIGHTS
        # gloo lets go of tensors when its thread comes to it: on a busy machine of a unit late
        assert one.allocated_bytes <= prompt + EMBEDDINGS + (1 << 17)
        # nothing piles up from step to step
        assert one.steps[-1].allocated_bytes < 1.03 * one.steps[1].allocated_bytes


def test_what_is_measured_is_not_measured_again(ranks, store, shared_workers):
    summary = run_cases(list(CASES.values()), "cpu", store, timeout=60)
    assert (len(summary.measured), summary.skipped) == (0, 3)


def test_a_rank_above_zero_does_not_stand_for_the_case(ranks, tmp_path):
    second = ranks["ddp"][1]
    with MeasurementStore(tmp_path / "s.db") as store:
        store.add([second])
        assert store.result(second.case, second.environment) is None
        assert store.begin(second.case, second.environment) is not None


def test_what_was_heard_of_all_ranks_outlives_the_campaign(ranks, tmp_path):
    case, environment = CASES["ddp"], ranks["ddp"][0].environment
    with MeasurementStore(tmp_path / "s.db") as store:
        opened = store.begin(case, environment)
        for rank in ({}, {"rank": 1}):
            opened.hear({"kind": "built", "parameters": 5, "trainable": 4, **rank})
            opened.hear({"kind": "phase", "phase": "forward 1 1", **rank})
        opened.hear({"kind": "step", "step": {"seconds": 0.5, "allocated_bytes": 7}, "rank": 1})
        store._db.execute("UPDATE runs SET owner = 'elsewhere:1:', seen = 0")
        assert store.recover() == 1
        first, second = store.measurements()
    assert (first.rank, second.rank) == (0, 1)
    assert {first.status, second.status} == {Status.INTERRUPTED}
    assert (first.parameters, second.parameters) == (5, 5)
    assert (len(first.steps), len(second.steps)) == (0, 1)


@pytest.mark.slow
def test_a_timeout_ends_all_ranks(attendant):
    attendant.describe("cpu")
    group = attendant._process.pid
    case = make_case("ddp", 2, grad_accum=2000)
    end = attendant.run(case, "cpu", lambda _: None, timeout=4)
    assert end.status is Status.TIMEOUT
    deadline = time.monotonic() + 10
    while _some_live(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _some_live(group)


def _some_live(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# -- without training


def ended(monkeypatch, run, case=CASES["ddp"]):
    """What a case of ranks that only do ``run`` says at its end, by rank."""
    monkeypatch.setattr(distributed._CpuRank, "run", run)
    monkeypatch.setattr(distributed, "_GRACE_SECONDS", 0.5)
    said = []
    distributed.launch(case, "cpu", said.append)
    ends = [m for m in said if m["kind"] == "end"]
    assert ends[-1].get("rank", 0) == 0, "the end of the case comes last"
    return {m.get("rank", 0): (m["status"], m.get("failure")) for m in ends}


def test_a_rank_that_is_gone_takes_the_case_with_it(monkeypatch):
    def run(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # as a collective would

    ends = ended(monkeypatch, run)
    status, failure = ends[0]
    assert status is Status.CRASHED
    assert failure["message"].startswith("rank 1: the worker ended by signal SIGKILL")
    assert ends[1][0] is Status.CRASHED


def test_a_rank_that_ended_waiting_is_not_the_cause(monkeypatch):
    def run(self):
        if self.rank == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        time.sleep(600)

    ends = ended(monkeypatch, run)
    assert ends[0][0] is Status.OOM
    assert ends[0][1]["message"].startswith("CUDA out of memory")
    assert ends[1][0] is Status.INTERRUPTED
    assert "rank 0" in ends[1][1]["message"]


def test_memory_is_the_cause_when_connections_break(monkeypatch):
    def run(self):
        if self.rank == 1:
            time.sleep(0.2)
            raise torch.OutOfMemoryError("CUDA out of memory")
        raise RuntimeError("Connection closed by peer")

    ends = ended(monkeypatch, run)
    assert ends[0][0] is Status.OOM
    assert ends[0][1]["message"] == "rank 1: CUDA out of memory"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (make_case("ddp", 2, loop="trainer"), "plain loop"),
    ],
)
def test_what_cannot_be_run_is_said(case, says):
    said = []
    distributed.launch(case, "cpu", said.append)
    assert [m["status"] for m in said] == [Status.FAILED]
    assert says in said[0]["failure"]["message"]


def test_fewer_gpus_than_processes_is_a_failure_of_the_case(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    said = []
    distributed.launch(CASES["ddp"], "cuda", said.append)
    assert said[0]["failure"]["message"].startswith("this case trains on 2 GPUs")


@pytest.mark.slow
def test_a_campaign_passes_such_cases_over(monkeypatch, tmp_path, shared_workers):
    monkeypatch.setattr(runner, "count_devices", lambda *_: 1)
    with MeasurementStore(tmp_path / "s.db") as store:
        summary = run_cases([CASES["ddp"], CASES["fsdp"]], "cpu", store)
    assert (summary.passed_over, summary.skipped, summary.measured) == (2, 0, [])


@pytest.mark.parametrize(
    ("device", "visible", "expected"), [("cpu", "0,1", None), ("cuda", "0, 2", 2), ("cuda", "5", 1)]
)
def test_devices_are_counted_as_they_are_visible(device, visible, expected):
    assert count_devices(device, {"CUDA_VISIBLE_DEVICES": visible}) == expected
