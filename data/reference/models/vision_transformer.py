"""Two vision transformers that were measured: torchvision's ViT-L/16 and timm's ViT-giant of DINOv2.

Architecture facts, and the order of operators, of ``torchvision/models/vision_transformer.py`` (0.15) and
``timm/models/vision_transformer.py``, ``timm/layers/mlp.py`` (1.0), written anew.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class TorchvisionLayer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.0, batch_first=True)
        self.dropout = nn.Dropout(0.0)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, inner),
            nn.GELU(),
            nn.Dropout(0.0),
            nn.Linear(inner, width),
            nn.Dropout(0.0),
        )

    def forward(self, given):
        x = self.ln_1(given)
        x, _ = self.attention(x, x, x, need_weights=False)
        x = self.dropout(x)
        x = x + given
        y = self.ln_2(x)
        y = self.mlp(y)
        return x + y


class TimmLayer(nn.Module):
    """Fused attention, layer scale, SwiGLU of one packed projection."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner // 2, width)
        self.gamma1 = nn.Parameter(torch.ones(width))
        self.gamma2 = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x + self._attended(self.norm1(x)) * self.gamma1
        return x + self._mixed(self.norm2(x)) * self.gamma2

    def _attended(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))

    def _mixed(self, x):
        x = self.fc1(x)
        gate, x = x.chunk(2, dim=-1)
        return self.fc2(functional.silu(gate) * x)


class Vit(nn.Module):
    def __init__(self, layer, width, layers, heads, inner, patch, size, classes, checkpointed):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(layer(width, heads, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        self.checkpointed = checkpointed

    def forward(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.places
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.checkpointed else layer(x)
        x = self.norm(x)
        return self.head(x[:, 0])


def vit_l_16(classes: int = 10, dtype: str = "float32") -> nn.Module:
    """torchvision's ViT-L/16 with a head of its own."""
    model = Vit(TorchvisionLayer, 1024, 24, 16, 4096, 16, 224, classes, False)
    return model.to(getattr(torch, dtype))


def vit_giant(classes: int = 45, dtype: str = "bfloat16") -> nn.Module:
    """timm's vit_giant_patch14_dinov2 at 224 pixels, checkpointed layer by layer."""
    model = Vit(TimmLayer, 1536, 40, 24, 8192, 14, 224, classes, True)
    return model.to(getattr(torch, dtype))
