"""Code that names ``cuda`` itself: on a trace its tensors are on meta, as all others are.

What such code asks of the driver is answered, or does nothing: clocks, marks for profilers, and
the figures of ``torch.cuda`` that are read where a step is measured. Streams are followed
(:mod:`memest.trace.cuda.streams`).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._device import _device_constructors

from memest.trace.cuda.patching import patch_attributes
from memest.trace.cuda.streams import (
    DEFAULT,
    Event,
    Graphs,
    Stream,
    in_stream,
    named_stream,
    record_stream,
    set_stream,
    watched_streams,
)
from memest.trace.isolation import also_in_backward
from memest.units import GIB
from memest.workspaces.operator_call import GpuTraits

__all__ = ["cuda_is_meta", "trace_device", "without_modes"]


def trace_device(device: Any) -> Any:
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
            kwargs = {**kwargs, "device": trace_device(kwargs["device"])}
        elif func is torch.Tensor.to and len(args) > 1 and not isinstance(args[1], torch.Tensor):
            args = (args[0], trace_device(args[1]), *args[2:])
        if func is _tensor and kwargs.get("device") == _META:
            # made on the host and copied, out of sight on meta (``internal_new_from_data``)
            grad = kwargs.get("requires_grad", False)
            kwargs = {**kwargs, "device": "cpu", "requires_grad": False}
            return func(*args, **kwargs).to(_META).requires_grad_(grad)
        if func in self._makes and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


_tensor = torch.tensor
_META = torch.device("meta")
_A100 = GpuTraits((8, 0), 108, 2048)
_MEMORY = 80 * GIB
"""What code is told that asks how much memory there is; a trace serves cards of any size."""


_STREAMS: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "ExternalStream": Stream,
    "StreamContext": in_stream,
    "stream": in_stream,
    "current_stream": named_stream,
    "set_stream": set_stream,
}
_GRAPHS = ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle", "MemPool")


def _driver(gpu: GpuTraits) -> AbstractContextManager[None]:
    """``torch.cuda`` where there is no driver, as code that measures itself uses it."""
    major, minor = gpu.capability
    properties = types.SimpleNamespace(
        name="GPU",
        major=major,
        minor=minor,
        multi_processor_count=gpu.sm_count,
        total_memory=_MEMORY,
    )

    def says(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    answers = {
        "is_available": True,
        "is_current_stream_capturing": False,
        "is_bf16_supported": gpu.capability >= (8, 0),
        "device_count": 1,
        "current_device": 0,
        "default_stream": DEFAULT,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "get_device_capability": gpu.capability,
        "mem_get_info": (_MEMORY, _MEMORY),
        "memory_summary": "",
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        **dict.fromkeys(
            """synchronize set_device ipc_collect reset_peak_memory_stats
            reset_max_memory_allocated reset_max_memory_cached
            reset_accumulated_memory_stats""".split()
        ),
    }
    memory = torch.cuda.memory
    silent = ("_record_memory_history", "_dump_snapshot", "reset_peak_memory_stats")
    return patch_attributes(
        *((torch.cuda, name, says(value)) for name, value in answers.items()),
        *((memory, name, says(None)) for name in silent),
        (memory, "mem_get_info", says((_MEMORY, _MEMORY))),
        *((torch.cuda, name, own) for name, own in _STREAMS.items()),
        *((torch.cuda, name, Graphs) for name in _GRAPHS),
        (torch.Tensor, "record_stream", record_stream),
        (torch.cuda.nvtx, "_nvtx", mock.MagicMock()),
    )


@contextmanager
def cuda_is_meta(gpu: GpuTraits | None = _A100, *, enabled: bool = True) -> Iterator[None]:
    """While it holds, tensors made on or moved to ``cuda`` are on meta, and a driver answers.

    Args:
        gpu: whose properties code is told; None for no driver, as where steps run on the CPU.
        enabled: whether it does so at all.
    """
    if not enabled:
        yield
        return
    driver = nullcontext() if gpu is None else _driver(gpu)
    with driver, watched_streams(), also_in_backward(_CudaIsMeta()):
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
