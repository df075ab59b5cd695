"""The work of a training step, counted from a trace: arithmetic, launches, memory written.

Counted, not measured: what a step asks of any GPU. How long a GPU takes for it is the matter of
:mod:`memest.search.cost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from memest.events import ALLOC, CALL, MARK, Phase, Trace
from memest.workspaces.flops import Arithmetic, arithmetic, flops

__all__ = ["NOTHING", "StepWork", "Work", "step_work"]


@dataclass(frozen=True, slots=True)
class Work:
    """What a part of a run asks of the GPU.

    Attributes:
        flops_by: floating-point operations (a multiplication and its addition are two) by what
            they are computed in; see :mod:`memest.workspaces.flops` for what counts.
        launches: operators that launch kernels; one for an operator on a list of tensors.
        bytes_made: requested bytes of new tensors. Almost every operator that writes makes a
            tensor, so this is what elementwise operators write.
    """

    flops_by: Mapping[Arithmetic, int] = field(default_factory=lambda: MappingProxyType({}))
    launches: int = 0
    bytes_made: int = 0

    @property
    def flops(self) -> int:
        """All floating-point operations."""
        return sum(self.flops_by.values())

    def __add__(self, other: Work) -> Work:
        return _add(self, other, 1)

    def __mul__(self, times: int) -> Work:
        return _add(NOTHING, self, times)

    __rmul__ = __mul__

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "flops": self.flops,
            "flops_by": {kind.value: count for kind, count in sorted(self.flops_by.items())},
            "launches": self.launches,
            "bytes_made": self.bytes_made,
        }


NOTHING = Work()
_OF_MICRO_STEPS = (Phase.BATCH, Phase.FORWARD, Phase.BACKWARD)


def _add(first: Work, second: Work, times: int) -> Work:
    flops_by = {
        kind: count
        for kind in Arithmetic
        if (count := first.flops_by.get(kind, 0) + times * second.flops_by.get(kind, 0))
    }
    return Work(
        flops_by=MappingProxyType(flops_by),
        launches=first.launches + times * second.launches,
        bytes_made=first.bytes_made + times * second.bytes_made,
    )


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one optimizer step by phase, all its micro-steps together.

    Recomputation of checkpointed layers is part of the backward pass, as in the run.
    """

    phases: Mapping[Phase, Work]

    @property
    def total(self) -> Work:
        """The whole step."""
        return sum(self.phases.values(), NOTHING)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {phase.value: work.to_dict() for phase, work in self.phases.items()}


def step_work(trace: Trace, grad_accum: int) -> StepWork:
    """The work of one optimizer step in the steady state.

    The last traced step's first micro-step and update, and as many of any step's second
    micro-step, which adds to gradients that are there already, as are missing.

    Args:
        trace: micro-steps and updates; a second micro-step in any step where the run accumulates.
        grad_accum: micro-steps of the run.
    """
    works = [(trace.marks[index], work) for index, work in _by_mark(trace).items()]
    last = max((mark.step for mark, _ in works), default=0)
    later = max((mark.step for mark, _ in works if mark.micro_step == 2), default=0)
    phases: dict[Phase, Work] = {}
    for mark, work in works:
        times = 1 if mark.step == last and mark.micro_step < 2 else 0
        if mark.phase not in _OF_MICRO_STEPS:
            times = 1 if mark.step == last else 0
        elif mark.step == later and mark.micro_step == 2:
            times = grad_accum - 1
        if times:
            phases[mark.phase] = phases.get(mark.phase, NOTHING) + work * times
    return StepWork(MappingProxyType(phases))


def _by_mark(trace: Trace) -> dict[int, Work]:
    """The work behind each mark that the events have, by its index."""
    steps: dict[int, Work] = {}
    known_flops: dict[int, tuple[Arithmetic, int]] = {}
    flops_by: dict[Arithmetic, int] = {}
    bytes_made = 0
    current = -1
    for value in (*trace.events, MARK):  # one more mark ends the last phase
        kind, index = value & 3, value >> 2
        if kind == ALLOC:
            bytes_made += trace.sizes[index]
        elif kind == CALL:
            number = trace.call_of_site[index]
            call_flops = known_flops.get(number)
            if call_flops is None:
                call = trace.calls[number]
                call_flops = known_flops[number] = (arithmetic(call), flops(call))
            if call_flops[1]:
                flops_by[call_flops[0]] = flops_by.get(call_flops[0], 0) + call_flops[1]
        elif kind == MARK:
            if current >= 0:
                steps[current] = Work(
                    MappingProxyType(flops_by), trace.launches[current], bytes_made
                )
            flops_by, bytes_made, current = {}, 0, index
    return steps
