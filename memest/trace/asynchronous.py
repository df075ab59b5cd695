"""Handlers of collectives whose result is waited for later, and of composites below autograd."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memest.trace.recorder import Handler, Recorder

__all__ = ["kept_until_waited"]


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
