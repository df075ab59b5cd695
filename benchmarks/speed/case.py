"""What is measured: a named piece of work, and the reference that it is told in."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Bench:
    """Where cases work: an empty folder of their own, and numbers that nobody asked with before.

    Answers are kept by memest; a question that is to be worked out must be a new one.
    """

    folder: Path
    profiles: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    fresh: Iterator[int] = field(default_factory=lambda: itertools.count(9))

    def __post_init__(self) -> None:
        """No cache and no profile of the user's takes part, nor does the network."""
        os.environ |= {
            "MEMEST_CACHE": str(self.folder / "cache"), "MEMEST_HOME": str(self.folder / "home"),
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip

    def profile(self, model: str, **options: Any) -> Any:
        """``memest.profile`` of a model, made once for all cases that ask it."""
        import memest

        key = (model, *sorted(options.items()))
        if key not in self.profiles:
            self.profiles[key] = memest.profile(model, **options)
        return self.profiles[key]


Work = Callable[[], "int | None"]
"""One run of a case; a command returns its largest resident set in bytes."""


@dataclass(frozen=True, slots=True)
class Case:
    """A piece of work.

    ``prepare`` gets everything ready (not timed, run once) and returns the work; ``units`` pieces
    are done in one run, and seconds are told for one of them. ``version`` goes up when the work
    changes, so that figures of another work are never compared. ``long`` cases take many
    seconds: they are measured when they are named, and in fewer rounds.
    """

    name: str
    what: str
    reference: str
    prepare: Callable[[Bench], Work]
    units: int = 1
    version: int = 1
    long: bool = False
