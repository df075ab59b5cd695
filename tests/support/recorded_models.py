"""The two language models of the recordings, written anew: the same operators in the same order.

Which operators ran, and which local variable held which result how long, follows from the frames
of the recordings (function, line, operator) and from the public repositories of their authors.
Lifetimes are what is compared, so a temporary bound to a name here was bound to one there.
"""

from __future__ import annotations

import math

import torch
from torch import nn

MASKED = -1e9


class Weight(nn.Module):
    """A matrix that is contracted with the last dimension of its input."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


# -- the 3.4 B model: fp32 or autocast on an H100 --------------------------------------------------


class WeightFirst(Weight):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ab,...b->...a", self.weight, x)


class LookUp(Weight):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


class NormOfNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        rms = torch.sqrt(norm**2 / self.width + 1e-5)
        normed = x / rms
        result = torch.einsum("d,bsd->bsd", self.weight, normed)
        return result.to(dtype)


class PairwiseRotation(nn.Module):
    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.pairs = width // 2
        self.register_buffer("table", torch.empty(positions, self.pairs, 2), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        pairs = x.reshape(*x.shape[:-1], self.pairs, 2)
        cos = self.table[positions, :, 0]
        sin = self.table[positions, :, 1]
        cos = cos.unsqueeze(1)
        sin = sin.unsqueeze(1)
        rotated = torch.zeros_like(pairs)
        rotated[..., 0] = cos * pairs[..., 0] - sin * pairs[..., 1]
        rotated[..., 1] = sin * pairs[..., 0] + cos * pairs[..., 1]
        return rotated.reshape(x.shape)


def softmax_of_function(x: torch.Tensor) -> torch.Tensor:
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(x - largest)
    total = torch.sum(exponentials, dim=-1, keepdim=True)
    result = exponentials / total
    return result  # noqa: RET504 - the locals die in their order


def attend(query, key, value, mask):
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    scores = scores / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(mask == False, MASKED)  # noqa: E712 - an operator that ran
    weights = softmax_of_function(scores)
    output = torch.einsum("...qk,...kd->...qd", weights, value)
    return output  # noqa: RET504


class BigAttention(nn.Module):
    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = WeightFirst(width, width)
        self.key = WeightFirst(width, width)
        self.value = WeightFirst(width, width)
        self.output = WeightFirst(width, width)
        self.rotation = PairwiseRotation(positions, width // heads)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        projected_q = self.query(x)
        projected_k = self.key(x)
        projected_v = self.value(x)
        q = self.split(projected_q)
        k = self.split(projected_k)
        v = self.split(projected_v)
        positions = torch.arange(length, device=x.device).unsqueeze(0).expand(batch, -1)
        q = self.rotation(q, positions)
        k = self.rotation(k, positions)
        mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).to(torch.bool)
        mask = ~mask
        mask = mask.unsqueeze(0).unsqueeze(0).expand(batch, self.heads, -1, -1)
        result = attend(q, k, v, mask)
        result = result.permute(0, 2, 1, 3).reshape(batch, length, -1)
        result = self.output(result)
        return result  # noqa: RET504


class BigFeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = WeightFirst(inner, width)
        self.down = WeightFirst(width, inner)
        self.up = WeightFirst(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        up = self.up(x)
        activated = torch.sigmoid(gate) * gate
        product = activated * up
        result = self.down(product)
        return result  # noqa: RET504


class BigBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, positions: int) -> None:
        super().__init__()
        self.norm1 = NormOfNorm(width)
        self.attention = BigAttention(width, heads, positions)
        self.norm2 = NormOfNorm(width)
        self.feed_forward = BigFeedForward(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        h = self.attention(h)
        x = x + h
        h = self.norm2(x)
        h = self.feed_forward(h)
        x = x + h
        return x  # noqa: RET504


class BigModel(nn.Module):
    """3.4 B parameters at the sizes of the recordings."""

    def __init__(
        self, *, positions: int, vocabulary: int = 10_000, width: int = 2560, heads: int = 32,
        inner: int = 10_240, layers: int = 32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = LookUp(vocabulary, width)
        self.layers = nn.ModuleList(BigBlock(width, heads, inner, positions) for _ in range(layers))
        self.norm = NormOfNorm(width)
        self.head = WeightFirst(vocabulary, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        x = self.head(x)
        return x  # noqa: RET504


def cross_entropy_by_hand(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = logits.reshape(-1, logits.size(-1))
    targets = targets.reshape(-1)
    largest = torch.max(logits, dim=-1, keepdim=True).values
    logits = logits - largest
    exponentials = torch.exp(logits)
    totals = exponentials.sum(dim=-1)
    rows = torch.arange(logits.shape[0])  # on the host, as it was
    chosen = logits[rows, targets]
    losses = torch.log(totals) - chosen
    return losses.mean()


class AdamWByHand(torch.optim.Optimizer):
    """One parameter after the other; the denominator stays bound until the next one's exists."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad.data
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter.data)
                    state["square"] = torch.zeros_like(parameter.data)
                mean, square = state["mean"], state["square"]
                mean.mul_(0.9).add_(gradient, alpha=0.1)
                square.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
                denominator = (square.sqrt() / math.sqrt(0.05)).add_(1e-8)
                parameter.data.addcdiv_(mean, denominator, value=-1e-4)
                parameter.data.add_(parameter.data, alpha=-1e-6)


