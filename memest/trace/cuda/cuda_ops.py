"""CUDA's choices where a meta tensor would take another path.

Composite operators pick their parts by device type. Here the choices CUDA makes are registered
for meta tensors with PyTorch's own dispatcher, for the time of a trace, so they hold in forward,
in recomputation and inside other composites alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from memest.config.setup import SdpaBackend
from memest.trace.cuda.patching import optimizers_on, register_kernels
from memest.trace.cuda.sdpa import scaled_dot_product_attention
from memest.trace.legacy.torch import kernels_as_before, torch_as_before
from memest.trace.recorder import Handler, Recorder
from memest.workspaces.operator_call import GpuTraits

__all__ = ["cuda_handlers", "cuda_operators", "kernel_handlers", "mish_backward"]

aten = torch.ops.aten


@contextmanager
def cuda_operators(
    gpu: GpuTraits, sdpa_backend: SdpaBackend, choices: list[tuple[Any, str]] | None = None
) -> Iterator[None]:
    """Run composites and optimizers on meta tensors as they run on this GPU with this torch."""
    kernels: dict[str, Callable[..., Any]] = {
        "dropout": _dropout,
        "softmax.int": _softmax_with(aten._softmax.default),
        "log_softmax.int": _softmax_with(aten._log_softmax.default),
        "rms_norm": _rms_norm,
        "scaled_dot_product_attention": partial(
            scaled_dot_product_attention, gpu=gpu, forced_backend=sdpa_backend, choices=choices
        ),
        "mish_backward": mish_backward,
        **kernels_as_before(gpu.torch),
    }
    # ``foreach`` and ``fused`` are chosen by device type; meta stands for cuda here
    lists = optimizers_on("cuda", "meta", default_foreach=True)
    with lists, register_kernels(kernels), torch_as_before(gpu.torch):
        yield


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """``ATen/native/Dropout.cpp``: the fused kernel with a bool mask, for 0 < p < 1."""
    if p == 0 or not train or x.numel() == 0:
        return x
    if p < 1:
        return aten.native_dropout.default(x, p, train)[0]
    return x * torch.zeros((), dtype=x.dtype, device=x.device)


def _softmax_with(op: Any) -> Callable[..., torch.Tensor]:
    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``ATen/native/SoftMax.cpp``: CUDA fuses the upcast of fp16, not of bf16."""
        if x.dtype == torch.float16 and dtype == torch.float32:
            return op(x, dim, True)
        return op(x if dtype is None else x.to(dtype), dim, False)

    return softmax


def _rms_norm(
    x: torch.Tensor, shape: list[int], weight: Any = None, eps: Any = None
) -> torch.Tensor:
    return _RmsNorm.apply(x, weight, len(shape))


class _RmsNorm(torch.autograd.Function):
    """``_fused_rms_norm``: keeps input, weight and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, dims: int) -> torch.Tensor:
        rows = x.shape[: x.dim() - dims] + (1,) * dims
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty(x.shape, dtype=dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        x, weight, _rstd = ctx.saved_tensors
        grad_weight = torch.empty_like(weight) if weight is not None else None
        return torch.empty_like(x), grad_weight, None


# -- results that meta kernels would lay out otherwise, or that they do not have ------------------


def _native_dropout(_: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _native_dropout_backward(_: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """``masked_scale`` of ``cuda/Dropout.cu``: channels last, or else contiguous."""
    gradient = args[0]
    return torch.empty_like(gradient, memory_format=suggest_memory_format(gradient))


def _roll(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """``roll_cuda``: one dimension at a time, each from a contiguous tensor into a new one.

    Source: ``ATen/native/cuda/TensorTransformations.cu`` and ``roll_common``.
    """
    x = args[0]
    shifts = args[1] if len(args) > 1 else kwargs["shifts"]
    keep = []
    for _ in range(len(shifts) if isinstance(shifts, (list, tuple)) else 1):
        if not x.is_contiguous():
            keep.append(recorder.record(x.new_empty(x.shape), aten.clone.default))
        x = recorder.record(x.new_empty(x.shape), func)
        keep.append(x)
    return x


def _layout(first: torch.Tensor, second: torch.Tensor) -> torch.memory_format:
    """``cudnn_conv_suggest_memory_format``: channels last as soon as one of the two is."""
    for tensor in (first, second):
        layout = suggest_memory_format(tensor)
        if layout in (torch.channels_last, torch.channels_last_3d):
            return layout
    return torch.contiguous_format


def _with_layout(tensor: torch.Tensor | None, layout: torch.memory_format) -> torch.Tensor | None:
    if tensor is None or tensor.is_contiguous(memory_format=layout):
        return tensor
    return torch.empty_like(tensor, memory_format=layout)


def mish_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One kernel on CPU and CUDA; meta takes the formula apart (``math_mish_backward``).

    Source: ATen/native/Activation.cpp, ``TensorIterator::binary_op``: nothing but the result.
    """
    return grad * x


