"""FlashAttention 2 without the flash-attn package: what its kernels keep and return.

Source: ``flash_attn/flash_attn_interface.py`` and ``csrc/flash_attn/flash_api.cpp`` of flash-attn
2.8. Layout is [batch, sequence, heads, head size], or [tokens, heads, head size] where padding was
cut out. The operators recorded are PyTorch's own copies of the same kernels, so the rules for
their hidden buffers hold for both.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from memest.errors import ConfigError
from memest.trace.cuda.patching import patch_attributes

__all__ = ["provide_flash_attention"]

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
_UTILS = "transformers.modeling_flash_attention_utils"


@contextmanager
def provide_flash_attention() -> Iterator[None]:
    """Let transformers find FlashAttention 2 and call the functions below."""
    try:
        utils = importlib.import_module(_UTILS)
        modeling = importlib.import_module("transformers.modeling_utils")
    except ImportError:
        yield
        return
    process = partial(utils._lazy_define_process_function, flash_attn_varlen_func)
    functions = {
        "_loaded_implementation": "flash_attention_2",
        "_flash_fn": flash_attn_func,
        "_flash_varlen_fn": flash_attn_varlen_func,
        "_flash_with_kvcache_fn": None,
        "_pad_fn": utils._pad_input,
        "_unpad_fn": utils._unpad_input,
        "_process_flash_kwargs_fn": process(),
        "_process_with_kvcache_kwargs_fn": dict,
    }
    # 5.17 does not have all of these names yet
    functions = {name: value for name, value in functions.items() if hasattr(utils, name)}
    changes = [(utils, name, value) for name, value in functions.items()]
    model = modeling.PreTrainedModel
    if hasattr(model, "_flash_attn_import_error"):
        changes.append((model, "_flash_attn_import_error", lambda *_, **__: None))
    matrix = getattr(utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {2: {}})
    entry = {**matrix[2], "general_availability_check": lambda *_, **__: True}
    with patch_attributes(*changes), mock.patch.dict(matrix, {2: entry}):
        yield


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """``flash_attn.flash_attn_func``."""
    return _run(q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> torch.Tensor:
    """``flash_attn.flash_attn_varlen_func``."""
    lengths = cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)
    return _run(q, k, v, *lengths, dropout_p, softmax_scale, causal)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    if q.dtype not in _HALF:
        raise ConfigError(
            f"FlashAttention 2 only takes fp16 and bf16, and got {q.dtype} queries. Add --bf16 or "
            "--fp16 (autocast), or --dtype bfloat16."
        )
    size = q.shape[-1]
    if size > _MAX_HEAD_DIM:
        raise ConfigError(
            f"FlashAttention 2 takes heads of up to {_MAX_HEAD_DIM}, these have {size}. Use "
            "--attn-implementation sdpa."
        )
    extra = -size % 8
    if extra:
        # padded inside flash-attn's autograd function: the padded copies are what it keeps
        q, k, v = (_Pad.apply(t, extra) for t in (q, k, v))
    out = _FlashAttention.apply(q, k, v, *rest)
    return out[..., :size] if extra else out


class _Pad(torch.autograd.Function):
    """Padding whose gradient is cut without a copy (``dq[..., : dout.shape[-1]]``)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, extra: int) -> torch.Tensor:
        ctx.size = x.shape[-1]
        return torch.nn.functional.pad(x, [0, extra])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0][..., : ctx.size], None


class _FlashAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the output, its log-sum-exp and the state of the generator."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        dropout: float,
        scale: float | None,
        causal: bool,
    ) -> torch.Tensor:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        out, lse, rng_state, _, _ = aten._flash_attention_forward.default(
            q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, rng_state, cu_q, cu_k)
        ctx.rest = (max_q, max_k, dropout, causal)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, out, lse, rng_state, cu_q, cu_k = ctx.saved_tensors
        grad = grads[0]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        dq, dk, dv = aten._flash_attention_backward.default(
            grad, q, k, v, out, lse, cu_q, cu_k, *ctx.rest, rng_state, rng_state, scale=ctx.scale
        )
        return dq, dk, dv, None, None, None, None, None, None, None
