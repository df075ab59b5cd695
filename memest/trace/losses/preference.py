"""What TRL's trainers over pairs of answers compute, written anew operator by operator.

==========  ====================================  ==========================================
method      a micro-batch of B                    log-probabilities
==========  ====================================  ==========================================
``dpo``     2 B sequences, and once more without  TRL's fused head, without all logits
``ipo``     gradients by the reference
``kto``     B sequences and B others for the KL   the same; four forwards, one with gradients
            estimate, both by both models
``orpo``    2 B sequences                         all logits (``preference_logits``)
``cpo``
``simpo``
``reward``  2 B sequences                         none: one number a sequence
==========  ====================================  ==========================================

What each function binds stays alive until it returns, as in the source; numbers that TRL fetches
for its log are computed and not fetched.

Source: TRL 1.16 ``trainer/dpo_trainer.py``, ``kto_trainer.py``, ``reward_trainer.py``
(``compute_loss``).
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from memest.config.kinds import LogProbs, Method
from memest.trace.losses.fused_head import IGNORED
from memest.trace.losses.preference_llama_factory import FACTORY_LOSSES
from memest.trace.losses.preference_logits import (
    BETA,
    LOSSES_OF_LOGITS,
    MODEL_INPUTS,
    Batch,
    Call,
    LossOfPairs,
    cpo,
    fetch,
    fetch_entropy,
    kto_losses,
    loss_of_ratios,
    orpo,
    rows_of_answers,
)
from memest.trace.losses.preference_recipes import SWIFT_LOSSES

__all__ = ["LossOfPairs", "loss_of_pairs"]


def loss_of_pairs(method: Method, log_probs: LogProbs) -> LossOfPairs:
    """The loss of a method, as its trainer computes it.

    Args:
        method: one of preferences.
        log_probs: where its log-probabilities come from.
    """
    return _BY_TRAINER[log_probs][method]


# -- DPO -------------------------------------------------------------------------------------------


def _dpo(model: Call, reference: Call, inputs: Batch, *, averages: bool = False) -> torch.Tensor:
    """``DPOTrainer._compute_loss``; IPO ``averages`` over the tokens of an answer."""
    model_inputs = {name: inputs[name] for name in MODEL_INPUTS}
    completion_mask = inputs["completion_mask"]
    shift_mask = completion_mask[..., 1:]
    labels = inputs["input_ids"].masked_fill(completion_mask == 0, IGNORED)
    outputs = model(**model_inputs, labels=labels)
    length = shift_mask.size(1)
    per_token = outputs.log_probs[:, -length:]
    log_probs = per_token.sum(dim=1)
    chosen, rejected = log_probs.chunk(2, dim=0)
    if "ref_chosen_logps" in inputs:
        ref_chosen, ref_rejected = inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
    else:
        with torch.no_grad():
            ref_outputs = reference(**model_inputs, labels=labels)
        ref_per_token = ref_outputs.log_probs[:, -length:]
        ref_log_probs = ref_per_token.sum(dim=1)
        ref_chosen, ref_rejected = ref_log_probs.chunk(2, dim=0)
    chosen_ratios = chosen - ref_chosen
    rejected_ratios = rejected - ref_rejected
    loss = loss_of_ratios(chosen_ratios, rejected_ratios, completion_mask if averages else None)
    if outputs.aux_loss is not None:
        loss = loss + 0.001 * outputs.aux_loss
        fetch(outputs.aux_loss.mean())
    # the log, whose tensors stay bound
    entropies = outputs.entropy[:, -length:].detach()
    fetch_entropy(entropies, shift_mask)
    fetch(inputs["attention_mask"].sum().sum())
    chosen_logits, rejected_logits = outputs.mean_logits[:, -length:].chunk(2, dim=0)
    chosen_mask, rejected_mask = shift_mask.chunk(2, dim=0)
    _fetch_sums(chosen_logits, chosen_mask, rejected_logits, rejected_mask)
    chosen_hits, _ = outputs.hits[:, -length:].chunk(2, dim=0)
    are_correct = chosen_hits & chosen_mask.bool()
    count = chosen_mask.sum()
    correct = are_correct.sum()
    total = count.sum()
    fetch(correct.sum() / total if total > 0 else total)
    chosen_rewards = BETA * chosen_ratios.detach()
    rejected_rewards = BETA * rejected_ratios.detach()
    fetch(chosen_rewards.mean())
    fetch(rejected_rewards.mean())
    accuracies = (chosen_rewards > rejected_rewards).float()
    fetch(accuracies.mean())
    margins = chosen_rewards - rejected_rewards
    for values in (margins, chosen, rejected):
        fetch(values.mean())
    return loss


def _fetch_sums(
    chosen: torch.Tensor,
    chosen_mask: torch.Tensor,
    rejected: torch.Tensor,
    rejected_mask: torch.Tensor,
) -> None:
    """Mean logits and tokens of both answers, for the log."""
    sums = [
        chosen[chosen_mask.bool()].sum(),
        chosen_mask.sum(),
        rejected[rejected_mask.bool()].sum(),
        rejected_mask.sum(),
    ]
    while sums:
        fetch(sums.pop(0).sum())


# -- KTO -------------------------------------------------------------------------------------------


def _kto(model: Call, reference: Call, inputs: Batch) -> torch.Tensor:
    """``KTOTrainer._compute_loss``: half of the answers are wanted ones."""
    labels = inputs["label"]
    num_chosen = labels.sum()
    num_rejected = len(labels) - num_chosen
    kl_log_probs = _kl_log_probs(model, inputs)
    model_inputs = {name: inputs[name] for name in MODEL_INPUTS}
    answer_labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORED)
    outputs = model(**model_inputs, labels=answer_labels)
    length = inputs["input_ids"].size(1) - 1
    per_token = outputs.log_probs[:, -length:]
    log_probs = per_token.sum(-1)
    chosen_rows, rejected_rows = rows_of_answers(labels, per_token.device)
    chosen = log_probs.index_select(0, chosen_rows)
    rejected = log_probs.index_select(0, rejected_rows)
    if "ref_logps" in inputs:
        ref_chosen = inputs["ref_logps"].index_select(0, chosen_rows)
        ref_rejected = inputs["ref_logps"].index_select(0, rejected_rows)
        ref_kl_log_probs = inputs["ref_KL_logps"]
    else:
        with torch.no_grad():
            ref_kl_log_probs = _kl_log_probs(reference, inputs)
            ref_outputs = reference(**model_inputs, labels=answer_labels)
        ref_per_token = ref_outputs.log_probs[:, -length:]
        ref_log_probs = ref_per_token.sum(-1)
        ref_chosen = ref_log_probs.index_select(0, chosen_rows)
        ref_rejected = ref_log_probs.index_select(0, rejected_rows)
    losses, _, (chosen_rewards, rejected_rewards) = kto_losses(
        (chosen, rejected, kl_log_probs), (ref_chosen, ref_rejected, ref_kl_log_probs)
    )
    mask = inputs["completion_mask"][:, 1:]
    entropies = outputs.entropy[:, -length:].detach()
    fetch_entropy(entropies, mask)
    fetch(inputs["attention_mask"].sum().sum())
    mean_logits = outputs.mean_logits[:, -length:]
    chosen_logits = mean_logits.index_select(0, chosen_rows)
    rejected_logits = mean_logits.index_select(0, rejected_rows)
    chosen_mask = mask.index_select(0, chosen_rows)
    rejected_mask = mask.index_select(0, rejected_rows)
    _fetch_sums(chosen_logits, chosen_mask, rejected_logits, rejected_mask)
    fetch(num_chosen.sum())
    fetch(num_rejected.sum())
    for values in (chosen_rewards, chosen, rejected_rewards, rejected):
        fetch(values.nansum().nansum())
    loss = losses.nanmean()
    if outputs.aux_loss is not None:
        loss = loss + 0.001 * outputs.aux_loss
        fetch(outputs.aux_loss.mean())
    return loss


def _kl_log_probs(model: Call, inputs: Batch) -> torch.Tensor:
    """``_compute_kl_logps``: of answers to other prompts, without gradients."""
    mask = inputs["KL_completion_mask"]
    labels = inputs["KL_input_ids"].masked_fill(mask == 0, IGNORED)
    with torch.no_grad():
        per_token = model(
            input_ids=inputs["KL_input_ids"],
            attention_mask=inputs["KL_attention_mask"],
            labels=labels,
        ).log_probs
    log_probs: torch.Tensor = per_token[:, -(labels.size(1) - 1) :].sum(-1)
    return log_probs


# -- reward models ---------------------------------------------------------------------------------


def _reward(model: Call, _: Call, inputs: Batch) -> torch.Tensor:
    """``RewardTrainer.compute_loss``: one number a sequence."""
    outputs = model(**inputs, use_cache=False)
    chosen, rejected = torch.chunk(outputs.logits.squeeze(-1), chunks=2)
    loss = -functional.logsigmoid(chosen - rejected).mean()
    fetch(inputs["attention_mask"].sum().sum())
    with torch.no_grad():
        rewards = outputs.logits
        fetch(rewards.min())
        fetch(rewards.mean())
        fetch(rewards.max())
        accuracy = (chosen > rejected).float().mean()
        fetch(accuracy.mean())
        margin = (chosen - rejected).mean()
        fetch(margin.mean())
    return loss


_LOSSES: dict[Method, LossOfPairs] = {
    Method.DPO: _dpo,
    Method.IPO: partial(_dpo, averages=True),
    Method.KTO: _kto,
    Method.ORPO: orpo,
    Method.CPO: cpo,
    Method.SIMPO: partial(cpo, simple=True),
    Method.REWARD: _reward,
}
_BY_TRAINER: dict[LogProbs, dict[Method, LossOfPairs]] = {
    LogProbs.FUSED: _LOSSES,
    LogProbs.LOGITS: {**LOSSES_OF_LOGITS, Method.REWARD: _reward},
    LogProbs.FLOAT32: FACTORY_LOSSES,
    LogProbs.SWIFT: SWIFT_LOSSES,
}