# -- the small model: forward without gradients, fp32 or autocast ----------------------------------


class WeightLast(Weight):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.einsum("...a,ba->...b", x, self.weight)
        return result  # noqa: RET504


class NormOfSquares(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        squares = torch.einsum("...a,...a->...", x, x)
        squares = squares / self.width + 1e-5
        rms = torch.sqrt(squares).unsqueeze(-1)
        result = x / rms * self.weight
        return result.to(dtype)


class HalfRotation(nn.Module):
    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(positions, width), persistent=False)
        self.register_buffer("sin", torch.empty(positions, width), persistent=False)

    def half(self, x: torch.Tensor) -> torch.Tensor:
        pairs = x.view(*x.shape[:-1], -1, 2)
        first, second = pairs.unbind(dim=-1)
        result = torch.stack((-second, first), dim=-1)
        return result.view(*x.shape)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos = self.cos[positions]
        sin = self.sin[positions]
        return (x * cos) + (self.half(x) * sin)


def softmax_of_method(x: torch.Tensor) -> torch.Tensor:
    largest = x.max(dim=-1, keepdim=True).values
    exponentials = torch.exp(x - largest)
    total = torch.sum(exponentials, dim=-1, keepdim=True)
    return exponentials / total


def attend_small(query, key, value, mask):
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    scores = scores / (query.shape[-1] ** 0.5)
    scores = scores.masked_fill(mask == False, MASKED)  # noqa: E712
    weights = softmax_of_method(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class SmallAttention(nn.Module):
    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = WeightLast(width, width)
        self.key = WeightLast(width, width)
        self.value = WeightLast(width, width)
        self.output = WeightLast(width, width)
        self.rotation = HalfRotation(positions, width // heads)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q = self.split(self.query(x))
        k = self.split(self.key(x))
        v = self.split(self.value(x))
        batch, length, _ = x.shape
        q = self.rotation(q, positions)
        k = self.rotation(k, positions)
        mask = torch.tril(torch.ones(length, length, device=x.device)).bool()
        attention = attend_small(q, k, v, mask)
        combined = attention.permute(0, 2, 1, 3).reshape(batch, length, -1)
        return self.output(combined)


class SmallFeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(inner, width))
        self.down = nn.Parameter(torch.empty(width, inner))
        self.up = nn.Parameter(torch.empty(inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        gate = torch.einsum("ab,...b->a...", self.gate, x)
        up = torch.einsum("ab,...b->a...", self.up, x)
        result = torch.einsum("ab,b...->...a", self.down, gate * torch.sigmoid(gate) * up)
        return result.to(dtype)


class SmallBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, positions: int) -> None:
        super().__init__()
        self.norm1 = NormOfSquares(width)
        self.norm2 = NormOfSquares(width)
        self.attention = SmallAttention(width, heads, positions)
        self.feed_forward = SmallFeedForward(width, inner)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        attention = self.attention(normed, positions)
        middle = x + attention
        normed2 = self.norm2(middle)
        fed = self.feed_forward(normed2)
        result = middle + fed
        return result  # noqa: RET504


class SmallModel(nn.Module):
    """12 layers of width 768 at the sizes of the recordings."""

    def __init__(
        self, *, positions: int, vocabulary: int = 10_000, width: int = 768, heads: int = 12,
        inner: int = 3072, layers: int = 12,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = LookUp(vocabulary, width)
        self.blocks = nn.ModuleList(
            SmallBlock(width, heads, inner, positions) for _ in range(layers)
        )
        self.norm = NormOfSquares(width)
        self.head = WeightLast(vocabulary, width)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)
        for block in self.blocks:
            following = block(x, positions)
            x = following
        x = self.norm(x)
        logits = self.head(x)
        return {"logits": logits}
