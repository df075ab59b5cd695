"""Which attention kernel CUDA runs, and the operators it runs to get there.

Source: ``ATen/native/transformers/cuda/sdp_utils.cpp`` (order and constraints) and
``ATen/native/transformers/attention.cpp`` (what is done around the kernels), torch 2.6 to 2.13;
``sdp_utils_cpp.h`` of the wheel of 2.14.1.
"""

from __future__ import annotations

import math

import torch

from memest.config.installed import installed_version
from memest.config.setup import SdpaBackend
from memest.errors import ConfigError
from memest.trace.legacy.torch import FLASH_2, packed_flash
from memest.workspaces.attention_choice import (
    EFFICIENT_GROUPS,
    SdpaCall,
    check_ring_kernel,
    choose_backend,
)
from memest.workspaces.operator_call import GpuTraits

__all__ = [
    "additive_mask",
    "math_attention",
    "scaled_dot_product_attention",
]

aten = torch.ops.aten
_UNBATCHED = (2, 14)
"""First torch that gives operands without a batch one before it chooses a kernel."""
_NOT_INSTALLED = (
    "--software torch=2.14: from that release on the efficient kernel takes grouped heads, and the "
    "torch installed here cannot trace it. Install torch 2.14 or later, or leave --software out."
)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    gpu: GpuTraits,
    forced_backend: SdpaBackend = SdpaBackend.AUTO,
    choices: list[tuple[SdpaCall, str]] | None = None,
) -> torch.Tensor:
    """What ``aten::scaled_dot_product_attention`` runs on a CUDA tensor, operator by operator."""
    if gpu.torch >= _UNBATCHED and query.dim() == key.dim() == value.dim() == 3:
        return scaled_dot_product_attention(
            query.unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())],
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            gpu=gpu,
            forced_backend=forced_backend,
            choices=choices,
        ).squeeze(0)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    call = SdpaCall(
        dtype=str(query.dtype).removeprefix("torch."),
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        query_len=query.shape[-2],
        key_len=key.shape[-2],
        has_mask=attn_mask is not None,
        dropout=dropout_p,
        is_causal=is_causal,
        grouped=enable_gqa and query.shape[-3] != key.shape[-3],
        needs_grad=needs_grad,
        strided=any(t is not None and t.stride(-1) != 1 for t in (query, key, value, attn_mask)),
    )
    backend = choose_backend(call, gpu, forced_backend)
    if choices is not None:
        choices.append((call, backend.value))
    # check_batch_size_and_num_heads_dense: no kernel broadcasts a batch (queries of a Q-Former)
    batches = {each.shape[0] for each in (query, key, value)}
    if query.dim() != 4 or len(batches) > 1 or len({query.dtype, key.dtype, value.dtype}) > 1:
        backend = SdpaBackend.MATH
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = additive_mask(attn_mask, query.dtype)
    elif attn_mask is not None and attn_mask.requires_grad and backend is SdpaBackend.CUDNN:
        backend = SdpaBackend.EFFICIENT
    if type(query).__name__ == "DTensor":
        check_ring_kernel(backend, call, query.device_mesh.size())  # type: ignore[attr-defined]
    if backend is SdpaBackend.FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale, gpu.torch)
    if backend is SdpaBackend.EFFICIENT:
        if call.grouped and (installed_version("torch") or EFFICIENT_GROUPS) < EFFICIENT_GROUPS:
            raise ConfigError(_NOT_INSTALLED)
        mask = None if attn_mask is None else _align_mask(attn_mask, query, key)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
    if backend is SdpaBackend.CUDNN:
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, needs_grad, dropout_p, is_causal, False, scale=scale
        )[0]
    return math_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        safe=gpu.torch >= (2, 5),
    )


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``convert_boolean_attn_mask``: every call makes its own additive mask.

    Some versions before 2.13 also made ``mask.logical_not()`` on the way, one byte an element.
    """
    zero = aten.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    return aten.where.ScalarOther(mask, zero, -math.inf)


def _align_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``preprocess_mask``: rows padded to multiples of 8 elements, expanded to all heads."""
    length = mask.shape[-1]
    if length % 8 and length > 1:
        padded_mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))
        mask = padded_mask[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    version: tuple[int, int],
) -> torch.Tensor:
    """Head dimensions are padded to a multiple of 8, visibly, and cut again."""
    size = query.shape[-1]
    rest = -size % 8
    if rest:
        query, key, value = (torch.nn.functional.pad(t, (0, rest)) for t in (query, key, value))
    scale = 1.0 / math.sqrt(size) if scale is None else scale
    if version < FLASH_2:
        out = packed_flash(query, key, value, dropout_p, is_causal, scale)
    else:
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    return out[..., :size] if rest else out


def math_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *,
    safe: bool = True,
) -> torch.Tensor:
    """``_scaled_dot_product_attention_math``: half inputs are computed in fp32.

    Locals live exactly as long as those of the C++ function: ``attention`` is one name for scores,
    probabilities and dropped probabilities, all others live to the end.

    Args:
        query: like the operator's arguments, as are all up to ``enable_gqa``.
        key: see above.
        value: see above.
        mask: additive.
        dropout_p: see above.
        is_causal: see above.
        scale: see above.
        enable_gqa: see above.
        safe: ``_safe_softmax``, since torch 2.5.
    """
    origin = query.dtype
    half = origin in (torch.float16, torch.bfloat16)
    query_acc, key_acc, value_acc = (t.float() if half else t for t in (query, key, value))
    factor = math.sqrt(1.0 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    scaled_query = query_acc * factor
    if is_causal:
        causal_mask = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
        ).tril()
        mask = additive_mask(causal_mask, scaled_query.dtype)
        del causal_mask
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key_acc = key_acc.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value_acc = value_acc.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    attention = torch.matmul(scaled_query, key_acc.transpose(-2, -1) * factor)
    if mask is not None:
        attention.add_(mask)
    attention = aten._safe_softmax(attention, -1) if safe else torch.softmax(attention, -1)
    if dropout_p > 0.0:
        attention = torch.dropout(attention, dropout_p, True)
    # the operator also returns the probabilities in the inputs' dtype, and makes them first
    probabilities = attention.to(origin)
    result = torch.matmul(attention, value_acc).to(origin)
    del probabilities
    return result
