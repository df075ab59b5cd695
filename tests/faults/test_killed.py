"""kill -9 in the middle of every writing operation: the old file whole, or the new one."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import subprocess
import threading
from pathlib import Path

import pytest

from memest.calibration.case import case_from_dict
from memest.calibration.exchange import write_lines
from memest.calibration.measurement import Environment, Status
from memest.calibration.store import MeasurementStore
from memest.cli.main import run
from memest.files.texts import write_text
from memest.files.whole import write_whole
from memest.profiles.cache import Store, digest_of
from support.dying import deaths_at_bytes, deaths_at_changes

SIZES = (0, 1, 100, 4095, 4096, 5000, 20_000, 70_000)
OLD = b"what was there\n"


@pytest.fixture(scope="module")
def answer():
    pytest.importorskip("transformers")
    import memest

    return memest.estimate("prajjwal1/bert-tiny", batch=4, seq_len=64, gpu="t4")


def exports(answer, name):
    """What writes a file of this name, as the commands do."""
    if name.startswith("answer"):
        return lambda path: answer.save(path)
    if name == "runs.jsonl.gz":
        return lambda path: write_lines(path, (json.dumps({"line": i}) for i in range(5000)))
    return lambda path: write_text(path, "line\n" * 20_000)


NAMES = ("answer.json", "answer.csv", "answer.html", "runs.jsonl.gz", "report.md")


@pytest.mark.slow(
    but=(
        "answer.csv-over an old one",
        "answer.html-new",
        "report.md-new",
    )
)
@pytest.mark.parametrize("before", [None, OLD], ids=["new", "over an old one"])
@pytest.mark.parametrize("name", NAMES)
def test_an_export_is_the_old_file_or_the_new_one(name, before, answer, tmp_path):
    write = exports(answer, name)
    write(tmp_path / f"whole-{name}")
    whole = (tmp_path / f"whole-{name}").read_bytes()
    target = tmp_path / "out" / name
    target.parent.mkdir()

    def work():
        write(target)

    def start_anew():
        target.unlink(missing_ok=True)
        if before is not None:
            target.write_bytes(before)

    start_anew()
    died = 0
    for deaths in (deaths_at_changes(work), deaths_at_bytes(work, *SIZES)):
        for _ in deaths:
            died += 1
            found = target.read_bytes() if target.exists() else None
            assert found in (before, whole)
            left = [p.name for p in target.parent.iterdir() if p != target]
            assert all(n.startswith(".memest-") and n.endswith(".part") for n in left)
            start_anew()
    assert died >= 4

    write(target)
    assert [p.name for p in target.parent.iterdir()] == [name], "leftovers are swept up"
    assert target.read_bytes() == whole


def test_what_the_living_write_is_not_swept_up(tmp_path):
    """The part of a process that is alive is locked, whatever the clock says."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"

    def write(file):
        file.write(b"begun, ")
        file.flush()
        (part,) = (p for p in tmp_path.iterdir() if p.name.endswith(".part"))
        os.utime(part, (0, 0))  # a clock that jumped by half a century
        write_whole(second, b"second")
        assert part.exists()
        file.write(b"and done")

    write_whole(first, write)

    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        "first.json": b"begun, and done", "second.json": b"second"
    }  # fmt: skip


def test_a_cache_is_usable_whenever_its_writer_dies(tmp_path):
    digest, old, new = digest_of("one"), [1] * 3000, [list(range(9000))]
    folder = tmp_path / "cache"

    def work():
        Store(folder).write(digest, "steps", new, {"model": "m"}, about="new")

    def contents():
        return [d.content for d in Store(folder).read(digest, "steps")]

    for deaths in (deaths_at_changes(work), deaths_at_bytes(work, 0, 10, 60, 1000, 4096)):
        Store(folder).write(digest, "steps", old, {"model": "m"}, about="old")
        died = 0
        for _ in deaths:
            died += 1
            assert contents() in ([old], [new])
        assert died >= 2
    work()
    assert contents() == [new]
    assert not [p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".json.gz")]


def test_no_measurement_that_was_kept_is_lost(tmp_path):
    """A store whose writer is cut off at any byte has all that was told to be kept."""
    path = tmp_path / "runs.db"
    told = tmp_path / "told"

    def work():
        with MeasurementStore(path) as store:
            for number in range(1, 40):
                case = case_from_dict({"model": "gpt2", "setup": {"batch": number}})
                run = store.begin(case, Environment(gpu="g"))
                if run is None:
                    continue
                run.hear({"kind": "step", "step": {"seconds": 0.5, "allocated_bytes": number}})
                run.close(Status.OK)
                with told.open("a") as file:
                    file.write(f"{number}\n")

    died = 0
    for _ in deaths_at_bytes(work, 1000, 5000, 30_000, 41_300, 60_000, 83_000, 100_000, 123_456):
        died += 1
        reported = set(map(int, told.read_text().split())) if told.exists() else set()
        with MeasurementStore(path) as store:
            store.recover()
            kept = {m.allocated_bytes for m in store.measurements() if m.status is Status.OK}
            assert store.running() == 0
        assert reported <= kept
        assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert died >= 4


@pytest.mark.slow
def test_a_sweep_that_is_killed_leaves_whole_lines(tmp_path, warm):
    folder, _ = warm
    out = tmp_path / "points.jsonl"

    def work():
        os.environ["MEMEST_CACHE"] = str(folder)
        run(["sweep", "prajjwal1/bert-tiny", "--over", "batch=4,8,16", "--seq-len", "64",
             "--jobs", "1", "-q", "--out", str(out)])  # fmt: skip

    work()
    lines = out.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    for size in (len(lines[0]), len(lines[0]) + len(lines[1])):
        for _ in deaths_at_bytes(work, size):
            assert out.read_bytes() == b"".join(lines)[:size]


def test_what_a_packed_file_holds_is_whole(tmp_path):
    path = tmp_path / "runs.jsonl.gz"
    assert write_lines(path, (str(i) for i in range(1000))) == 1000
    assert gzip.decompress(path.read_bytes()).count(b"\n") == 1000


def test_a_link_a_pipe_and_permissions_are_kept(tmp_path):
    real, link = tmp_path / "real" / "a.json", tmp_path / "link.json"
    real.parent.mkdir()
    real.write_bytes(OLD)
    real.chmod(0o640)
    link.symlink_to(real)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert real.stat().st_mode & 0o777 == 0o640

    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"through the pipe")
    reader.join(timeout=30)
    assert heard == [b"through the pipe"]
    assert not pipe.is_file()


def test_the_longest_name_that_a_file_may_have(tmp_path):
    path = tmp_path / f"{'n' * 250}.json"
    write_whole(path, b"[]")
    assert path.read_bytes() == b"[]"


def test_a_file_that_is_a_mount_of_its_own_is_written_in_place(tmp_path):
    path, source = tmp_path / "mounted.json", tmp_path / "elsewhere"
    path.write_bytes(OLD * 100)
    source.write_bytes(OLD * 100)
    if subprocess.run(
        ["mount", "--bind", source, path], capture_output=True, check=False
    ).returncode:
        pytest.skip("only root may mount a file")
    try:
        write_whole(path, b"new")
        assert source.read_bytes() == b"new"
        assert sorted(p.name for p in Path(tmp_path).iterdir()) == ["elsewhere", "mounted.json"]
    finally:
        subprocess.run(["umount", "-l", path], check=True)
