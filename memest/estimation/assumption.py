"""What is assumed of a run, in sentences: those that say the same of every run, and the others."""

from __future__ import annotations

__all__ = ["Usual"]


class Usual(str):
    """A sentence that is the same for every run alike: reports tell it on request alone."""

    __slots__ = ()
