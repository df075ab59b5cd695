"""Updates of weights of other shapes follow from those that were traced."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memest.config.options import setup_from_options
from memest.estimation.optimizer_traces import BY_SHAPE
from memest.events import Weight
from memest.profiles.document import rule_from_json, rule_to_json
from memest.profiles.updates import (
    NoRuleError,
    find_rule,
    is_same,
    marked_weights,
    shape_classes,
)
from memest.trace.training import trace_updates
from memest.workspaces.operator_call import GpuTraits

GPU = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)


def weight(name: str, *shape: int, dtype: str = "float32", trains: bool = True) -> Weight:
    stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Weight(name, shape, stride, dtype, trains=trains, decays=True, has_grad=trains)


WEIGHTS = (
    weight("embed", 100, 8),
    weight("norm", 8),
    weight("head", 8, 100, dtype="bfloat16"),
    weight("frozen", 8, 8, trains=False),
    weight("bias", 100),
)


@pytest.mark.parametrize("optim", sorted(BY_SHAPE))
@settings(max_examples=2, deadline=None)
@given(extents=st.lists(st.integers(1, 200), min_size=9, max_size=9))
def test_updates_of_other_shapes_are_those_that_are_traced(optim: str, extents: list[int]) -> None:
    setup = setup_from_options(optim=optim)
    marks = marked_weights(WEIGHTS)
    rule = find_rule(
        trace_updates(WEIGHTS, setup, GPU), WEIGHTS, trace_updates(marks, setup, GPU), marks
    )
    again = rule_from_json(rule_to_json(rule), len(WEIGHTS))
    rest = iter(extents)
    others = tuple(
        weight(w.name, *(next(rest) for _ in w.shape), dtype=w.dtype, trains=w.trains)
        for w in WEIGHTS
    )
    assert shape_classes(others) == shape_classes(WEIGHTS)
    assert is_same(again.at(others).at(()), trace_updates(others, setup, GPU))


def test_what_changes_updates_is_in_the_classes_of_shapes() -> None:
    plain = shape_classes(WEIGHTS)
    for other in (
        replace(WEIGHTS[0], dtype="float16"),
        replace(WEIGHTS[0], trains=False),
        replace(WEIGHTS[0], decays=False),
        replace(WEIGHTS[0], has_grad=False),
        weight("embed", 0, 8),
        weight("embed", 100),
        replace(WEIGHTS[0], stride=(1, 100)),
    ):
        assert shape_classes((other, *WEIGHTS[1:])) != plain


def test_numbers_that_are_nobodys_have_no_rule() -> None:
    setup = setup_from_options(optim="adamw_torch")
    marks = marked_weights(WEIGHTS)
    trace, marked_trace = (trace_updates(w, setup, GPU) for w in (WEIGHTS, marks))
    marked_trace.sizes[-1] += 2
    with pytest.raises(NoRuleError):
        find_rule(trace, WEIGHTS, marked_trace, marks)
    with pytest.raises(NoRuleError):
        marked_weights([replace(WEIGHTS[0], stride=(1, 100))])
