"""Preference losses of torchtune and ms-swift, written anew: they make the logits of all tokens.

==============  ==================================================================================
torchtune       logits in float32, a copy of them, and the logarithms of all of them. What the loop
                calls ``_`` is the reference's logits, which so live until it is asked again.
ms-swift        logits as the model gives them; the logarithms of one sequence at a time (float32:
                their sums alone), and a mean of the logits of each token, which is logged.
==============  ==================================================================================

Source: torchtune 0.6.1 ``recipes/lora_dpo_single_device.py`` (``concatenated_forward``, ``train``),
``rlhf/sequence_processing.py``, ``rlhf/loss/dpo.py``; ms-swift 4.6.0
``rlhf_trainers/dpo_trainer.py``, ``rlhf_mixin.py``, ``kto_trainer.py``, ``reward_trainer.py``,
``orpo_trainer.py`` and ``cpo_trainer.py`` over TRL 0.29, ``grpo_trainer.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from memest.config.kinds import Method
from memest.trace.losses.fused_head import IGNORED
from memest.trace.losses.preference_logits import (
    BETA,
    MODEL_INPUTS,
    Batch,
    Call,
    LossOfPairs,
    cpo,
    fetch,
    kto_losses,
    orpo,
    selected,
)

__all__ = ["SWIFT_LOSSES", "ScriptLoss", "torchtune_dpo"]

ScriptLoss = Callable[[Call, Call, Batch], tuple[torch.Tensor, Any]]
"""``loss(model, reference, batch)`` of a script's loop: the loss, and what its names keep."""


_CLIP = 0.2


# -- torchtune -------------------------------------------------------------------------------------


def torchtune_dpo(model: Call, reference: Call, inputs: Batch) -> tuple[torch.Tensor, Any]:
    """``LoRADPORecipeSingleDevice.train`` up to its backward.

    Args:
        model: that trains.
        reference: the same, its adapters off.
        inputs: ``input_ids`` and ``labels``, chosen answers before rejected ones, (2 B, S).

    Returns:
        The loss, and the logits that the loop's ``_`` keeps until the reference is asked again.
    """
    chosen, rejected, chosen_logits, rejected_logits = _concatenated_forward(model, inputs)
    means = chosen_logits.detach().mean(), rejected_logits.detach().mean()
    del chosen_logits, rejected_logits
    with torch.no_grad():
        ref_chosen, ref_rejected, _, _ = _concatenated_forward(reference, inputs)
    ratios = chosen - rejected
    ref_ratios = ref_chosen - ref_rejected
    difference = ratios - ref_ratios
    losses = (
        -functional.logsigmoid(BETA * difference) * 1.0
        - functional.logsigmoid(-BETA * difference) * 0.0
    )
    rewards = (BETA * (chosen - ref_chosen)).detach(), (BETA * (rejected - ref_rejected)).detach()
    hits = (rewards[0] > rewards[1]).float()
    for value in (*means, *rewards, hits):
        fetch(value)
    return losses.mean(), _


def _concatenated_forward(model: Call, inputs: Batch) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of chosen and rejected answers, and their logits."""
    all_logits = model(input_ids=inputs["input_ids"], use_cache=False).logits.float()
    log_probs = _log_probs(all_logits, inputs["labels"])
    number = len(inputs["input_ids"]) // 2
    return log_probs[:number], log_probs[number:], all_logits[:number], all_logits[number:]


def _log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``rlhf.get_batch_log_probs``: sums over answers, (2 B,)."""
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    mask = labels != IGNORED
    labels[labels == IGNORED] = 0
    per_token = torch.gather(
        functional.log_softmax(logits / 1.0, dim=-1), 2, labels.unsqueeze(-1)
    ).squeeze(-1)
    total: torch.Tensor = (per_token * mask).sum(-1)
    return total


# -- ms-swift --------------------------------------------------------------------------------------


