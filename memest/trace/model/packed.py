"""Bases of GPTQ and AWQ on meta: packed words, scales and zero points in place of weights.

The libraries that load such checkpoints bring kernels of CUDA and cannot be asked on meta, so their
layers are built here with the same tensors and the same steps. Which linear layers are packed is
decided as the loaders decide it; adapters are peft's own classes for such layers.

Two things matter for memory. GPTQ has no kernel that trains: in training gptqmodel makes the whole
weight (one compiled kernel, nothing between) and multiplies by it under plain autograd, which keeps
it for the gradient of the input. AWQ keeps only the packed words and makes the weight again in
backward.

Source: gptqmodel 7.7 nn_modules/qlinear: __init__.py (buffers), torch.py (TorchLinear, in training
also tritonv2.py), gemm_awq.py (AwqGemmFn), gptqmodel_ext/awq (split-K parts); optimum 2.3
gptq/quantizer.py, gptq/utils.py (which layers); transformers 5.23 quantizers/quantizer_awq.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from memest.config.quantization import Format, Quantization
from memest.config.setup import Dtype, Setup
from memest.errors import ConfigError
from memest.trace.model.quantization import Loading, prepare_kbit

__all__ = [
    "AwqLinear",
    "GptqLinear",
    "PackedLinear",
    "adapt_to_packed",
    "as_loaded",
    "pack",
    "packed_layers",
]

_WORD_BITS = 32
_FUSED_ROWS = 1024
_SPLIT_K = 8
_BLOCKS = (
    "transformer.h",
    "model.decoder.layers",
    "gpt_neox.layers",
    "model.layers",
    "model.language_model.layers",
    "h",
    "decoder.layers",
    "layers",
)
"""Where optimum looks for blocks, in this order (gptq/constants.py)."""
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Described:
    """What gptqmodel's GPTQ layers answer when they are asked for a ``weight``."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


class PackedLinear(torch.nn.Module):
    """A linear layer whose weight is packed into buffers, (out_features, in_features)."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, num_in: int, num_out: int, *, bits: int, group_size: int, bias: bool
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bits = num_in, num_out, bits
        self.group_size = num_in if group_size == -1 else group_size
        if bias:
            self._buffer_of("bias", (num_out,), torch.float16)
        else:
            self.bias = None

    def _buffer_of(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))

    def _words(self, count: int) -> int:
        return math.ceil(count * self.bits / _WORD_BITS)

    def extra_repr(self) -> str:
        """What a printed model says of it."""
        return f"{self.in_features}, {self.out_features}, bits={self.bits}, group={self.group_size}"


class GptqLinear(PackedLinear):
    """``TorchLinear``, which is also what ``TritonV2Linear`` does in training.

    Buffers: qweight (words of in, out), qzeros (groups, words of out), scales (groups, out) in
    float16, g_idx (in) int32, and the shifts that unpack a word.
    """

    def __init__(
        self, num_in: int, num_out: int, *, bits: int, group_size: int, bias: bool
    ) -> None:
        super().__init__(num_in, num_out, bits=bits, group_size=group_size, bias=bias)
        groups = math.ceil(num_in / self.group_size)
        self._buffer_of("qweight", (self._words(num_in), num_out), torch.int32)
        self._buffer_of("qzeros", (groups, self._words(num_out)), torch.int32)
        self._buffer_of("scales", (groups, num_out), torch.float16)
        self._buffer_of("g_idx", (num_in,), torch.int32)
        shifts = torch.empty((1, 3, 12) if bits == 3 else (1, _WORD_BITS // bits), device="meta")
        self.register_buffer("shifts", shifts.to(torch.int32), persistent=False)

    @property
    def weight(self) -> _Described:
        """Its form alone; adapters ask for the dtype."""
        shape = (self.out_features, self.in_features)
        return _Described(shape, self.scales.dtype, self.qweight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in) to (…, out); the dequantised weight is what autograd keeps."""
        shape = (*x.shape[:-1], self.out_features)
        x = x.reshape(-1, x.shape[-1])
        # Triton's kernel, of evaluation alone, writes the dtype of its input; it has no 3 bits
        direct = not self.training and self.bits != 3
        weight = torch.empty(
            (self.in_features, self.out_features),
            dtype=x.dtype if direct else self.scales.dtype,
            device=x.device,
        )
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        out = torch.matmul(x, weight).reshape(shape)
        del weight
        if self.bias is not None:
            out.add_(self.bias.to(out.dtype))
        return out


