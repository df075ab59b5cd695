"""The transformer of DeepSpeedExamples' ``training/bf16_master_weight/train.py``, written anew.

Operators in the order of that source: attention that returns its weights, norms behind the sums, an
output layer of its own. Each block is recomputed where the script is told
``--activation_checkpointing``.
Source: https://github.com/deepspeedai/DeepSpeedExamples at 45b4b7156c87, Apache 2.0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(x, x, x)
        x = self.norm1(x + attended)
        fed = self.ff(x)
        return self.norm2(x + fed)


class _Model(nn.Module):
    def __init__(
        self, width: int, layers: int, heads: int, vocabulary: int, length: int, *, recomputes: bool
    ) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embedding = nn.Embedding(vocabulary, width)
        self.pos_embedding = nn.Embedding(length, width)
        self.layers = nn.ModuleList([_Block(width, heads) for _ in range(layers)])
        self.output_proj = nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        batch, length = input_ids.shape
        positions = torch.arange(length, device=input_ids.device).unsqueeze(0).expand(batch, -1)
        x = self.embedding(input_ids) + self.pos_embedding(positions)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.output_proj(x)


def build(
    width: int = 1024,
    layers: int = 12,
    heads: int = 16,
    vocabulary: int = 50000,
    length: int = 512,
    recomputes: bool = False,
) -> nn.Module:
    """The model of the script, by its arguments."""
    return _Model(width, layers, heads, vocabulary, length, recomputes=recomputes)


def loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of all positions, as the script has it."""
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), batch["labels"].view(-1))
