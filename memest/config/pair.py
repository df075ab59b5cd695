"""A row of the tables of options that do not go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memest.config.training_run import TrainingRun

__all__ = ["Pair"]


class Pair(NamedTuple):
    """An option that is refused beside others.

    Attributes:
        groups: the others, by the names that :func:`refuse_pairs` takes, with blanks between.
        label: the option; ``{s}`` is the setup.
        applies: whether a setup has the option.
        why: the reason, where there is more to say than that nobody compared it.
        remedy: what to write; given, ``label`` names both of them, and they exclude each other.
    """

    groups: str
    label: str
    applies: Callable[[TrainingRun], object]
    why: str = ""
    remedy: str = ""
