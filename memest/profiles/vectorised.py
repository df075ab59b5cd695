"""Allocated peaks of many points at once.

The allocated bytes after an event are the sum of what is alive, and what is alive after an event is
the same at every point of a family: so many allocations of each size. One matrix of counts, times
the sizes at all points, gives every curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memest.profiles.family import Point
from memest.profiles.program import Program
from memest.profiles.stream import Course
from memest.workspaces.operator_call import GpuTraits

if TYPE_CHECKING:
    import numpy as np

__all__ = ["PeakQuery", "allocated_peaks"]


@dataclass(frozen=True, slots=True)
class PeakQuery:
    """One point.

    Attributes:
        program: that answers it.
        point: of its family.
        gpu: decides workspaces.
        num_steps: optimizer steps.
        grad_accum: micro-steps of each.
    """

    program: Program
    point: Point
    gpu: GpuTraits
    num_steps: int
    grad_accum: int


def allocated_peaks(queries: Sequence[PeakQuery]) -> list[int]:
    """The allocated peak of every question, in bytes, rounded to 512 for each allocation."""
    import numpy as np

    groups: dict[tuple[object, ...], list[int]] = {}
    tables: list[list[int]] = []
    for number, query in enumerate(queries):
        numbers, call_workspaces = query.program.numbers_at(query.point, query.gpu)
        # a workspace that is not needed counts as one of no bytes: fewer courses
        shape = tuple(tuple(w.label for w in workspaces) for workspaces in call_workspaces)
        tables.append([*numbers, *(w.nbytes for workspaces in call_workspaces for w in workspaces)])
        accum = query.program.enough_micro_steps(query.grad_accum)
        key = id(query.program), query.num_steps, accum, shape
        groups.setdefault(key, []).append(number)
    peaks = [0] * len(queries)
    for members in groups.values():
        first = queries[members[0]]
        accum = first.program.enough_micro_steps(first.grad_accum)
        course = first.program.full_course(first.point, first.gpu, first.num_steps, accum)
        sizes = np.array([tables[member] for member in members], dtype=np.float64).T
        rounded_sizes = np.ceil(sizes / 512) * 512
        memo = course.chains.memo
        if "alive" not in memo:
            memo["alive"] = _alive(course, len(sizes))
        curves = (memo["alive"] @ rounded_sizes).max(axis=0)
        for member, peak in zip(members, curves, strict=True):
            peaks[member] = int(peak)
    return peaks


def _alive(course: Course, num_places: int) -> np.ndarray[Any, Any]:
    """How many allocations of each size are alive, at the moments that can be a peak."""
    import numpy as np

    events = np.array(course.events)
    numbers = np.where(events >= 0, events, ~events)
    places = np.array(course.places)[numbers]
    change: Any = np.zeros((len(events), num_places), dtype=np.int16)
    change[np.arange(len(events)), places] = np.where(events >= 0, 1, -1)
    # a peak is after an allocation that is followed by a free
    last: Any = np.append((events[:-1] >= 0) & (events[1:] < 0), events[-1] >= 0)
    alive = change.cumsum(axis=0, dtype=np.int16)[last]
    first: dict[bytes, int] = {}
    for index, row in enumerate(alive):
        first.setdefault(row.tobytes(), index)
    peaks: np.ndarray[Any, Any] = alive[list(first.values())].astype(np.float64)
    return peaks
