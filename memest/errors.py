"""What can go wrong, and the exit code the command line gives it.

    MemestError (1)
    |- ConfigError, a ValueError (2)      an option, a combination or a file that cannot be
    |  `- UnfitGpuError                   a GPU that cannot run what is asked
    |- UnknownModelError, a LookupError (5)
    |- UnknownGpuError, a LookupError (5)
    |- ModelLoadError (1)                 found, but its config or code cannot be built
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
import re
from collections.abc import Iterable, Iterator

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
    """A model reference that leads nowhere.

    Attributes:
        why: without what to do about it, which is another thing in a browser.
    """

    exit_code = 5

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why or message


class UnknownGpuError(MemestError, LookupError):
    """A GPU name that the catalogue does not have."""

    exit_code = 5


class ModelLoadError(MemestError):
    """A model that was found but whose configuration or code cannot be built."""


class TraceError(MemestError):
    """A model whose training step cannot be traced.

    Attributes:
        why: without what to do about it, where the model's own code failed.
    """

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why


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


def closest(value: str, legal: Iterable[str], *, limit: int = 3) -> list[str]:
    """The legal spellings near to ``value``, best first; empty where none is near.

    Near is a slip of the pen (``bacth`` for ``batch``), and a part of a name (``memory`` for
    ``gpu-memory``). Names that share a part alone (``hidden-size``, ``image-size``) are not: what
    differs has to look alike too.
    """
    by_key: dict[str, str] = {}
    for name in legal:
        by_key.setdefault(_key(name), name)
    word = _key(value)
    if word in by_key:
        return [by_key[word]]
    joined = {key.replace("-", ""): name for key, name in by_key.items()}
    flat = word.replace("-", "")
    if flat in joined:
        return [joined[flat]]
    swapped = [joined[each] for each in _swaps(flat) if each in joined]
    ranks = {key: rank for key in by_key if (rank := _nearness(word, key))}
    best = sorted(ranks, key=lambda key: (-ranks[key], len(key)))
    return list(dict.fromkeys((*swapped, *(by_key[key] for key in best))))[:limit]


def _swaps(word: str) -> Iterator[str]:
    """A word with two neighbouring letters in each other's place: ``rtx4090`` of ``rtx4900``."""
    for at in range(len(word) - 1):
        yield word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def _key(name: str) -> str:
    """A name without what people take for the same: case, dashes in front, kinds of gaps."""
    return re.sub(r"[\s_./:-]+", "-", name.lower()).strip("-")


def _nearness(word: str, name: str) -> float:
    """How near a word is to a name, 0 where it is not."""
    matcher = difflib.SequenceMatcher(None, name, word)
    if len(word) >= _PART and (name.startswith(word) or f"-{word}-" in f"-{name}-"):
        return matcher.ratio() + name.startswith(word)
    if len(name) >= _PART and word.startswith(name) and matcher.ratio() >= _REST:
        # adamw-8bit is nearer to adam8bit than adam is, and of two beginnings the longer one
        return max(matcher.ratio(), _SURELY + matcher.ratio() / 100)
    least = _NEAR_SHORT if len(word) <= _SHORT else _NEAR
    # the quick ones are upper bounds, and spare thousands of names the slow one
    if matcher.real_quick_ratio() < least or matcher.quick_ratio() < least:
        return 0.0
    ratio = matcher.ratio()
    if ratio < least or ratio >= _SURELY:
        return ratio if ratio >= least else 0.0
    words, names = word.split("-"), name.split("-")
    for end in (0, -1):
        while words and names and words[end] == names[end]:
            words.pop(end), names.pop(end)
    rest, other = "-".join(words), "-".join(names)
    alike = difflib.SequenceMatcher(None, other, rest).ratio() >= _REST or _shortens(rest, other)
    return ratio if alike else 0.0


def _shortens(word: str, name: str) -> bool:
    """Whether a word has letters of a name, in their order: ``ckpt``."""
    letters = iter(name)
    return len(word) >= _PART and word[0] == name[:1] and all(letter in letters for letter in word)


_PART, _SHORT = 3, 4
"""Letters that a part of a name has at least, and a short word at most."""
_NEAR_SHORT, _NEAR, _SURELY, _REST = 0.65, 0.7, 0.8, 0.6
"""Ratios of letters in common: of a short word, of a longer one, of one that needs no second look,
and of what is left when parts that are the same are taken away."""


def hint(value: object, legal: Iterable[str]) -> str:
    """What a message says of the legal spelling nearest to ``value``; empty where none is near."""
    matches = closest(str(value), legal, limit=1)
    return f" Did you mean {str(matches[0])!r}?" if matches and matches[0] else ""


def not_legal(
    what: str,
    value: object,
    legal: Iterable[str],
    *,
    state: str = "is not known",
    more: str = "",
    listed_by: str = "",
) -> ConfigError:
    """What to raise for a value that is none of the legal ones.

    Args:
        what: how the message calls it, with the value as it was given.
        value: what the nearest legal one is looked for by.
        legal: the values.
        state: what is wrong with it.
        more: what else is legal.
        listed_by: the command that lists them where they are too many for a message, which then
            has the nearest ones alone.
    """
    names = list(legal)
    message = f"{what} {state}.{hint(value, names)}"
    if not listed_by:
        return ConfigError(f"{message} Legal: {', '.join(names)}{more}.")
    others = closest(str(value), names, limit=_MOST_NAMES)[1:]
    near = f" Also near it: {', '.join(others)}." if others else ""
    return ConfigError(f"{message}{near} All that are legal: {listed_by}.")


_MOST_NAMES = 5
