"""What a library did otherwise in earlier releases, as a table of patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Change", "Release", "changes_of"]

Release = tuple[int, int]
_FIRST: Release = (0, 0)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that earlier releases did otherwise.

    Attributes:
        patch: does it their way; its docstring says what it is and where that was read.
        until: the first release that does it no more, by family of models; "" is every other
            family, and one that is not named never did it.
        since: the first release that did it, in the same way.
        name: what is patched, where the patch does not know.
    """

    patch: Callable[..., Any]
    until: Mapping[str, Release]
    since: Mapping[str, Release] | None = None
    name: str = ""


def changes_of(changes: Sequence[Change], release: Release, family: str = "") -> Iterator[Change]:
    """The changes that a release does not have yet, in their order.

    Args:
        changes: of one library.
        release: of that library.
        family: of the model.
    """
    for change in changes:
        since = change.since or {}
        first = since.get(family, since.get("", _FIRST))
        if first <= release < change.until.get(family, change.until.get("", _FIRST)):
            yield change
