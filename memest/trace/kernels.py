"""Operators whose meta kernels show other tensors than the real kernels make, on every device.

Two kinds. Composites with a derivative of their own run below the dispatch mode: what they make on
the way is recorded here, in the order in which they make it. And some meta kernels (decompositions
written in Python) lay their results out differently from the C++ kernels, which decides whether a
later ``reshape`` copies. What *kernels* take behind an operator's back is another matter
(``memest.hidden``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from memest.trace.recorder import Handler, Recorder

__all__ = ["kernel_handlers"]

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


def _reduced_loss(_: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A reduced loss is a number on a storage as large as the unreduced loss.

    ``TORCH_META_FUNC(mse_loss)`` in ``ATen/native/BinaryOps.cpp`` makes the result with the
    inputs' shape, then resizes it to a number; resizing never gives memory back. The same holds
    for smooth_l1, binary cross-entropy and soft margin.
    """
    out = func(*args, **kwargs)
    if out.dim() or not args[0].dim():
        return out
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return out.new_empty(shape).resize_(())


def _contiguous_first(_: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The first result is contiguous, whatever the arguments' layout.

    ``ATen/native/layer_norm.cpp`` and ``cuda/layer_norm_kernel.cu`` (``LEGACY_CONTIGUOUS``);
    ``TORCH_META_FUNC(_log_softmax_backward_data)`` (``set_output_raw_strided`` without strides).
    """
    out = func(*args, **kwargs)
    if isinstance(out, torch.Tensor):
        return out if out.is_contiguous() else out.new_empty(out.shape)
    first, *rest = out
    if first is None or first.is_contiguous():
        return out
    return (first.new_empty(first.shape), *rest)


def _like_batch(position: int) -> Handler:
    """Batch norm lays its result out as its input: channels last, or else contiguous.

    ``ATen/native/cudnn/BatchNorm.cpp`` and ``ATen/native/Normalization.cpp``
    (``suggest_memory_format``).
    """

    def handler(_: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        first, *rest = func(*args, **kwargs)
        layout = suggest_memory_format(args[position])
        if first is not None and not first.is_contiguous(memory_format=layout):
            first = torch.empty_like(first, memory_format=layout)
        return (first, *rest)

    return handler


def kernel_handlers() -> dict[Any, Handler]:
    """Handlers that show what the real kernels make and return."""
    return {
        aten._safe_softmax.default: _safe_softmax,
        aten.mse_loss.default: _reduced_loss,
        aten.smooth_l1_loss.default: _reduced_loss,
        aten.binary_cross_entropy.default: _reduced_loss,
        aten.soft_margin_loss.default: _reduced_loss,
        aten.native_layer_norm.default: _contiguous_first,
        aten.native_layer_norm_backward.default: _contiguous_first,
        aten._log_softmax_backward_data.default: _contiguous_first,
        aten.native_batch_norm.default: _like_batch(0),
        aten._native_batch_norm_legit.default: _like_batch(0),
        aten.native_batch_norm_backward.default: _like_batch(1),
        aten.cudnn_batch_norm.default: _like_batch(0),
        aten.cudnn_batch_norm_backward.default: _like_batch(0),
    }
