"""Formulas are found where there is one, and nothing is taken for one that does not hold."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memest.profiles.formula import MAX_TERMS, Formula, NoFormulaError, constant, find, monomials

DEGREES = st.sampled_from([(2,), (4,), (2, 2), (2, 4), (2, 2, 2)])


@st.composite
def sums(draw):
    """A sparse polynomial in as many sizes as it may have, the basis with it."""
    degrees = draw(DEGREES)
    basis = monomials(degrees)
    count = draw(st.integers(1, 3))
    chosen = draw(st.lists(st.sampled_from(basis), min_size=count, max_size=count, unique=True))
    numbers = draw(st.lists(st.integers(1, 1 << 30), min_size=count, max_size=count))
    signs = draw(st.lists(st.sampled_from([1, 1, 1, -1]), min_size=count, max_size=count))
    terms = [(n * s, e) for n, s, e in zip(numbers, signs, chosen, strict=True)]
    return basis, Formula(tuple(sorted(terms, key=lambda term: basis.index(term[1]))))


def scattered(data, basis, count):
    """Points as a family has them: different in every size, none twice."""
    axes = len(basis[0])
    point = st.tuples(*[st.integers(2, 8192)] * axes)
    points = data.draw(st.lists(point, min_size=count, max_size=count, unique=True))
    assume(all(len(set(sizes)) == count for sizes in zip(*points, strict=True)))
    return points


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(asked=sums(), data=st.data())
def test_a_sum_is_found_again(asked, data):
    basis, formula = asked
    points = scattered(data, basis, 7)
    values = [formula.at(point) for point in points]
    assume(len(set(values)) > 1)

    found, more = looked_for(values, points, basis)

    # where points lie so that one cannot tell, more are asked for
    assert found is not None or more
    if found is not None and len(found.terms) == len(formula.terms):
        assert found == formula
    elif found is not None:
        # by chance a shorter sum fits as well
        assert len(found.terms) < len(formula.terms)
        assert [found.at(point) for point in points] == values


def looked_for(values, points, basis):
    """(the formula, None if there is none; whether more traces may help)."""
    try:
        return find(values, points, basis), False
    except NoFormulaError as error:
        return None, error.open


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(degrees=DEGREES, data=st.data(), count=st.integers(2, 8))
def test_whatever_is_found_fits_every_trace_without_that_trace(degrees, data, count):
    basis = monomials(degrees)
    points = scattered(data, basis, count)
    small = st.one_of(st.integers(0, 8), st.integers(0, 1 << 40))
    values = data.draw(st.lists(small, min_size=count, max_size=count))

    try:
        found = find(values, points, basis)
    except NoFormulaError:
        return

    assert [found.at(point) for point in points] == values
    assert len(found.terms) < count
    if len(set(values)) == 1:
        assert found == constant(values[0], len(degrees))
    elif len(points) > len(found.terms) + 1:
        for left_out in range(count):
            rest = [i for i in range(count) if i != left_out]
            again, more = looked_for([values[i] for i in rest], [points[i] for i in rest], basis)
            assert more or again == found or len(again.terms) < len(found.terms)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), count=st.integers(1, MAX_TERMS))
def test_as_many_traces_as_terms_leave_it_open(data, count):
    basis = monomials((2, 2))
    points = scattered(data, basis, count)
    values = data.draw(
        st.lists(st.integers(1, 1 << 50), min_size=count, max_size=count, unique=True)
    )

    found, more = looked_for(values, points, basis)

    assert more if found is None else len(found.terms) < count


def test_noise_has_no_formula_however_many_traces():
    points = [(b,) for b in (2, 3, 5, 7, 11, 13, 17, 19)]
    values = [218112, 463872, 122880, 30637056, 10208256, 20398080, 15310848, 1]

    with pytest.raises(NoFormulaError) as caught:
        find(values, points, monomials((2,)))

    assert not caught.value.open


@pytest.mark.parametrize(
    ("points", "size"),
    [
        # through three lengths goes a parabola; that the batch was right tests the batch alone
        *(
            ([(4, 128), (2, 128), (509, 8064), (171, 2560)], lambda b, s, w=w: b * min(s, w) * 512)
            for w in (130, 200, 1000, 8000)
        ),
        # batch and length doubled make any sum of one degree four times as large
        (
            [(4, 256), (2, 128), (509, 8064), (171, 2560)],
            lambda b, s: b * s * 768 * (1 if b * s < 100_000 else 2),
        ),
    ],
    ids=["130", "200", "1000", "8000", "on a ray"],
)
def test_traces_that_no_trace_tests_do_not_pass_for_a_formula(points, size):
    with pytest.raises(NoFormulaError) as caught:
        find([size(*point) for point in points], points, monomials((2, 2)))

    assert caught.value.open


def test_one_term_needs_two_traces():
    assert find([12, 24], [(3,), (6,)], monomials((2,))) == Formula(((4, (1,)),))
    with pytest.raises(NoFormulaError):
        find([12], [(3,)], monomials((2,)))


def test_halves_and_the_like():
    points = [(s,) for s in (16, 144, 1040, 4112)]
    values = [s * (s + 1) // 2 for (s,) in points]

    found = find(values, points, monomials((2,)))

    assert found == Formula(((1, (1,)), (1, (2,))), 2)
    assert found.at((5,)) == 15
    assert Fraction(found.at((7,))) == 28


def test_a_value_that_is_not_whole_is_none():
    with pytest.raises(NoFormulaError):
        Formula(((1, (1,)),), 2).at((3,))
    assert constant(7, 2).at((3, 5)) == 7


@settings(max_examples=100, deadline=None, derandomize=True)
@given(degrees=DEGREES)
def test_monomials_are_all_there_once_simplest_first(degrees):
    found = monomials(degrees)

    size = 1
    for degree in degrees:
        size *= degree + 1
    assert len(set(found)) == len(found) == size
    assert found == sorted(found, key=lambda e: (sum(e), e))
    assert found[0] == (0,) * len(degrees)
