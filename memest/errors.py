"""What can go wrong, and the exit code the command line gives it.

    MemestError (1)
    |- ConfigError, a ValueError (2)      an option or a combination that cannot be
    |  `- UnfitGpuError                   a GPU that cannot run what is asked
    |- UnknownModelError, a LookupError (5)
    |- UnknownGpuError, a LookupError (5)
    |- ModelLoadError (1)                 known, but its config or code cannot be read or built
    |- TraceError (1)                     a model whose step cannot be traced
    |- NotKnownError (1)                  what needs a trace, where only what is known was asked for
    |- ReplayError (2)                    an event stream or snapshot that contradicts itself
    |- DeviceError (1)                    a live GPU cannot be read
    |- DoesNotFitError (4)                a live run that would be out of memory
    `- MissingDependencyError, an ImportError (6)

A message says what was wrong, the value received, what is legal (closest match first), and what
to type next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "DeviceError",
    "DoesNotFitError",
    "MemestError",
    "MissingDependencyError",
    "ModelLoadError",
    "NotKnownError",
    "ReplayError",
    "TraceError",
    "UnfitGpuError",
    "UnknownGpuError",
    "UnknownModelError",
    "closest",
    "hint",
    "not_legal",
]


class MemestError(Exception):
    """Base of every error that memest raises on purpose."""

    exit_code = 1


class ConfigError(MemestError, ValueError):
    """An option, a value or a combination of options that cannot be."""

    exit_code = 2


class UnfitGpuError(ConfigError):
    """A GPU that cannot run what is asked.

    Attributes:
        why: in a few words, for a list of the GPUs that are left out.
    """

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why


class UnknownModelError(MemestError, LookupError):
    """A model reference that leads nowhere."""

    exit_code = 5


class UnknownGpuError(MemestError, LookupError):
    """A GPU name that the catalogue does not have."""

    exit_code = 5


class ModelLoadError(MemestError):
    """A model that was found but whose configuration cannot be read or built."""


class TraceError(MemestError):
    """A model whose training step cannot be traced."""


class NotKnownError(MemestError):
    """What needs a trace, where only what is known was asked for."""


class ReplayError(MemestError):
    """An event stream or a snapshot that contradicts itself, or is none."""

    exit_code = 2


class DeviceError(MemestError):
    """A live GPU that cannot be read."""


class DoesNotFitError(MemestError):
    """A training run that was stopped before its first step, because it will not fit."""

    exit_code = 4


class MissingDependencyError(MemestError, ImportError):
    """A package of an extra that is not installed."""

    exit_code = 6


def closest(value: str, legal: Iterable[str], *, limit: int = 3, cutoff: float = 0.5) -> list[str]:
    """The legal spellings nearest to ``value``, best first (may be empty).

    Args:
        value: as it was given.
        legal: the spellings.
        limit: how many, at most.
        cutoff: how alike they must be, 0 to 1.
    """
    candidates = list(dict.fromkeys(legal))
    by_lower_case: dict[str, str] = {}
    for name in candidates:
        by_lower_case.setdefault(name.lower(), name)
    matches = difflib.get_close_matches(value.lower(), by_lower_case, n=limit, cutoff=cutoff)
    return [by_lower_case[name] for name in matches]


def hint(value: object, legal: Iterable[str]) -> str:
    """What a message says of the legal spelling nearest to ``value``; empty where none is near."""
    matches = closest(str(value), legal, limit=1)
    return f" Did you mean {str(matches[0])!r}?" if matches and matches[0] else ""


def not_legal(
    what: str, value: object, legal: Iterable[str], *, state: str = "is not known", more: str = ""
) -> ConfigError:
    """What to raise for a value that is none of the legal ones.

    Args:
        what: how the message calls it, with the value as it was given.
        value: what the nearest legal one is looked for by.
        legal: the values.
        state: what is wrong with it.
        more: what else is legal.
    """
    names = list(legal)
    return ConfigError(f"{what} {state}.{hint(value, names)} Legal: {', '.join(names)}{more}.")
