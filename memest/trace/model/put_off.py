"""Libraries that transformers imports beside every model, loaded once something of them is called.

``transformers.modeling_utils`` imports the losses of all models and all quantisers, and with them
SciPy (for one function, which matches boxes) and torchao (for one that writes checkpoints).
Together they take an eighth of the processor time that torch and a model's code do, and hardly a
trace calls any of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any

__all__ = ["put_off"]

_FUNCTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # loss/loss_for_object_detection.py and its like (transformers 4.43 to 5)
        "scipy.optimize": ("linear_sum_assignment",),
        # quantizers/quantizer_torchao.py (transformers 5)
        "torchao.prototype.safetensors.safetensors_support": ("flatten_tensor_state_dict",),
    }
)
"""What is imported for its functions alone, as ``from module import function``."""


class _StandIn(ModuleType):
    """A module that is loaded when more is asked of it than the functions that it was given."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            return _Parts(self)
        if name.startswith("__"):
            raise AttributeError(name)  # what looks through all modules (inspect) asks for these
        return getattr(_load(self), name)


class _Parts:
    """Where a module's parts are: whoever imports one of them loads the module."""

    def __init__(self, stand_in: ModuleType) -> None:
        self._stand_in = stand_in

    def __iter__(self) -> Iterator[str]:
        return iter(getattr(_load(self._stand_in), "__path__", ()))


def _load(stand_in: ModuleType) -> ModuleType:
    """The module itself."""
    name = stand_in.__name__
    if sys.modules.get(name) is stand_in:
        del sys.modules[name]
    return importlib.import_module(name)


def _called_later(stand_in: ModuleType, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(_load(stand_in), name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def _is_to_be_loaded(name: str) -> bool:
    return name not in sys.modules and find_spec(name.partition(".")[0]) is not None


@contextmanager
def put_off(functions: Mapping[str, tuple[str, ...]] = _FUNCTIONS) -> Iterator[None]:
    """While it is open, some functions are imported without the modules that they are of.

    A module that is loaded already, and one of a library that is not installed, is left as it is.

    Args:
        functions: by the name of their module.
    """
    stand_ins = {name: _StandIn(name) for name in functions if _is_to_be_loaded(name)}
    for name, stand_in in stand_ins.items():
        for function in functions[name]:
            setattr(stand_in, function, _called_later(stand_in, function))
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]
