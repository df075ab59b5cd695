"""One trace at a time in a process.

A trace holds things of the whole process for its time: kernels registered with the dispatcher,
class attributes of libraries, the garbage collector. Threads that trace take turns; what is
answered from traces that are there waits for nobody.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["TURN", "in_turn"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

TURN = threading.RLock()
"""Held while anything is traced; a thread may take it again."""


def in_turn(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let one thread at a time into all functions so marked; each may call the others."""

    @functools.wraps(function)
    def waits(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with TURN:
            return function(*args, **kwargs)

    return waits
