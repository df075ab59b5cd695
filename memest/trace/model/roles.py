"""What a weight is to its model, where an optimizer treats weights by the module that owns them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Roles", "roles_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Names of parameters, as ``named_parameters`` has them (tied ones by their first name).

    Attributes:
        embeddings: weights of ``nn.Embedding``, a head tied to one included.
        linear: ``<module>.weight`` of every ``nn.Linear``: what GaLore and APOLLO look at.
        head: weight of the output embeddings.
    """

    embeddings: frozenset[str]
    linear: frozenset[str]
    head: frozenset[str]


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
    )


def _head(model: Any) -> Iterator[torch.nn.Parameter]:
    get = getattr(model, "get_output_embeddings", None)
    try:
        head = get() if get is not None else None
    except NotImplementedError:
        head = None
    if isinstance(head, torch.nn.Module):
        yield from head.parameters()
