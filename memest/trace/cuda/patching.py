"""What a trace changes in libraries for its time: their attributes, and PyTorch's kernels."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch

__all__ = ["Change", "optimizers_on", "patch_attributes", "register_kernels"]

Change = tuple[Any, str, Any]
"""An attribute's owner (a module may be named), its name and its value."""


@contextmanager
def patch_attributes(*changes: Change) -> Iterator[None]:
    """Attributes have other values while this is open."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            holder = importlib.import_module(owner) if isinstance(owner, str) else owner
            stack.enter_context(mock.patch.object(holder, name, value))
        yield


@contextmanager
def register_kernels(
    kernels: Mapping[str, Callable[..., Any]], key: str = "AutogradMeta"
) -> Iterator[None]:
    """Operators of aten have these kernels for a dispatch key while this is open."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # replacing kernels is the purpose here
            warnings.simplefilter("ignore", UserWarning)
            for name, kernel in kernels.items():
                library.impl(name, kernel, key, allow_override=True)
        yield
    finally:
        with suppress(AttributeError):
            library._destroy()


def optimizers_on(*devices: str, default_foreach: bool) -> Any:
    """Optimizers take the kernels for many tensors on these devices, as torch asks by type.

    Args:
        devices: types of device.
        default_foreach: whether optimizers that are told nothing take them too.
    """
    utils, optimizer = "torch.utils._foreach_utils", "torch.optim.optimizer"
    foreach, fused = (f"_get_{kind}_kernels_supported_devices" for kind in ("foreach", "fused"))
    places = [(utils, foreach), (utils, fused), (optimizer, fused)]
    if default_foreach:
        places.append((optimizer, foreach))
    return patch_attributes(*((owner, name, lambda: list(devices)) for owner, name in places))
