"""Handlers of collectives whose result is waited for later, and of composites below autograd."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memest.trace.recorder import Handler, Recorder

__all__ = ["Gather", "kept_until_waited"]


def kept_until_waited(collectives: Iterable[Any], composites: Iterable[Any]) -> dict[Any, Handler]:
    """Collectives that keep what they send until it is waited for, and composites taken apart.

    Source: ``TensorShelf`` of ``ProcessGroupNCCL.hpp`` (torch 2.8 and later): asynchronous
    collectives keep their tensors until ``Work.wait``. The operators of torch's functional
    collectives are asynchronous, and ``AsyncCollectiveTensor`` waits when it is used. They stand
    beside ``collective_handlers``, which wrap what is waited for.

    Args:
        collectives: of torch's functional collectives, whose first argument is sent.
        composites: which arrive whole because they are called below autograd.
    """
    sent: dict[int, torch.Tensor] = {}

    def send(_recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        sent[out.untyped_storage()._cdata] = args[0]
        return out

    def wait(_recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> Any:
        sent.pop(args[0].untyped_storage()._cdata, None)
        return args[0]

    return {
        **dict.fromkeys(composites, _decomposed),
        **dict.fromkeys(collectives, send),
        torch.ops._c10d_functional.wait_tensor.default: wait,
    }


def _decomposed(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Here are the parts of a composite that arrived whole."""
    with recorder:
        return func.decompose(*args, **kwargs)


# -- an evaluation's -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gather:
    """Gathers tensors of all processes, which have the same shapes here: those of the largest.

    Attributes:
        ranks: processes; None where none was launched beside this one, and nothing is copied. One
            that was launched as one of several gathers from itself.
    """

    ranks: int | None

    def __call__(self, value: Any) -> Any:
        """A tensor, or several in tuples, lists and mappings, gathered one after the other."""
        return value if self.ranks is None else _mapped(self._gathered, value)

    def pad(self, value: Any) -> None:
        """``pad_across_processes`` along the second dimension, where nothing is to be padded.

        The sizes of all processes are gathered, and compared on the host.
        """
        if self.ranks is not None and value is not None:
            _mapped(self._compared, value)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        ranks = self.ranks or 1
        if tensor.ndim == 0:
            tensor = tensor.clone()[None]
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        flat = torch.empty(ranks * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return flat.view(-1, *tensor.shape[1:])

    def _compared(self, tensor: torch.Tensor) -> None:
        if tensor.ndim > 1:
            size = torch.empty(tensor.ndim, dtype=torch.int64, device=tensor.device)
            self._gathered(size[None])


def _mapped(function: Any, value: Any) -> Any:
    """As ``recursively_apply``, which knows named tuples by their fields."""
    if isinstance(value, (tuple, list)):
        items = [_mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        kind: Any = type(value)
        return kind({name: _mapped(function, item) for name, item in value.items()})
    return function(value)
