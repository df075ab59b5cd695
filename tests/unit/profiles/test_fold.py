"""What a period of layers adds, and documents that say so."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memest.config.options import setup_from_options
from memest.estimation.profiler import Profiler
from memest.profiles.document import BadDocumentError, family_from_json, family_to_json
from memest.profiles.family import Family, single_trace_family
from memest.profiles.fold_search import find_insertions, plans_for
from memest.profiles.transcript import Stack, fill_in, templates_of
from memest.workspaces.operator_call import GpuTraits

GPU = GpuTraits(capability=(8, 0), sm_count=108, max_threads_per_sm=2048)
ROWS = st.lists(st.integers(0, 3), max_size=6)


@given(ROWS, ROWS.filter(len), ROWS, ROWS, ROWS)
def test_insertions_make_the_deeper_lists(
    front: list[int], run: list[int], middle: list[int], second_run: list[int], back: list[int]
) -> None:
    def rows(periods: int) -> list[int]:
        # where nothing tells two runs apart, there may be other ways to see them
        return [*front, *run * periods, 7, *middle, 8, *second_run * periods, 9, *back]

    found = find_insertions(rows(0), rows(1), rows(2))
    assert found is not None
    for periods in (1, 2):
        written, last, at = [], 0, 0
        for _, position, length in found:
            written += rows(0)[last:position]
            start = position + at
            written += rows(1)[start : start + length] * periods
            last, at = position, at + length
        assert [*written, *rows(0)[last:]] == rows(periods)


def test_lists_that_do_not_repeat_have_no_insertions() -> None:
    assert find_insertions([1, 2], [1, 3, 2], [1, 3, 4, 2]) is None
    assert find_insertions([1, 2], [1, 3, 2], [1, 3, 2]) is None
    assert find_insertions([1, 2], [1], []) is None


def test_paths_name_layers_of_their_stack_alone() -> None:
    template = templates_of([Stack(("model.layers",), 1, 0, 0, 8), Stack(("layers",), 1, 0, 0, 8)])
    assert template("model.layers.3.mlp") == ("model.layers.\0.mlp", 0, 3)
    assert template("layers.11.experts.4") == ("layers.\0.experts.4", 1, 11)
    assert template("my_layers.3.mlp") == ("my_layers.3.mlp", -1, 0)
    assert fill_in(template("base.model.layers.3"), 12) == "base.model.layers.12"


def test_what_costs_no_less_is_not_folded() -> None:
    assert not plans_for([Stack(("layers",), 1, 0, 0, 3)], [10])
    assert [plan.kept for plan in plans_for([Stack(("layers",), 1, 0, 0, 30)], [10])] == [
        (1,),
        (3,),
        (6,),
    ]
    # a tower that is most of the work, and another that is next to nothing
    small_and_large = [Stack(("a",), 1, 0, 0, 4), Stack(("b",), 1, 0, 0, 48)]
    assert plans_for(small_and_large, [1, 10])[0].stacks == (1,)


@cache
def folded() -> Family:
    """A model of nine layers, traced from few."""
    profiler = Profiler.of("prajjwal1/bert-mini?num_hidden_layers=9")
    question = profiler.question(setup_from_options(batch=2), GPU)
    few = profiler._tracer.folded(question, [])
    assert few.fold is not None
    return single_trace_family(few.trace, question.sizes, few.fold)


def test_documents_keep_folds() -> None:
    family = folded()
    document = family_to_json(family)
    again = family_from_json(copy.deepcopy(document))
    assert again.fold == family.fold
    assert again.unfolded().at(()) == family.unfolded().at(())
    assert again.unfolded().unfolded() == again.unfolded()
    assert "of 9 layers" in family.depth_words


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((0, 0, 4), 100_000),  # as many layers as nobody has
        ((1, 0), 9),
        ((2,), []),
        ((2, -1, 0, 1), 10**6),
        ((2, -1, 0, 0), 3),
        ((4, 0, 0), 10**6),
        ((4, 0, 1), 99),
        ((5, 0), [0]),
        ((6,), [[10**7, [1]]]),
    ],
)
def test_damaged_folds_are_no_folds(place: tuple[int, ...], value: Any) -> None:
    document = copy.deepcopy(family_to_json(folded()))
    part = document["fold"]
    listing = next(n for n, runs in enumerate(part[2]) if n > 6 and runs)
    *path, last = (listing if step == -1 else step for step in place)
    for step in path:
        part = part[step]
    part[last] = value
    with pytest.raises(BadDocumentError):
        family_from_json(document)
