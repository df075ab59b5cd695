"""Bases of GPTQ on meta: packed words, scales and zero points in place of weights.

The library that loads such checkpoints brings kernels of CUDA and cannot be asked on meta, so its
layers are built here with the same tensors and the same steps. Which linear layers are packed is
decided as the loader decides it; adapters are peft's own classes for such layers.

GPTQ has no kernel that trains: in training gptqmodel makes the whole weight (one compiled kernel,
nothing between) and multiplies by it under plain autograd, which keeps it for the gradient of the
input.

Source: gptqmodel 7.7 nn_modules/qlinear: __init__.py (buffers), torch.py (TorchLinear, in training
also tritonv2.py); optimum 2.3 gptq/quantizer.py, gptq/utils.py (which layers).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memest.config.quantization import Quantization
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.trace.model.quantization import Loading, prepare_kbit

__all__ = [
    "GptqLinear",
    "pack",
    "packed_layers",
    "register_packed_layers",
]

_WORD_BITS = 32
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


@dataclass(frozen=True, slots=True)
class _WeightStub:
    """What gptqmodel's GPTQ layers answer when they are asked for a ``weight``."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


class GptqLinear(torch.nn.Module):
    """``TorchLinear``, which is also what ``TritonV2Linear`` does in training.

    Buffers: qweight (words of in, out), qzeros (groups, words of out), scales (groups, out) in
    float16, g_idx (in) int32, and the shifts that unpack a word.
    """

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
        groups = math.ceil(num_in / self.group_size)
        for name, shape, dtype in (
            ("bias", (num_out,) if bias else None, torch.float16),
            ("qweight", (self._words(num_in), num_out), torch.int32),
            ("qzeros", (groups, self._words(num_out)), torch.int32),
            ("scales", (groups, num_out), torch.float16),
            ("g_idx", (num_in,), torch.int32),
        ):
            empty = None if shape is None else torch.empty(shape, dtype=dtype, device="meta")
            self.register_buffer(name, empty)
        shifts = torch.empty((1, 3, 12) if bits == 3 else (1, _WORD_BITS // bits), device="meta")
        self.register_buffer("shifts", shifts.to(torch.int32), persistent=False)

    def _words(self, count: int) -> int:
        return math.ceil(count * self.bits / _WORD_BITS)

    def extra_repr(self) -> str:
        """What a printed model says of it."""
        return f"{self.in_features}, {self.out_features}, bits={self.bits}, group={self.group_size}"

    @property
    def weight(self) -> _WeightStub:
        """Its form alone; adapters ask for the dtype."""
        shape = (self.out_features, self.in_features)
        return _WeightStub(shape, self.scales.dtype, self.qweight.device)

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


def packed_layers(model: torch.nn.Module) -> Iterator[GptqLinear]:
    """The packed layers of a model."""
    return (module for module in model.modules() if isinstance(module, GptqLinear))


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
    if not hasattr(model, "all_tied_weights_keys"):
        raise ConfigError(
            "GPTQ checkpoints are of models of transformers, and this is a "
            f"{type(model).__name__}: put its packed layers in by the code that builds it."
        )
    if model.main_input_name != "input_ids":
        raise ConfigError(
            f"{type(model).__name__} takes {model.main_input_name}, and transformers loads GPTQ "
            "weights of pure text models only."
        )
    layers = list(_gptq_layers(model, quantization))
    if not layers:
        raise ConfigError(
            f"GPTQ: no linear layer of {type(model).__name__} is one that the loader packs."
        )
    for path, layer in layers:
        num_in, num_out = _extents(layer)
        packed_layer = GptqLinear(
            num_in,
            num_out,
            bits=quantization.bits,
            group_size=quantization.group_size,
            bias=layer.bias is not None,
        )
        model.set_submodule(path, packed_layer.train(layer.training))
    model.is_quantized = True
    model.quantization_method = quantization.format.value
    loading = Loading(dtype, quantized=True, ready=True)
    notes = [
        (
            f"{len(layers)} linear layers hold {quantization.bits}-bit words as GPTQ checkpoints "
            "do; computed as gptqmodel 7.7 trains them (backend auto_trainable)"
        ),
        (
            "gptqmodel multiplies by a dequantised weight under plain autograd, which keeps it "
            "until backward wherever the input needs a gradient; --checkpointing lets go of it"
        ),
    ]
    notes += prepare_kbit(model, loading, setup)
    return loading, tuple(notes)


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


def register_packed_layers(config: Any, model: torch.nn.Module, method: str) -> None:
    """Tell peft which of its layers goes around a packed one; it knows them by gptqmodel's classes.

    Raises:
        ConfigError: a method whose layers for packed weights are not modelled.
    """
    if next(packed_layers(model), None) is None:
        return
    if method in ("adalora", "oft"):
        raise ConfigError(f"--peft {method} on a base of GPTQ is not modelled: use lora.")
    if method == "lora":
        from peft.tuners.lora.gptq import GPTQLoraLinear

        config._register_custom_module({GptqLinear: GPTQLoraLinear})
