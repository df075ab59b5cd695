"""What TRL's trainers compute that learn from completions of the model's own.

A micro-step is one forward of prompts and completions by TRL's fused head, whose tokens of
completions alone are scored; what the model said when it wrote them, and what the reference says,
was computed before and is part of the batch. What each function binds stays alive until it returns,
as in the source; numbers that TRL fetches for its log are computed and not fetched.

Source: TRL 1.16 ``trainer/grpo_trainer.py``, ``trainer/rloo_trainer.py`` (``_compute_loss``), with
the defaults of ``GRPOConfig`` (``loss_type="dapo"``, importance by token) and ``RLOOConfig``.
"""

from __future__ import annotations

from typing import Any

import torch

from memest.config.kinds import Method
from memest.trace.losses.fused_head import IGNORED
from memest.trace.losses.preference_logits import Batch, Call, LossOfPairs, fetch

__all__ = ["loss_of_rollouts", "score_completions"]

_CLIP = 0.2
_BETA = 0.05
_ROUTERS = 0.001


def loss_of_rollouts(method: Method) -> LossOfPairs:
    """The loss of a method, as its trainer computes it; it asks no reference.

    Args:
        method: one that generates.
    """
    return _grpo if method is Method.GRPO else _rloo


def _score(
    model: Call,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    length: int,
    *,
    asks_entropies: bool = True,
) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
    """``_get_per_token_logps_and_entropies`` of the micro-batch, which is one piece."""
    batch_ids = input_ids[0 : input_ids.size(0)]
    batch_mask = attention_mask[0 : input_ids.size(0)]
    labels = batch_ids.masked_fill(batch_mask == 0, IGNORED)
    labels[:, :-length] = IGNORED
    outputs = model(input_ids=batch_ids, attention_mask=batch_mask, labels=labels)
    all_log_probs = [outputs.log_probs[:, -length:]]
    all_entropies = [outputs.entropy[:, -length:]] if asks_entropies else []
    log_probs = torch.cat(all_log_probs, dim=0)
    entropies = torch.cat(all_entropies, dim=0) if asks_entropies else None
    aux_loss = None if outputs.aux_loss is None else torch.stack([outputs.aux_loss]).mean()
    return log_probs, entropies, aux_loss


def score_completions(model: Call | None, reference: Call | None, inputs: Batch) -> None:
    """``_generate_and_score_completions``: what both models say before a step, a batch at a time.

    Args:
        model: that trains; None where what it says in the step is what it said when it wrote.
        reference: None where nothing diverges from one.
        inputs: a micro-batch.
    """
    completion_ids = inputs["completion_ids"]
    input_ids = torch.cat([inputs["prompt_ids"], completion_ids], dim=1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = completion_ids.size(1)
    with torch.no_grad():
        for asked in (model, reference):
            if asked is not None:
                _score(asked, input_ids, attention_mask, length, asks_entropies=False)


# -- GRPO ------------------------------------------------------------------------------------------


def _grpo(model: Call, _: Call, inputs: Batch) -> torch.Tensor:
    """``GRPOTrainer._compute_loss``."""
    prompt_ids, prompt_mask = inputs["prompt_ids"], inputs["prompt_mask"]
    completion_ids, mask = inputs["completion_ids"], inputs["completion_mask"]
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
    attention_mask = torch.cat([prompt_mask, mask], dim=1)
    per_token, entropies, aux_loss = _score(
        model, input_ids, attention_mask, completion_ids.size(1)
    )
    advantages = inputs["advantages"].unsqueeze(1)
    old = inputs.get("old_per_token_logps")
    old = per_token.detach() if old is None else old
    log_ratio = per_token - old
    coef = torch.exp(log_ratio)
    diverges = "ref_per_token_logps" in inputs
    if diverges:
        ref_per_token = inputs["ref_per_token_logps"]
        per_token_kl = torch.exp(ref_per_token - per_token) - (ref_per_token - per_token) - 1
    clipped_coef = torch.clamp(coef, 1 - _CLIP, 1 + _CLIP)
    loss1 = coef * advantages
    loss2 = clipped_coef * advantages
    per_token_loss = -torch.min(loss1, loss2)
    if "importance_sampling_ratio" in inputs:
        per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]
    if diverges:
        per_token_loss = per_token_loss + _BETA * per_token_kl
    normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / 1
    normalizer = normalizer * 1 / 1  # numbers of micro-steps, which no size depends on
    loss = (per_token_loss * mask).sum() / normalizer
    policy_loss = loss.detach()  # noqa: F841 - bound until the end, as there
    if aux_loss is not None:
        loss = loss + _ROUTERS * aux_loss / 1
        fetch(aux_loss.mean())
    # the log
    if diverges:
        _fetch_mean(per_token_kl, mask)
    _fetch_mean(entropies, mask)
    is_low = (coef < 1 - _CLIP) & (advantages < 0)
    is_high = (coef > 1 + _CLIP) & (advantages > 0)
    is_outside = is_low | is_high
    for clipped in (is_low, is_high, is_outside):
        _fetch_mean(clipped.float(), mask)
    low_shares = _means_of_sequences(is_low.float(), mask)
    fetch(low_shares.min())
    high_shares = _means_of_sequences(is_high.float(), mask)
    fetch(high_shares.max())
    return loss


def _fetch_mean(values: torch.Tensor, mask: torch.Tensor) -> None:
    """The mean over the tokens of completions (``global_masked_mean``)."""
    total, count = (values * mask).sum(), mask.sum().float()
    totals = torch.stack([total, count])
    fetch(totals[0] / totals[1].clamp(min=1.0))


def _means_of_sequences(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum(-1) / mask.sum(-1)


# -- RLOO ------------------------------------------------------------------------------------------


def _rloo(model: Call, _: Call, inputs: Batch) -> torch.Tensor:
    """``RLOOTrainer._compute_loss``."""
    prompt_ids, prompt_mask = inputs["prompt_ids"], inputs["prompt_mask"]
    completion_ids, mask = inputs["completion_ids"], inputs["completion_mask"]
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
    attention_mask = torch.cat([prompt_mask, mask], dim=1)
    per_token, entropies, aux_loss = _score(
        model, input_ids, attention_mask, completion_ids.size(1)
    )
    log_probs = (per_token * mask).sum(1)
    old = inputs["old_logps"]
    log_ratio = log_probs - old
    advantages = inputs["advantages"]
    coef = torch.exp(log_ratio)
    clipped_coef = torch.clamp(coef, 1 - _CLIP, 1 + _CLIP)
    loss1 = coef * advantages
    loss2 = clipped_coef * advantages
    per_sequence_loss = -torch.min(loss1, loss2)
    loss = per_sequence_loss.mean()
    if aux_loss is not None:
        loss = loss + _ROUTERS * aux_loss
        fetch(aux_loss.mean())
    stats = torch.stack([(entropies * mask).sum(), mask.sum().float()])
    fetch(stats[0] / stats[1].clamp(min=1.0))
    is_low = (coef < 1 - _CLIP) & (advantages < 0)
    is_high = (coef > 1 + _CLIP) & (advantages > 0)
    is_outside = is_low | is_high
    low_clips = is_low.float()
    fetch(low_clips.nanmean())
    fetch(low_clips.min())
    high_clips = is_high.float()
    fetch(high_clips.nanmean())
    fetch(high_clips.max())
    fetch(is_outside.float().nanmean())
    return loss
