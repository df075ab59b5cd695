"""The timeline as rows: micro-steps that repeat each other are one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from memest.events import Phase
from memest.result import PeakMoment, Row, TimePoint

__all__ = ["PhaseRow", "phase_rows"]

STEP_PHASES = frozenset({Phase.CLIP, Phase.OPTIMIZER, Phase.ZERO_GRAD})
"""Phases that come once a step, not once a micro-step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """One phase of one micro-step, or of several with the same figures."""

    step: int
    micro_step: int
    last_micro_step: int
    phase: Phase
    allocated_bytes: int
    reserved_bytes: int
    is_peak: bool
    breakdown: tuple[Row, ...] = ()
    """What was alive when the most was allocated."""

    @property
    def label(self) -> str:
        """A short name for axes: ``2.1-3 forward``."""
        if not self.step:
            return self.phase.value
        micro = f".{self.micro_text}" if self.micro_text else ""
        return f"{self.step}{micro} {self.phase.value}"

    @property
    def micro_text(self) -> str:
        """The micro-step, or the first and the last of several; empty where there is none."""
        if self.phase in STEP_PHASES or not self.micro_step:
            return ""
        if self.last_micro_step == self.micro_step:
            return str(self.micro_step)
        return f"{self.micro_step}-{self.last_micro_step}"


def phase_rows(timeline: Iterable[TimePoint], peak_at: PeakMoment) -> list[PhaseRow]:
    """Rows in the order of time; the row of the allocated peak is never folded."""
    groups: list[list[PhaseRow]] = []
    for _, points in itertools.groupby(
        timeline, key=lambda p: (p.step, p.micro_step, p.phase in STEP_PHASES)
    ):
        group = [_row(point, peak_at) for point in points]
        if groups and _repeats(groups[-1], group):
            last = group[0].micro_step
            groups[-1] = [replace(row, last_micro_step=last) for row in groups[-1]]
        else:
            groups.append(group)
    return [row for group in groups for row in group]


def _row(point: TimePoint, at: PeakMoment) -> PhaseRow:
    here = (point.step, point.micro_step, point.phase)
    return PhaseRow(
        step=point.step,
        micro_step=point.micro_step,
        last_micro_step=point.micro_step,
        phase=point.phase,
        allocated_bytes=point.allocated_bytes,
        reserved_bytes=point.reserved_bytes,
        is_peak=here == (at.step, at.micro_step, at.phase),
        breakdown=point.breakdown,
    )


def _repeats(before: Sequence[PhaseRow], group: Sequence[PhaseRow]) -> bool:
    if any(row.is_peak or row.phase in STEP_PHASES for row in (*before, *group)):
        return False
    if before[0].step != group[0].step or before[0].last_micro_step + 1 != group[0].micro_step:
        return False

    def figures(rows: Sequence[PhaseRow]) -> list[tuple[Phase, int, int, tuple[Row, ...]]]:
        return [(row.phase, row.allocated_bytes, row.reserved_bytes, row.breakdown) for row in rows]

    return figures(before) == figures(group)
