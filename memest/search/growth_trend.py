"""Whether a row of readings grows, and by how much a step: told by the floors of its stretches.

What lives from one step to the next depends on the sample (a batch that a variable still names), so
single readings go up and down. The least of a stretch does not, where nothing is kept; where a
little is kept with every step, each stretch has a higher floor than the one before.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from memest.report.growth_result import Quantity
from memest.units import MIB

__all__ = ["FEWEST_POINTS", "Shape", "Trend", "trend_of"]

FEWEST_POINTS = 5
"""Readings that a trend needs: the first differs, and three differences must agree."""
_STRETCHES = 8
_MOST_RISE = 0.75
_BEGINNING = 8
"""How much faster than later memory rises while a run begins: it loads, and its states come."""
_AGREE = 0.1
_NOISE = {Quantity.DEVICE: 2 * MIB, Quantity.HOST: 4 * MIB}
"""What the driver rounds to, and what an interpreter takes and gives back by the way."""
_TOPS = (Quantity.PEAK_ALLOCATED, Quantity.RESERVED)
"""Quantities of which the most of a stretch tells: they are peaks themselves."""


class Shape(enum.StrEnum):
    """How a quantity goes, once the first steps are over."""

    FLAT = "flat"
    STEADY = "steady"
    JUMPS = "jumps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """How one quantity goes.

    Attributes:
        quantity: which.
        shape: flat, growing with every step, or by jumps.
        first_bytes: once the first steps are over.
        last_bytes: at the end.
        step_bytes: of growth a step; 0 where it is not steady.
        steps: between the two.
    """

    quantity: Quantity
    shape: Shape
    first_bytes: int
    last_bytes: int
    step_bytes: int
    steps: int

    @property
    def bytes(self) -> int:
        """What was added."""
        return self.last_bytes - self.first_bytes

    @property
    def grows(self) -> bool:
        """Whether it grew, steadily or by jumps."""
        return self.shape in (Shape.STEADY, Shape.JUMPS)


def trend_of(quantity: Quantity, values: Sequence[tuple[int, int]]) -> Trend | None:
    """How a quantity goes.

    Args:
        quantity: which: peaks are told by the most of a stretch, others by the least.
        values: (step, bytes), in order.

    Returns:
        None for too few values.
    """
    if len(values) < FEWEST_POINTS:
        return None
    choose = max if quantity in _TOPS else min
    count = min(_STRETCHES, len(values))
    stretches = [
        values[len(values) * number // count : len(values) * (number + 1) // count]
        for number in range(count)
    ]
    # without the first: it has the loading, and the states that come with the first step
    floors = [choose(stretch, key=lambda each: each[1]) for stretch in stretches][1:]
    floors = _settled(floors)
    noise = _NOISE.get(quantity, 0)
    gaps = [after[1] - before[1] for before, after in pairwise(floors)]
    rises, falls = sum(gap > noise for gap in gaps), sum(gap < -noise for gap in gaps)
    (first_step, first), (last_step, last) = floors[0], floors[-1]
    shape = Shape.FLAT
    if not falls and rises >= math.ceil(_MOST_RISE * len(gaps)) and gaps[-1] > noise:
        shape = Shape.STEADY
    elif not falls and rises:
        shape = Shape.JUMPS
    steps = max(last_step - first_step, 1)
    slope = _slope(values, (last - first) / steps) if shape is Shape.STEADY else 0
    return Trend(
        quantity=quantity,
        shape=shape,
        first_bytes=first,
        last_bytes=last,
        step_bytes=slope,
        steps=steps,
    )


def _settled(floors: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without the stretches in which a run begins: they rise far faster than what follows."""
    rises = [max(after[1] - before[1], 0) for before, after in pairwise(floors)]
    begin = 0
    while begin < len(rises) // 2 and rises[begin] > _BEGINNING * median(rises[begin + 1 :]):
        begin += 1
    return floors[begin:]


def _slope(values: Sequence[tuple[int, int]], slope: float) -> int:
    """Bytes a step: the usual difference between two readings, where it is that of the floors."""
    usual = median(
        (after[1] - before[1]) / max(after[0] - before[0], 1)
        for before, after in pairwise(values[1:])
    )
    return round(usual if abs(usual - slope) <= _AGREE * slope else slope)
