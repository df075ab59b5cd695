"""Code that names ``cuda`` itself: on a trace its tensors are on meta, as all others are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._device import _device_constructors

__all__ = ["cuda_is_meta", "without_modes"]


def _trace_device(device: Any) -> Any:
    """The device on a trace: meta for any GPU."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return torch.device("meta")
    if isinstance(device, str):
        return torch.device("meta") if device.partition(":")[0] == "cuda" else device
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("meta")
    return device


class _CudaIsMeta(TorchFunctionMode):
    """Rewrites the device of whatever makes or moves a tensor.

    Python functions are asked before PyTorch looks for a driver, so code runs on machines without
    one; and where there is one, nothing gets to the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._makes = _device_constructors()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0].to("meta")
        if func is torch.Tensor.pin_memory:
            return args[0]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _trace_device(kwargs["device"])}
        elif func is torch.Tensor.to and len(args) > 1 and not isinstance(args[1], torch.Tensor):
            args = (args[0], _trace_device(args[1]), *args[2:])
        if func in self._makes and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


@contextmanager
def cuda_is_meta(*, enabled: bool = True) -> Iterator[None]:
    """While it holds, tensors made on or moved to ``cuda`` are on meta."""
    if not enabled:
        yield
        return
    mode = _CudaIsMeta()
    run_backward = torch.autograd._engine_run_backward

    def also_in_backward(*args: Any, **kwargs: Any) -> Any:
        # a mode is not on while one of its functions runs, and backward is one: what checkpointing
        # recomputes there is the user's code again
        with mode:
            return run_backward(*args, **kwargs)

    with mode, mock.patch.object(torch.autograd, "_engine_run_backward", also_in_backward):
        yield


def without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called with no function mode on: Dynamo would take one for the model's code.

    Dynamo cannot guard on sets of functions that a mode looks into, and a compiled model names its
    devices in the graph.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for _ in range(torch._C._len_torch_function_stack()):
                stack.enter_context(_pop_mode_temporarily())
            return function(*args, **kwargs)

    return call
