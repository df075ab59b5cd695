"""The CPU's choices where a meta tensor would take another path.

The twin of ``cuda_ops`` for the machine the tests run on: a trace with these operators must give,
byte for byte, what a real step on the CPU allocates. That is how the tracer is proved without a
GPU; nothing else uses it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from memest.trace.cuda import sdpa
from memest.trace.cuda.autocast import Lists
from memest.trace.cuda.cuda_ops import mish_backward
from memest.trace.cuda.patching import Change, optimizers_on, patch_attributes, register_kernels
from memest.trace.recorder import Handler, Recorder

__all__ = ["CPU_LISTS", "cpu_handlers", "cpu_operators", "flash_runs_on_cpu"]

aten = torch.ops.aten

# TORCH_LIBRARY_IMPL(aten, AutocastCPU, m) of ATen/autocast_mode.cpp: much shorter than CUDA's
CPU_LISTS = Lists(
    "AutocastCPU",
    lower=frozenset(
        """conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot
        baddbmm addmm _addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc
        mkldnn_rnn_layer conv_transpose1d conv_transpose2d.input conv_transpose3d.input prelu
        scaled_dot_product_attention _native_multi_head_attention""".split()
    ),
    promote=frozenset(("cat", "index_copy", "stack")),
)


@contextmanager
def cpu_operators() -> Iterator[None]:
    """Run composites and optimizers on meta tensors as they run on this machine's CPU.

    Dropout needs nothing: the CPU takes the same unfused path as meta (a noise tensor in the
    input's dtype).
    """
    kernels: dict[str, Any] = {
        "scaled_dot_product_attention": _attention,
        "mish_backward": mish_backward,
    }
    int8 = _int8_in_floats() if "bitsandbytes" in sys.modules else ()
    # Optimizers take fused kernels where they are told to, and one parameter after the other by
    # default; clip_grad_norm_ takes foreach (``_has_foreach_support``).
    with (
        optimizers_on("cpu", "meta", default_foreach=False),
        register_kernels(kernels),
        patch_attributes(*int8),
    ):
        yield


def _int8_in_floats() -> tuple[Change, ...]:
    """``bitsandbytes.matmul``: the CPU dequantises the weight instead of multiplying int8."""
    import bitsandbytes

    functions = bitsandbytes.autograd._functions

    def matmul(
        a: Any, b: Any, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Any = None
    ) -> Any:
        if threshold > 0.0:
            state.threshold = threshold
        return functions.MatMul8bitFp.apply(a, b, out, bias, state)

    return ((bitsandbytes, "matmul", matmul),)


def flash_runs_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, dropout: float
) -> bool:
    """``use_flash_attention_cpp`` of ``ATen/native/transformers/sdp_utils_cpp.cpp``."""
    if dropout > 0 or any(t.dim() != 4 for t in (query, key, value)):
        return False
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        return False
    if any(t.stride(-1) != 1 for t in (query, key, value)):
        return False
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    if mask.shape[-2] not in (1, query.shape[-2]) or mask.shape[-1] not in (1, key.shape[-2]):
        return False
    return mask.dim() == 2 or (
        mask.shape[0] in (1, query.shape[0]) and mask.shape[1] in (1, query.shape[1])
    )


def _attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    p: Any = 0.0,
    causal: Any = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if mask is not None and mask.dtype == torch.bool:
        mask = sdpa.additive_mask(mask, query.dtype)
    if flash_runs_on_cpu(query, key, value, mask, p):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, p, causal, attn_mask=mask, scale=scale
        )[0]
    return sdpa.math_attention(query, key, value, mask, p, causal, scale, enable_gqa)


def _native_layer_norm(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The CPU keeps mean and rstd in the dtype of half weights; CUDA and meta in fp32."""
    out, mean, rstd = func(*args, **kwargs)
    weight = args[2]
    if weight is not None and weight.dtype == args[0].dtype:
        mean, rstd = mean.to(weight.dtype), rstd.to(weight.dtype)
    return out, mean, rstd


def _roll(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """``roll_cpu`` of ``ATen/native/TensorTransformations.cpp``: one ``cat`` for each dimension."""
    x = args[0]
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    for _ in dims[1:]:
        x = aten.cat.default([x])
        recorder.record_storage(x, func)
    return recorder.record(aten.cat.default([x]), func)


def _copy_strided(*positions: int) -> Handler:
    """Kernels that call ``contiguous`` on inputs when their result is there.

    ``softmax_cpu_out`` and its like (``ATen/native/SoftMax.cpp``), and
    ``embedding_dense_backward_cpu`` (``Embedding.cpp``). On CUDA the rules of hidden allocations
    count such copies.
    """

    def handle(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        out = recorder.record(func(*args, **kwargs), func)
        copies = [args[at].contiguous() for at in positions if not args[at].is_contiguous()]
        for copy in copies:
            recorder.record_storage(copy, func)
        return out

    return handle


def _average_pool_backward(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """``avg_pool2d_backward_kernel_impl`` (``cpu/AvgPoolKernel.cpp``): in the gradient's format."""
    grad = args[0]
    out = recorder.record(func(*args, **kwargs), func)
    last = torch.channels_last
    layout = last if grad.is_contiguous(memory_format=last) else torch.contiguous_format
    if grad.is_contiguous():
        layout = torch.contiguous_format
    copies = [
        x.contiguous(memory_format=layout)
        for x in (out, grad)
        if not x.is_contiguous(memory_format=layout)
    ]
    for copy in copies:
        recorder.record_storage(copy, func)
    return out


def _promotion_handler(
    fallback: Handler | None, operands: int = 2, *, in_place: bool = False
) -> Handler:
    """``TensorIteratorBase::compute_types``: the CPU casts inputs of mixed dtypes to copies first.

    What is written in place in another dtype than the common one is computed beside it first. CUDA
    casts inside the kernel and makes none.

    Args:
        fallback: what handles the operator where dtypes are the same.
        operands: how many of the arguments are.
        in_place: the first of them is the result.
    """

    def handle(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = args[:operands]
        if (
            not all(isinstance(x, torch.Tensor) for x in tensors)
            or len({x.dtype for x in tensors}) == 1
        ):
            return (
                func(*args, **kwargs)
                if fallback is None
                else fallback(recorder, func, args, kwargs)
            )
        common = functools.reduce(_promoted_operand, tensors[1:], tensors[0]).dtype
        copies = []
        if in_place and tensors[0].dtype != common:
            copies.append(torch.empty_like(tensors[0], dtype=common))
        copies += [x.to(common) for x in tensors if x.dtype != common]
        for copy in copies:
            recorder.record_storage(copy, func)
        out = func(*args, **kwargs)
        if not in_place:
            recorder.record_storage(out, func)
        return out

    return handle


def _promoted_operand(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Something of the dtype and the rank that two operands have together."""
    rank = max(left.dim(), right.dim())
    return torch.empty((1,) * rank, dtype=torch.result_type(left, right), device=left.device)


def _gemm_4bit(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """``_gemm_4bit_default_impl`` of bitsandbytes: scales, then the weight, then the product."""
    rows, shape = args[0], args[2]
    scales = kwargs.get("absmax_8bit")
    if scales is not None:
        dequantized_scales = recorder.record(torch.empty_like(scales, dtype=torch.float32), func)
        _offset_scales = recorder.record(torch.empty_like(dequantized_scales), func)
        del dequantized_scales
    _weight = recorder.record(torch.empty(shape, dtype=rows.dtype, device=rows.device), func)
    return recorder.record(func(*args, **kwargs), func)


def cpu_handlers(handlers: Mapping[Any, Handler]) -> dict[Any, Handler]:
    """Handlers for operators whose CPU kernels return other tensors than CUDA's.

    Args:
        handlers: what handles operators of any device; it is asked where the CPU has no say.
    """
    library_handlers: dict[Any, Handler] = {}
    if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        library_handlers[torch.ops.bitsandbytes.gemm_4bit.default] = _gemm_4bit
    binary_ops = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
    in_place_ops = (aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor)
    ternary_ops = (aten.addcmul.default, aten.addcdiv.default)
    return {
        aten.native_layer_norm.default: _native_layer_norm,
        aten.roll.default: _roll,
        aten.embedding_dense_backward.default: _copy_strided(1, 0),
        aten.avg_pool2d_backward.default: _average_pool_backward,
        aten._softmax.default: _copy_strided(0),
        aten._log_softmax.default: _copy_strided(0),
        aten._softmax_backward_data.default: _copy_strided(0, 1),
        **{op: _promotion_handler(handlers.get(op)) for op in binary_ops},
        **{op: _promotion_handler(handlers.get(op), in_place=True) for op in in_place_ops},
        **{op: _promotion_handler(handlers.get(op), 3) for op in ternary_ops},
        **library_handlers,
    }
