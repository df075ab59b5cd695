"""What would make a run fit: a few changes, each with what it saves and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from memest.report.answer import Answer, Document
from memest.report.result import Verdict

__all__ = ["Suggestion", "Suggestions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion(Document):
    """One change of a run, of one option or of a few together.

    Attributes:
        words: what is done, as a phrase.
        options: what is given in addition or in place, by the options' keywords.
        arguments: the same as the command line spells it.
        verdict: of the run with it.
        device_bytes: its expected device peak.
        gain_bytes: what it saves of the device peak.
        relative_time: estimated time of a sample over that without it; None where it is not
            comparable, because other GPUs share the work, and of pipelines.
        changes_training: what makes the training another one; empty where it is only a matter of
            memory and time.
    """

    words: str
    options: tuple[tuple[str, Any], ...]
    arguments: str
    verdict: Verdict
    device_bytes: int
    gain_bytes: int
    relative_time: float | None
    changes_training: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        time = self.relative_time
        rounded = {"relative_time": None if time is None else round(time, 3)}
        return Document.to_dict(self) | {"options": dict(self.options)} | rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions(Answer):
    """What to change of a run, best first.

    Attributes:
        model: its reference.
        gpu: name of the GPU.
        usable_bytes: what PyTorch can have of its memory.
        verdict: of the run as it is.
        device_bytes: its expected device peak.
        changes: that were found: of a run that does not surely fit those that make it fit, else
            what makes use of the room that is left.
        closest: where the run does not fit with any of them, the one that misses by the least.
        time_basis: what the relative times are made of.
    """

    model: str
    gpu: str
    usable_bytes: int
    verdict: Verdict
    device_bytes: int
    changes: tuple[Suggestion, ...]
    closest: Suggestion | None
    time_basis: str
    computed: ClassVar[tuple[str, ...]] = ("miss_bytes",)

    @property
    def miss_bytes(self) -> int:
        """By how much the closest change misses; 0 where there is none."""
        if self.closest is None:
            return 0
        return max(self.closest.device_bytes - self.usable_bytes, 0)
