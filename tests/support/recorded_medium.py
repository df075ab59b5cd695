"""The third model of the recordings: 24 layers, trained for whole steps, fp32 or autocast.

Written anew like ``recorded_models``: the same operators in the same order, and a name for each
temporary that had one.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from support.recorded_models import Weight, WeightLast


class LookUpRows(Weight):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids, :]


class NormOfMean(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class PlaneRotation(nn.Module):
    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(2, positions, width // 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.reshape(*x.shape[:-1], -1, 2).permute(4, 0, 1, 2, 3).unbind(0)
        cos, sin = self.table[:, : x.size(-2), :].unbind(0)
        turned = cos * first - sin * second
        other = sin * first + cos * second
        result = torch.concat((turned, other), dim=-1)
        return result  # noqa: RET504


def softmax_by_hand(x: torch.Tensor) -> torch.Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def attend_where(query, key, value, mask):
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax_by_hand(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class MediumAttention(nn.Module):
    def __init__(self, width: int, heads: int, rotation: PlaneRotation) -> None:
        super().__init__()
        self.heads = heads
        self.query = WeightLast(width, width)
        self.key = WeightLast(width, width)
        self.value = WeightLast(width, width)
        self.output = WeightLast(width, width)
        self.rotation = rotation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *lead, length, _ = x.size()
        q = self.query(x)
        k = self.key(x)
        v = self.value(x)
        q, k, v = (
            each.reshape(*each.shape[:2], self.heads, -1).permute(0, 2, 1, 3) for each in (q, k, v)
        )
        q = self.rotation(q)
        k = self.rotation(k)
        steps = torch.arange(length, device=x.device)
        rows = steps.reshape(length, 1)
        columns = steps.reshape(1, length)
        mask = rows >= columns
        mask = mask[(None,) * len(lead) + (...,)]
        attention = attend_where(q, k, v, mask)
        attention = attention.permute(0, 2, 1, 3).reshape(*lead, length, -1).contiguous()
        result = self.output(attention)
        return result  # noqa: RET504


class MediumFeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = WeightLast(inner, width)
        self.down = WeightLast(width, inner)
        self.up = WeightLast(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class MediumBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, rotation: PlaneRotation) -> None:
        super().__init__()
        self.attention = MediumAttention(width, heads, rotation)
        self.feed_forward = MediumFeedForward(width, inner)
        self.norm1 = NormOfMean(width)
        self.norm2 = NormOfMean(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = self.attention(self.norm1(x))
        middle = x + attended
        fed = self.feed_forward(self.norm2(middle))
        result = middle + fed
        return result  # noqa: RET504


class MediumModel(nn.Module):
    """423 M parameters at the sizes of the recordings."""

    def __init__(
        self, *, positions: int, vocabulary: int = 10_000, width: int = 1024, heads: int = 16,
        inner: int = 4096, layers: int = 24,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = LookUpRows(vocabulary, width)
        self.rotation = PlaneRotation(positions, width // heads)
        self.layers = nn.ModuleList(
            MediumBlock(width, heads, inner, self.rotation) for _ in range(layers)
        )
        self.norm = NormOfMean(width)
        self.head = WeightLast(vocabulary, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(ids)
        x = embedded
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits = self.head(x)
        return logits  # noqa: RET504


def cross_entropy_by_gather(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    negative = -log_softmax_by_hand(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def log_softmax_by_hand(x: torch.Tensor) -> torch.Tensor:
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class AdamWOutOfPlace(torch.optim.Optimizer):
    """New moments are new tensors, and the zeros they could start from are made every time."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad.data
                state = self.state[parameter]
                parameter.data -= 1e-5 * parameter.data
                old_mean = state.get("mean", torch.zeros_like(gradient))
                old_square = state.get("square", torch.zeros_like(gradient))
                mean = 0.9 * old_mean + (0.1 * gradient)
                square = 0.999 * old_square + (0.001 * torch.square(gradient))
                parameter.data -= 1e-3 * mean / (torch.sqrt(square) + 1e-8)
                state["mean"] = mean
                state["square"] = square
