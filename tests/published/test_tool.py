"""The tool itself: reading records, summing up, writing the page."""

from __future__ import annotations

import json

from memest.validation.records import parse_record


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
    return tool.Outcome(record=record, predicted_bytes=predicted, **more)


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
    for name in ("summary", "bert_large", "xmem"):
        body = text.split(f"<!-- begin {name} -->")[1].split(f"<!-- end {name} -->")[0]
        assert body.count("\n| ") > 2
