"""Sizes as exact polynomials of the sizes of a batch, found from a few traces.

The extents of every tensor are products of model constants and of sizes (batch, length), now and
then shifted by one or by the tokens of an image. So the bytes of every allocation are a sum of very
few monomials. :func:`find` takes the shortest sum that fits all traces, demands that the value of
each trace follows from those of the others, and demands that no other sum of that length fits as
well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import gcd, lcm

__all__ = ["Formula", "NoFormulaError", "constant", "find", "monomials"]

Exponents = tuple[int, ...]
Point = tuple[int, ...]

MAX_TERMS = 4


class NoFormulaError(Exception):
    """No sum of monomials fits the traces, or they leave it open which one does.

    Attributes:
        open: more traces may decide.
    """

    def __init__(self, *, open: bool) -> None:  # noqa: A002 - the word for it
        super().__init__("more traces are needed" if open else "no formula")
        self.open = open


@dataclass(frozen=True, slots=True)
class Formula:
    """``sum(coefficient * product(size ** exponent)) / divisor``, always a whole number.

    Attributes:
        terms: (coefficient, exponents in the order of the axes).
        divisor: of the sum.
    """

    terms: tuple[tuple[int, Exponents], ...]
    divisor: int = 1

    def at(self, point: Point) -> int:
        """The value at a point.

        Raises:
            NoFormulaError: the sum is not divisible there.
        """
        total = 0
        for coefficient, exponents in self.terms:
            for size, exponent in zip(point, exponents, strict=True):
                coefficient *= size**exponent
            total += coefficient
        if self.divisor == 1:
            return total
        value, rest = divmod(total, self.divisor)
        if rest:
            raise NoFormulaError(open=False)
        return value

    def plus(self, more: int) -> Formula:
        """The same and so much more at every point."""
        if not more:
            return self
        added = (more * self.divisor, (0,) * len(self.terms[0][1]))
        return Formula((*self.terms, added), self.divisor)


def constant(value: int, num_axes: int) -> Formula:
    """The formula of a number that no size changes."""
    return Formula(((value, (0,) * num_axes),))


def monomials(degrees: Sequence[int]) -> list[Exponents]:
    """All exponents up to a degree for each axis, simplest first.

    Example:
        >>> monomials((1, 2))
        [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]
    """
    exponents = product(*(range(degree + 1) for degree in degrees))
    return sorted(exponents, key=lambda e: (sum(e), e))


def find(values: Sequence[int], points: Sequence[Point], basis: Sequence[Exponents]) -> Formula:
    """The one shortest sum of monomials that has these values at these points.

    Args:
        values: one for each point.
        points: the traced points.
        basis: exponents that may occur.

    Raises:
        NoFormulaError: none fits, or more traces are needed to tell.
    """
    if len(set(values)) == 1 and len(set(points)) > 1:
        return constant(values[0], len(points[0]))
    columns = [[_power(point, exponents) for point in points] for exponents in basis]
    for count in range(1, MAX_TERMS + 1):
        if count >= len(points):
            raise NoFormulaError(open=True)
        solutions = []
        for combination in combinations(range(len(basis)), count):
            solution = _solve([columns[c] for c in combination], values)
            if solution is not None:
                solutions.append((combination, solution))
        if len(solutions) > 1:
            raise NoFormulaError(open=True)
        if solutions:
            combination, (numbers, divisor) = solutions[0]
            if not _is_overdetermined([columns[c] for c in combination]):
                raise NoFormulaError(open=True)
            terms = tuple((n, basis[c]) for n, c in zip(numbers, combination, strict=True))
            return Formula(terms, divisor)
    raise NoFormulaError(open=False)


def _is_overdetermined(columns: Sequence[Sequence[int]]) -> bool:
    """Whether each value follows from the others.

    One that does not fits whatever it is: that of the only trace at some length, or, where all
    terms are of one degree, those of two traces of which one is twice the other in every size.
    """
    rows = list(zip(*columns, strict=True))
    return all(
        len(_eliminate([*rows[:i], *rows[i + 1 :]], len(columns))) == len(columns)
        for i in range(len(rows))
    )


def _power(point: Point, exponents: Exponents) -> int:
    value = 1
    for size, exponent in zip(point, exponents, strict=True):
        value *= size**exponent
    return value


def _solve(
    columns: Sequence[Sequence[int]], values: Sequence[int]
) -> tuple[tuple[int, ...], int] | None:
    """Coefficients over a common divisor, none of them 0; None where the values do not fit."""
    size = len(columns)
    rows = [[*(column[i] for column in columns), value] for i, value in enumerate(values)]
    pivots = _eliminate(rows, size)
    if len(pivots) < size or size in pivots:
        return None
    # the last row has one column of its own alone: from there on upwards, so has each
    pivots = _eliminate(reversed(pivots.values()), size)
    numbers = [(pivots[lead][size], pivots[lead][lead]) for lead in range(size)]
    divisor = lcm(*(d // gcd(n, d) for n, d in numbers))
    coefficients = tuple(n * divisor // d for n, d in numbers)
    return None if 0 in coefficients else (coefficients, divisor)


def _eliminate(rows: Iterable[Sequence[int]], size: int) -> dict[int, list[int]]:
    """Rows that span the same, by their leading column, which is 0 in all rows behind it.

    Whole numbers throughout. A leading column at ``size`` is a contradiction, and the last one.
    """
    pivots: dict[int, list[int]] = {}
    for row in rows:
        rest = list(row)
        for lead, pivot in pivots.items():
            rest = _without(rest, pivot, lead)
        column = next((i for i, entry in enumerate(rest) if entry), None)
        if column is not None:
            pivots[column] = rest
            if column == size:
                break
    return pivots


def _without(row: list[int], pivot: list[int], lead: int) -> list[int]:
    """The row with 0 in the leading column of a pivot."""
    if not row[lead]:
        return row
    a, b = pivot[lead], row[lead]
    row = [a * x - b * y for x, y in zip(row, pivot, strict=True)]
    common = gcd(*row)
    return [x // common for x in row] if common > 1 else row
