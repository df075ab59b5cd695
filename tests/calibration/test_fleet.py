"""A campaign on a local Ray cluster of two CPUs, with one store."""

import contextlib
import os
import subprocess
import sys
from collections import Counter
from itertools import accumulate

import pytest

from memest.calibration.case import case_from_dict
from memest.calibration.measurement import Status
from memest.calibration.running import fleet
from memest.calibration.store import MeasurementStore, Open
from memest.errors import DeviceError, MemestError, MissingDependencyError

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def make_case(batch, model="prajjwal1/bert-tiny"):
    setup = {"batch": batch, "seq_len": 32, "loop": "plain", "dtype": "float32"}
    return case_from_dict({"model": model, "setup": setup})


CASES = [make_case(1), make_case(2), make_case(2, "no/such-model"), make_case(3)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of two CPUs."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # workers import from the folder that the driver was started in, and it may hold the tree
    with contextlib.chdir(tmp_path_factory.mktemp("driver")):
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, address="local")
        yield
        ray.shutdown()


@pytest.fixture
def store(tmp_path):
    with MeasurementStore(tmp_path / "store.db") as kept:
        yield kept


def measure(cases, store, tell=lambda _: None, **how):
    options = {"command": "here", "timeout": 60, "budget": None, "address": None, **how}
    summaries = fleet.run_on_ray(cases, "auto", store, tell=tell, **options)
    assert len(summaries) == 1, "there is one environment"
    return summaries[0]


def test_two_actors_share_a_campaign_and_do_nothing_twice(cluster, store):
    told = []
    summary = measure(CASES, store, told.append)

    statuses = {m.case: m.status for m in summary.measured}
    expected = dict.fromkeys(CASES, Status.OK) | {CASES[2]: Status.FAILED}
    assert statuses == expected, [m.failure for m in summary.measured]
    assert len(summary.measured) == len(CASES), "each case once"
    assert sorted(store.measurements(), key=lambda m: m.run) == sorted(
        summary.measured, key=lambda m: m.run
    )
    for one in summary.measured:
        assert one.environment.command == "here"
        assert len(one.steps) == (4 if one.status is Status.OK else 0)
    # the second actor may come to its first case late, on a machine with other work
    running = accumulate(1 if p.measured is None else -1 for p in told)
    assert max(running) == 2, "two cases run at once"
    assert [p.number for p in told if p.measured] == [1, 2, 3, 4]
    assert {p.total for p in told} == {4}
    assert ray.is_initialized(), "a connection that was there stays"

    again = measure([CASES[0], CASES[1], CASES[3]], store)
    assert (again.measured, again.skipped) == ([], 3)


def test_a_lost_actor_takes_only_its_case_which_is_tried_again(cluster, store, monkeypatch):
    fleets, hear = [], Open.hear
    make = fleet._Fleet
    monkeypatch.setattr(
        fleet, "_Fleet", lambda *words: fleets.append(make(*words)) or fleets[-1]
    )  # fmt: skip

    def lose(self, message):
        hear(self, message)
        if message["kind"] == "built" and self.case == CASES[0] and not lost:
            lost.append(self.run)
            ray.kill(next(p.actor for p in fleets[0]._posts if p.opened is self))

    lost = []
    monkeypatch.setattr(Open, "hear", lose)
    summary = measure([CASES[0], CASES[1], CASES[3]], store)

    ends = Counter((m.case.setup.batch, m.status) for m in summary.measured)
    assert ends[1, Status.OK] == ends[2, Status.OK] == ends[3, Status.OK] == 1
    assert ends[1, Status.CRASHED] == 1
    (crashed,) = (m for m in store.measurements() if m.status is Status.CRASHED)
    assert crashed.run == lost[0]
    assert crashed.parameters, "what was heard of it is kept"
    assert crashed.failure.message.startswith("its actor is gone; ")


def test_ended_by_hand(cluster, store):
    def tell(progress):
        if progress.measured is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure([CASES[0], CASES[1], CASES[3]], store, tell)
    ends = Counter(m.status for m in store.measurements())
    # the other actor may have been between two cases
    assert ends[Status.OK] >= 1
    assert set(ends) <= {Status.OK, Status.INTERRUPTED}
    assert store.running() == 0
    assert store.running() == 0


def test_no_time_no_case(cluster, store):
    summary = measure(CASES, store, budget=0.0)
    assert (summary.measured, summary.left) == ([], len(CASES))


def test_another_release_on_a_node_is_refused(cluster, store, monkeypatch):
    monkeypatch.setattr(fleet, "release", lambda _: "0.0.1")
    with pytest.raises(MemestError, match="install the same version everywhere"):
        measure(CASES, store)


def test_the_command_line(cluster, tmp_path):
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-m", "memest", "calibrate", "run", "--campaign", "smoke", "--device",
         "cuda", "--ray", address, "--store", str(tmp_path / "s.db")],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode
    assert "--device cuda: no node of the Ray cluster has a GPU" in done.stderr


# -- without a cluster


def node(name, alive=True, **resources):
    renamed = {k.replace("accelerator_type_", "accelerator_type:"): v for k, v in resources.items()}
    return {"NodeID": name, "Alive": alive, "Resources": renamed}


NODES = [
    node("a", CPU=8.0, GPU=2.0, accelerator_type_H100=1.0),
    node("b", CPU=8.0, GPU=4.0, accelerator_type_T4=1.0),
    node("c", CPU=2.0),
    node("d", alive=False, GPU=8.0, accelerator_type_T4=1.0),
]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_every_kind_of_gpu_has_its_places(device):
    found = fleet.places_of(NODES, device, most=3)
    assert [(p.node, p.kind) for p in found] == [("a", "H100")] * 2 + [("b", "T4")] * 3


def test_cpus_where_they_are_asked_for_or_nothing_else_is_there():
    assert {p.kind for p in fleet.places_of(NODES, "cpu", most=99)} == {"cpu"}
    assert [p.kind for p in fleet.places_of(NODES[2:], "auto", most=99)] == ["cpu", "cpu"]
    with pytest.raises(DeviceError, match="no node of the Ray cluster has a GPU"):
        fleet.places_of(NODES[2:], "cuda", most=99)


def test_without_ray(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'memest\[ray\]'"):
        measure(CASES, store)
