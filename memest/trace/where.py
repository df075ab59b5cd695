"""Which line of the user's own code is at work: what an error or a note can point at."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["is_own", "line_here", "line_of", "own_code"]

_HERE = str(Path(__file__).resolve().parents[1]) + os.sep
_MACHINERY = frozenset(("torch", "functorch", "memest"))
_KNOWN = frozenset(("torch", "transformers", "peft", "bitsandbytes", "accelerate", "liger_kernel"))
"""Libraries whose code a trace knows how to run."""


@functools.cache
def _standard() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(str(Path(paths[name]).resolve()) + os.sep for name in ("stdlib", "platstdlib"))


@functools.cache
def _rank(file: str) -> int:
    """0 for the user's code, 1 for a library, 2 for what runs it."""
    if file.startswith(("<frozen", _HERE)):
        return 2
    parts = Path(file).parts
    for place in ("site-packages", "dist-packages"):
        if place in parts:
            package = parts[parts.index(place) + 1]
            return 2 if package.removesuffix(".py") in _MACHINERY else 1
    return 2 if file.startswith(_standard()) else 0


def _shown(frames: Iterable[tuple[str, int, str]], *, own: bool = False) -> str:
    best: tuple[int, str, int, str] | None = None
    for file, line, function in frames:  # the innermost comes first
        rank = _rank(file)
        if rank < (best[0] if best is not None else 2):
            best = rank, file, line, function
    if best is None or (own and best[0]):
        return ""
    _, file, line, function = best
    try:
        inside = Path(file).is_relative_to(Path.cwd())
        file = str(Path(file).relative_to(Path.cwd())) if inside else file
    except OSError:
        pass
    return f"{file}:{line}, in {function}"


def line_of(trace: TracebackType | None) -> str:
    """``file:line, in function`` of the innermost line of a traceback that is the user's.

    Returns:
        Of a library's line where none is the user's; empty where there is neither.
    """
    frames = [(f.f_code.co_filename, n, f.f_code.co_name) for f, n in traceback.walk_tb(trace)]
    return _shown(reversed(frames))


def line_here(*, own: bool = False) -> str:
    """The same of what runs now.

    Args:
        own: only where it is the user's own code, not a library's.
    """
    frames = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return _shown(frames, own=own)


def is_own(kind: type) -> bool:
    """Whether a class comes from none of the libraries that a trace knows."""
    return kind.__module__.partition(".")[0] not in _KNOWN


def own_code(model: Any) -> bool:
    """Whether some module of a model is the user's, or an unknown library's."""
    return any(is_own(type(module)) for module in model.modules())
