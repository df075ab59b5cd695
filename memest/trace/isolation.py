"""A model is traced as it was built, whatever an earlier trace made it remember.

Position tables that grow, rotary frequencies that are scaled anew, values that the library caches
for the whole process: the first step of a run finds none of them.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

__all__ = [
    "TURN",
    "also_in_backward",
    "in_turn",
    "is_own",
    "keep_random_states",
    "line_here",
    "line_of",
    "own_code",
    "restore_model",
    "seed_generators",
    "seed_numpy",
]


@contextmanager
def restore_model(model: torch.nn.Module) -> Iterator[None]:
    """Forget what was cached for a model, and leave the model as it is found."""
    for name in sorted({type(module).__module__ for module in model.modules()}):
        for clear in _cache_clears(name):
            clear()
    contents = [(module, _contents(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, (values, copies) in contents:
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
def _cache_clears(name: str) -> tuple[Callable[[], None], ...]:
    """What clears the cached functions and methods of a Python module."""
    functions: list[Callable[[], None]] = []
    for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
        if isinstance(value, type) and value.__module__ == name:
            functions.extend(clear for v in vars(value).values() if (clear := _cache_clear_of(v)))
        elif clear := _cache_clear_of(value):
            functions.append(clear)
    return tuple(functions)


def _cache_clear_of(value: Any) -> Callable[[], None] | None:
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


# -- one trace at a time ---------------------------------------------------------------------------


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

TURN = threading.RLock()
"""Held while anything is traced; a thread may take it again."""


def in_turn(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let one thread at a time into all functions so marked; each may call the others."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with TURN:
            return function(*args, **kwargs)

    return call


# -- random numbers --------------------------------------------------------------------------------


_SEED = 20_241_121


@contextmanager
def _restore_random_states() -> Iterator[None]:
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


def keep_random_states(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Leave the generators of the process as a function finds them."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with _restore_random_states():
            return function(*args, **kwargs)

    return call


def seed_generators() -> None:
    """Begin at the same place in every trace, so that traces at two sizes can be compared."""
    random.seed(_SEED)
    # of the CPU alone: torch.manual_seed would leave a seed for CUDA behind
    torch.default_generator.manual_seed(_SEED)


def seed_numpy() -> None:
    """The same for NumPy's generator, by which SpecAugment draws its masks."""
    sys.modules["numpy"].random.seed(_SEED)


# -- whose code runs -------------------------------------------------------------------------------


_HERE = str(Path(__file__).resolve().parents[1]) + os.sep
_MACHINERY = frozenset(("torch", "functorch", "memest"))
_KNOWN = frozenset(
    """torch transformers peft bitsandbytes accelerate liger_kernel timm torchvision""".split()
)
"""Libraries whose code a trace knows how to run."""


@functools.cache
def _standard_library_paths() -> tuple[str, ...]:
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
    return 2 if file.startswith(_standard_library_paths()) else 0


def _innermost_line(frames: Iterable[tuple[str, int, str]], *, own: bool = False) -> str:
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
    return _innermost_line(reversed(frames))


def line_here(*, own: bool = False) -> str:
    """The same of what runs now.

    Args:
        own: only where it is the user's own code, not a library's.
    """
    frames = []
    asked = 0
    frame: Any = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        asked = len(frames) if frame.f_code.co_filename.startswith(_HERE) else asked
        frame = frame.f_back
    # further out is whoever asks memest
    return _innermost_line(frames[:asked], own=own)


def is_own(kind: type) -> bool:
    """Whether a class comes from none of the libraries that a trace knows."""
    return kind.__module__.partition(".")[0] not in _KNOWN


def own_code(model: Any) -> bool:
    """Whether some module of a model, or a hook on one, is the user's, or an unknown library's."""
    return any(
        is_own(type(module)) or any(map(_is_own_function, _hooks_of(module)))
        for module in model.modules()
    )


def _hooks_of(module: Any) -> Iterator[Any]:
    for name, hooks in vars(module).items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            yield from hooks.values()


def _is_own_function(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    kind = getattr(function, "__module__", None) or type(function).__module__
    return kind.partition(".")[0] not in (_KNOWN | {"memest"})


@contextmanager
def also_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """A mode is on, and in what backward recomputes too.

    It is not on while one of its functions runs, and backward is one.
    """
    run_backward = torch.autograd._engine_run_backward

    def with_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    with mode, mock.patch.object(torch.autograd, "_engine_run_backward", with_mode):
        yield
