"""The history: what is written is read again, and broken lines cost themselves alone."""

from __future__ import annotations

import json

import pytest
from speed import history
from speed.history import Run, append, read
from speed.timing import Figure

RUN = Run(
    date="2026-01-01T00:00Z", commit="abc", changed=True, machine=history.machine(), load=0.5,
    references={"python-1": 0.2},
    cases={"help": Figure("process-1", 1, 7, 3.0, 2.9, 3.1, 0.4, rss_bytes=50 << 20)},
)  # fmt: skip


def test_a_run_comes_back(tmp_path):
    path = tmp_path / "deep" / "history.jsonl"
    append(RUN, path)
    append(RUN, path)

    assert read(path) == ([RUN, RUN], [])


def changed(**values) -> str:
    return json.dumps({**json.loads(RUN.to_json()), **values})


def figure(**values) -> str:
    document = json.loads(RUN.to_json())
    document["cases"]["help"] |= values
    return json.dumps(document)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (RUN.to_json()[:-20], "no JSON"),
        ("[]", "not an object but list"),
        ("{}", "schema_version is not 1"),
        (changed(schema_version=2), "schema_version is not 1"),
        (changed(cases=None), "not a run"),
        (changed(cases={"help": {"ratio": 1}}), "not a run"),
        (changed(surprise=1), "surprise"),
        (changed(machine="a fast one"), "machine and references must be objects"),
        (figure(ratio="3"), "positive numbers"),
        (figure(ratio=float("nan")), "positive numbers"),
        (figure(seconds=0), "positive numbers"),
    ],
)
def test_a_broken_line_is_named_and_the_others_count(tmp_path, line, said):
    path = tmp_path / "history.jsonl"
    path.write_text(f"{RUN.to_json()}\n\n{line}\n{RUN.to_json()}\n")

    runs, problems = read(path)

    assert runs == [RUN, RUN]
    assert len(problems) == 1
    assert problems[0].startswith("line 3: ")
    assert said in problems[0]


def test_a_line_that_was_cut_off_is_not_continued(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text(RUN.to_json()[:50])
    append(RUN, path)

    runs, problems = read(path)

    assert runs == [RUN]
    assert [p.partition(":")[0] for p in problems] == ["line 1"]


def test_no_history_is_an_empty_one(tmp_path):
    assert read(tmp_path / "none.jsonl") == ([], [])


def test_the_recorded_history_is_whole():
    runs, problems = read(history.HISTORY)

    assert problems == []
    assert runs
