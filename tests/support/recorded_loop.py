"""A real training loop on the CPU, recorded as torch records one on a GPU, Python frames included.

Storages of tensors are what is recorded: born with the operator that makes them, dead when their
last reference goes. The modelled allocator hands out the addresses. Backward runs in threads of
its own on a GPU, which have no Python frames, so its frames are left out here.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memest.replay.conf import AllocatorConf
from memest.replay.recording import NO_CATEGORY, AllocationLabel, record

_DEPTH = 60
_IN_BACKWARD = "_engine_run_backward"


class _Storages(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.labels: dict[int, AllocationLabel] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor, _frames())
        return out

    def see(self, tensor: torch.Tensor, frames: list[dict[str, Any]]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known or not storage.nbytes():
            return
        number = len(self.sizes)
        self.sizes.append(storage.nbytes())
        self.events.append(number)
        self.labels[number] = AllocationLabel(frames, NO_CATEGORY)
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._gone, number, storage._cdata).atexit = False

    def _gone(self, number: int, cdata: int) -> None:
        self._known.discard(cdata)
        self.events.append(~number)


def _frames() -> list[dict[str, Any]]:
    """The Python frames of the caller, innermost first, as torch writes them."""
    frames: list[dict[str, Any]] = []
    frame = sys._getframe(2)
    while frame is not None and len(frames) < _DEPTH:
        code = frame.f_code
        if code.co_name == _IN_BACKWARD:
            return []
        frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return frames


def recorded(loop: Callable[[], Any]) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot()`` would return behind a loop.

    Args:
        loop: it; what it returns is alive at the end.
    """
    mode = _Storages()
    gc.collect()
    with mode:
        kept = loop()
    snapshot = record(
        list(mode.events), mode.sizes, AllocatorConf(), label_of=lambda _, n: mode.labels[n]
    )
    del kept
    return snapshot
