"""Packed layers with numbers, on the CPU: words are unpacked by NumPy into one new tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memest.trace.model.packed import AwqLinear, GptqLinear, PackedLinear

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ keeps the eight outputs of a word."""


def _lanes(words: np.ndarray, bits: int) -> np.ndarray:
    """Integers of words along a new last axis, lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)


class GptqReference(GptqLinear):
    """Inputs run down the words of a column; zero points are those of gptq_v2."""

    def numbers(self) -> np.ndarray:
        codes = _lanes(self.qweight.numpy(), self.bits).transpose(0, 2, 1)
        codes = codes.reshape(-1, self.out_features)[: self.in_features]
        zeros = _lanes(self.qzeros.numpy(), self.bits).reshape(self.scales.shape[0], -1)
        zeros = zeros[:, : self.out_features]
        group = self.g_idx.numpy()
        return self.scales.numpy()[group] * (codes.astype(np.int8) - zeros.astype(np.int8)[group])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.empty((self.in_features, self.out_features), dtype=self.scales.dtype)
        weight.numpy()[:] = self.numbers()
        weight = weight if weight.dtype == x.dtype else weight.to(x.dtype)
        y = x.reshape(-1, self.in_features) @ weight
        if self.bias is not None:
            y.add_(self.bias.to(y.dtype))
        return y.reshape(*x.shape[:-1], self.out_features)


class AwqReference(AwqLinear):
    """Outputs run along the words of a row, interleaved."""

    def numbers(self) -> np.ndarray:
        def unpacked(words: torch.Tensor) -> np.ndarray:
            lanes = _lanes(words.numpy(), 4)[..., list(_ORDER)]
            return lanes.reshape(words.shape[0], -1).astype(np.int8)

        group = np.arange(self.in_features) // self.group_size
        return (unpacked(self.qweight) - unpacked(self.qzeros)[group]) * self.scales.numpy()[group]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x if x.dtype in (torch.float16, torch.bfloat16) else x.half()
        y: Any = _Product.apply(half, self)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype)


class _Product(torch.autograd.Function):
    """x W forward, the gradient times W transposed backward; W is made anew each time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: AwqReference) -> torch.Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return (x.reshape(-1, layer.in_features) @ _weight(layer, x.dtype)).reshape(
            *x.shape[:-1], layer.out_features
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        if not ctx.needs_input_grad[0]:
            return None, None
        weight = _weight(ctx.layer, ctx.dtype).to(grad.dtype)
        return grad @ weight.t(), None


def _weight(layer: AwqReference, dtype: torch.dtype) -> torch.Tensor:
    assert dtype == torch.float16, "NumPy has no bfloat16"
    weight = torch.empty((layer.in_features, layer.out_features), dtype=dtype)
    weight.numpy()[:] = layer.numbers()
    return weight


def reference_of(layer: PackedLinear) -> PackedLinear:
    """The same layer with random words and scales."""
    kind = GptqReference if isinstance(layer, GptqLinear) else AwqReference
    real = kind(
        layer.in_features, layer.out_features, bits=layer.bits, group_size=layer.group_size,
        bias=layer.bias is not None,
    )  # fmt: skip
    for name, buffer in real.named_buffers():
        if name == "g_idx":
            values = torch.arange(layer.in_features, dtype=torch.int32) // layer.group_size
        elif buffer.dtype == torch.int32:
            values = torch.randint(-(2**31), 2**31 - 1, buffer.shape, dtype=torch.int32)
        else:
            values = torch.rand(buffer.shape).mul_(1e-3).to(buffer.dtype)
        setattr(real, name, values)
    return real.train()
