"""Llama 3 as torchtitan had it from December 2024 to November 2025, with its selective checkpointing.

Architecture facts, and the order of operators, of ``models/llama/model.py``, ``norms.py``,
``parallelize_llama.py`` and ``train.py`` at commit 5940ddeb5 (and f8f545c45, from which on the norm is
torch's) of https://github.com/pytorch/torchtitan, written anew.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

SIZES = {  # width, layers, heads, groups, inner
    "8B": (4096, 32, 32, 8, 14336),
    "debug": (256, 2, 8, 4, 512),
}
_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""cuDNN's kernel came to the list later; it is not picked unless it was switched on."""


def _every_second_product():
    """The contexts of one checkpointed layer: attention and every second product are saved."""
    counts = defaultdict(int)

    def policy(ctx, func, *args, **kwargs):
        mode = ctx.is_recompute
        if func == torch.ops.aten.mm.default:
            counts[mode] += 1
        saved = func in _SAVED and not (func == torch.ops.aten.mm.default and counts[mode] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Box:
    """Holds the logits, as the script's variable does; no loop converts what is in it."""

    def __init__(self, logits) -> None:
        self.logits = logits

    def pop(self):
        logits, self.logits = self.logits, None
        return logits


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.weight


def rotated(x, turns):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size, self.repeat = width // heads, heads // groups
        self.wq = nn.Linear(width, heads * self.size, bias=False)
        self.wk = nn.Linear(width, groups * self.size, bias=False)
        self.wv = nn.Linear(width, groups * self.size, bias=False)
        self.wo = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x, turns):
        batch, length, _ = x.shape
        query, key, value = self.wq(x), self.wk(x), self.wv(x)
        query = query.view(batch, length, -1, self.size)
        key = key.view(batch, length, -1, self.size)
        value = value.view(batch, length, -1, self.size)
        q_turned, k_turned = rotated(query, turns), rotated(key, turns)
        query, key = q_turned.type_as(query), k_turned.type_as(key)
        del q_turned, k_turned  # results of a function that has returned
        keys, values = self._repeated(key), self._repeated(value)
        query = query.transpose(1, 2)
        key = keys.transpose(1, 2)
        value = values.transpose(1, 2)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = y.transpose(1, 2).contiguous()
        return self.wo(y.view(batch, length, -1))

    def _repeated(self, x):
        batch, length, groups, size = x.shape
        wide = x.unsqueeze(3).expand(batch, length, groups, self.repeat, size)
        return wide.reshape(batch, length, groups * self.repeat, size)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """One layer, which is one unit of FSDP; its hooks lie outside of the checkpoint."""

    def __init__(self, width, heads, groups, inner, norm, saving) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, heads, groups), Mlp(width, inner)
        make = nn.RMSNorm if norm == "torch" else RmsNorm
        self.norm1, self.norm2 = make(width), make(width)
        self.saving = saving

    def forward(self, x, turns):
        if self.saving == "none":
            return self._body(x, turns)
        more = {"context_fn": _every_second_product} if self.saving == "op" else {}
        return checkpoint(
            self._body, x, turns, use_reentrant=False, preserve_rng_state=False, **more
        )

    def _body(self, x, turns):
        h = x + self.attention(self.norm1(x), turns)
        return h + self.mlp(self.norm2(h))


class Llama(nn.Module):
    def __init__(self, size: str, length: int, norm: str, saving: str, vocab: int) -> None:
        super().__init__()
        width, layers, heads, groups, inner = SIZES[size]
        self.tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, groups, inner, norm, saving) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width) if norm == "torch" else RmsNorm(width)
        self.output = nn.Linear(width, vocab, bias=False)
        steps = torch.outer(
            torch.arange(length).float(),
            1.0 / (500000.0 ** (torch.arange(0, width // heads, 2).float() / (width // heads))),
        )
        self.register_buffer("turns", torch.polar(torch.ones_like(steps), steps), persistent=False)

    def forward(self, ids):
        h = self.tokens(ids)
        for layer in self.layers:
            h = layer(h, self.turns[: ids.shape[1]])
        h = self.norm(h)
        return Box(self.output(h))


def build(
    size: str = "8B",
    length: int = 8192,
    norm: str = "composed",
    saving: str = "op",
    vocab: int = 128256,
) -> nn.Module:
    """One Llama in float32; FSDP makes its weights bfloat16."""
    return Llama(size, length, norm, saving, vocab)


def loss(boxed, batch):
    """Cross-entropy in float32; the script deletes the logits before backward: they leave the box."""
    logits = boxed.pop()
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(0, 1))


def chunked_loss(boxed, batch):
    """The same in eight pieces of the length."""
    logits = boxed.pop()
    total = 0.0
    parts = zip(logits.chunk(8, dim=1), batch["targets"].chunk(8, dim=1), strict=True)
    for one, two in parts:
        total = total + functional.cross_entropy(one.flatten(0, 1).float(), two.flatten(0, 1))
    return total / 8
