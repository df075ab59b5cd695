"""The rule that says when a case has become slower.

A case has regressed if the lower quartile of its ratios lies above the upper quartile of each of
the last runs that are comparable, and its median beyond the tolerance above their median: so
neither the spread within a run nor that between runs is taken for a change. Faster is the same rule
turned round. Comparable are runs on the same processor and Python, of the same version of the
case, against the same reference.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from speed.history import Run
from speed.timing import Figure

LOOK_BACK = 5
TOLERANCE = 0.05


class Change(StrEnum):
    """What became of a case."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    UNKNOWN = "no earlier run"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A case beside its earlier figures; ``factor`` is its median over theirs, None without."""

    name: str
    figure: Figure
    change: Change
    factor: float | None
    earlier: int


def compare(
    run: Run, earlier: Sequence[Run], *, look_back: int = LOOK_BACK, tolerance: float = TOLERANCE
) -> list[Comparison]:
    """Every case of a run beside the same case of the runs before it, oldest first."""
    comparable_runs = [other for other in earlier if run.like(other)]
    return [
        _comparison(
            name, figure, _comparable(name, figure, comparable_runs)[-look_back:], tolerance
        )
        for name, figure in run.cases.items()
    ]


def _comparable(name: str, figure: Figure, runs: Sequence[Run]) -> list[Figure]:
    figures = [run.cases[name] for run in runs if name in run.cases]
    return [
        other
        for other in figures
        if (other.reference, other.version) == (figure.reference, figure.version)
    ]


def _comparison(
    name: str, figure: Figure, before: Sequence[Figure], tolerance: float
) -> Comparison:
    if not before:
        return Comparison(name, figure, Change.UNKNOWN, None, 0)
    usual = statistics.median(other.ratio for other in before)
    factor = figure.ratio / usual
    change = Change.SAME
    if factor > 1 + tolerance and figure.low > max(other.high for other in before):
        change = Change.SLOWER
    elif factor < 1 / (1 + tolerance) and figure.high < min(other.low for other in before):
        change = Change.FASTER
    return Comparison(name, figure, change, factor, len(before))
