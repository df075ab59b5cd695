"""torchtune's losses over the head's pieces, written anew operator by operator.

=====================  =====================================  =================================
loss                   the head's pieces                      kept for backward
=====================  =====================================  =================================
``torchtune-chunked``  N of each sample, all logits at once   fp32 log-probabilities
``torchtune-linear``   N of all tokens that count             fp32 log-probabilities
=====================  =====================================  =================================

What is padded, and the last token of each sample, has labels of -100.

Source: torchtune 0.6.1 ``modules/loss/ce_chunked_output_loss.py``, ``modules/transformer.py``
(``chunked_output``), ``recipes/full_finetune_single_device.py``; torchtune at April 2026
``modules/loss/cross_entropy_loss.py``, ``models/gemma2/_component_builders.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from memest.trace.cuda.known_values import attach
from memest.trace.losses.parts import Parts, parts_of

__all__ = ["torchtune_chunked", "torchtune_linear"]

_IGNORED = -100


def _outputs(parts: Parts, inputs: dict[str, Any]) -> torch.Tensor:
    """The last hidden states; torchtune caps them, and not the logits, where a model caps."""
    hidden_states: torch.Tensor = parts.backbone(**{**inputs, "use_cache": False}).last_hidden_state
    if parts.softcap is not None:
        hidden_states = hidden_states / parts.softcap
        hidden_states = torch.tanh(hidden_states)
        hidden_states = hidden_states * parts.softcap
    return hidden_states


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits.float(), labels, ignore_index=_IGNORED, reduction="sum"
    )


def torchtune_chunked(model: Any, chunks: int) -> Callable[..., Any]:
    """The forward of a model with ``CEWithChunkedOutputLoss``; 0.6 shifts labels on the GPU.

    Args:
        model: of transformers.
        chunks: ``num_output_chunks``: pieces of the tokens of each sample.

    Raises:
        ConfigError: the model is no causal language model.
    """
    parts = parts_of(model, "--fused-loss torchtune-chunked")

    def unembed(inputs: dict[str, Any]) -> list[torch.Tensor]:
        hidden_states = _outputs(parts, inputs)
        return [parts.head(piece) for piece in hidden_states.chunk(chunks, dim=1)]

    def loss_of(logits: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        count = (labels != _IGNORED).sum()
        targets = [piece.reshape(-1) for piece in labels.chunk(chunks, dim=1)]
        flat = [piece.reshape(-1, piece.size(-1)) for piece in logits]
        total: Any = 0.0
        for piece, target in zip(flat, targets, strict=True):
            total += _cross_entropy(piece, target)
        loss: torch.Tensor = total / count
        return loss

    def forward(labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        logits = unembed(inputs)
        ignored_shape = (labels.shape[0], 1)
        labels = torch.hstack(
            (labels[..., 1:], torch.full(ignored_shape, _IGNORED, device=labels.device))
        )
        return CausalLMOutputWithPast(loss=loss_of(logits, labels))

    return forward


def torchtune_linear(model: Any, chunks: int) -> Callable[..., Any]:
    """The forward of a model with ``LinearCrossEntropyLoss``.

    Args:
        model: of transformers.
        chunks: ``num_output_chunks``: pieces of all tokens that are not ignored.

    Raises:
        ConfigError: the model is no causal language model.
    """
    parts = parts_of(model, "--fused-loss torchtune-linear")

    def drop_ignored(
        hidden_states: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.where(labels != _IGNORED)[0]
        hidden_states = hidden_states.index_select(0, indices)
        return hidden_states, labels.index_select(0, indices)

    def loss_of(hidden_states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = torch.where(labels != _IGNORED)[0].numel()
        labels = labels.reshape(-1)
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        hidden_states, labels = drop_ignored(hidden_states, labels)
        pieces = hidden_states.tensor_split(chunks, dim=0)
        targets = labels.tensor_split(chunks, dim=0)
        total = torch.tensor(0.0, device=labels.device)
        for piece, target in zip(pieces, targets, strict=True):
            loss = _cross_entropy(parts.head(piece), target)
            total += loss
        return total / count

    def forward(labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        hidden_states = _outputs(parts, inputs)
        # the host has shifted them: the last of each sample counts no more
        shifted_labels = torch.zeros(labels.shape, dtype=labels.dtype)
        shifted_labels[:, -1] = _IGNORED
        attach(labels, shifted_labels)
        return CausalLMOutputWithPast(loss=loss_of(hidden_states, labels))

    return forward
