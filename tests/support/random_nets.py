"""Random nets: a specification of tuples that hypothesis can shrink, and the module it stands for.

A specification is a tuple of layers, a layer a tuple of its name, whole numbers, and inner nets.
Numbers are taken modulo what is legal where the layer stands, so every specification is a net. Two
kinds of values run through nets: sequences (batch, length, width) and images (batch, channels,
height, width).

Recurrent layers are not among them: the CPU takes them otherwise than meta, and CUDA by cuDNN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Net = tuple[Any, ...]
Shape = tuple[int, ...]

WIDTHS = (64, 96, 160)
CHANNELS = (8, 16, 24)
VOCABULARY = 300
ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "elu", "leaky_relu", "hardswish", "mish",
               "softplus", "relu6")  # fmt: skip
IN_PLACE = ("relu", "elu", "leaky_relu", "hardswish", "silu", "relu6")


class Applied(nn.Module):
    """A function of a value, with modules and parameters of its own."""

    def __init__(self, function: Any, *modules: nn.Module, **parameters: Shape) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(modules)
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 0.01)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def net_of(spec: Net, shape: Shape) -> tuple[nn.Module, Shape]:
    """The module of a specification for a value of this shape, and the shape of what it gives."""
    modules = []
    for name, *numbers in spec:
        module, shape = LAYERS[name](shape, *numbers)
        modules.append(module)
    return nn.Sequential(*modules), shape


class Model(nn.Module):
    """Tokens, a sequence or an image in, one tensor out."""

    def __init__(self, kind: str, spec: Net, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape[-1]) if kind == "tokens" else None
        self.net, _ = net_of(spec, shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x if self.embedding is None else self.embedding(x))


def _linear(shape: Shape, width: int, bias: int) -> tuple[nn.Module, Shape]:
    wide = WIDTHS[width % len(WIDTHS)]
    return nn.Linear(shape[-1], wide, bias=bool(bias % 2)), (*shape[:-1], wide)


def _norm(shape: Shape, kind: int, affine: int) -> tuple[nn.Module, Shape]:
    affine = bool(affine % 2)
    if len(shape) == 4:
        made = (
            nn.BatchNorm2d(shape[1], affine=affine),
            nn.GroupNorm(4, shape[1], affine=affine),
            nn.InstanceNorm2d(shape[1], affine=affine),
            nn.LayerNorm(shape[1:], elementwise_affine=affine),
        )[kind % 4]
        return made, shape
    wide = shape[-1]
    if kind % 4 < 2:
        return (nn.LayerNorm, nn.RMSNorm)[kind % 4](wide, elementwise_affine=affine), shape
    inner = nn.BatchNorm1d(wide, affine=affine) if kind % 4 == 2 else nn.GroupNorm(8, wide)
    return Applied(lambda m, x: m.inner[0](x.transpose(1, 2)).transpose(1, 2), inner), shape


def _activation(shape: Shape, kind: int) -> tuple[nn.Module, Shape]:
    name = ACTIVATIONS[kind % len(ACTIVATIONS)]
    return Applied(lambda m, x: getattr(functional, name)(x)), shape


def _in_place(shape: Shape, kind: int) -> tuple[nn.Module, Shape]:
    name = IN_PLACE[kind % len(IN_PLACE)]
    return Applied(lambda m, x: getattr(functional, name)(x, inplace=True)), shape


def _dropout(shape: Shape, in_place: int) -> tuple[nn.Module, Shape]:
    kind = nn.Dropout2d if len(shape) == 4 and in_place >= 2 else nn.Dropout
    return kind(0.1, inplace=bool(in_place % 2)), shape


def _prelu(shape: Shape, each: int) -> tuple[nn.Module, Shape]:
    return nn.PReLU(shape[1] if each % 2 else 1), shape


def _convolution(
    shape: Shape, width: int, kernel: int, stride: int, bias: int
) -> tuple[nn.Module, Shape]:
    size, step, bias = 1 + 2 * (kernel % 2), 1 + stride % 2, bool(bias % 2)
    if len(shape) == 4:
        step = step if min(shape[2:]) >= 8 else 1
        channels = CHANNELS[width % len(CHANNELS)]
        module = nn.Conv2d(shape[1], channels, size, step, padding=size // 2, bias=bias)
        return module, (shape[0], channels, *(-(-n // step) for n in shape[2:]))
    step = step if shape[1] >= 8 else 1
    wide = WIDTHS[width % len(WIDTHS)]
    inner = nn.Conv1d(shape[2], wide, size, step, padding=size // 2, bias=bias)
    made = Applied(lambda m, x: m.inner[0](x.transpose(1, 2)).transpose(1, 2), inner)
    return made, (shape[0], -(-shape[1] // step), wide)


def _transposed(shape: Shape, width: int, bias: int) -> tuple[nn.Module, Shape]:
    bias = bool(bias % 2)
    if len(shape) == 4:
        channels = CHANNELS[width % len(CHANNELS)]
        step = 2 if shape[2] <= 16 else 1
        module = nn.ConvTranspose2d(shape[1], channels, step, step, bias=bias)
        return module, (shape[0], channels, *(n * step for n in shape[2:]))
    wide, step = WIDTHS[width % len(WIDTHS)], 2 if shape[1] <= 64 else 1
    inner = nn.ConvTranspose1d(shape[2], wide, step, step, bias=bias)
    made = Applied(lambda m, x: m.inner[0](x.transpose(1, 2)).transpose(1, 2), inner)
    return made, (shape[0], shape[1] * step, wide)


def _pooling(shape: Shape, kind: int) -> tuple[nn.Module, Shape]:
    if len(shape) == 4:
        if min(shape[2:]) < 4:
            return nn.Identity(), shape
        module = (
            nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.MaxPool2d(3, 1, 1)
        )[kind % 4]  # fmt: skip
        sides = ([n // 2 for n in shape[2:]], [n // 2 for n in shape[2:]], [2, 2], shape[2:])
        return module, (*shape[:2], *sides[kind % 4])
    if shape[1] < 4:
        return nn.Identity(), shape
    if kind % 2:
        # with indices, as CUDA always does; without gradients the CPU has a kernel of its own
        function = lambda m, x: m.inner[0](x.transpose(1, 2))[0].transpose(1, 2)  # noqa: E731
        made = Applied(function, nn.MaxPool1d(2, return_indices=True))
    else:
        function = lambda m, x: m.inner[0](x.transpose(1, 2)).transpose(1, 2)  # noqa: E731
        made = Applied(function, nn.AvgPool1d(2))
    return made, (shape[0], shape[1] // 2, shape[2])


def _upsampling(shape: Shape, kind: int) -> tuple[nn.Module, Shape]:
    if len(shape) != 4 or shape[2] > 16:
        return nn.Identity(), shape
    mode = ("nearest", "bilinear")[kind % 2]
    return nn.Upsample(scale_factor=2, mode=mode), (*shape[:2], *(n * 2 for n in shape[2:]))


def _attention(shape: Shape, kind: int, causal: int) -> tuple[nn.Module, Shape]:
    if len(shape) != 3 or shape[2] % 4:
        return nn.Identity(), shape
    wide = shape[2]

    def split(m: Applied, x: torch.Tensor) -> list[torch.Tensor]:
        parts = m.inner[0](x).chunk(3, dim=-1)
        return [p.view(*x.shape[:2], 4, wide // 4).transpose(1, 2) for p in parts]

    def fused(m: Applied, x: torch.Tensor) -> torch.Tensor:
        q, k, v = split(m, x)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal % 2))
        return m.inner[1](out.transpose(1, 2).reshape(x.shape))

    def written_out(m: Applied, x: torch.Tensor) -> torch.Tensor:
        q, k, v = split(m, x)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.2
        if causal % 2:
            length = x.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(mask, -1e9)
        out = torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v)
        return m.inner[1](out.reshape(x.shape))

    inner = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
    return Applied((fused, written_out)[kind % 2], *inner), shape


def _gate(shape: Shape, kind: int) -> tuple[nn.Module, Shape]:
    dim = 1 if len(shape) == 4 else -1
    if shape[dim] % 2:
        return nn.Identity(), shape
    half = list(shape)
    half[dim] //= 2

    def chunked(m: Applied, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim)
        return a * functional.silu(b)

    def split(m: Applied, x: torch.Tensor) -> torch.Tensor:
        a, b = torch.split(x, x.shape[dim] // 2, dim)
        return a.sigmoid().mul_(b.tanh()) if kind >= 4 else a + b.exp()

    gated = Applied(lambda m, x: functional.glu(x, dim))
    return (gated, Applied(chunked), Applied(split))[kind % 3], tuple(half)


def _function(shape: Shape, kind: int) -> tuple[nn.Module, Shape]:
    """Functions without weights that keep the shape, and views."""
    last = shape[-1]
    functions = (
        lambda m, x: x * 0.5 + 1,
        lambda m, x: x.softmax(-1),
        lambda m, x: x.flip(1),
        lambda m, x: torch.roll(x, 1, dims=1),
        lambda m, x: x - x.mean(dim=-1, keepdim=True),
        lambda m, x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda m, x: x.reshape(-1, last).reshape(x.shape),
        lambda m, x: torch.where(x > 0, x, x * 0.1),
        lambda m, x: x.clamp(-1, 1),
        lambda m, x: x.pow(2).sqrt(),
        lambda m, x: functional.normalize(x, dim=-1),
        lambda m, x: x.cumsum(1),
        lambda m, x: x / (1 + x.abs()),
        lambda m, x: torch.stack([x, x * 2]).sum(0),
        lambda m, x: x.unsqueeze(1).expand(-1, 2, *[-1] * (x.dim() - 1)).mean(1),
        lambda m, x: functional.pad(x, (1, 1))[..., 1:-1],
        lambda m, x: x.masked_fill(x < -1, 0.0),
        lambda m, x: x.clone().mul_(2),
        lambda m, x: torch.maximum(x, -x),
        lambda m, x: x.log_softmax(-1),
    )
    return Applied(functions[kind % len(functions)]), shape


def _einsum(shape: Shape, width: int) -> tuple[nn.Module, Shape]:
    wide = WIDTHS[width % len(WIDTHS)]
    made = Applied(lambda m, x: torch.einsum("...d,ed->...e", x, m.w), w=(wide, shape[-1]))
    return made, (*shape[:-1], wide)


def _scale(shape: Shape, kind: int) -> tuple[nn.Module, Shape]:
    if kind % 2:
        return Applied(lambda m, x: torch.addcmul(m.b, x, m.w), w=(shape[-1],), b=shape[-1:]), shape
    return Applied(lambda m, x: x * m.w + m.b, w=(shape[-1],), b=(shape[-1],)), shape


def _flat(shape: Shape) -> tuple[nn.Module, Shape]:
    """An image becomes a sequence of its places."""
    if len(shape) == 3:
        return nn.Identity(), shape
    out = (shape[0], shape[2] * shape[3], shape[1])
    return Applied(lambda m, x: x.flatten(2).transpose(1, 2)), out


def _residual(shape: Shape, inner: Net, kind: int) -> tuple[nn.Module, Shape]:
    net, out = net_of(inner, shape)
    if out != shape:
        return net, out
    functions = (
        lambda m, x: x + m.inner[0](x),
        lambda m, x: m.inner[0](x).add_(x),
        lambda m, x: torch.add(x, m.inner[0](x), alpha=0.5),
    )
    return Applied(functions[kind % 3], net), shape


def _concat(shape: Shape, left: Net, right: Net) -> tuple[nn.Module, Shape]:
    dim = 1 if len(shape) == 4 else 2
    (one, a), (two, b) = net_of(left, shape), net_of(right, shape)
    rest = [s[:dim] + s[dim + 1 :] for s in (a, b)]
    if len(a) != len(shape) or rest[0] != rest[1] or a[dim] + b[dim] > 400:
        return one, a
    made = Applied(lambda m, x: torch.cat([m.inner[0](x), m.inner[1](x)], dim), one, two)
    return made, (*a[:dim], a[dim] + b[dim], *a[dim + 1 :])


def _shared(shape: Shape, inner: Net, times: int) -> tuple[nn.Module, Shape]:
    net, out = net_of(inner, shape)
    return (nn.Sequential(*[net] * (2 + times % 2)), out) if out == shape else (net, out)


def _frozen(shape: Shape, inner: Net) -> tuple[nn.Module, Shape]:
    net, out = net_of(inner, shape)
    return net.requires_grad_(False), out


def _checkpointed(shape: Shape, inner: Net, reentrant: int) -> tuple[nn.Module, Shape]:
    net, out = net_of(inner, shape)
    two = bool(reentrant % 2)
    return Applied(lambda m, x: checkpoint(m.inner[0], x, use_reentrant=two), net), out


def _half(shape: Shape, width: int) -> tuple[nn.Module, Shape]:
    """A layer in bfloat16 between two casts."""
    inner, out = _linear(shape, width, 0)
    return Applied(lambda m, x: m.inner[0](x.bfloat16()).float(), inner.bfloat16()), out


LAYERS = {
    "linear": _linear, "norm": _norm, "activation": _activation, "in_place": _in_place,
    "dropout": _dropout, "prelu": _prelu, "convolution": _convolution, "transposed": _transposed,
    "pooling": _pooling, "upsampling": _upsampling,
    "attention": _attention, "gate": _gate, "function": _function, "einsum": _einsum,
    "scale": _scale, "flat": _flat, "residual": _residual, "concat": _concat, "shared": _shared,
    "frozen": _frozen, "checkpointed": _checkpointed, "half": _half,
}  # fmt: skip
NUMBERS = {
    "linear": 2, "norm": 2, "activation": 1, "in_place": 1, "dropout": 1, "prelu": 1,
    "convolution": 4, "transposed": 2, "pooling": 1, "upsampling": 1,
    "attention": 2, "gate": 1, "function": 1, "einsum": 1, "scale": 1, "flat": 0, "half": 1,
}  # fmt: skip
"""How many whole numbers a layer without inner nets takes."""
