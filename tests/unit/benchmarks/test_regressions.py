"""When a case counts as slower: beyond the spread within runs, between runs, and the tolerance."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from speed.history import Run
from speed.regressions import LOOK_BACK, Change, compare
from speed.timing import Figure, RunTime, figure, quartiles

MACHINE = {"cpu": "a processor", "python": "3.11", "torch": "2.13", "cores": 2}


def run(ratio: float, spread: float = 0.0, *, machine=MACHINE, **changes) -> Run:
    found = Figure("python-1", 1, 7, ratio, ratio * (1 - spread), ratio * (1 + spread), 0.1)
    return Run(
        date="2026-01-01T00:00Z", commit="abc", changed=False, machine=machine, load=0.0,
        references={"python-1": 0.2}, cases={"trace": replace(found, **changes)},
    )  # fmt: skip


def change_of(new: Run, *earlier: Run, **rule) -> Change:
    (found,) = compare(new, earlier, **rule)
    return found.change


def test_slower_beyond_spread_and_tolerance():
    assert change_of(run(1.3, 0.02), run(1.0, 0.02)) is Change.SLOWER
    assert change_of(run(0.7, 0.02), run(1.0, 0.02)) is Change.FASTER


@pytest.mark.parametrize(
    ("new", "earlier", "why"),
    [
        (run(1.3, 0.2), [run(1.0, 0.2)], "the quartiles overlap"),
        (run(1.04, 0.001), [run(1.0, 0.001)], "within the tolerance"),
        (run(1.3, 0.02), [run(1.0, 0.02), run(1.4, 0.02)], "one earlier run was as slow"),
    ],
)
def test_what_is_no_regression(new, earlier, why):
    assert change_of(new, *earlier) is Change.SAME, why


@pytest.mark.parametrize(
    "other",
    [
        run(1.0, machine={**MACHINE, "cpu": "another"}),
        run(1.0, machine={**MACHINE, "python": "3.14"}),
        run(1.0, version=2),
        run(1.0, reference="python-2"),
        replace(run(1.0), cases={}),
    ],
    ids=["processor", "python", "version", "reference", "case"],
)
def test_what_cannot_be_compared_is_unknown(other):
    (found,) = compare(run(9.0), [other])

    assert (found.change, found.factor, found.earlier) == (Change.UNKNOWN, None, 0)


def test_another_torch_is_compared():
    # a release that slows tracing down is what is to be seen
    other = run(1.0, machine={**MACHINE, "torch": "2.14"})

    assert change_of(run(1.3), other) is Change.SLOWER


def test_only_the_last_runs_count():
    slow, fast = run(2.0), [run(1.0)] * LOOK_BACK

    assert change_of(run(1.5), slow, *fast) is Change.SLOWER
    assert change_of(run(1.5), slow, *fast[1:]) is Change.SAME


ratios = st.floats(0.01, 1000)


@given(ratios, st.lists(st.tuples(ratios, st.floats(0, 0.5)), min_size=1, max_size=8))
def test_a_run_is_never_slower_than_itself(ratio, others):
    new = run(ratio, 0.01)

    assert change_of(new, *(run(*other) for other in others), new) is not Change.SLOWER


@given(ratios, st.floats(0, 0.3), ratios, st.floats(0, 0.3))
def test_slower_and_faster_are_the_same_rule(a, spread_a, b, spread_b):
    one, other = run(a, spread_a), run(b, spread_b)

    assert (change_of(one, other) is Change.SLOWER) == (change_of(other, one) is Change.FASTER)


def test_a_figure_is_the_median_ratio_of_rounds_to_what_ran_beside_them():
    rounds = [
        (RunTime(9, 1.0), RunTime(6.0, 4.0), RunTime(9, 3.0)),  # 4 / 2
        (RunTime(9, 1.0), RunTime(8.0, 5.0), RunTime(9, 1.0)),  # 5 / 1
        (RunTime(9, 2.0), RunTime(7.0, 6.0), RunTime(9, 2.0)),  # 6 / 2
    ]

    assert figure("meta-1", 3, rounds, units=10, rss_bytes=5) == Figure(
        "meta-1", 3, rounds=3, ratio=3.0, low=2.5, high=4.0, seconds=0.7, rss_bytes=5
    )


@given(st.lists(ratios, min_size=1, max_size=20))
def test_quartiles_are_in_order_and_in_range(values):
    low, middle, high = quartiles(values)

    assert min(values) <= low * (1 + 1e-9)
    assert low <= middle * (1 + 1e-9)
    assert middle <= high * (1 + 1e-9)
    assert high <= max(values) * (1 + 1e-9)
