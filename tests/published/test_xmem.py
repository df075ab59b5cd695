"""xMem's runs of transformers models: median error of reserved memory, verdicts, ranges."""

from __future__ import annotations

import statistics

import pytest


def _subset(records):
    """Of each model the smallest and the largest batch from 10 on, for each place of zero_grad."""
    groups = {}
    for record in records:
        setup = record.setup
        if record.group == "xmem" and setup["batch"] >= 10 and not record.oom:
            key = (record.model, setup["zero_grad_at"])
            groups.setdefault(key, []).append(record)
    chosen = {}
    for group in groups.values():
        group.sort(key=lambda r: r.setup["batch"])
        chosen.update({r.id: r for r in (group[0], group[-1])})
    return list(chosen.values())


@pytest.mark.slow
def test_median_error_of_reserved_memory(tool, by_id):
    records = _subset(by_id.values())
    assert len(records) >= 15
    outcomes = [tool.predict(r) for r in records]
    assert all(o.scored for o in outcomes)
    assert statistics.median(abs(o.error) for o in outcomes) <= 0.025
    assert statistics.median(o.error for o in outcomes) == pytest.approx(0, abs=0.015)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xmem-087", "xmem-090"])
def test_run_that_failed_is_predicted_to_fail(tool, by_id, name):
    outcome = tool.predict(by_id[name])
    assert outcome.runs_out is True
    assert "predicted" in tool._remark(outcome)


@pytest.mark.slow("xmem-081")
@pytest.mark.parametrize("name", ["xmem-011", "xmem-081"])
def test_run_at_the_limit_releases_its_cache_and_completes(tool, by_id, name):
    outcome = tool.predict(by_id[name])
    assert outcome.retries > 0
    assert outcome.runs_out is not True
    assert abs(outcome.error) < 0.005


@pytest.mark.slow("xmem-016")
@pytest.mark.parametrize("name", ["xmem-016", "xmem-073"])
def test_plain_loops_are_near_exact(tool, by_id, name):
    assert abs(tool.predict(by_id[name]).error) < 0.005


@pytest.mark.slow
def test_adafactor_of_torch_goes_one_by_one(tool, by_id):
    """Runs on the A100 lie the same 94 MiB above: libraries, which nobody subtracted."""
    gaps = [
        o.record.measured_bytes - o.predicted_bytes
        for o in (tool.predict(by_id[n]) for n in ("xmem-017", "xmem-021"))
    ]
    assert max(gaps) - min(gaps) <= 32 << 20
    assert min(gaps) > 0


@pytest.mark.slow
def test_range_for_an_unrecorded_length(tool, by_id):
    outcome = tool.predict(by_id["xmem-127"])
    assert outcome.low_bytes < outcome.record.measured_bytes < outcome.predicted_bytes
    assert not outcome.scored