def _swift_dpo(
    model: Call, reference: Call, inputs: Batch, *, averages: bool = False
) -> torch.Tensor:
    """``DPOTrainer.get_batch_loss_metrics``; IPO ``averages`` over the tokens of an answer."""
    output = _swift_forward(model, inputs, trains=True)
    with torch.no_grad():
        ref_output = _swift_forward(reference, inputs, trains=False)
    ref_chosen, ref_rejected = ref_output["chosen"], ref_output["rejected"]
    del ref_output
    chosen, rejected = output["chosen"], output["rejected"]
    if averages:
        counts = output["chosen_counts"], output["rejected_counts"]
        chosen, rejected, ref_chosen, ref_rejected = (
            values / count.to(values).clamp_min(1)
            for values, count in zip(
                (chosen, rejected, ref_chosen, ref_rejected), counts * 2, strict=True
            )
        )
    logits = (chosen - rejected) - (ref_chosen - ref_rejected)
    if averages:
        losses = (logits - 1 / (2 * BETA)) ** 2
    else:
        losses = (
            -functional.logsigmoid(BETA * logits) * 1.0
            - functional.logsigmoid(-BETA * logits) * 0.0
        )
    rewards = BETA * (chosen - ref_chosen).detach(), BETA * (rejected - ref_rejected).detach()
    hits = (rewards[0] > rewards[1]).float()
    for values in (*rewards, hits, rewards[0] - rewards[1], *output.values()):
        fetch(values.float().mean())
    loss = losses.mean()
    if "aux_loss" in output:
        loss = loss + 0.001 * output["aux_loss"]
    return loss


def _swift_forward(model: Call, inputs: Batch, *, trains: bool) -> dict[str, torch.Tensor]:
    """``concatenated_forward`` with ``get_per_token_logps``."""
    # names are let go of in the order in which they appear
    labels = inputs["labels"]
    model_inputs = {name: inputs[name] for name in MODEL_INPUTS}
    outputs = model(**model_inputs, use_cache=False)
    all_logits = outputs.logits
    labels = torch.roll(labels, shifts=-1, dims=1)
    per_token, means, mask = _per_token(all_logits, labels)
    number = len(labels) // 2
    counts = mask.sum(dim=1)
    output = {}
    if trains:
        output["own_loss"] = -per_token[:number][mask[:number]].mean()
    log_probs = per_token.sum(-1)
    output["chosen"], output["rejected"] = log_probs[:number], log_probs[number:]
    output["chosen_logits"] = means[:number][mask[:number]].mean()
    output["rejected_logits"] = means[number:][mask[number:]].mean()
    output["chosen_counts"], output["rejected_counts"] = counts[:number], counts[number:]
    aux_loss = getattr(outputs, "aux_loss", None)
    if aux_loss is not None:
        output["aux_loss"] = aux_loss
    return output


def _per_token(
    logits: torch.Tensor,
    labels: torch.Tensor,
    reduce: Callable[[torch.Tensor, int], torch.Tensor] = torch.Tensor.mean,
) -> tuple[torch.Tensor, ...]:
    """``get_per_token_logps``: log-probabilities and mean logits of the tokens that count."""
    mask = labels != IGNORED
    labels = labels.clone()
    labels[~mask] = 0
    means = reduce(logits, -1)
    per_token = selected(logits, labels)
    per_token[~mask] = 0
    means[~mask] = 0
    return per_token, means, mask


def _swift_kto(model: Call, reference: Call, inputs: Batch) -> torch.Tensor:
    """``KTOTrainer.get_batch_loss_metrics``: every other answer is a wanted one."""
    num_chosen = (len(inputs["labels"]) + 1) // 2
    chosen, rejected, chosen_logits, rejected_logits, kl_log_probs = _swift_answers(model, inputs)
    with torch.no_grad():
        ref_chosen, ref_rejected, _, _, ref_kl_log_probs = _swift_answers(reference, inputs)
    losses, _, (chosen_rewards, rejected_rewards) = kto_losses(
        (chosen, rejected, kl_log_probs), (ref_chosen, ref_rejected, ref_kl_log_probs)
    )
    logged = [chosen_rewards, chosen, chosen_logits] if num_chosen else []
    for values in (*logged, rejected_rewards, rejected, rejected_logits):
        fetch(values.nansum().nansum())
    return losses.nanmean()


