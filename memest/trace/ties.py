"""Tied weights as training has them, where building from a config ties too much."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["separate_head"]


def separate_head(model: Any, config: dict[str, Any]) -> list[str]:
    """Give the head its own weight where the checkpoint has one.

    T5 v1.1, flan-T5, mT5, byT5 and their kin say ``tie_word_embeddings: false``; transformers 5
    ties them all the same when it builds from a config, while ``from_pretrained`` keeps the
    checkpoint's ``lm_head`` (flan-t5-base: 222.9 M built, 247.6 M trained).

    Args:
        model: on meta.
        config: the configuration as written in its file.

    Returns:
        What was changed, in words.
    """
    parts = [config, config.get("text_config") or {}]
    if not any(part.get("tie_word_embeddings") is False for part in parts):
        return []
    try:
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return []
    weight = getattr(head, "weight", None)
    if weight is None:
        return []
    trains = bool(weight.requires_grad)
    if weight is not getattr(embedding, "weight", None):
        return []
    head.weight = torch.nn.Parameter(torch.empty_like(weight), requires_grad=trains)
    return ["the head has a weight of its own, as in the checkpoint (tie_word_embeddings: false)"]
