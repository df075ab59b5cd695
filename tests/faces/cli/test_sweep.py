"""``memest sweep`` in processes of its own: formats, files, errors, interruption."""

import csv
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest

import memest
from memest.cli.sweep import Interruption
from support.commands import check_refused

TINY, MINI = "prajjwal1/bert-tiny", "prajjwal1/bert-mini"
AXES = ("--over", "batch=1,2", "--over", "seq-len=32,1024", "--gpu", "t4")
ANSWERED = ("--over", "batch=1,2", "--over", "seq-len=32,64", "--gpu", "t4")


@pytest.fixture(scope="module")
def written(cli, tmp_path_factory):
    """One run that writes JSON on stdout, JSON lines and a page; with the answers of Python."""
    folder = tmp_path_factory.mktemp("written")
    answers = memest.sweep(TINY, {"batch": [1, 2], "seq_len": [32, 1024]}, gpu="t4")
    done = cli("sweep", TINY, *AXES, "--json", "--out", str(folder / "grid.jsonl"), "--heatmap",
               str(folder / "grid.html"), "--metric", "headroom")  # fmt: skip
    return done, folder, answers


@pytest.fixture(scope="module")
def answers():
    """Of points that all have one: what looks for no answer needs no torch the second time."""
    return memest.sweep(TINY, {"batch": [1, 2], "seq_len": [32, 64]}, gpu="t4")


@pytest.mark.slow
def test_one_document_and_files(written):
    done, folder, answers = written
    assert done.returncode == 0
    assert json.loads(done.stdout) == answers.to_dict()
    assert (folder / "grid.jsonl").read_text() == answers.to_jsonl()
    assert (folder / "grid.html").read_text() == answers.to_html("headroom")


def test_points_without_an_answer_are_noted_on_stderr(written):
    done, _, _ = written
    assert done.stderr.startswith("memest: 2 of 4 points have no answer. batch 1, seq-len 1024")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_csv(cli, answers):
    done = cli("sweep", TINY, *ANSWERED, "--csv")
    assert done.returncode == 0
    assert done.stdout == answers.to_csv()
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["seq_len"] for row in rows] == ["32", "64", "32", "64"]


@pytest.mark.slow
def test_the_table(cli, answers):
    done = cli("sweep", TINY, *ANSWERED)
    assert done.stdout.startswith("4 points of prajjwal1/bert-tiny on Tesla T4: 4 fit")
    assert done.stdout.splitlines()[3].split() == [
        "batch", "seq-len", "allocated", "reserved", "device", "headroom", "verdict"
    ]  # fmt: skip
    quiet = cli("sweep", TINY, *ANSWERED, "--quiet")
    assert quiet.stdout == f"{done.stdout.splitlines()[0]}\n"
    assert quiet.stderr == ""


@pytest.mark.slow
def test_two_processes_in_the_order_of_the_question(cli):
    line = ["sweep", TINY, MINI, "--over", "batch=1,2", "--seq-len", "32", "--jsonl"]
    one, two = cli(*line, "--jobs", "1"), cli(*line, "--jobs", "2")
    assert one.returncode == two.returncode == 0, two.stderr
    assert one.stdout == two.stdout
    assert one.stderr == two.stderr == ""
    assert [json.loads(row)["model"] for row in one.stdout.splitlines()] == [TINY] * 2 + [MINI] * 2


@pytest.mark.slow
def test_all_points_failed(here):
    done = here("sweep", TINY, "--over", "seq-len=1024,2048", "--json")
    assert done.returncode == 1
    assert len(json.loads(done.stdout)["points"]) == 2
    assert done.stderr.startswith("memest: 2 of 2 points have no answer.")


