"""What a weight is to its model, where an optimizer treats weights by the module that owns them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["AttentionSizes", "Roles", "roles_of"]


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes that Adam-mini asks its user for."""

    hidden: int
    heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Names of parameters, as ``named_parameters`` has them (tied ones by their first name).

    Attributes:
        embeddings: weights of ``nn.Embedding``, a head tied to one included.
        linear: ``<module>.weight`` of every ``nn.Linear``: what GaLore and APOLLO look at.
        head: weight of the output embeddings.
        heads: attention of the config, None where it does not say.
    """

    embeddings: frozenset[str]
    linear: frozenset[str]
    head: frozenset[str]
    heads: AttentionSizes | None


def roles_of(model: torch.nn.Module) -> Roles:
    """The roles of all parameters of a model."""
    by_identity = {id(p): name for name, p in model.named_parameters()}
    names = set(by_identity.values())
    embeddings = {
        by_identity[id(parameter)]
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if id(parameter) in by_identity
    }
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    return Roles(
        embeddings=frozenset(embeddings),
        linear=frozenset(linear & names),
        head=frozenset(by_identity[id(p)] for p in _head(model) if id(p) in by_identity),
        heads=_heads(getattr(model, "config", None)),
    )


def _head(model: Any) -> Iterator[torch.nn.Parameter]:
    get = getattr(model, "get_output_embeddings", None)
    try:
        head = get() if get is not None else None
    except NotImplementedError:
        head = None
    if isinstance(head, torch.nn.Module):
        yield from head.parameters()


def _heads(config: Any) -> AttentionSizes | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(text, "hidden_size", None)
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return None
    kv_heads = getattr(text, "num_key_value_heads", None)
    return AttentionSizes(hidden, heads, kv_heads if isinstance(kv_heads, int) else heads)