class AwqLinear(PackedLinear):
    """``AwqGEMMLinear``, what trains on NVIDIA cards.

    Buffers: qweight (in, words of out), qzeros (groups, words of out), scales (groups, out). Scales
    and bias take the dtype of the first input, of as many bytes.
    """

    def __init__(
        self, num_in: int, num_out: int, *, bits: int, group_size: int, bias: bool
    ) -> None:
        super().__init__(num_in, num_out, bits=bits, group_size=group_size, bias=bias)
        groups = num_in // self.group_size
        self._buffer_of("qweight", (num_in, self._words(num_out)), torch.int32)
        self._buffer_of("qzeros", (groups, self._words(num_out)), torch.int32)
        self._buffer_of("scales", (groups, num_out), torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, in) to (…, out); computes in half precision whatever comes in."""
        dtype = x.dtype
        x = x.to(dtype if dtype in _HALF else torch.float16).contiguous()
        out: torch.Tensor = _AwqProduct.apply(  # type: ignore[no-untyped-call]
            x, self.qweight, self.qzeros, self.scales, self.bias, self.out_features
        )
        return out.to(dtype).reshape(*x.shape[:-1], self.out_features)


class _AwqProduct(torch.autograd.Function):
    """``AwqGemmFn``: the weight is made for more than 1,024 rows, and in backward always."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        qweight: torch.Tensor,
        qzeros: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        num_out: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(qweight, qzeros, scales)
        ctx.input_shape, ctx.compute = tuple(x.shape), x.dtype
        num_in = x.shape[-1]
        flat = x.reshape(-1, num_in)
        rows = flat.shape[0]
        if rows > _FUSED_ROWS:
            weight = torch.empty((num_in, num_out), dtype=x.dtype, device=x.device)
            out = torch.matmul(flat, weight.to(x.dtype))
        else:
            # float32 accumulation is the default: parts of the sum, then one kernel adds them up
            parts = torch.empty((_SPLIT_K, rows, num_out), dtype=torch.float32, device=x.device)
            out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
            del parts
        if bias is not None:
            out = out + bias
        return out.reshape(*x.shape[:-1], num_out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None, None
        shape = (ctx.input_shape[-1], grad.shape[-1])
        weight = torch.empty(shape, dtype=ctx.compute, device=grad.device).to(grad.dtype)
        flat = torch.matmul(grad.reshape(-1, grad.shape[-1]), weight.transpose(-1, -2))
        return flat.reshape(ctx.input_shape), None, None, None, None, None


def packed_layers(model: torch.nn.Module) -> Iterator[PackedLinear]:
    """The packed layers of a model."""
    return (module for module in model.modules() if isinstance(module, PackedLinear))


def as_loaded(dtype: torch.dtype, setup: Setup) -> Setup:
    """The setup with the dtype that the loader gives to what is not packed.

    AWQ has no bfloat16 on CUDA: ``AwqQuantizer.update_dtype`` takes float16 instead.
    """
    quantization = setup.quantization
    if quantization is None or quantization.format is not Format.AWQ or dtype != torch.bfloat16:
        return setup
    return replace(setup, dtype=Dtype.FLOAT16)


def pack(model: Any, dtype: torch.dtype, setup: Setup) -> tuple[Loading, tuple[str, ...]]:
    """Put packed layers into a model of transformers on meta, and prepare it for training.

    Args:
        model: on meta; it is changed.
        dtype: of what stays as it is.
        setup: says how it is quantised.

    Returns:
        How the weights come to the device, and what there is to say.

    Raises:
        ConfigError: a model whose checkpoints cannot be quantised like this.
        MissingDependencyError: peft, which prepares it, is not installed.
    """
    quantization = setup.quantization
    assert quantization is not None
    assert quantization.bits is not None
    method = quantization.format.value.upper()
    if not hasattr(model, "all_tied_weights_keys"):
        raise ConfigError(
            f"{method} checkpoints are of models of transformers, and this is a "
            f"{type(model).__name__}: put its packed layers in by the code that builds it."
        )
    if quantization.format is Format.GPTQ and model.main_input_name != "input_ids":
        raise ConfigError(
            f"{type(model).__name__} takes {model.main_input_name}, and transformers loads GPTQ "
            "weights of pure text models only."
        )
    chosen = _gptq_layers if quantization.format is Format.GPTQ else _awq_layers
    count = 0
    for path, layer in list(chosen(model, quantization)):
        model.set_submodule(path, _packed(path, layer, quantization))
        count += 1
    if not count:
        raise ConfigError(
            f"{method}: no linear layer of {type(model).__name__} is one that the loader packs."
        )
    model.is_quantized = True
    model.quantization_method = quantization.format.value
    loading = Loading(dtype, quantized=True, ready=True)
    notes = [
        (
            f"{count} linear layers hold {quantization.bits}-bit words as {method} checkpoints do; "
            "computed as gptqmodel 7.7 trains them (backend auto_trainable)"
        )
    ]
    if quantization.format is Format.GPTQ:
        notes.append(
            "gptqmodel multiplies by a dequantised weight under plain autograd, which keeps it "
            "until backward wherever the input needs a gradient; --checkpointing lets go of it"
        )
    elif dtype == torch.float16:
        notes.append("AWQ computes in float16 on CUDA: what is not packed is loaded in it")
    if quantization.prepare or (quantization.prepare is None and setup.adapter is not None):
        notes += prepare_kbit(model, loading)
    return loading, tuple(notes)


def _packed(path: str, layer: Any, quantization: Quantization) -> PackedLinear:
    num_in, num_out = _extents(layer)
    group = num_in if quantization.group_size == -1 else quantization.group_size
    bits = quantization.bits
    assert bits is not None
    four = quantization.format is Format.AWQ
    if four and (num_in % group or num_out % (_WORD_BITS // bits)):
        raise ConfigError(
            f"{path} is {num_out} x {num_in}, and AWQ packs layers whose inputs are a multiple of "
            f"the group of {group} and outputs of {_WORD_BITS // bits}: name it in "
            "modules_to_not_convert."
        )
    kind = AwqLinear if four else GptqLinear
    made = kind(num_in, num_out, bits=bits, group_size=group, bias=layer.bias is not None)
    return made.train(layer.training)


def _extents(layer: Any) -> tuple[int, int]:
    if isinstance(layer, torch.nn.Linear):
        return layer.in_features, layer.out_features
    num_in, num_out = layer.weight.shape  # Conv1D of transformers
    return int(num_in), int(num_out)


def _gptq_layers(model: Any, quantization: Quantization) -> Iterator[tuple[str, Any]]:
    """Linear layers below the blocks, as ``GPTQQuantizer.convert_model`` takes them."""
    from transformers.pytorch_utils import Conv1D

    names = [name for name, _ in model.named_modules()]
    block = quantization.block_name or next(
        (b for b in _BLOCKS if any(name.startswith(b) for name in names)), None
    )
    if block is None:
        raise ConfigError(
            f"GPTQ: optimum finds no blocks in {type(model).__name__}: write "
            "block_name_to_quantize into --quantization-config."
        )
    only = quantization.only_modules
    for name, module in model.named_modules():
        # subclasses of Linear have a forward of their own and stay
        fits = type(module) is torch.nn.Linear or isinstance(module, Conv1D)
        is_named = only is None or any(name.endswith(part) for part in only)
        if fits and is_named and name.startswith(block):
            yield name, module


def _awq_layers(model: Any, quantization: Quantization) -> Iterator[tuple[str, Any]]:
    """Linear layers but for the head and what is named, as ``replace_with_awq_linear``."""
    from transformers.integrations.awq import AWQ_SCALES_MAPPINGS
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    if model.config.model_type in AWQ_SCALES_MAPPINGS:
        raise ConfigError(
            f"AWQ checkpoints of {model.config.model_type} scale its activations, which is not "
            "modelled."
        )
    skip = quantization.skip_modules
    kept = HfQuantizer.get_modules_to_not_convert(
        model,
        None if skip is None else list(skip),
        getattr(model, "_keep_in_fp32_modules", None),
        add_default_skips=True,
    )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and should_convert_module(name, kept):
            yield name, module


def adapt_to_packed(config: Any, model: torch.nn.Module, method: str) -> None:
    """Tell peft which of its layers goes around a packed one; it knows them by gptqmodel's classes.

    Raises:
        ConfigError: a method whose layers for packed weights are not modelled.
    """
    if next(packed_layers(model), None) is None:
        return
    if method in ("adalora", "oft"):
        raise ConfigError(f"--peft {method} on a base of GPTQ or AWQ is not modelled: use lora.")
    if method == "lora":
        from peft.tuners.lora.awq import AwqLoraLinear
        from peft.tuners.lora.gptq import GPTQLoraLinear

        config._register_custom_module({GptqLinear: GPTQLoraLinear, AwqLinear: AwqLoraLinear})
