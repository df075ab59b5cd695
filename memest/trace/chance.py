"""Random numbers: what a trace draws is given back, and every trace draws the same."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

__all__ = ["same_draws", "undisturbed"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_SEED = 20_241_121


@contextmanager
def _kept() -> Iterator[None]:
    """Generators of this process as they were: Python's, NumPy's where it is loaded, torch's."""
    numpy = sys.modules.get("numpy")
    python, own = random.getstate(), torch.default_generator.get_state()
    theirs = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(own)
        if numpy is not None and theirs is not None:
            numpy.random.set_state(theirs)


def undisturbed(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Leave the generators of the process as a function finds them."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with _kept():
            return function(*args, **kwargs)

    return call


def same_draws() -> None:
    """Begin at the same place in every trace, so that traces at two sizes can be compared."""
    random.seed(_SEED)
    # of the CPU alone: torch.manual_seed would leave a seed for CUDA behind
    torch.default_generator.manual_seed(_SEED)
