"""The GPT of 124 M parameters that "LLMs from scratch" trains, in the variants that were measured.

Architecture facts, and the order of operators that decides what is saved, of chapter 5, folder
``10_llm-training-speed`` (``00_orig.py``, ``01_opt_single_gpu.py``) of
https://github.com/rasbt/LLMs-from-scratch, written anew.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class ComposedNorm(nn.Module):
    """Layer norm of elementary operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        centre = x.mean(dim=-1, keepdim=True)
        spread = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.weight * ((x - centre) / torch.sqrt(spread + 1e-5)) + self.bias


class ComposedGelu(nn.Module):
    """GELU by tanh of elementary operators."""

    def forward(self, x):
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


class ScoresAttention(nn.Module):
    """Attention that holds its scores; the mask is a buffer of each layer, or made at each call."""

    def __init__(self, width: int, heads: int, context: int, dropout: float, mask: str) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        if mask == "buffer":
            self.register_buffer("mask", torch.triu(torch.ones(context, context), diagonal=1))
        else:
            self.mask = None

    def forward(self, x):
        batch, length, width = x.shape

        def split(y):
            return y.view(batch, length, self.heads, -1).transpose(1, 2)

        key, query, value = self.key(x), self.query(x), self.value(x)
        key, query, value = split(key), split(query), split(value)
        scores = query @ key.transpose(2, 3)
        if self.mask is None:
            ones = torch.ones(length, length, dtype=torch.bool, device=x.device)
            hidden = torch.triu(ones, diagonal=1)
        else:
            hidden = self.mask.bool()[:length, :length]
        scores.masked_fill_(hidden, -torch.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class SdpaAttention(nn.Module):
    """Attention by PyTorch's scaled_dot_product_attention, one projection for all three."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=None, dropout_p=rate, is_causal=True
        )
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, context, dropout, attention, mask, native) -> None:
        super().__init__()
        if attention == "sdpa":
            self.attention = SdpaAttention(width, heads, dropout)
        else:
            self.attention = ScoresAttention(width, heads, context, dropout, mask)
        gelu = nn.GELU(approximate="tanh") if native else ComposedGelu()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        norm = nn.LayerNorm if native else ComposedNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        shortcut = x
        x = self.norm1(x)
        x = self.attention(x)
        x = self.drop(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.mlp(x)
        x = self.drop(x)
        return x + shortcut


class Gpt(nn.Module):
    def __init__(
        self, vocab, width, heads, layers, context, dropout, attention, mask, native, boxed
    ):
        super().__init__()
        self.boxed = boxed
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width, heads, context, dropout, attention, mask, native) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width) if native else ComposedNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        tokens = self.tokens(ids)
        places = self.places(torch.arange(ids.shape[1], device=ids.device))
        x = tokens + places
        x = self.drop(x)
        x = self.blocks(x)
        x = self.norm(x)
        logits = self.head(x)
        return [logits] if self.boxed else logits


def build(
    attention: str = "scores",
    mask: str = "call",
    native: bool = False,
    vocab: int = 50257,
    width: int = 768,
    heads: int = 12,
    layers: int = 12,
    context: int = 1024,
    dropout: float = 0.1,
    dtype: str = "float32",
    boxed: bool = False,
) -> nn.Module:
    """The model of one measured variant; boxed, it returns its logits in a list (:func:`loss`)."""
    model = Gpt(vocab, width, heads, layers, context, dropout, attention, mask, native, boxed)
    return model.to(getattr(torch, dtype))


def step(model, batch):
    """The loss of a batch; logits are gone when it returns, as in the script."""
    logits = model(batch["ids"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def loss(boxed, batch):
    """The loss of a compiled model; it takes the logits out of the loop's hands, as above."""
    logits = boxed.pop()
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
