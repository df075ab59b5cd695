"""A full disk: answers are given, what was there stays, what could not be written is said."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from memest.calibration.case import case_from_dict
from memest.calibration.measurement import Environment, Status
from memest.calibration.store import MeasurementStore
from memest.errors import MemestError
from support.asking import QUESTION, fill

FULL = Path("/dev/full")


def no_large_files():
    """Files of this process end at 100 bytes: what a quota does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


@pytest.mark.slow
def test_an_answer_whose_traces_cannot_be_kept(small_disk, warm, here):
    fill(small_disk)
    done = here("estimate", *QUESTION, "--json", env={"MEMEST_CACHE": str(small_disk / "cache")})

    assert done.returncode == 0
    assert done.stdout == warm[1]
    (line,) = done.stderr.decode().splitlines()
    assert str(small_disk / "cache") in line
    assert "could not be written (No space left on device)" in line


@pytest.mark.parametrize("target", ["out.json", "out.html", "out.csv"])
def test_a_quota_leaves_the_old_file(target, tmp_path, warm, cli):
    path = tmp_path / target
    path.write_text("old")
    done = cli(
        "estimate",
        *QUESTION,
        "--json",
        "--out",
        str(path),
        # Python 3.11 does not notice that bytecode it keeps was cut off
        env={"MEMEST_CACHE": str(warm[0]), "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=no_large_files,
    )

    assert done.returncode == 1
    assert done.stdout == warm[1]
    assert str(path) in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == [target]
    assert path.read_text() == "old"


@pytest.mark.parametrize("option", ["--out", "--snapshot"])
def test_an_export_to_a_full_disk(option, small_disk, warm, cli):
    fill(small_disk)
    path = small_disk / "out.json"
    done = cli(
        "estimate", *QUESTION, "--json", option, str(path), env={"MEMEST_CACHE": str(warm[0])}
    )

    assert done.returncode == 1
    assert done.stdout == warm[1]
    said = done.stderr.decode()
    assert f"no space left on the device {path}" in said
    assert [p.name for p in small_disk.iterdir()] == ["full"]


@pytest.mark.slow
def test_a_sweep_goes_on_where_its_file_ends(small_disk, warm, cli, here):
    words = ("sweep", *QUESTION[:1], "--over", "batch=4:64:4", "--seq-len", "64", "--jobs", "1",
             "--jsonl")  # fmt: skip
    env = {"MEMEST_CACHE": str(warm[0])}
    here(*words, env=env)  # which needs torch, once
    fill(small_disk)
    with (small_disk / "full").open("r+b") as file:
        file.truncate((small_disk / "full").stat().st_size - 4096)
    path = small_disk / "points.jsonl"
    done = cli(*words, "--out", str(path), env=env)

    assert done.returncode == 1
    lines = done.stdout.splitlines(keepends=True)
    assert len(lines) == 16
    kept = path.read_bytes()
    assert kept == b"".join(lines[: kept.count(b"\n")]), "whole lines alone"
    assert 0 < kept.count(b"\n") < 16
    assert f"no space left on the device {path}" in done.stderr.decode()


def test_measurements_on_a_full_disk(small_disk):
    # the database, its log and its index of the log need more
    subprocess.run(["mount", "-o", "remount,size=512k", str(small_disk)], check=True)
    path = small_disk / "runs.db"

    def case(number):
        return case_from_dict({"model": "gpt2", "setup": {"batch": number}})

    with MeasurementStore(path) as store:
        run = store.begin(case(1), Environment(gpu="g"))
        run.hear({"kind": "step", "step": {"seconds": 0.5, "allocated_bytes": 1}})
        run.close(Status.OK)

        def go_on():
            for number in range(2, 1000):
                store.begin(case(number), Environment(gpu="g")).close(Status.OK)

        with pytest.raises(MemestError, match="What was kept before is still in it") as told:
            go_on()
        assert str(path) in str(told.value)
    with MeasurementStore(path) as store:
        assert 1 in {m.allocated_bytes for m in store.measurements()}


@pytest.mark.parametrize("shape", [("--json",), ()], ids=["json", "report"])
def test_stdout_that_takes_nothing(shape, warm, cli):
    with FULL.open("w") as full:
        done = cli("estimate", *QUESTION, *shape, env={"MEMEST_CACHE": str(warm[0])}, stdout=full)
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert "no space left on the device" in line


@pytest.mark.slow
def test_a_full_pipe_of_errors_costs_no_answer(warm, cli, tmp_path):
    (tmp_path / "file").write_text("")
    with FULL.open("w") as full:
        done = cli(
            "estimate", *QUESTION, "--json", env={"MEMEST_CACHE": str(tmp_path / "file" / "below")},
            stderr=full,
        )  # fmt: skip
    assert done.returncode == 0
    assert json.loads(done.stdout) == json.loads(warm[1])
