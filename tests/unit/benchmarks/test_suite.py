"""The suite runs its cases beside fixed references, and its command says what became of them."""

from __future__ import annotations

import hashlib
import inspect
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from speed import history, report
from speed.case import Bench, Case
from speed.reference import REFERENCES
from speed.suite import CASES, choose_cases, measure

from support.paths import ROOT

DIGESTS = {
    "python-1": "530a428dd921b04f",
    "meta-1": "8a283e580df126bb",
    "process-1": "c12b910031f77fb4",
    "imports-1": "665a1ff8f7ecd1b0",
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_never_change(name):
    text = inspect.getsource(REFERENCES[name])

    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[name], (
        f"{name} has changed: every recorded figure is a multiple of it. Leave it as it was, and "
        "add one with the next number"
    )


def test_references_do_the_same_work_every_time():
    assert REFERENCES["python-1"]() == REFERENCES["python-1"]() > 0
    assert REFERENCES["process-1"]() == 0


@pytest.mark.slow
def test_rounds_are_interleaved_and_long_cases_have_fewer(monkeypatch, tmp_path):
    done: list[str] = []
    monkeypatch.setitem(REFERENCES, "python-1", lambda: sum(range(100_000)))

    def case(name: str, **facts) -> Case:
        return Case(name, name, "python-1", lambda bench: lambda: done.append(name) or 7, **facts)

    for key in ("MEMEST_CACHE", "MEMEST_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(key, "as it was")
    run = measure([case("a"), case("b", units=4), case("c", long=True)], rounds=3)

    assert "".join(done) == "abcabab"
    assert {name: f.rounds for name, f in run.cases.items()} == {"a": 3, "b": 3, "c": 1}
    assert run.cases["a"].rss_bytes == 7
    assert list(run.references) == ["python-1"]


def test_names_are_one_case_each_and_references_are_known():
    assert len(CASES) == len({case.what for case in CASES.values()})
    assert {case.reference for case in CASES.values()} <= set(REFERENCES)
    assert [case.name for case in choose_cases(["replay", "trace", "replay"])] == [
        "replay",
        "trace",
    ]
    assert set(choose_cases([], everything=True)) > set(choose_cases([]))


def speed(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/speed"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_the_command_measures_writes_and_checks(tmp_path):
    path = tmp_path / "history.jsonl"
    words = ("help", "replay", "--rounds", "1", "--write", "--check", "--history", str(path))

    first = speed(*words)

    assert first.returncode == 0, first.stderr
    assert "nothing to compare with" in first.stdout
    (run,), _ = history.read(path)
    assert list(run.cases) == ["help", "replay"]
    assert 10 << 20 < run.cases["help"].rss_bytes < 200 << 20  # its own, without torch

    # what was a thousand times faster before has become slower
    case = replace(run.cases["replay"], ratio=1e-3, low=1e-3, high=1e-3)
    path.write_text(replace(run, cases={"replay": case}).to_json() + "\n" + run.to_json() + "\n")
    last = speed("--check", "--last", "--history", str(path))

    assert last.returncode == 1
    assert "Slower than before, beyond the spread: replay." in last.stdout
    assert speed("--last", "--history", str(path)).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing",), "no such case: nothing; there are help, command"),
        (("--rounds", "0"), "--rounds must be 1 or more, not 0"),
        (("--tolerance", "-1"), "--tolerance must be 0 or more"),
        (("--last", "--write"), "--last measures nothing"),
        (("--last", "--history", "none.jsonl"), "no run in none.jsonl: record one with --write"),
    ],
)
def test_wrong_usage_is_said(words, said):
    done = speed(*words)

    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_page_shows_the_history():
    runs, _ = history.read(history.HISTORY)
    text = report.PAGE.read_text(encoding="utf-8")

    assert report.page(text, runs, CASES) == text, (
        "docs/speed.md has drifted: run python benchmarks/speed --page"
    )
    assert json.loads(runs[-1].to_json())["commit"] in text


def test_the_page_is_the_same_from_a_run_and_from_its_line():
    last = history.read(history.HISTORY)[0][-1]
    measured = replace(last, references=dict(reversed(last.references.items())))

    text = report.PAGE.read_text(encoding="utf-8")
    read_again = history.run_of(measured.to_json())
    assert report.page(text, [measured], CASES) == report.page(text, [read_again], CASES)


@pytest.mark.slow(
    but=(
        "estimate",
        "largest-batch",
        "replay",
        "replay-curve",
        "replay-expandable",
        "replay-exact",
        "replay-bert",
    )
)
@pytest.mark.parametrize("case", choose_cases([]), ids=lambda case: case.name)
def test_every_case_does_its_work(case, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    if case.name.startswith("page"):
        pytest.importorskip("streamlit")
    for key in ("MEMEST_CACHE", "MEMEST_HOME", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(key, "as it was")

    result = case.prepare(Bench(tmp_path))()

    assert (result is not None) == (case.reference in ("process-1", "imports-1"))