@pytest.mark.slow
def test_a_picture(cli, answers, tmp_path):
    pytest.importorskip("matplotlib")
    done = cli("sweep", TINY, *ANSWERED, "--out", str(tmp_path / "grid.png"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def without(package, tmp_path):
    """An environment in which a package is not installed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib.abc\n"
        "class Gone(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
    )
    # an empty entry would be the current folder, which may hold the tree
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.slow("torch--words2", "torch---jobs 2-words3")
@pytest.mark.parametrize(
    ("package", "line", "words"),
    [
        ("matplotlib", "--out grid.png", ["pip install 'memest-gpu[plot]'", ".html"]),
        ("ray", "--ray", ["pip install 'memest-gpu[ray]'"]),
        ("torch", "", ["pip install 'memest-gpu["]),
        ("torch", "--jobs 2", ["pip install 'memest-gpu["]),
    ],
)
def test_missing_packages(process, tmp_path, package, line, words):
    # what another test left in the cache would answer without torch
    env = {**without(package, tmp_path), "MEMEST_CACHE": str(tmp_path / "cache")}
    done = process("sweep", TINY, "--over", "batch=1,2", *line.split(), env=env)
    check_refused(done, 6, *words)


def test_the_address_of_ray_may_be_left_out(cli):
    from memest.cli.argv import normalise

    assert normalise(["--ray", "gpt2"]) == ["--ray=auto", "gpt2"]
    assert normalise(["--ray"]) == ["--ray=auto"]
    assert normalise(["--ray", "10.0.0.1:6379"]) == ["--ray=10.0.0.1:6379"]
    assert normalise(["--ray=local", "gpt2"]) == ["--ray=local", "gpt2"]
    assert normalise(["--ray", "package.module:factory"])[1] == "package.module:factory"


def test_no_ray_cluster(cli):
    pytest.importorskip("ray")
    check_refused(
        cli("sweep", TINY, "--over", "batch=1,2", "--ray", "localhost:1"), 1, "--ray local"
    )


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interruption_keeps_whole_lines(tmp_path, jobs):
    file = tmp_path / "grid.jsonl"
    # the first points are known: what is interrupted is the sweep, not an import
    memest.sweep([TINY, MINI], {"batch": [1, 2], "seq_len": [32, 64]})
    line = ["sweep", TINY, MINI, "--over", "batch=1:1600", "--over", "seq-len=32,64", "--jobs",
            str(jobs), "--out", str(file)]  # fmt: skip
    # a group of its own: Ctrl-C on a terminal reaches every process of the command
    process = subprocess.Popen(
        [sys.executable, "-m", "memest", *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not file.exists() or file.read_text().count("\n") < 3:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, stderr
    text = file.read_text()
    assert text.endswith("\n")
    points = [json.loads(row) for row in text.splitlines()]
    asked = [(b, s) for b in range(1, 1601) for s in (32, 64)]
    assert [(p["options"]["batch"], p["options"]["seq_len"]) for p in points] == asked[
        : len(points)
    ]
    assert 3 <= len(points) < 6400
    first, *rest = stderr.splitlines()
    assert first == f"memest: interrupted after {len(points)} of 6400 points; {file} keeps them."
    assert rest in ([], ["memest: interrupted."])


def test_a_point_is_kept_and_counted_or_neither():
    interruption, kept, counted = Interruption(), [], []

    def answer():
        for point in range(3):
            with interruption.between_points():
                kept.append(point)
                if point == 1:
                    signal.raise_signal(signal.SIGINT)
                counted.append(point)

    with interruption.watch(), pytest.raises(KeyboardInterrupt):
        answer()
    assert kept == counted == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def drain(terminal, shown):
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            return
        if not piece:
            return
        shown.append(piece)


@pytest.mark.slow
def test_progress_on_a_terminal_only(tmp_path):
    ours, theirs = pty.openpty()
    line = ["sweep", TINY, "--over", "batch=1,2", "--over", "seq-len=16,32", "--csv"]
    process = subprocess.Popen(
        [sys.executable, "-m", "memest", *line], stdout=subprocess.PIPE, stderr=theirs,
        # a cache of its own: what is answered at once shows none
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TERM": "xterm", "COLUMNS": "80",
                          "MEMEST_CACHE": str(tmp_path)},
    )  # fmt: skip
    os.close(theirs)
    shown = []
    # a terminal that nobody reads fills up and stops whoever writes
    reader = threading.Thread(target=drain, args=(ours, shown), daemon=True)
    reader.start()
    try:
        data, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    reader.join(10)
    os.close(ours)
    shown = b"".join(shown)
    assert process.returncode == 0
    assert b" of 4" in shown
    assert b"\x1b" not in data
    assert data.count(b"\n") == 5
