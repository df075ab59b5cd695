"""A sweep on a local Ray cluster gives what this process gives."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

import memest
from memest.errors import ConfigError, MemestError

ray = pytest.importorskip("ray")

TINY, MINI = "prajjwal1/bert-tiny", "prajjwal1/bert-mini"
GRID = {"batch": [1, 2], "seq_len": [32, 1024]}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of two CPUs, and its address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # workers import from the folder that the driver was started in, and it may hold the tree
    with contextlib.chdir(tmp_path_factory.mktemp("driver")):
        context = ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, address="local"
        )
        yield context.address_info["gcs_address"]
        ray.shutdown()


@pytest.fixture(scope="module")
def serial():
    return memest.sweep([TINY, MINI], GRID, gpu="t4", fp16=True)


def test_the_same_result_as_in_this_process(cluster, serial):
    assert memest.sweep([TINY, MINI], GRID, gpu="t4", fp16=True, ray=True) == serial
    assert ray.is_initialized(), "a connection that was there stays"


def test_several_tasks_a_model(cluster, serial):
    found = memest.sweep([TINY, MINI], GRID, gpu="t4", fp16=True, ray=True, jobs=4)
    assert found == serial


def test_the_command_line_on_a_cluster_that_runs(cluster, serial):
    done = subprocess.run(
        [sys.executable, "-m", "memest", "sweep", TINY, MINI, "--over", "batch=1,2", "--over",
         "seq-len=32,1024", "--fp16", "--gpu", "t4", "--jsonl", "--ray", cluster],
        capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("memest: 4 of 8 points have no answer.")
    assert done.stderr.count("\n") == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [point.to_dict() for point in serial.points]


def test_another_version_on_a_node_is_refused(cluster, monkeypatch):
    from memest.search import executors

    monkeypatch.setattr(executors, "version", lambda _: "0.0.1")
    with pytest.raises(MemestError, match=r"this machine has 0\.0\.1: install the same version"):
        memest.sweep(TINY, {"batch": [1, 2]}, seq_len=32, ray=True)


def test_local_gpus_differ_from_node_to_node():
    with pytest.raises(ConfigError, match="another GPU on every node"):
        memest.sweep(TINY, {"batch": [1]}, gpu="local", ray=True)


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [("somewhere", ConfigError, "is no address"), ("", ConfigError, "is no address")],
)
def test_what_is_no_address(address, error, words):
    with pytest.raises(error, match=words):
        memest.sweep(TINY, {"batch": [1]}, ray=address)
