"""Decoders as lit-gpt had them in October 2023, with its own LoRA, its chunked head and loss.

Architecture facts, and the order of operators, of ``lit_gpt/{config,model,lora,rmsnorm,utils}.py``
at commit 8641822 of https://github.com/Lightning-AI/litgpt, written anew. Lightning Fabric converts
what the model returns to float32 (``Precision.convert_output``). Tables
of cosines are float32: ``max_seq_length`` is set outside of ``init_module``, which makes them anew in
the default dtype.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

SIZES = {
    # width, layers, heads, groups, inner, padded vocabulary, share of rotary, norm, parallel, shared
    "phi-1_5": (2048, 24, 32, 32, 8192, 51200, 0.5, "layer", True, True, True, True),
    "stablelm-base-alpha-3b": (
        4096,
        16,
        32,
        32,
        16384,
        50688,
        0.25,
        "layer",
        True,
        False,
        True,
        False,
    ),
    "Llama-2-7b-hf": (4096, 32, 32, 32, 11008, 32000, 1.0, "rms", False, False, False, False),
    "Llama-2-13b-hf": (5120, 40, 40, 40, 13824, 32000, 1.0, "rms", False, False, False, False),
    "tiny-llama-1.1b": (2048, 22, 32, 4, 5632, 32000, 1.0, "rms32", False, False, False, False),
}


class Box:
    """Holds the logits of a script whose function takes them and returns the loss alone."""

    def __init__(self, logits) -> None:
        self.logits = logits

    def pop(self):
        logits, self.logits = self.logits, None
        return logits


class RmsNorm(nn.Module):
    def __init__(self, width: int, wide: bool) -> None:
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.ones(width)), wide

    def forward(self, x):
        kind = x.dtype
        if self.wide:  # from 2024 on
            x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(mean + 1e-5)
        if self.wide:
            normed = normed.to(dtype=kind)
        return self.weight * normed


class LoraQkv(nn.Module):
    """One linear layer for queries, keys and values, with LoRA on queries and values."""

    def __init__(self, width: int, heads: int, groups: int, bias: bool, rank: int, dropout: float):
        super().__init__()
        self.split = (width, width // heads * groups)
        self.equal = heads == groups
        self.linear = nn.Linear(width, width + 2 * self.split[1], bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.lora_a = nn.Parameter(torch.zeros(2 * rank, width))
        self.lora_b = nn.Parameter(torch.zeros(sum(self.split), rank))
        self.scaling = 16 / rank

    def forward(self, x):
        base = self.linear(x)
        down = functional.linear(self.dropout(x), self.lora_a).transpose(-2, -1)
        weight = self.lora_b.unsqueeze(-1)
        if self.equal:
            up = functional.conv1d(down, weight, groups=2)
        else:
            pairs = zip(down.chunk(2, dim=1), weight.split(self.split), strict=True)
            up = torch.cat([functional.conv1d(one, two) for one, two in pairs], dim=1)
        return base + self._padded(up.transpose(-2, -1)) * self.scaling

    def _padded(self, x):
        x = x.transpose(0, 1)
        wide = self.linear.out_features
        whole = x.new_zeros((*x.shape[:-1], wide)).view(-1, wide)
        query, value = self.split
        columns = [*range(query), *range(query + value, wide)]
        places = torch.tensor(columns, device=x.device)
        whole = whole.index_copy(1, places, x.reshape(-1, query + value))
        return whole.view((*x.shape[:-1], wide)).transpose(0, 1)


def rotated(x, cos, sin):
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).type_as(x)


class Attention(nn.Module):
    def __init__(self, width, heads, groups, rotary, bias, rank, dropout) -> None:
        super().__init__()
        self.heads, self.groups, self.rotary = heads, groups, rotary
        shape = width + 2 * (width // heads) * groups
        self.attn = (
            LoraQkv(width, heads, groups, bias, rank, dropout)
            if rank
            else nn.Linear(width, shape, bias=bias)
        )
        self.proj = nn.Linear(width, width, bias=bias)

    def forward(self, x, cos, sin):
        batch, length, width = x.size()
        size, each = width // self.heads, self.heads // self.groups
        qkv = self.attn(x).view(batch, length, self.groups, each + 2, size).permute(0, 2, 3, 1, 4)
        query, key, value = qkv.split((each, 1, 1), dim=2)
        if self.groups != 1 and each != 1:
            key = key.expand(batch, self.groups, each, length, size)
            value = value.expand(batch, self.groups, each, length, size)
        query = query.reshape(batch, -1, length, size)
        key = key.reshape(batch, -1, length, size)
        value = value.reshape(batch, -1, length, size)
        n = self.rotary
        q_turned, k_turned = rotated(query[..., :n], cos, sin), rotated(key[..., :n], cos, sin)
        query = torch.cat((q_turned, query[..., n:]), dim=-1)
        key = torch.cat((k_turned, key[..., n:]), dim=-1)
        y = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.0, scale=1.0 / math.sqrt(size), is_causal=True
        )
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class NeoxMlp(nn.Module):
    def __init__(self, width, inner, bias, tanh) -> None:
        super().__init__()
        self.fc, self.proj = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.kind = "tanh" if tanh else "none"

    def forward(self, x):
        x = self.fc(x)
        x = functional.gelu(x, approximate=self.kind)
        return self.proj(x)


class LlamaMlp(nn.Module):
    def __init__(self, width, inner) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(width, inner, bias=False)
        self.fc_2 = nn.Linear(width, inner, bias=False)
        self.proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        one = self.fc_1(x)
        two = self.fc_2(x)
        x = functional.silu(one) * two
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, name: str, rank: int, dropout: float) -> None:
        super().__init__()
        width, _, heads, groups, inner, _, share, norm, parallel, shared, bias, tanh = SIZES[name]
        self.parallel = parallel

        def make():
            return nn.LayerNorm(width) if norm == "layer" else RmsNorm(width, norm == "rms32")

        self.norm_1, self.norm_2 = make(), None if shared else make()
        rotary = int(share * (width // heads))
        self.attn = Attention(width, heads, groups, rotary, bias, rank, dropout)
        self.mlp = NeoxMlp(width, inner, bias, tanh) if norm == "layer" else LlamaMlp(width, inner)

    def forward(self, x, cos, sin):
        first = self.norm_1(x)
        attended = self.attn(first, cos, sin)
        if self.parallel:
            second = first if self.norm_2 is None else self.norm_2(x)
            return x + attended + self.mlp(second)
        x = x + attended
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    def __init__(
        self, name: str, rank: int, dropout: float, chunk: int, length: int, boxed: bool
    ) -> None:
        super().__init__()
        width, layers, heads, _, _, vocab, share, norm, *_ = SIZES[name]
        self.boxed = boxed
        self.wte = nn.Embedding(vocab, width)
        self.h = nn.ModuleList(Block(name, rank, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width) if norm == "layer" else RmsNorm(width, norm == "rms32")
        self.lm_head = nn.Linear(width, vocab, bias=name.startswith("phi"))
        self.chunk = chunk
        n = int(share * (width // heads))
        table = torch.outer(
            torch.arange(length).float(), 1.0 / (10000 ** (torch.arange(0, n, 2) / n))
        ).repeat(1, 2)
        self.register_buffer("cos", torch.cos(table), persistent=False)
        self.register_buffer("sin", torch.sin(table), persistent=False)

    def forward(self, ids):
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.wte(ids)
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        if self.chunk:
            chunks = [self.lm_head(part) for part in x.split(self.chunk, dim=1)]
            return [chunk.to(torch.float32) for chunk in chunks]
        logits = self.lm_head(x).to(torch.float32)
        return Box(logits) if self.boxed else logits


def build(
    name: str,
    length: int,
    rank: int = 0,
    dropout: float = 0.05,
    chunk: int = 0,
    boxed: bool = False,
):
    """One decoder in bfloat16; with a rank, its LoRA alone is trained."""
    model = Decoder(name, rank, dropout, chunk, length, boxed)
    tables = model.cos, model.sin
    model = model.to(torch.bfloat16)
    model.cos, model.sin = tables
    if rank:
        for name_of, weight in model.named_parameters():
            weight.requires_grad_("lora_" in name_of)
    return model


def loss(logits, batch):
    """The cross-entropy of each chunk; the logits stay with the script."""
    targets = batch["targets"]
    if isinstance(logits, list):
        logits[-1] = logits[-1][..., :-1, :]
        parts = [part.reshape(-1, part.size(-1)) for part in logits]
        wanted = [t.reshape(-1) for t in targets[..., 1:].split(logits[0].size(1), dim=1)]
        losses = [
            functional.cross_entropy(one, two, ignore_index=-1, reduction="none")
            for one, two in zip(parts, wanted, strict=True)
        ]
        return torch.cat(losses).mean()
    return functional.cross_entropy(
        logits.reshape(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1
    )


def boxed_loss(boxed, batch):
    """``forward_and_loss`` of its Thunder script, which keeps no logits; without Thunder."""
    return loss(boxed.pop(), batch)
