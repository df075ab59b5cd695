"""What an optimizer does to weights of any shapes, from what it did to some.

Most optimizers do the same to every weight of one dtype: a state, a step, a norm is as large as the
weight. So updates traced on a model's weights, and once more on weights whose extents are distinct
primes, say of every number whose extent it is, or how many bytes for each element; and the same
updates of other shapes, shards on more GPUs or adapters of another rank, need no trace. Whatever
does not follow like this has no rule, and is traced for the weights that there are.

Some optimizers keep other states for weights beyond a number of elements, and scales for blocks of
them. A rule of theirs holds for weights on the same sides of these limits; and as no primes are
left between two limits for hundreds of weights, for those that are alike where the traced ones are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from math import prod

from memest.events import Trace, Weight
from memest.profiles.family import Family, FormulaTable, Merger, NotAlikeError, alike
from memest.profiles.formula import constant

__all__ = [
    "NoRuleError",
    "Number",
    "UpdateRule",
    "find_rule",
    "is_same",
    "marked_weights",
    "shape_classes",
]

_BYTES = (1, 2, 4, 8)
_ALL = -1
_PLAIN = -1
_BLOCKS = (1, 256, 2048)
"""Elements that have a number in common: each its own, or bitsandbytes' blocks, small and large."""


class NoRuleError(Exception):
    """A number that is no extent of a weight and no multiple of one."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a trace: ``factor`` times an extent, a stride or all elements of a weight.

    Attributes:
        factor: the number itself where no weight enters.
        weight: which one; -1 for none.
        axis: of the extent; -1 for all elements; beyond the extents, of the stride.
        block: of all elements, how many have one in common; the last block may be smaller.
    """

    factor: int
    weight: int = _PLAIN
    axis: int = _ALL
    block: int = 1

    def at(self, weights: Sequence[Weight]) -> int:
        """The number for some weights."""
        if self.weight == _PLAIN:
            return self.factor
        weight = weights[self.weight]
        if self.axis == _ALL:
            return self.factor * -(-prod(weight.shape) // self.block)
        return self.factor * (*weight.shape, *weight.stride)[self.axis]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """Updates of weights of any shapes.

    Attributes:
        family: of the weights that were traced.
        numbers: of its table.
        managed: bytes of managed memory for each element of :func:`_managed` weights.
        managed_limit: elements from which a weight has some.
    """

    family: Family
    numbers: tuple[Number, ...]
    managed: int = 0
    managed_limit: int = 0

    def at(self, weights: Sequence[Weight]) -> Family:
        """The updates of weights of the same :func:`shape_classes`."""
        formulas = [constant(number.at(weights), 0) for number in self.numbers]
        managed_bytes = self.managed * _managed(weights, self.managed_limit)
        skeleton = replace(self.family.skeleton, managed_bytes=managed_bytes)
        return replace(self.family, table=FormulaTable((), formulas), skeleton=skeleton)


def shape_classes(weights: Sequence[Weight], size_limits: Sequence[int] = ()) -> list[list[object]]:
    """What updates do beside sizes follows from this: all of weights but how large they are.

    Args:
        weights: that are updated.
        size_limits: numbers of elements from which an optimizer does something else. Where there
            are some, it is said too which limits a weight reaches, and which one is shaped alike.
    """
    classes: list[list[object]] = [
        [
            weight.dtype,
            len(weight.shape),
            weight.stride == _dense(weight.shape),
            prod(weight.shape) == 0,
            weight.trains,
            weight.decays,
            weight.has_grad,
        ]
        for weight in weights
    ]
    if not size_limits:
        return classes
    first: dict[tuple[int, ...], int] = {}
    return [
        [
            *about,
            bisect_right(size_limits, prod(weight.shape)),
            first.setdefault(weight.shape, number),
        ]
        for number, (about, weight) in enumerate(zip(classes, weights, strict=True))
    ]


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _primes() -> Iterator[int]:
    """Beyond all factors that a number of bytes has."""
    found: list[int] = []
    for number in count(11, 2):
        if all(number % prime for prime in (3, 5, 7, *found[: int(number**0.5)])):
            found.append(number)
            yield number


def marked_weights(
    weights: Sequence[Weight], size_limits: Sequence[int] = ()
) -> tuple[Weight, ...]:
    """Weights of the same :func:`shape_classes`, whose extents are primes; empty ones stay empty.

    Extents are distinct, but for those of weights that have to be alike.

    Raises:
        NoRuleError: one of them does not lie densely, or there are no primes left for it.
    """
    taken = {extent for weight in weights for extent in weight.shape}
    primes = (prime for prime in _primes() if prime not in taken)
    alike: dict[tuple[int, ...], tuple[int, ...]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    # the smallest primes for those of most dimensions: thousands to the fifth power are no size
    for number in sorted(range(len(weights)), key=lambda n: -len(weights[n].shape)):
        weight = weights[number]
        if weight.stride != _dense(weight.shape):
            raise NoRuleError
        if not size_limits:
            shape = tuple(0 if extent == 0 else next(primes) for extent in weight.shape)
        elif weight.shape in alike:
            shape = alike[weight.shape]
        else:
            shape = alike[weight.shape] = _mark_between(weight.shape, size_limits, taken)
        shapes[number] = shape
    return tuple(
        replace(weight, shape=shapes[number], stride=_dense(shapes[number]))
        for number, weight in enumerate(weights)
    )


def _mark_between(
    shape: Sequence[int], size_limits: Sequence[int], taken: set[int]
) -> tuple[int, ...]:
    """Primes that nobody has, whose product reaches the same limits; they are taken then.

    Raises:
        NoRuleError: there are none.
    """
    if prod(shape) == 0:
        return tuple(shape)
    reached = bisect_right(size_limits, prod(shape))
    low = size_limits[reached - 1] if reached else 0
    primes = (p for p in _primes() if p ** len(shape) >= low and p not in taken)
    found = tuple(islice(primes, len(shape)))
    if bisect_right(size_limits, prod(found)) != reached:
        raise NoRuleError
    taken.update(found)
    return found


def _managed(weights: Sequence[Weight], limit: int) -> int:
    """Elements of the weights that are updated and whose states may be managed memory."""
    sizes = (prod(weight.shape) for weight in weights if weight.trains and weight.has_grad)
    return sum(size for size in sizes if size >= limit)


def find_rule(
    trace: Trace,
    weights: Sequence[Weight],
    marked_trace: Trace,
    marks: Sequence[Weight],
    size_limits: Sequence[int] = (),
) -> UpdateRule:
    """The rule of updates that were traced on weights, and on :func:`marked_weights`.

    Where there are limits, numbers may go by blocks of elements too.

    Raises:
        NoRuleError: they do something else for other shapes.
    """
    if not alike(trace, marked_trace):
        raise NoRuleError
    finder = _Finder(weights, marks, _BLOCKS if size_limits else _BLOCKS[:1])
    skeleton = replace(trace)
    skeleton.sizes = [
        finder.place(pair) for pair in zip(trace.sizes, marked_trace.sizes, strict=True)
    ]
    calls = [
        (trace.calls[one], marked_trace.calls[other])
        for one, other in zip(trace.call_of_site, marked_trace.call_of_site, strict=True)
    ]
    places = {pair: number for number, pair in enumerate(dict.fromkeys(calls))}
    skeleton.call_of_site = type(trace.call_of_site)("l", [places[pair] for pair in calls])
    try:
        skeleton.calls = [finder.merge(pair) for pair in places]
    except NotAlikeError:
        raise NoRuleError from None
    numbers = tuple(finder.numbers)
    table = FormulaTable((), [constant(number.at(weights), 0) for number in numbers])
    limit = max(size_limits, default=0)
    elements = _managed(weights, limit)
    managed = trace.managed_bytes // elements if elements else 0
    family = Family(table, skeleton, ((),), (), {})
    rule = UpdateRule(family, numbers, managed, limit if managed else 0)
    for traced, ones in ((trace, weights), (marked_trace, marks)):
        if not is_same(rule.at(ones).at(()), traced):
            raise NoRuleError
    return rule


def is_same(one: Trace, other: Trace) -> bool:
    """Whether two traces take the same memory by the same calls, however calls are listed."""
    if one.managed_bytes != other.managed_bytes:
        return False
    calls, other_calls = (
        [trace.calls[number] for number in trace.call_of_site] for trace in (one, other)
    )
    return alike(one, other) and one.sizes == other.sizes and calls == other_calls


class _Finder(Merger):
    """Finds what a number is, by its value for marked weights, and checks it for the others."""

    def __init__(
        self, weights: Sequence[Weight], marks: Sequence[Weight], blocks: Sequence[int]
    ) -> None:
        self._weights = weights
        self._places: dict[Number, int] = {}
        self.numbers: list[Number] = []
        self._known: dict[int, list[Number]] = {}
        shapes: set[tuple[int, ...]] = set()
        for index, mark in enumerate(marks):
            if not prod(mark.shape) or mark.shape in shapes:
                continue
            shapes.add(mark.shape)
            of_all = (Number(1, index, _ALL, block) for block in blocks)
            extents = (Number(1, index, axis) for axis in range(2 * len(mark.shape)))
            for number in (*of_all, *extents):
                value = number.at(marks)
                for factor in _BYTES if value > 1 else ():
                    found = replace(number, factor=factor)
                    self._known.setdefault(factor * value, []).append(found)

    def place(self, values: tuple[int, ...]) -> int:
        """The place in the table of a number with these values."""
        value, marked_value = values
        candidates = self._known.get(marked_value, ())
        number = next((n for n in candidates if n.at(self._weights) == value), Number(value))
        if number.weight == _PLAIN and value != marked_value:
            raise NoRuleError
        place = self._places.setdefault(number, len(self._places))
        if place == len(self.numbers):
            self.numbers.append(number)
        return place
