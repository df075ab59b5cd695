"""A model is traced as it was built, whatever an earlier trace made it remember.

Position tables that grow, rotary frequencies that are scaled anew, values that the library caches
for the whole process: the first step of a run finds none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch

__all__ = ["as_built"]


@contextmanager
def as_built(model: torch.nn.Module) -> Iterator[None]:
    """Forget what was cached for a model, and leave the model as it is found."""
    for name in sorted({type(module).__module__ for module in model.modules()}):
        for clear in _caches(name):
            clear()
    kept = [(module, _contents(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, (values, copies) in kept:
            for value, copy in copies:
                _put_back(value, copy)
            _put_back(vars(module), values)


_Contents = tuple[dict[str, Any], list[tuple[Any, Any]]]


def _contents(values: dict[str, Any]) -> _Contents:
    """A copy of attributes, and copies of those that are collections themselves."""
    collections = [v for v in values.values() if isinstance(v, (dict, list, set))]
    return dict(values), [(value, value.copy()) for value in collections]


def _put_back(value: Any, copy: Any) -> None:
    if isinstance(value, dict):
        same = len(value) == len(copy) and all(
            key in copy and copy[key] is item for key, item in value.items()
        )
    else:
        same = len(value) == len(copy) and all(a is b for a, b in zip(value, copy, strict=True))
    if not same:
        value.clear()
        value.extend(copy) if isinstance(value, list) else value.update(copy)


@cache
def _caches(name: str) -> tuple[Callable[[], None], ...]:
    """What clears the cached functions and methods of a Python module."""
    found: list[Callable[[], None]] = []
    for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
        if isinstance(value, type) and value.__module__ == name:
            found.extend(clear for v in vars(value).values() if (clear := _clearing(v)))
        elif clear := _clearing(value):
            found.append(clear)
    return tuple(found)


def _clearing(value: Any) -> Callable[[], None] | None:
    """The ``cache_clear`` of a cached function, or of one that another function wraps."""
    clear = getattr(value, "cache_clear", None) if callable(value) else None
    if clear is None and isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                clear = getattr(cell.cell_contents, "cache_clear", None)
            except ValueError:  # an empty cell
                continue
            if clear is not None:
                break
    return clear if callable(clear) and not isinstance(value, type) else None
