"""What a search among runs answers: frozen results, printable, with a JSON document each.

:class:`Comparison` sets runs side by side; :class:`Advice` ranks plans for one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from memest.events import Category, Phase
from memest.report.answer import SCHEMA_VERSION, Answer, Document, document
from memest.report.result import Estimate, PeakMoment, Verdict
from memest.report.suggestions import Suggestions

__all__ = [
    "Advice",
    "Comparison",
    "PhaseChange",
    "Plan",
    "PlanEngine",
    "PlanStep",
    "Reasons",
    "RowChange",
    "Scenario",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChange(Document):
    """One category of the breakdown before and after a change, in bytes."""

    category: Category
    before_bytes: int
    after_bytes: int
    computed: ClassVar[tuple[str, ...]] = ("delta_bytes",)

    @property
    def delta_bytes(self) -> int:
        """What the change adds (negative: saves)."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange(Document):
    """The highest allocated memory within one phase of the run, before and after, in bytes."""

    phase: Phase
    before_bytes: int
    after_bytes: int
    computed: ClassVar[tuple[str, ...]] = ("delta_bytes",)

    @property
    def delta_bytes(self) -> int:
        """What the change adds (negative: saves)."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons(Document):
    """Why the allocated peaks of two runs differ.

    Attributes:
        delta_bytes: difference of the allocated peaks.
        rows: the categories that differ, largest difference first; they add up to
            ``delta_bytes`` exactly.
        phases: the phases both runs have, in the order of a step.
        before: moment of the first run's peak.
        after: moment of the second run's peak.
        sentences: the same in words.
    """

    delta_bytes: int
    rows: tuple[RowChange, ...]
    phases: tuple[PhaseChange, ...]
    before: PeakMoment
    after: PeakMoment
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "allocated_delta_bytes": self.delta_bytes,
            "rows": document(self.rows),
            "phases": document(self.phases),
            "peak_moved": (self.before.phase, self.before.micro_step)
            != (self.after.phase, self.after.micro_step),
            "sentences": list(self.sentences),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(Document):
    """One run of a comparison.

    Attributes:
        name: as the user wrote it; ``base`` for the options without a change.
        model: the model's reference.
        changes: options that differ from the base, as text.
        estimate: the answer for it.
        reasons: why its peak differs from the first scenario's; None for the first.
        relative_time: estimated time of one sample over the first scenario's; None if unknown.
        flops: floating-point operations of one optimizer step; None if unknown.
        launches: operators of one optimizer step that launch kernels; None if unknown.
    """

    name: str
    model: str
    changes: tuple[tuple[str, str], ...]
    estimate: Estimate
    reasons: Reasons | None
    relative_time: float | None
    flops: int | None
    launches: int | None

    @property
    def effective_batch(self) -> int:
        """Samples of one optimizer step, on all GPUs."""
        return self.estimate.setup.effective_batch

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "model": self.model,
            "changes": dict(self.changes),
            "effective_batch": self.effective_batch,
            "relative_time_per_sample": _round_ratio(self.relative_time),
            "flops_per_step": self.flops,
            "launches_per_step": self.launches,
            "against_first": document(self.reasons),
            "estimate": document(self.estimate),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Answer):
    """Runs side by side; the first one is what the others are compared with.

    Attributes:
        scenarios: the runs, in the order asked for.
        time_basis: what the relative times are made of.
        notes: what the user should know besides.
    """

    scenarios: tuple[Scenario, ...]
    time_basis: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep(Document):
    """One decision of a plan: the option, its value, and why it has that value."""

    option: str
    value: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEngine(Document):
    """What a plan leaves the engine that writes completions on the same GPU.

    Attributes:
        share: of the GPU's memory, what the engine takes in the plan.
        asked_share: what was asked for.
        largest_share: the most with which the plan surely fits, in hundredths rounded down; None
            where no share that holds the engine's weights will do.
    """

    share: float
    asked_share: float
    largest_share: float | None

    @property
    def words(self) -> str:
        """The share as a phrase, and what it takes the place of."""
        words = f"engine share {self.share:g}"
        if self.share == self.asked_share:
            return words
        return f"{words} in place of {self.asked_share:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Document):
    """One way to train on the GPU.

    Attributes:
        batch: samples of a micro-batch.
        grad_accum: micro-batches of an optimizer step.
        estimate: the answer for the plan itself.
        relative_time: estimated time of one sample over the first plan's; None where none is
            estimated.
        changes_training: what makes the training another one than asked for; empty where the
            plan only moves memory and time.
        steps: the decisions with their reasons.
        written_for: whose settings ``arguments`` are: ``TrainingArguments``, TRL's ``DPOConfig``;
            ``memest`` where the loop is no Trainer's, which has no settings of its own.
        arguments: the plan as those settings.
        own_arguments: what memest is to be told besides, as its options: what those settings do not
            say, because the model, its optimizer or the trainer itself does.
        engine: the engine that shares the GPU; None where none does.
    """

    batch: int
    grad_accum: int
    estimate: Estimate
    relative_time: float | None
    changes_training: tuple[str, ...]
    steps: tuple[PlanStep, ...]
    written_for: str
    arguments: tuple[str, ...]
    own_arguments: tuple[str, ...] = ()
    engine: PlanEngine | None = None

    @property
    def written(self) -> tuple[tuple[str, str], ...]:
        """The plan as it is typed: whose settings, and those in a line."""
        both = (self.written_for, self.arguments), ("memest", self.own_arguments)
        return tuple((whose, " ".join(words)) for whose, words in both if words)

    @property
    def effective_batch(self) -> int:
        """Samples of one optimizer step, on all GPUs."""
        return self.batch * self.grad_accum * self.estimate.setup.distributed.data_ranks

    @property
    def verdict(self) -> Verdict:
        """Whether it fits."""
        return self.estimate.verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        setup, gpu = self.estimate.setup, self.estimate.gpu
        return {
            "verdict": self.verdict.value,
            "batch": self.batch,
            "grad_accum": self.grad_accum,
            "effective_batch": self.effective_batch,
            "checkpointing": setup.checkpointing,
            "precision": setup.precision.value,
            "optim": setup.optimizer,
            "attn_implementation": setup.attn_implementation.value,
            "changes_training": list(self.changes_training),
            "relative_time_per_sample": _round_ratio(self.relative_time),
            **self.estimate.peak.to_dict(),
            "headroom_bytes": None if gpu is None else gpu.headroom_bytes,
            "interval": {
                "low_bytes": self.estimate.interval.low_bytes,
                "high_bytes": self.estimate.interval.high_bytes,
            },
            "written_for": self.written_for,
            "arguments": list(self.arguments),
            "own_arguments": list(self.own_arguments),
            "steps": document(self.steps),
            **({} if self.engine is None else {"engine": document(self.engine)}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice(Answer):
    """Plans for training a model on a GPU, the best first.

    Attributes:
        model: the model's reference.
        gpu: name of the GPU.
        usable_bytes: what PyTorch can have of its memory.
        effective_batch: samples of an optimizer step that were asked for.
        plans: those that fit, then those too close to call; fastest first, those that change
            the training behind those that do not.
        closest: where there is no plan, the one that misses by the least; else None.
        otherwise: where no plan surely fits that trains as asked, what would fit and trains other
            weights, or on more GPUs; else None.
        time_basis: what the relative times are made of.
        notes: what the user should know besides.
        unpriced: what the run does besides and no plan has in its figures.
        overpriced: what the figures have and the run does not take.
    """

    model: str
    gpu: str
    usable_bytes: int
    effective_batch: int
    plans: tuple[Plan, ...]
    closest: Plan | None
    time_basis: str
    notes: tuple[str, ...] = ()
    otherwise: Suggestions | None = None
    unpriced: tuple[str, ...] = ()
    overpriced: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """That of the best plan, unless something is not priced, or not taken."""
        if not self.plans:
            return Verdict.CANNOT_SAY if self.overpriced else Verdict.DOES_NOT_FIT
        return Verdict.CANNOT_SAY if self.unpriced else self.plans[0].verdict

    @property
    def miss_bytes(self) -> int:
        """By how much the closest plan misses; 0 where there are plans."""
        if self.closest is None or self.closest.estimate.gpu is None:
            return 0
        return max(-self.closest.estimate.gpu.headroom_bytes, 0)

    def to_dict(self) -> dict[str, Any]:
        """The document that ``memest advise --json`` prints."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "gpu": {"name": self.gpu, "usable_bytes": self.usable_bytes},
            "effective_batch": self.effective_batch,
            "verdict": self.verdict.value,
            "unpriced": list(self.unpriced),
            "overpriced": list(self.overpriced),
            "plans": document(self.plans),
            "closest": document(self.closest),
            "miss_bytes": self.miss_bytes,
            "otherwise": document(self.otherwise),
            "time_basis": self.time_basis,
            "notes": list(self.notes),
        }


def _round_ratio(ratio: float | None) -> float | None:
    """A ratio with the digits that mean something."""
    return None if ratio is None else round(ratio, 3)
