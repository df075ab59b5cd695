"""The tool itself: reading records, summing up, writing the page."""

from __future__ import annotations

import json
from dataclasses import replace

from memest.calibration.validation.records import parse_record


def _record(name, **more):
    setup = {
        "batch": 2,
        "seq_len": 16,
        "optim": "sgd",
        "precision": "fp32",
        "checkpointing": "none",
    }
    return {
        "id": name, "model": "gpt2", "gpu": "RTX 3060", "metric": "reserved", "setup": setup,
        "measured_bytes": 100 << 20, "source": "here", "set": "mine",
        "software": {"torch": "2.6", "transformers": "4.51"}, **more,
    }  # fmt: skip


def _outcome(tool, name, predicted, *, oom=False, **more):
    record = parse_record(_record(name, oom=oom), "line 1", "mine")
    return tool.RecordOutcome(record=record, predicted_bytes=predicted, **more)


def test_records_of_the_repository_are_complete(by_id):
    ours = [r for r in by_id.values() if r.group in ("bert_large", "xmem")]
    assert len(ours) == 80
    for record in ours:
        assert record.measured_bytes > 0
        assert record.source
        assert record.software["torch"]


def test_more_records_are_read_from_the_named_folder(tool, tmp_path, monkeypatch):
    lines = [json.dumps(_record("extra")), "", json.dumps({"id": "not complete"})]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("MEMEST_REFERENCE", str(tmp_path))
    assert "extra" in {r.id for r in tool.records()}
    monkeypatch.setenv("MEMEST_REFERENCE", str(tmp_path / "absent"))
    assert "extra" not in {r.id for r in tool.records()}


def test_summary_leaves_out_what_is_no_number(tool):
    outcomes = [
        _outcome(tool, "a", 102 << 20),
        _outcome(tool, "b", 96 << 20),
        _outcome(tool, "failed", 50 << 20, oom=True, runs_out=True),
        _outcome(tool, "range", 500 << 20, low_bytes=1 << 20),
        _outcome(tool, "refused", None, failure="not modelled"),
    ]
    rows = [row for row in tool.summary(outcomes) if row.startswith("| **mine**")]
    assert rows == ["| **mine** | 2 | 3.00 % | 4.00 % | 4.00 % | -1.00 % | 1 | - |"]


def test_page_keeps_its_prose(tool, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin mine -->\nold\n<!-- end mine -->\nafter\n")
    tool.write_page([_outcome(tool, "a", 102 << 20, where="backward 2, add")], page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "+2.00 %" in text


def test_page_of_the_repository_has_every_table(tool):
    text = tool.PAGE.read_text(encoding="utf-8")
    sets = {record.group for record in tool.records()}
    for name in ("summary", "targets", "refused", "incomplete", *sets):
        body = text.split(f"<!-- begin {name} -->")[1].split(f"<!-- end {name} -->")[0]
        assert body.count("\n| ") > 2


def test_the_page_is_what_the_records_and_their_outcomes_say(tool, tmp_path):
    found = tool.read()
    kept = tool.read_outcomes(found.complete)
    lacking = [one.id for one in found.complete if one.id not in kept]
    assert not lacking, "python tools/published.py --new runs what was added or changed"
    page = tmp_path / "accuracy.md"
    page.write_text(tool.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    tool.write_page([kept[one.id] for one in found.complete], page, found)
    assert page.read_text(encoding="utf-8") == tool.PAGE.read_text(encoding="utf-8")


def test_outcomes_are_kept_whole_until_their_record_changes(tool, tmp_path):
    outcomes = [
        _outcome(tool, "a", 102 << 20, where="backward 2, add", retries=2, family="gpt2"),
        _outcome(tool, "b", None, failure="not modelled. Because."),
    ]
    path = tmp_path / "outcomes.jsonl"
    tool.write_outcomes(outcomes, path)
    every = [one.record for one in outcomes]
    assert tool.read_outcomes(every, path) == {"a": outcomes[0], "b": outcomes[1]}
    setup = {**_record("a")["setup"], "batch": 3}
    changed = parse_record(_record("a", setup=setup), "line 1", "mine")
    assert set(tool.read_outcomes([changed, every[1]], path)) == {"b"}
    told = parse_record(_record("a", notes="another note"), "line 1", "mine")
    assert set(tool.read_outcomes([told], path)) == {"a"}, "words change no prediction"


def test_outcomes_tell_who_predicted_them_and_what_is_stale(tool, tmp_path):
    from memest.calibration.validation.predict import Predictor
    from memest.files.code_digest import made_with

    record = parse_record(_record("a", gpu="no such card"), "line 1", "mine")
    mine = Predictor().predict(record)
    assert mine.made_with == made_with()
    assert not mine.stale
    others = (
        replace(mine, made_with="0.0.9 0123456789abcdef"), replace(mine, made_with=""),
    )  # fmt: skip
    assert all(one.stale for one in others)

    path = tmp_path / "outcomes.jsonl"
    tool.write_outcomes([others[0]], path)
    assert tool.read_outcomes([record], path) == {"a": others[0]}
    old = json.loads(path.read_text(encoding="utf-8"))
    del old["outcome"]["made_with"]  # of before it was recorded
    path.write_text(json.dumps(old), encoding="utf-8")
    assert tool.read_outcomes([record], path) == {"a": others[1]}
    rows = list(tool.release_rows([mine, *others, others[0]]))
    assert rows[2] == "| 0.0.9 0123456789abcdef | 2 |"
    assert "| not recorded | 1 |" in rows


def test_outcomes_of_code_beside_the_file_change_with_it(tool, tmp_path):
    code = tmp_path / "models" / "net.py"
    code.parent.mkdir()
    code.write_text("one", encoding="utf-8")
    record = parse_record(_record("a", model="net:build", code=str(code.parent)), "line 1", "mine")
    path = tmp_path / "outcomes.jsonl"
    tool.write_outcomes([tool.RecordOutcome(record=record, predicted_bytes=1 << 20)], path)
    assert set(tool.read_outcomes([record], path)) == {"a"}
    code.write_text("two", encoding="utf-8")
    assert not tool.read_outcomes([record], path)


def test_targets_say_what_is_missed(tool):
    outcomes = [
        _outcome(tool, "a", 103 << 20),
        _outcome(tool, "b", 120 << 20),
        _outcome(tool, "c", None, failure="not modelled"),
    ]
    (row,) = [row for row in tool.targets(outcomes) if "one GPU" in row]
    assert "11.50 % **missed** | 2 | 1 | 1 |" in row
    (row,) = [row for row in tool.targets(outcomes[:1]) if "one GPU" in row]
    assert "| 3.00 % | 1 | 0 | 0 |" in row


def test_what_is_refused_and_what_is_incomplete_is_counted_by_reason(tool, tmp_path):
    outcomes = [
        _outcome(tool, name, None, failure="not modelled yet. Write less.") for name in "ab"
    ]
    assert "| mine | 2 | not modelled yet |" in list(tool.refusal_rows(outcomes))
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(_record("a", gpu="")), encoding="utf-8")
    assert "| mine | 1 | gpu |" in list(tool.incomplete(tool.read_records([path])))
