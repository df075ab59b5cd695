"""Operators that the dispatcher shows as one, and which make more tensors than they return.

A composite with its own derivative runs below the dispatch mode, so what it makes on the way is
not seen. These handlers record it, in the order in which the composite makes it, on every device
alike. (What *kernels* take behind an operator's back is another matter: ``memest.hidden``.)
"""

from __future__ import annotations

from typing import Any

import torch

from memest.trace.recorder import Handler, Recorder

__all__ = ["composite_handlers"]

aten = torch.ops.aten


def _safe_softmax(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """``ATen/native/SoftMax.cpp``: softmax, then zeros for rows that were masked out altogether.

    ``isneginf`` of the input is a bool tensor of its size, made while the softmax exists.
    """
    x, dim = args[0], args[1]
    out = func(*args, **kwargs)
    recorder.born(out, func)
    masked = torch.empty_like(x, dtype=torch.bool)
    recorder.born(masked, aten.isneginf.default)
    recorder.born(masked.new_empty(masked.select(dim, 0).shape), aten.all.dim)
    return out


def composite_handlers() -> dict[Any, Handler]:
    """Handlers that record what composites make on the way."""
    return {aten._safe_softmax.default: _safe_softmax}
