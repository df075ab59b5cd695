"""Values that a trace still knows."""

from __future__ import annotations

import pytest
import torch

from memest.trace.cuda.known_values import assume, assumptions_of, attach, evaluate
from memest.trace.cuda.value_answers import answer_handlers
from memest.trace.recorder import Recorder


@pytest.fixture(autouse=True)
def recorder():
    with Recorder(answer_handlers()) as made:
        yield made


def known(values):
    value = torch.tensor(values)
    return attach(torch.empty(value.shape, dtype=value.dtype, device="meta"), value)


def test_what_is_computed_from_known_values_is_known():
    mask = known([[1, 1, 0], [1, 0, 0]])

    assert evaluate(mask.sum(dim=-1).max()).item() == 2
    assert bool((mask[:, 0] == 1).all())


def test_writes_into_a_view_change_the_tensor_behind_it():
    mask = torch.zeros(2, 3, dtype=torch.int64, device="meta")

    mask[:, 0] = 1
    mask[1, 1:] = 2

    assert evaluate(mask).tolist() == [[1, 0, 0], [1, 2, 2]]


def test_a_view_that_was_written_knows_its_value():
    row = torch.zeros(2, 3, device="meta")[0]

    row.add_(1)

    assert evaluate(row).tolist() == [1, 1, 1]


def test_a_view_sees_what_is_written_elsewhere():
    mask = torch.zeros(2, 3, device="meta")
    flat, row = mask.view(-1), mask[0]

    mask[0, 1:] = 7
    row[0] += 2

    assert evaluate(row).tolist() == [2, 7, 7]
    assert evaluate(flat).tolist() == [2, 7, 7, 0, 0, 0]
    assert evaluate(mask).tolist() == [[2, 7, 7], [0, 0, 0]]


def test_writes_of_unknown_values_make_unknown():
    mask = known([1, 2, 3])

    mask[:1] = torch.empty(1, device="meta").long()

    assert evaluate(mask) is None


def test_writes_by_a_known_mask_are_known():
    values = known([1, 2, 3])

    values[known([True, False, True])] = 0

    assert evaluate(values).tolist() == [0, 2, 0]


def test_an_assumption_is_told():
    experts = assume(
        torch.empty(4, dtype=torch.int64, device="meta"), lambda: torch.arange(4) % 2, "even"
    )

    hit = (experts == 1).nonzero()

    assert hit.shape == (2, 1)
    assert assumptions_of(experts + 1) == {"even"}


def test_selection_by_a_known_mask_has_a_shape():
    hidden = torch.empty(2, 3, 8, device="meta")
    mask = known([[True, True, False], [True, False, False]])

    assert hidden[mask].shape == (3, 8)
    assert hidden.masked_select(mask.unsqueeze(-1)).shape == (24,)
