"""Losses of TRL's SFTTrainer, written anew operator by operator.

=================  =============================  ==========================================
loss               the head's pieces              kept for backward
=================  =============================  ==========================================
``trl-fused``      4,096 tokens by 32,768 words   hidden states; each is computed anew,
                   in one buffer                  gradients are summed in fp32
``trl-chunked``    256 tokens                     hidden states (checkpointed)
=================  =============================  ==========================================

Source: TRL 1.16 ``trainer/sft_trainer.py`` (``compute_loss``); TRL 1.13
``trainer/sft_trainer.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memest.config.compilation import fused_loss_flag
from memest.errors import ConfigError
from memest.trace.losses.fused_head import (
    IGNORED,
    LossOutput,
    backbone_outputs,
    balancing_loss,
    fused_head,
)
from memest.trace.losses.parts import SCALES, Parts, parts_of

__all__ = ["parts_for_trl", "trl_chunked", "trl_fused"]

_KINDS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_CHUNK_TOKENS = 256  # _CHUNKED_LM_HEAD_CHUNK_SIZE


def parts_for_trl(
    model: Any, flag: str, *, scales: tuple[str, ...] = SCALES, calls_head: bool = False
) -> Parts:
    """A model that TRL's trainers take.

    Args:
        model: of transformers, without wrappers.
        flag: what asks for the trainer, for errors.
        scales: settings of scaled logits that it knows.
        calls_head: the trainer calls the head, which may have an adapter then.

    Raises:
        ConfigError: another one, or an adapter on its head: TRL multiplies by the head's weight, so
            the adapter would never be trained.
    """
    parts = parts_of(model, flag, kinds=_KINDS, scales=scales, is_base=True)
    if hasattr(parts.head, "base_layer") and not calls_head:
        raise ConfigError(
            f"{flag} does not go with an adapter on the head: TRL refuses it, because the loss "
            "multiplies by the head's own weight. Leave the head out of --lora-target-modules."
        )
    return parts


def trl_fused(model: Any) -> Callable[..., Any]:
    """The forward of a model under SFTTrainer of TRL 1.15 and later.

    Raises:
        ConfigError: SFTTrainer does not train such a model.
    """
    parts = parts_for_trl(model, fused_loss_flag("trl-fused"))
    score = fused_head(parts, ("entropy", "hits"))

    def forward(labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        """As ``SFTTrainer.compute_loss``, whose loss comes from the values of the tokens."""
        outputs = score(labels, num_items_in_batch, **inputs)
        assert outputs.log_probs is not None
        assert outputs.label_mask is not None
        losses = -outputs.log_probs
        items = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = losses.sum() / torch.as_tensor(items).clamp(min=1)
        if outputs.aux_loss is not None:
            weighted_aux = parts.config.router_aux_loss_coef * outputs.aux_loss
            loss = loss + weighted_aux / 1  # by the number of micro-steps; no size depends on it
        outputs.own_loss, outputs.loss = outputs.loss, loss
        return outputs

    return forward


def trl_chunked(model: Any) -> Callable[..., Any]:
    """The forward of a model under SFTTrainer of TRL 1.4 to 1.14 with ``chunked_nll``.

    Raises:
        ConfigError: SFTTrainer does not train such a model.
    """
    parts = parts_for_trl(
        model, "--fused-loss trl-chunked", scales=("logit_scale", "output_multiplier")
    )
    scales_logits, softcap = bool(parts.scale), parts.softcap

    def chunk(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Loss, hits and entropy of some tokens."""
        logits = (hidden_states @ weight.to(hidden_states.dtype).t()).float()
        if bias is not None:
            logits = logits + bias.float()
        if scales_logits:
            logits = logits * 1.5  # any number but 1: no size depends on it
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        log_p = torch.nn.functional.log_softmax(logits, dim=-1)
        loss = torch.nn.functional.nll_loss(log_p, labels, ignore_index=IGNORED, reduction="sum")
        valid = labels != IGNORED
        hits = ((logits.argmax(dim=-1) == labels) & valid).sum().float()
        entropy = (-(log_p.exp() * log_p).sum(dim=-1) * valid).sum()
        return loss, hits, entropy

    def cross_entropy(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        items: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Loss, hits, entropy and number of the tokens that count."""
        hidden_states = hidden_states[..., :-1, :].reshape(-1, hidden_states.size(-1))
        labels = labels[..., 1:].reshape(-1)
        valid = labels != IGNORED
        count = valid.sum()
        hits = hidden_states.new_zeros((), dtype=torch.float32)
        entropy = hidden_states.new_zeros((), dtype=torch.float32)
        # tokens that count come first; chunks of others are left out
        order = valid.to(torch.int8).argsort(descending=True, stable=True)
        hidden_states = hidden_states[order]
        labels = labels[order]
        padded_count = (count / _CHUNK_TOKENS).ceil().clamp(min=1).to(torch.int64) * _CHUNK_TOKENS
        loss = hidden_states.new_zeros((), dtype=torch.float32)
        for start in range(0, int(padded_count), _CHUNK_TOKENS):
            chunk_loss, chunk_hits, chunk_entropy = torch.utils.checkpoint.checkpoint(
                chunk,
                hidden_states[start : start + _CHUNK_TOKENS],
                weight,
                bias,
                labels[start : start + _CHUNK_TOKENS],
                use_reentrant=False,
            )
            loss = loss + chunk_loss
            hits = hits + chunk_hits
            entropy = entropy + chunk_entropy
        loss = loss / (count.clamp(min=1) if items is None else items)
        return loss, hits, entropy, count

    def forward(labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        outputs, balances = backbone_outputs(parts, inputs)
        hidden_states, bias = outputs.last_hidden_state, getattr(parts.head, "bias", None)
        loss, hits, entropy, count = cross_entropy(
            hidden_states, parts.head.weight, bias, labels, num_items_in_batch
        )
        aux = None
        if balances:
            aux = balancing_loss(parts, outputs, inputs.get("attention_mask"))
            loss = loss + parts.config.router_aux_loss_coef * aux
        return LossOutput(loss=loss, entropy=entropy, hits=hits, label_mask=count, aux_loss=aux)

    return forward