def _convolution(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Meta leaves results contiguous; cuDNN returns the layout of its operands."""
    return _with_layout(recorder.result_of(func, args, kwargs), _layout(args[0], args[1]))


def _convolution_backward(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """``cudnn_convolution_backward`` of ``ATen/native/cudnn/ConvShared.cpp``."""
    grad_input, grad_weight, grad_bias = recorder.result_of(func, args, kwargs)
    layout = _layout(args[1], args[2])
    return _with_layout(grad_input, layout), _with_layout(grad_weight, layout), grad_bias


def cuda_handlers() -> dict[Any, Handler]:
    """Handlers for operators whose meta kernel differs from CUDA's in what it returns."""
    return {
        aten.native_dropout.default: _native_dropout,
        aten.native_dropout_backward.default: _native_dropout_backward,
        aten.roll.default: _roll,
        aten.convolution.default: _convolution,
        aten.convolution_backward.default: _convolution_backward,
    }


# -- what meta kernels show otherwise than real ones, on every device ------------------------------


def _safe_softmax(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """``ATen/native/SoftMax.cpp``: softmax, then zeros for rows that were masked out altogether.

    ``isneginf`` of the input is a bool tensor of its size, made while the softmax exists.
    """
    x, dim = args[0], args[1]
    out = recorder.record(recorder.result_of(func, args, kwargs), func)
    mask = recorder.record(torch.empty_like(x, dtype=torch.bool), aten.isneginf.default)
    recorder.record_storage(mask.new_empty(mask.select(dim, 0).shape), aten.all.dim)
    return out


def _reduced_loss(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A reduced loss is a number on a storage as large as the unreduced loss.

    ``TORCH_META_FUNC(mse_loss)`` in ``ATen/native/BinaryOps.cpp`` makes the result with the
    inputs' shape, then resizes it to a number; resizing never gives memory back. The same holds
    for smooth_l1, binary cross-entropy and soft margin.
    """
    out = recorder.result_of(func, args, kwargs)
    if out.dim() or not args[0].dim():
        return out
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return out.new_empty(shape).resize_(())


def _contiguous_first(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The first result is contiguous, whatever the arguments' layout.

    ``ATen/native/layer_norm.cpp`` and ``cuda/layer_norm_kernel.cu`` (``LEGACY_CONTIGUOUS``);
    ``TORCH_META_FUNC(_log_softmax_backward_data)`` (``set_output_raw_strided`` without strides).
    """
    out = recorder.result_of(func, args, kwargs)
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

    def handler(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        first, *rest = recorder.result_of(func, args, kwargs)
        layout = suggest_memory_format(args[position])
        if first is not None and not first.is_contiguous(memory_format=layout):
            first = torch.empty_like(first, memory_format=layout)
        return (first, *rest)

    return handler


def _batch_norm(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """What a batch norm in training returns: the result, and its mean and inverse deviation.

    Meta takes it apart into some thirty operators of Python to find that out.
    """
    x, training = args[0], args[5]
    if kwargs or not training or not x.is_floating_point() or x.dim() < 2:
        return _like_batch(0)(recorder, func, args, kwargs)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    out = torch.empty_like(x, memory_format=suggest_memory_format(x))
    return out, x.new_empty(x.shape[1], dtype=wide), x.new_empty(x.shape[1], dtype=wide)


def _batch_norm_backward(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Gradients of the input as it lies, of weight and bias as the weight is."""
    x, weight, training, mask = args[1], args[2], args[7], args[9]
    if kwargs or not training or weight is None:
        return _like_batch(1)(recorder, func, args, kwargs)
    grad = torch.empty_like(x, memory_format=suggest_memory_format(x))
    of_weight = torch.empty_like(weight) if mask[1] else None
    return grad, of_weight, torch.empty_like(weight) if mask[2] else None


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
        aten.native_batch_norm.default: _batch_norm,
        aten._native_batch_norm_legit.default: _like_batch(0),
        aten.native_batch_norm_backward.default: _batch_norm_backward,
        aten.cudnn_batch_norm.default: _like_batch(0),
        aten.cudnn_batch_norm_backward.default: _like_batch(0),
    }
