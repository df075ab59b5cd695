"""Errors, groups and the two-step test, on outcomes whose numbers are known."""

from __future__ import annotations

import pytest

from memest.calibration.validation.predict import RecordOutcome
from memest.calibration.validation.records import CaseRecord
from memest.calibration.validation.scores import (
    Errors,
    Scores,
    VerdictTest,
    likely_cause,
    scores_by_group,
)


def outcome(name="a", *, measured=100, predicted=100, metric="reserved", oom=False, **more):
    names = ("context_bytes", "setup", "taken", "software", "gpu", "group")
    taken = {key: more.pop(key) for key in names if key in more}
    base = {"group": "set", "setup": {}, "software": {"torch": "2.6"}, "gpu": "A100"}
    record = CaseRecord(
        id=name, model="m", metric=metric, measured_bytes=measured, oom=oom, **{**base, **taken}
    )
    return RecordOutcome(record=record, predicted_bytes=predicted, **more)


def test_errors_are_signed_and_absolute():
    errors = Errors.of([(100, 101), (100, 98), (100, 100), (100, 110)])
    assert errors.count == 4
    assert errors.median == pytest.approx(0.015)
    assert errors.median_signed == pytest.approx(0.005)
    assert errors.mean_signed == pytest.approx(0.0225)
    assert errors.worst == pytest.approx(0.1)
    assert errors.below == 0.25
    assert errors.p90 == pytest.approx(0.1)
    assert Errors.of([]) is None


def test_p90_is_met_by_nine_of_ten():
    errors = Errors.of_signed([n / 100 for n in range(1, 11)])
    assert errors.p90 == pytest.approx(0.09)


def test_a_failed_run_and_a_range_have_no_error():
    assert outcome(oom=True).error is None
    assert outcome(low_bytes=90).error is None
    assert outcome(predicted=None).error is None
    assert outcome(measured=200).error == pytest.approx(-0.5)


def test_ranges_are_judged_by_device_peaks_and_by_bounds_of_lengths():
    ranged = {"metric": "device", "floor_bytes": 90, "bound_bytes": 110}
    scores = Scores.of(
        "all", [outcome(measured=m, **ranged) for m in (89, 90, 110, 111)] + [outcome()]
    )
    assert (scores.inside, scores.num_ranged) == (2, 4)
    assert outcome(measured=95, low_bytes=90).inside is True
    assert outcome(measured=101, low_bytes=90).inside is False


def test_the_two_steps_of_the_verdict():
    limit = {"limit_bytes": 1000}
    test = VerdictTest.of([
        outcome("right", runs_out=False, bound_bytes=100, **limit),
        outcome("above", measured=120, runs_out=False, bound_bytes=110, **limit),
        outcome("ran", runs_out=True, **limit),
        outcome("failed", oom=True, runs_out=True, **limit),
        outcome("missed", oom=True, runs_out=False, **limit),
        outcome("close", runs_out=None, **limit),
        outcome("no limit", runs_out=None),
        outcome("nothing", predicted=None, **limit),
    ])  # fmt: skip
    assert test.right == 3
    assert test.wrong == (("ran", "out of memory"), ("missed", "fits"))
    assert test.close == ("close",)
    assert test.num_bounded == 1
    assert test.unproven == ("above",)
    assert (test.least, test.most) == (2 / 5, 3 / 5)


def test_groups_that_are_all_alike_are_left_out():
    one, two = outcome("a", gpu="A100", family="bert"), outcome("b", gpu="V100", family="bert")
    assert [name for name, _ in scores_by_group([one, two])] == ["GPU"]
    old = outcome("c", software={"torch": "1.10"})
    names = [s.name for s in dict(scores_by_group([one, old]))["software"]]
    assert names == ["2021: torch 1.10", "2025: torch 2.6"]


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (outcome(), ""),
        (outcome(predicted=None, failure="no such model"), "no such model"),
        (outcome(predicted=90, runs_out=True, limit_bytes=500), "predicted to go out of memory"),
        (outcome(predicted=90, limit_bytes=101), "the GPU was full"),
        (outcome(predicted=90, limit_bytes=500, retries=1), "the GPU was full"),
        (outcome(predicted=90, metric="device", floor_bytes=80, bound_bytes=105), "were not read"),
        (outcome(predicted=90, setup={"padded": True, "batch": 4}), "few samples padded"),
        (outcome(predicted=90, setup={"padded": True, "batch": 40}), "several lengths"),
        (outcome(predicted=90, taken=("loop",)), "does not say loop"),
        (outcome(predicted=90), "not known"),
    ],
)
def test_a_cause_is_named_only_where_something_speaks_for_it(one, said):
    assert likely_cause(one).count(said) if said else likely_cause(one) == ""
