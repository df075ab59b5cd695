"""A family never answers for a point where a model does something else than at its traces."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memest.errors import TraceError
from support.toy_models import Toy, grow_family, up

# -- traces without torch: as many numbers as wanted, of any function of the sizes ----------------


BATCHES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 32, 33, 64, 100, 127, 128, 200, 251, 400, 508, 509)


def wrong(family, toy, s, limit=8192, step=128):
    """Where a family answers, and what it answers is not so."""
    found = []
    for length in range(s % step or step, limit + 1, step):
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
@settings(max_examples=150, deadline=None, derandomize=True)
@given(b=st.integers(1, 64), s=st.integers(1, 4096), asked=st.integers(32, 4096))
def test_one_question_settles_the_lengths_of_every_remainder(b, s, asked):
    toy = Toy(lambda b, s: [b * s * (s + 1) // 2, (b - 1) * (s - 1) * 7, b * b * 4])

    family = grow_family(toy, b, s, any_remainder=True)

    assert family is not None
    sizes = {"batch": b, "seq_len": asked}
    assert asked < s or family.point_of(sizes) is not None
    assert not wrong(family, toy, s, 4096, step=37)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    b=st.integers(1, 64), s=st.integers(1, 8192), down=st.booleans(), added=st.integers(0, 40),
    multiple=st.sampled_from([2, 3, 4, 8, 16, 32, 48, 64, 100, 128, 192, 256, 1024]),
)  # fmt: skip
def test_what_is_padded_is_settled_for_no_other_remainder(b, s, down, added, multiple):
    def padded(s):
        return (s + added) // multiple * multiple if down else up(s + added, multiple)

    toy = Toy(lambda b, s: [b * padded(s) * 512, padded(s) // multiple])

    assert grow_family(toy, b, s, any_remainder=True) is None


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    b=st.integers(1, 64), s=st.integers(1, 4096), limit=st.integers(64, 4200),
    multiple=st.sampled_from([2, 4, 8, 16, 32, 64, 128]), in_numbers=st.booleans(),
)  # fmt: skip
def test_what_is_done_to_multiples_alone_is_not_missed(b, s, limit, multiple, in_numbers):
    def is_multiple(b, s):
        return (s % multiple == 0,)

    toy = Toy(lambda b, s: [b * s * (1 + in_numbers * is_multiple(b, s)[0])], is_multiple)
    if in_numbers:
        toy.structure = lambda b, s: ()

    family = grow_family(toy, b, s, max(limit, s), any_remainder=True)

    assert family is None or not wrong(family, toy, s, 4200, step=1)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    b=st.integers(1, 64), s=st.integers(1, 8192), edge=st.integers(1, 8192),
    kind=st.sampled_from(["window", "number", "structure"]),
)  # fmt: skip
def test_an_edge_is_not_missed_among_all_remainders(b, s, edge, kind):
    toy = {
        "window": Toy(lambda b, s: [b * min(s, edge) * 512, b * s * min(s, edge) * 12]),
        "number": Toy(lambda b, s: [b * s * 768 * (2 if s > edge else 1)]),
        "structure": Toy(lambda b, s: [b * s], lambda b, s: (s > edge,)),
    }[kind]

    family = grow_family(toy, b, s, any_remainder=True)

    assert family is None or not wrong(family, toy, s, step=37)


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
