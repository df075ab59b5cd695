"""Updates of weights of other shapes follow from those that were traced."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memest.config.optimizers import PAGED_SIZE, facts_of
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
from memest.trace.model.roles import Roles
from memest.trace.training import trace_updates
from memest.workspaces.operator_call import GpuTraits

GPU = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)


def limits_of(optim: str) -> tuple[int, ...]:
    return facts_of(optim).size_limits


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


def test_marks_of_many_weights_are_sizes_that_there_can_be() -> None:
    many = (*(weight(f"norm {n}", 8) for n in range(3000)), weight("patches", 8, 3, 2, 4, 4))
    marks = marked_weights(many)

    assert [len(mark.shape) for mark in marks] == [len(each.shape) for each in many]
    assert len({extent for mark in marks for extent in mark.shape}) == 3005
    assert prod(marks[-1].shape) < 1 << 40


@pytest.mark.parametrize("optim", sorted(name for name in BY_SHAPE if not limits_of(name)))
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


def adapters(rank: int) -> tuple[Weight, ...]:
    """Of two layers, with a norm; some have fp32 states, some are not in managed memory."""
    pairs = [
        (weight(f"{layer}.{name}.A", rank, width), weight(f"{layer}.{name}.B", out, rank))
        for layer in range(2)
        for name, width, out in (("q", 4096, 4096), ("v", 4096, 100), ("down", 14336, 4096))
    ]
    embeddings = (weight("embed", 128, 64), weight("norm", 4096))
    return tuple(each for pair in pairs for each in pair) + embeddings


ROLES = Roles(embeddings=frozenset(), linear=frozenset(), head=frozenset())


@pytest.mark.parametrize("optim", sorted(filter(limits_of, BY_SHAPE)))
def test_rules_hold_between_the_sizes_at_which_states_are_others(optim: str) -> None:
    setup = setup_from_options(optim=optim)
    limits = limits_of(optim)
    weights = adapters(16)
    marks = marked_weights(weights, limits)
    assert shape_classes(marks, limits) == shape_classes(weights, limits)
    trace, marked_trace = (trace_updates(each, setup, GPU, ROLES) for each in (weights, marks))
    rule = find_rule(trace, weights, marked_trace, marks, limits)
    again = rule_from_json(rule_to_json(rule), len(weights))
    for rank in (8, 12, 17, 23, 24):
        others = adapters(rank)
        if shape_classes(others, limits) == shape_classes(weights, limits):
            traced = trace_updates(others, setup, GPU, ROLES)
            assert is_same(again.at(others).at(()), traced), rank
    assert shape_classes(adapters(17), limits) == shape_classes(weights, limits)
    others = adapters(25)
    if PAGED_SIZE in limits:
        assert trace.managed_bytes
        assert shape_classes(others, limits) != shape_classes(weights, limits)


def test_states_that_go_by_the_module_have_no_rule() -> None:
    setup = setup_from_options(optim="paged_adamw_8bit")
    limits = limits_of("paged_adamw_8bit")
    weights = (*adapters(64), weight("embed.large", 1000, 4096))
    roles = replace(ROLES, embeddings=frozenset(["embed.large"]))
    marks = marked_weights(weights, limits)
    trace, marked_trace = (trace_updates(each, setup, GPU, roles) for each in (weights, marks))
    with pytest.raises(NoRuleError):
        find_rule(trace, weights, marked_trace, marks, limits)


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
