"""How large a run can be: frozen results of a search for the largest size, printable.

:class:`MaxBatch` has a :class:`Largest` for each GPU.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from memest.config.idle_options import smallest_batch
from memest.config.setup import Setup
from memest.report.answer import SCHEMA_VERSION, Answer, Document, document
from memest.report.result import Verdict

__all__ = [
    "CurveEnd",
    "CurvePoint",
    "EffectiveBatch",
    "Largest",
    "MaxBatch",
    "Multiple",
    "SizeAxis",
]


class SizeAxis(enum.StrEnum):
    """The size that is looked for."""

    BATCH = "batch"
    SEQ_LEN = "seq-len"
    IMAGE_SIZE = "image-size"

    @property
    def field(self) -> str:
        """The field of :class:`memest.config.setup.Setup` that it is."""
        return self.value.replace("-", "_")


class CurveEnd(enum.StrEnum):
    """What keeps a size from being larger."""

    GPU = "gpu"
    """The memory of the GPU."""
    MODEL = "model"
    """The model takes no larger one."""
    SEARCH = "search"
    """Nothing did: the search ended, and the size is at least this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint(Document):
    """One size and the memory it takes, in bytes.

    Attributes:
        size: of the batch, or whatever is looked for.
        allocated_bytes: peak, ``torch.cuda.max_memory_allocated()``.
        reserved_bytes: peak, ``torch.cuda.max_memory_reserved()``.
        device_bytes: peak of the device, with the context expected.
        headroom_bytes: what is left of the GPU (negative: missing).
        verdict: the one ``memest estimate`` gives.
    """

    size: int
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    headroom_bytes: int
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiple(Document):
    """The largest multiples of a number; 0 where none is.

    Attributes:
        of: the number.
        largest: that runs.
        safe: that surely fits.
    """

    of: int
    largest: int
    safe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveBatch(Document):
    """One way to make an optimizer step of so many samples.

    Attributes:
        micro_batch: samples of a micro-step.
        num_micro_steps: of an optimizer step (``--grad-accum``).
        num_gpus: that have batches of their own.
        device_bytes: peak of the device with it, in bytes.
        verdict: whether it surely fits.
    """

    micro_batch: int
    num_micro_steps: int
    device_bytes: int
    verdict: Verdict
    num_gpus: int = 1

    @property
    def samples(self) -> int:
        """Of an optimizer step, on all GPUs."""
        return self.micro_batch * self.num_micro_steps * self.num_gpus

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("micro_batch", "num_micro_steps", "num_gpus", "samples", "device_bytes", "verdict")
        return {name: document(getattr(self, name)) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest(Document):
    """The answer for one GPU.

    Attributes:
        gpu: its name.
        usable_bytes: what PyTorch can have of it.
        largest: the largest size that runs with the context expected; 0 where not even the
            smallest does.
        safe: the largest that surely fits, at the upper end of the range of the device peak; 0
            where none does.
        end: what keeps it from being larger.
        curve: the sizes that were looked at, and some beside them, in order.
        multiples: the largest round sizes.
        unsteady: sizes below the largest that do not run although it does: how blocks fit and how
            lengths are aligned has a say too.
        effective: ways to reach the effective batch that was asked for, the one that is exact
            first; empty where none was asked for or nothing fits.
    """

    gpu: str
    usable_bytes: int
    largest: int
    safe: int
    end: CurveEnd
    curve: tuple[CurvePoint, ...]
    multiples: tuple[Multiple, ...] = ()
    unsteady: tuple[int, ...] = ()
    effective: tuple[EffectiveBatch, ...] = ()

    def at(self, size: int) -> CurvePoint | None:
        """The point of the curve for a size, None if there is none."""
        return next((point for point in self.curve if point.size == size), None)

    @property
    def verdict(self) -> Verdict:
        """The best one of any size that was looked at: ``fits`` where one is safe."""
        return min((point.verdict for point in self.curve), key=lambda verdict: verdict.rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "gpu": {"name": self.gpu, "usable_bytes": self.usable_bytes},
            "largest": self.largest,
            "safe": self.safe,
            "ended_by": self.end.value,
            "multiples": document(self.multiples),
            "unsteady": list(self.unsteady),
            "effective": document(self.effective),
            "curve": document(self.curve),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxBatch(Answer):
    """The largest batch, sequence length or image size of a model on one GPU or several.

    Attributes:
        model: the model's reference.
        of: what was looked for.
        step: sizes that were looked at are multiples of this.
        setup: of the run; the size that was looked for has no meaning in it.
        effective_batch: samples of an optimizer step that were asked for, None otherwise.
        answers: one for each GPU, in the order they were named.
        assumptions: what was decided, in sentences.
        notes: what the user should know besides.
    """

    model: str
    of: SizeAxis
    step: int
    setup: Setup
    effective_batch: int | None
    answers: tuple[Largest, ...]
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def largest(self) -> int:
        """The largest size that runs on the first GPU, 0 where none does."""
        return self.answers[0].largest

    @property
    def safe(self) -> int:
        """The largest size that surely fits the first GPU, 0 where none does."""
        return self.answers[0].safe

    @property
    def smallest(self) -> int:
        """The smallest size that was looked at."""
        return smallest_batch(self.setup) if self.of is SizeAxis.BATCH else self.step

    def to_dict(self) -> dict[str, Any]:
        """The document that ``memest max-batch --json`` prints; sizes of memory in bytes."""
        setup = {k: v for k, v in self.setup.to_dict().items() if k != self.of.field}
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "of": self.of.value,
            "step": self.step,
            "setup": setup,
            "effective_batch": self.effective_batch,
            "answers": document(self.answers),
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
        }
