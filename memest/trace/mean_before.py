"""``mean`` as it was: from torch 1.13 to 2.1 its backward kept the input, though it needs the size.

Source: ``torch/csrc/autograd/generated/Functions.h`` of the wheels. ``MeanBackward1``, which is
``mean.dim``, has no saved variable in 1.12.1, ``self_`` in 1.13.1, 2.0.1 and 2.1.2, and none from
2.2.2 on; ``MeanBackward0``, of all elements, has ``self_`` in 2.0.1 and 2.1.2 alone. So the squares
of which an RMS norm takes the mean stayed alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["mean_kernels"]

aten = torch.ops.aten
_SINCE_OF_DIMS, _SINCE_OF_ALL, _UNTIL = (1, 13), (2, 0), (2, 2)


def mean_kernels(version: tuple[int, int]) -> dict[str, Callable[..., torch.Tensor]]:
    """Kernels by operator where this release of torch kept the input; none elsewhere."""
    kernels: dict[str, Callable[..., torch.Tensor]] = {}
    if _SINCE_OF_DIMS <= version < _UNTIL:
        kernels["mean.dim"] = _of_dims
    if _SINCE_OF_ALL <= version < _UNTIL:
        kernels["mean"] = _of_all
    return kernels


def _of_dims(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    return _Mean.apply(x, None if dim is None else tuple(dim), keepdim, dtype)


def _of_all(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _Mean.apply(x, None, False, dtype)


class _Mean(torch.autograd.Function):
    """``mean_backward``: the gradient is expanded, and divided by how many were taken together."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: tuple[int, ...] | None, keepdim: bool,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:  # fmt: skip
        with torch._C._AutoDispatchBelowAutograd():
            out = aten.mean.dim(x, dim, keepdim, dtype=dtype)
        ctx.save_for_backward(x)
        ctx.dims = sorted(d % x.dim() for d in dim or range(x.dim())) if x.dim() else []
        ctx.keepdim = keepdim
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        grad, count = grads[0], 1
        for d in ctx.dims:
            count *= x.shape[d]
            if not ctx.keepdim:
                grad = grad.unsqueeze(d)
        return (grad.expand(x.shape) / count).to(x.dtype), None, None, None