def _swift_answers(model: Call, inputs: Batch) -> tuple[torch.Tensor, ...]:
    """``forward`` of KTOTrainer: log-probabilities and sums of logits, and those of the KL."""
    kl_inputs = {name: inputs[f"KL_{name}"] for name in MODEL_INPUTS}
    with torch.no_grad():
        kl_logits = model(**kl_inputs, use_cache=False).logits
    kl_log_probs, _ = _of_answers(kl_logits, inputs["KL_labels"])
    del kl_logits
    model_inputs = {name: inputs[name] for name in MODEL_INPUTS}
    outputs = model(**model_inputs, use_cache=False)
    log_probs, logits = _of_answers(outputs.logits, inputs["labels"])
    chosen_rows = list(range(0, len(log_probs), 2))
    rejected_rows = list(range(1, len(log_probs), 2))
    chosen, rejected = log_probs[chosen_rows, ...], log_probs[rejected_rows, ...]
    return chosen, rejected, logits[chosen_rows], logits[rejected_rows], kl_log_probs


def _of_answers(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``get_batch_logps`` of KTOTrainer: sums over answers."""
    labels = torch.roll(labels, shifts=-1, dims=1)
    per_token, sums, _ = _per_token(logits, labels, reduce=torch.Tensor.sum)
    return per_token.sum(-1), sums.sum(-1)


def _swift_reward(model: Call, _: Call, inputs: Batch) -> torch.Tensor:
    """``RewardTrainer.compute_loss``: one number a sequence."""
    model_inputs = {name: inputs[name] for name in MODEL_INPUTS}
    rewards = model(**model_inputs, use_cache=False).logits
    chosen, rejected = torch.split(rewards, len(rewards) // 2, dim=0)
    loss = -functional.logsigmoid(chosen - rejected).mean()
    chosen, rejected = chosen.detach(), rejected.detach()
    for values in (chosen, rejected, (chosen > rejected).float(), chosen - rejected):
        fetch(values.mean())
    return loss


def _swift_grpo(model: Call, _: Call, inputs: Batch) -> torch.Tensor:
    """``GRPOTrainer._compute_loss_and_metrics``, of completions that were scored before."""
    mask = inputs["completion_mask"]
    per_token = _swift_scores(model, inputs, mask.size(1))
    diverges = "ref_per_token_logps" in inputs
    if diverges:
        safe_ratio = torch.clamp(inputs["ref_per_token_logps"] - per_token, min=-20, max=20)
        per_token_kl = torch.clamp(torch.exp(safe_ratio) - safe_ratio - 1, min=-10, max=10)
    advantages = inputs["advantages"]
    log_ratio = per_token - inputs["old_per_token_logps"]
    coef = torch.exp(log_ratio)
    clipped_coef = torch.clamp(coef, 1 - _CLIP, 1 + _CLIP)
    loss1 = coef * advantages
    loss2 = clipped_coef * advantages
    per_token_loss = -torch.min(loss1, loss2)
    if diverges:
        per_token_loss = per_token_loss + BETA * per_token_kl
    loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    count = mask.sum().clamp(min=1.0)
    if diverges:
        fetch((per_token_kl * mask).sum() / count)
    is_low = (coef < 1 - _CLIP) & (advantages < 0)
    is_high = (coef > 1 + _CLIP) & (advantages > 0)
    is_outside = is_low | is_high
    for clipped in (is_low, is_high, is_outside):
        fetch((clipped.float() * mask).sum() / count)
    return loss


def _swift_scores(model: Call, inputs: Batch, length: int) -> torch.Tensor:
    """``_get_logps_via_local_forward``: logits of the completions alone, divided in place."""
    model_inputs = {name: inputs[name] for name in MODEL_INPUTS}
    logits = model(**model_inputs, use_cache=False, logits_to_keep=length + 1).logits
    logits = logits[:, -(length + 1) : -1, :]
    logits.div_(1.0)
    return selected(logits, inputs["input_ids"][:, -length:])


SWIFT_LOSSES: dict[Method, LossOfPairs] = {
    Method.DPO: _swift_dpo,
    Method.IPO: partial(_swift_dpo, averages=True),
    Method.KTO: _swift_kto,
    Method.ORPO: partial(orpo, select=selected),
    Method.CPO: partial(cpo, select=selected),
    Method.SIMPO: partial(cpo, simple=True, select=selected),
    Method.REWARD: _swift_reward,
    Method.GRPO: _swift_grpo,
}
"""ms-swift's, of ``swift rlhf``."""
