"""What an estimate says of a run around its steps: host memory phase by phase, and its verdict."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from memest.report.answer import Document
from memest.units import format_size

__all__ = ["HostShare", "HostVerdict", "LifePhase", "RunLife"]


class HostVerdict(enum.StrEnum):
    """Whether what is counted fits the host memory of a node."""

    FITS = "fits"
    TIGHT = "tight"
    """It fits, and leaves little for what is not counted."""
    CANNOT_SAY = "cannot say"
    """What is counted fits, and something is not priced."""
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "no memory named"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare(Document):
    """Something in host memory at the fullest moment of a phase.

    Attributes:
        what: in words.
        bytes: of one process that has it.
        every: every process of a node has it, not the first alone.
    """

    what: str
    bytes: int
    every: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LifePhase(Document):
    """One phase of a run. Sizes are bytes, None where the phase is not priced.

    Attributes:
        phase: loading, training, evaluating, saving or resuming.
        process_bytes: host memory of the process that has the most.
        node_bytes: of all processes of a node together.
        mapped_bytes: of files that are mapped besides: page cache, which the kernel takes back.
        gpu_bytes: on the fullest GPU, while it is saved or resumed from; None of other phases.
        parts: what the node's figure is made of, at its fullest moment.
        source: file or function that the rule is taken from.
        not_priced: why there are no figures; empty where there are.
    """

    phase: str
    process_bytes: int | None = None
    node_bytes: int | None = None
    mapped_bytes: int = 0
    gpu_bytes: int | None = None
    parts: tuple[HostShare, ...] = ()
    source: str = ""
    not_priced: str = ""

    @property
    def words(self) -> str:
        """What the figure is made of, or why there is none."""
        if self.not_priced:
            return f"not priced: {self.not_priced}"
        return ", ".join(
            f"{part.what} {format_size(part.bytes)}" + ("" if part.every else " (first process)")
            for part in self.parts
            if part.bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLife(Document):
    """Host memory of a run, phase by phase.

    Attributes:
        phases: loading and training, and what was asked for besides.
        processes: of a node.
        budget_bytes: what a node has; None where nobody said.
        verdict: of the fullest phase.
        reason: why, where it neither fits nor does not.
        gpu: what saving and resuming mean for the GPU, a sentence each.
        not_counted: what comes on top.
    """

    computed: ClassVar[tuple[str, ...]] = ("sentence",)

    phases: tuple[LifePhase, ...]
    processes: int
    budget_bytes: int | None
    verdict: HostVerdict
    reason: str
    gpu: tuple[str, ...]
    not_counted: tuple[str, ...]

    @property
    def fullest(self) -> LifePhase:
        """The phase that takes the most of a node."""
        return max(self.phases, key=lambda phase: phase.node_bytes or 0)

    @property
    def node_bytes(self) -> int:
        """What the fullest phase takes of a node."""
        return self.fullest.node_bytes or 0

    @property
    def head(self) -> tuple[str, ...]:
        """The columns of :attr:`rows`; the last one is words."""
        of_node = ("a node",) if self.processes > 1 else ()
        return ("", "a process", *of_node, "files", "at the fullest moment")

    @property
    def is_wanted(self) -> bool:
        """Whether a limit is named, or more is asked about than the steps."""
        more = any(phase.phase in ("saving", "resuming") for phase in self.phases)
        return more or self.budget_bytes is not None

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """A row a phase, for people; sizes are empty where it is not priced."""
        several = self.processes > 1
        rows = []
        for phase in self.phases:
            of_node = (phase.node_bytes,) if several else ()
            sizes = (phase.process_bytes, *of_node, phase.mapped_bytes)
            cells = ("" if phase.not_priced else format_size(size or 0) for size in sizes)
            rows.append((phase.phase, *cells, phase.words))
        return tuple(rows)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What goes with the rows, in sentences."""
        shared = f"{self.processes} processes share a node (--processes-per-node)"
        return (
            *([shared] if self.processes > 1 else []),
            *([self.sentence.removeprefix("Host: ")] if self.budget_bytes is None else []),
            *(f"GPU: {sentence}" for sentence in self.gpu),
            *(f"not counted: {text}" for text in self.not_counted),
        )

    @property
    def sentence(self) -> str:
        """Whether the host memory of a node suffices."""
        need, phase = format_size(self.node_bytes), self.fullest.phase
        if self.budget_bytes is None:
            unpriced = ", ".join(phase.phase for phase in self.phases if phase.not_priced)
            more = f", and more while {unpriced}" if unpriced else ""
            return f"Host: needs {need} of a node while {phase}{more}."
        have = format_size(self.budget_bytes)
        why = f"; {self.reason}" if self.reason else ""
        return {
            HostVerdict.FITS: f"Host: fits, needs {need} of {have} while {phase}.",
            HostVerdict.TIGHT: f"Host: tight, needs {need} of {have} while {phase}{why}.",
            HostVerdict.CANNOT_SAY: f"Host: cannot say, {need} of {have} while {phase}{why}.",
            HostVerdict.DOES_NOT_FIT: f"Host: does not fit, needs {need} of {have} while {phase}.",
        }[self.verdict]
