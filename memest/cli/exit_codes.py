"""The exit codes of every command, and the kinds of errors: what scripts can rely on."""

from __future__ import annotations

import enum

import memest.errors
from memest.errors import MemestError

__all__ = [
    "HOST_MEMORY",
    "OPERATING_SYSTEM",
    "UNEXPECTED",
    "USAGE",
    "ExitCode",
    "error_kinds",
    "kind_of",
]

USAGE = "UsageError"
"""A command line that cannot be parsed."""
OPERATING_SYSTEM = "OperatingSystemError"
HOST_MEMORY = "HostMemoryError"
UNEXPECTED = "UnexpectedError"
"""A bug in memest."""


class ExitCode(enum.IntEnum):
    """What the number means that a command ends with.

    Attributes:
        meaning: in a line for people.
    """

    meaning: str

    def __new__(cls, number: int, meaning: str) -> ExitCode:
        """A number with its meaning."""
        code = int.__new__(cls, number)
        code._value_ = number
        code.meaning = meaning
        return code

    DONE = 0, "done; for fits and advise: it fits; for max-batch: a size is safe"
    FAILURE = 1, "failure: a model that cannot be traced, a recording that differs"
    USAGE = 2, "wrong usage: an option, a value or a file that cannot be"
    TIGHT = 3, "tight, too close to call; or fits by releasing cache, slowly"
    DOES_NOT_FIT = 4, "does not fit the GPU, or the host (fits); not even 1 does (max-batch)"
    UNKNOWN = 5, "unknown model or GPU"
    MISSING = 6, "a package of an extra is missing"
    CANNOT_SAY = 7, "cannot say: something is not priced; no history (replay)"
    INTERRUPTED = 130, "interrupted"
    PIPE_CLOSED = 141, "the reader of a pipe is gone"


def kind_of(error: MemestError) -> str:
    """The kind of an error: its class in :mod:`memest.errors`, or that it is derived from."""
    names = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "memest.errors")
    return next(names, MemestError.__name__)


def error_kinds() -> list[str]:
    """Every kind of error that a document can name."""
    classes = (getattr(memest.errors, name) for name in memest.errors.__all__)
    own = [c.__name__ for c in classes if isinstance(c, type) and issubclass(c, MemestError)]
    return [*own, USAGE, OPERATING_SYSTEM, HOST_MEMORY, UNEXPECTED]
