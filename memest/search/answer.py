"""Answering points: one profile a model, whatever goes wrong stays with its point."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from memest.config.inputs import NO_INPUTS, ModuleInputs
from memest.config.option_table import PLACE
from memest.config.options import setup_from_options
from memest.errors import MemestError, MissingDependencyError
from memest.search.grid import GridPoint, setup_options
from memest.search.points import SweepPoint

__all__ = ["WorkUnit", "answer", "failed_point", "in_order", "units_of"]

_WORTH_A_FORMULA = 4
"""Values of an option from which on its formula is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkUnit:
    """Questions about one model that are answered one after the other by one profile.

    Attributes:
        model: what to profile: a name, or a live module.
        label: how results call it.
        trust_remote_code: run code that the model's repository brings.
        questions: the points.
        feed: what a module of one's own is fed.
    """

    model: Any
    label: str
    trust_remote_code: bool
    questions: tuple[GridPoint, ...]
    feed: ModuleInputs = NO_INPUTS


def units_of(units: Iterable[WorkUnit], num_units: int) -> list[WorkUnit]:
    """The same work in at least ``num_units`` units, where there are as many points."""
    unit_list = list(units)
    num_parts = max(1, -(-num_units // max(1, len(unit_list))))
    smaller_units: list[WorkUnit] = []
    for unit in unit_list:
        size = -(-len(unit.questions) // num_parts)
        smaller_units += [
            replace(unit, questions=unit.questions[start : start + size])
            for start in range(0, len(unit.questions), size)
        ]
    return smaller_units


def failed_point(unit: WorkUnit, question: GridPoint, reason: str) -> SweepPoint:
    """The point of a question that has no answer."""
    return SweepPoint(
        index=question.index, model=unit.label, options=question.options, error=reason
    )


def answer(unit: WorkUnit, progress: Callable[[str], None] | None = None) -> Iterator[SweepPoint]:
    """Answer the questions of a unit, in order.

    Raises:
        MissingDependencyError: without torch no point at all can be answered.
    """
    from memest.search.profile import Profile

    frequent_options = _frequent_options(unit.questions)
    profile = None
    for question in unit.questions:
        try:
            setup = setup_from_options(**setup_options(question.options))
            if profile is None:
                profile = Profile(unit.model, setup, unit.feed, unit.trust_remote_code, progress)
            setup = profile.with_own_parts(setup, setup_options(question.options))
            place = {name: value for name, value in question.options if name in PLACE}
            spot = profile.spot(setup, vary=frequent_options, **place)
        except MissingDependencyError:
            raise
        except MemestError as error:
            yield failed_point(unit, question, str(error))
        except Exception as error:  # noqa: BLE001 - one point must not take the others with it
            reason = f"unexpected {type(error).__name__}: {error}"
            yield failed_point(unit, question, " ".join(reason.split()))
        else:
            yield SweepPoint.of(question.index, unit.label, question.options, spot)


def _frequent_options(questions: Iterable[GridPoint]) -> tuple[str, ...]:
    """The options with enough values for a formula to pay, which takes a few more traces."""
    values: dict[str, set[str]] = {}
    for question in questions:
        for name, value in question.options:
            values.setdefault(name, set()).add(repr(value))
    return tuple(name for name, distinct in values.items() if len(distinct) >= _WORTH_A_FORMULA)


def in_order(
    points: Iterable[SweepPoint], indices: Iterable[int]
) -> Generator[SweepPoint, None, None]:
    """Points that come in any order, in the order of ``indices``, each as soon as it can be."""
    buffer: dict[int, SweepPoint] = {}
    order = iter(indices)
    next_index = next(order, None)
    for point in points:
        buffer[point.index] = point
        while next_index is not None and next_index in buffer:
            yield buffer.pop(next_index)
            next_index = next(order, None)
