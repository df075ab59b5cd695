"""Packed layers with numbers, on the CPU: words are unpacked by NumPy into one new tensor."""

from __future__ import annotations

import numpy as np
import torch

from memest.trace.model.packed import GptqLinear


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


def reference_of(layer: GptqLinear) -> GptqLinear:
    """The same layer with random words and scales."""
    real = GptqReference(
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
