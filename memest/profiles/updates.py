"""What an optimizer does to weights of any shapes, from what it did to some.

Most optimizers do the same to every weight of one dtype: a state, a step, a norm is as large as the
weight. So updates traced on a model's weights, and once more on weights whose extents are distinct
primes, say of every number whose extent it is, or how many bytes for each element; and the same
updates of other shapes, shards on more GPUs or adapters of another rank, need no trace. Whatever
does not follow like this has no rule, and is traced for the weights that there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
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


class NoRuleError(Exception):
    """A number that is no extent of a weight and no multiple of one."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a trace: ``factor`` times an extent, a stride or all elements of a weight.

    Attributes:
        factor: the number itself where no weight enters.
        weight: which one; -1 for none.
        axis: of the extent; -1 for all elements; beyond the extents, of the stride.
    """

    factor: int
    weight: int = _PLAIN
    axis: int = _ALL

    def at(self, weights: Sequence[Weight]) -> int:
        """The number for some weights."""
        if self.weight == _PLAIN:
            return self.factor
        weight = weights[self.weight]
        if self.axis == _ALL:
            return self.factor * prod(weight.shape)
        return self.factor * (*weight.shape, *weight.stride)[self.axis]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """Updates of weights of any shapes.

    Attributes:
        family: of the weights that were traced.
        numbers: of its table.
    """

    family: Family
    numbers: tuple[Number, ...]

    def at(self, weights: Sequence[Weight]) -> Family:
        """The updates of weights of the same :func:`shape_classes`."""
        formulas = [constant(number.at(weights), 0) for number in self.numbers]
        return replace(self.family, table=FormulaTable((), formulas))


def shape_classes(weights: Sequence[Weight]) -> list[list[object]]:
    """What updates do beside sizes follows from this: all of weights but how large they are."""
    return [
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


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _primes() -> Iterator[int]:
    """Beyond all factors that a number of bytes has."""
    found: list[int] = []
    for number in count(11, 2):
        if all(number % prime for prime in (3, 5, 7, *found[: int(number**0.5)])):
            found.append(number)
            yield number


def marked_weights(weights: Sequence[Weight]) -> tuple[Weight, ...]:
    """Weights whose extents are distinct primes; empty ones stay empty.

    Raises:
        NoRuleError: one of them does not lie densely.
    """
    taken = {extent for weight in weights for extent in weight.shape}
    primes = (prime for prime in _primes() if prime not in taken)
    out = []
    for weight in weights:
        if weight.stride != _dense(weight.shape):
            raise NoRuleError
        shape = tuple(0 if extent == 0 else next(primes) for extent in weight.shape)
        out.append(replace(weight, shape=shape, stride=_dense(shape)))
    return tuple(out)


def find_rule(
    trace: Trace, weights: Sequence[Weight], marked_trace: Trace, marks: Sequence[Weight]
) -> UpdateRule:
    """The rule of updates that were traced on weights, and on :func:`marked_weights`.

    Raises:
        NoRuleError: they do something else for other shapes.
    """
    if not alike(trace, marked_trace):
        raise NoRuleError
    finder = _Finder(weights, marks)
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
    rule = UpdateRule(Family(table, skeleton, ((),), (), {}), numbers)
    if not is_same(rule.at(weights).at(()), trace):
        raise NoRuleError
    return rule


def is_same(one: Trace, other: Trace) -> bool:
    """Whether two traces take the same memory by the same calls, however calls are listed."""
    calls, other_calls = (
        [trace.calls[number] for number in trace.call_of_site] for trace in (one, other)
    )
    return alike(one, other) and one.sizes == other.sizes and calls == other_calls


class _Finder(Merger):
    """Finds what a number is, by its value for marked weights, and checks it for the others."""

    def __init__(self, weights: Sequence[Weight], marks: Sequence[Weight]) -> None:
        self._weights = weights
        self._places: dict[Number, int] = {}
        self.numbers: list[Number] = []
        self._known: dict[int, list[Number]] = {}
        for index, mark in enumerate(marks):
            axes = [_ALL, *range(2 * len(mark.shape))] if prod(mark.shape) else []
            for axis in axes:
                value = Number(1, index, axis).at(marks)
                for factor in _BYTES if value > 1 else ():
                    number = Number(factor, index, axis)
                    self._known.setdefault(factor * value, []).append(number)

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
