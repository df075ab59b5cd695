"""FlashAttention behind sdpa as it was before torch 2.2: the first one, on packed tokens.

It takes queries, keys and values as ``[tokens, heads, size]``. Tensors that do not lie so, such as
those of ``nn.MultiheadAttention``, whose sequence comes first, are copied for the call, forward and
backward; and the output is a new tensor of packed tokens, however the queries lay. Since 2.2 it
lies as the queries do.

Source: ``_scaled_dot_product_flash_attention_cuda`` and ``_flash_attention_forward`` of
``ATen/native/transformers/cuda/attention.cu``, torch 2.0 and 2.1 (``query_reshaped``,
``at::empty_like(query)``), and ``attention_backward.cu``.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FLASH_2", "packed_flash"]

aten = torch.ops.aten
FLASH_2 = (2, 2)
"""The release of torch that brought FlashAttention 2."""


def packed_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """The output of attention, ``[batch, heads, tokens, size]``, over packed tokens.

    Args:
        query: ``[batch, heads, tokens, size]``; size a multiple of 8.
        key: as the query.
        value: as the query.
        dropout_p: share of dropped probabilities.
        is_causal: no token sees later ones.
        scale: of the products.
    """
    return _PackedFlash.apply(query, key, value, dropout_p, is_causal, scale)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """As ``[batch, heads, tokens, size]`` over ``[tokens, heads, size]``: a view, else a copy."""
    batch, heads, tokens, size = x.shape
    flat = x.transpose(1, 2).reshape(batch * tokens, heads, size)
    return flat.view(batch, tokens, heads, size).transpose(1, 2)


class _PackedFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float,
        is_causal: bool, scale: float,
    ) -> torch.Tensor:  # fmt: skip
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = (
            aten._scaled_dot_product_flash_attention.default(
                _packed(query), _packed(key), _packed(value), dropout_p, is_causal, False,
                scale=scale,
            )
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, lse, cum_q, cum_k, seed, offset)
        ctx.longest = max_q, max_k
        ctx.settings = dropout_p, is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, out, lse, cum_q, cum_k, seed, offset = ctx.saved_tensors
        dropout_p, is_causal, scale = ctx.settings
        into = aten._scaled_dot_product_flash_attention_backward.default(
            _packed(grads[0]), _packed(query), _packed(key), _packed(value), out, lse, cum_q, cum_k,
            *ctx.longest, dropout_p, is_causal, seed, offset, scale=scale,
        )  # fmt: skip
        return (*into, None, None, None)
