"""The decoder of Stanford's course CS336 ("basics"), of elementary operators.

Architecture facts, and the order of operators, of ``cs336_basics/model.py`` and ``nn_utils.py`` in
https://github.com/Wedsonlin/assignment2-systems, written anew without einops.
"""

from __future__ import annotations

import math

import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, inner))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        kind = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(kind)


class Rotary(nn.Module):
    """Pairs of neighbours are turned; positions are looked up at each call."""

    def __init__(self, context: int, size: int) -> None:
        super().__init__()
        steps = torch.outer(
            torch.arange(context).float(),
            torch.tensor(10000.0) ** -(torch.arange(0, size, 2) / size),
        )
        table = torch.stack((torch.cos(steps), torch.sin(steps)))
        self.register_buffer("table", table, persistent=False)

    def forward(self, x, places):
        pairs = x.unflatten(-1, (-1, 2)).movedim(-1, 0)
        one, two = pairs.unbind(0)
        cos, sin = self.table[:, places].unbind(0)
        return torch.cat((cos * one - sin * two, sin * one + cos * two), dim=-1)


def softmax(x):
    x = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(x)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))
        self.out = Linear(width, width)
        self.rotary = rotary

    def forward(self, x):
        length = x.shape[1]

        def split(y):
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = split(query), split(key), split(value)
        places = torch.arange(length, device=x.device)
        query, key = self.rotary(query, places), self.rotary(key, places)
        mask = places[:, None] >= places[None, :]
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(key.shape[-1])
        scores = torch.where(mask, scores, float("-inf"))
        weights = softmax(scores)
        y = torch.einsum("bhqk,bhkd->bhqd", weights, value)
        y = y.transpose(1, 2).flatten(2).contiguous()
        return self.out(y)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            Linear(width, inner),
            Linear(inner, width),
            Linear(width, inner),
        )

    def forward(self, x):
        gate = self.one(x)
        return self.two(gate * torch.sigmoid(gate) * self.three(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, rotary: Rotary) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, heads, rotary), Mlp(width, inner)
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocab, context, width, layers, heads, inner) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(vocab, width))
        rotary = Rotary(context, width // heads)
        self.layers = nn.ModuleList(Block(width, heads, inner, rotary) for _ in range(layers))
        self.norm, self.head = RmsNorm(width), Linear(width, vocab)

    def forward(self, ids):
        x = self.tokens[ids, :]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(
    context: int, width: int, layers: int, heads: int, inner: int, vocab: int = 10000
) -> nn.Module:
    """The decoder of one size."""
    return Decoder(vocab, context, width, layers, heads, inner)


def loss(logits, batch):
    """Cross-entropy of elementary operators; the logits stay with the script."""
    shifted = logits - torch.max(logits, dim=-1, keepdim=True)[0]
    logs = shifted - torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))
    return torch.mean(torch.gather(-logs, -1, batch["targets"].unsqueeze(-1)))
