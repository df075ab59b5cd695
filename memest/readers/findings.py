"""What a reader finds: values with where they come from, and what it leaves aside, with why."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Level", "Reading", "Remark", "Said"]


class Level(enum.IntEnum):
    """Who has the last word: the higher one."""

    DEFAULT = 1
    """A framework's own default."""
    FILE = 2
    COMMAND = 3
    """The launch command: launcher, environment and script."""
    FLAG = 4
    """memest's own command line, or a keyword in Python."""


@dataclass(frozen=True, slots=True)
class Said:
    """One value.

    Attributes:
        option: keyword of an option of an estimate, or ``model``.
        value: in any spelling that the option takes.
        origin: where it was said: ``run.yaml:micro_batch_size``, ``command: --bf16``,
            ``default of axolotl``.
        level: how much it counts.
        by: framework that it is a value of.
        checked: it is DeepSpeed's, and the Trainer stops where its own value differs
            (``HfTrainerDeepSpeedConfig.fill_match`` of transformers 5.23).
    """

    option: str
    value: Any
    origin: str
    level: Level
    by: str = ""
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Remark:
    """A key that became no value.

    Attributes:
        key: with its file: ``run.yaml:warmup_steps``.
        why: it does not matter, or what of it is not modelled.
    """

    key: str
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one document says.

    Attributes:
        source: file name, or ``command``.
        format: title of its format.
        said: values.
        ignored: what does not matter for memory.
        not_modelled: what matters, or may, and is left out of the estimate.
        samples_per_step: samples of an optimizer step over all GPUs, where the document has them.
    """

    source: str
    format: str
    said: tuple[Said, ...] = ()
    ignored: tuple[Remark, ...] = ()
    not_modelled: tuple[Remark, ...] = ()
    samples_per_step: tuple[int, str] | None = field(default=None)
