"""A family never answers for a point where a model does something else than at its traces."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memest.errors import TraceError
from support.toy_models import Toy, grow_family, up

# -- traces without torch: as many numbers as wanted, of any function of the sizes ----------------


BATCHES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 32, 33, 64, 100, 127, 128, 200, 251, 400, 508, 509)


def wrong(family, toy, s, limit=8192):
    """Where a family answers, and what it answers is not so."""
    found = []
    for length in range(s % 128 or 128, limit + 1, 128):
        for b in BATCHES:
            point = family.point_of({"batch": b, "seq_len": length})
            if point is None:
                continue
            try:
                truth = toy.truth(b, length)
            except TraceError:
                found.append((b, length, "refused"))
                continue
            told = family.at(point)
            if told.sizes != truth.sizes or told.notes != truth.notes:
                found.append((b, length))
    return found


LENGTHS = st.one_of(st.integers(1, 8192), st.sampled_from([1, 7, 32, 100, 128, 512, 513, 2048]))


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(b=st.integers(1, 64), s=LENGTHS, axes=st.sampled_from([("batch", "seq_len"), ("seq_len",)]))
def test_a_well_behaved_model_has_a_family_over_its_whole_range(b, s, axes):
    toy = Toy(lambda b, s: [b * s * (s + 1) // 2, (b - 1) * (s - 1) * 7, b * b * 4])

    family = grow_family(toy, b, s, axes=axes)

    if b == 1 and axes == ("batch", "seq_len"):
        axes = ("seq_len",)
    assert family is not None
    assert family.axes == axes
    assert not wrong(family, toy, s)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(b=st.integers(1, 64), s=LENGTHS, window=st.integers(1, 8192), high=st.integers(300, 9000))
def test_a_window_is_not_missed(b, s, window, high):
    high = max(high, s)
    toy = Toy(lambda b, s: [b * min(s, window) * 512, b * s * min(s, window) * 12])

    family = grow_family(toy, b, s, high)

    assert family is None or not wrong(family, toy, s, high)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    b=st.integers(1, 64),
    s=LENGTHS,
    multiple=st.sampled_from([8, 32, 48, 50, 64, 100, 128, 192, 200, 256, 512, 1024]),
    high=st.integers(300, 9000),
)
def test_padding_to_a_multiple_is_not_missed(b, s, multiple, high):
    high = max(high, s)
    toy = Toy(
        lambda b, s: [b * up(s, multiple) * 512, b * up(s, multiple) ** 2 // multiple, up(s, 8)]
    )

    family = grow_family(toy, b, s, high)

    assert family is None or not wrong(family, toy, s, high)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    b=st.integers(1, 64), s=LENGTHS, threshold=st.integers(1, 8192),
    kind=st.sampled_from(["number", "structure", "refused"]), tokens=st.booleans(),
)  # fmt: skip
def test_a_threshold_is_not_missed(b, s, threshold, kind, tokens):
    def above(b, s):
        return b * s > threshold * 32 if tokens else s > threshold

    if kind == "number":
        toy = Toy(lambda b, s: [b * s * 768 * (2 if above(b, s) else 1), 4096 * above(b, s)])
    elif kind == "structure":
        toy = Toy(lambda b, s: [], lambda b, s: (above(b, s),))
    else:
        assume(not above(b, s))  # what is asked about can be traced
        toy = Toy(lambda b, s: [], refuses=above)

    family = grow_family(toy, b, s)

    assert family is None or not wrong(family, toy, s)
