"""How memory went over a run, and why it grew: frozen results, printable, with a JSON document."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from memest.report.answer import Answer, Document

__all__ = [
    "Cause",
    "ExpectedCourse",
    "GrowingSite",
    "GrowthExplanation",
    "GrowthFinding",
    "MemoryPoint",
    "Quantity",
]


class Quantity(enum.StrEnum):
    """What is read of a run's memory."""

    ALLOCATED = "allocated"
    """Of tensors, between two steps."""
    PEAK_ALLOCATED = "peak_allocated"
    """Of tensors, the most within a step."""
    RESERVED = "reserved"
    """The allocator's segments."""
    DEVICE = "device"
    """The process, or the whole card, by the driver."""
    HOST = "host"
    """Host memory of the process."""


class Cause(enum.StrEnum):
    """Why memory grew."""

    FIRST_STEP = "first step"
    """Gradients and states of the optimizer come with the first step, and stay."""
    KEPT_GRAPH = "kept graph"
    """What a forward saves for its backward is kept step after step."""
    KEPT_WEIGHTS = "kept weights"
    """Copies of the weights are kept."""
    KEPT_TENSORS = "kept tensors"
    """Some tensors of each step are kept: losses, outputs, metrics."""
    EVALUATION = "evaluation"
    """Predictions of an evaluation gather until it is over."""
    VARYING_SIZES = "varying sizes"
    """Longer samples came, or the cache holds blocks of lengths that passed."""
    OUTSIDE = "outside the allocator"
    """Kernels, libraries, or another process."""
    HOST = "host memory"
    """The process on the host."""
    UNEXPLAINED = "unexplained"
    """It grows, and nothing tells why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint(Document):
    """What was read at one step; None where it was not.

    Attributes:
        step: its number.
        allocated_bytes: of tensors, when the step was over.
        peak_allocated_bytes: of tensors, the most in the step.
        reserved_bytes: of the allocator's segments.
        device_bytes: by the driver.
        host_bytes: of the process on the host.
        evaluation: whether it was read in an evaluation.
    """

    step: int
    allocated_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    evaluation: bool = False

    def value(self, quantity: Quantity) -> int | None:
        """What was read of one quantity, bytes."""
        value: int | None = getattr(self, f"{quantity.value}_bytes")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingSite(Document):
    """A place in the code whose allocations stay, pass after pass.

    Attributes:
        site: the innermost code and its caller; empty where the recording does not tell.
        line: the innermost line of the user's own code.
        role: the part of a step it is of.
        places: different ways there.
        count: allocations that are alive.
        passes: those that they were made in.
        bytes: of them all.
        pass_bytes: added in a pass that keeps any.
    """

    site: str
    line: str
    role: str
    places: int
    count: int
    passes: int
    bytes: int
    pass_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedCourse(Document):
    """What a prediction says of the same run.

    Attributes:
        model: its reference.
        gpu: whose kernels were taken.
        loaded_bytes: allocated before the first step.
        held_bytes: allocated between two steps, from the second on.
        peak_allocated_bytes: the most within a step.
        reserved_bytes: the allocator's segments at most.
        forward_bytes: what a forward keeps for its backward.
        parameter_bytes: the weights.
        state_bytes: gradients and states of the optimizer that stay between steps.
    """

    model: str
    gpu: str
    loaded_bytes: int
    held_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    forward_bytes: int
    parameter_bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthFinding(Document):
    """One way in which memory grew.

    Attributes:
        cause: the kind.
        quantity: where it shows.
        bytes: how much, over what was read.
        step_bytes: for each step; None where it does not grow step by step.
        evidence: what it is told by, in sentences.
        remedy: what to do, in sentences.
        is_leak: whether something is kept that the steps to come do not need.
    """

    cause: Cause
    quantity: Quantity
    bytes: int
    step_bytes: int | None
    evidence: tuple[str, ...]
    remedy: tuple[str, ...]
    is_leak: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthExplanation(Answer):
    """How memory went over a run, and why.

    Attributes:
        source: what was read, in words.
        unit: what a point is of: ``step``, ``pass`` or ``row``.
        points: in order.
        findings: what grew, leaks first, the largest first.
        sites: code whose allocations stay, the largest first; empty without a recording.
        expected: what a prediction says; None without a model.
        full_at: the step at which the card would be full if it went on so; None where it does not
            grow or no card was named.
        notes: what the user should know besides.
    """

    source: str
    unit: str
    points: tuple[MemoryPoint, ...]
    findings: tuple[GrowthFinding, ...]
    sites: tuple[GrowingSite, ...] = ()
    expected: ExpectedCourse | None = None
    full_at: int | None = None
    notes: tuple[str, ...] = ()

    computed = ("leaks",)

    @property
    def leaks(self) -> bool:
        """Whether something is kept that the steps to come do not need."""
        return any(finding.is_leak for finding in self.findings)
