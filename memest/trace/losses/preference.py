"""What TRL's trainers over pairs of answers compute, written anew operator by operator.

==========  ====================================  ==========================================
method      a micro-batch of B                    log-probabilities
==========  ====================================  ==========================================
``dpo``     2 B sequences, and once more without  TRL's fused head, without all logits
``ipo``     gradients by the reference
``kto``     B sequences and B others for the KL   the same; four forwards, one with gradients
            estimate, both by both models
``orpo``    2 B sequences                         all logits, which stay until backward
``cpo``
``simpo``
``reward``  2 B sequences                         none: one number a sequence
==========  ====================================  ==========================================

What each function binds stays alive until it returns, as in the source; numbers that TRL fetches
for its log are computed and not fetched.

Source: TRL 1.16 ``trainer/dpo_trainer.py``, ``kto_trainer.py``, ``reward_trainer.py``
(``compute_loss``), ``experimental/orpo/orpo_trainer.py``, ``experimental/cpo/cpo_trainer.py``
(``concatenated_forward``, ``get_batch_loss_metrics``), ``kernels/logprob_entropy.py``,
``trainer/utils.py`` (``selective_log_softmax``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from memest.config.kinds import Method
from memest.trace.losses.fused_head import IGNORED

__all__ = ["LossOfPairs", "loss_of_pairs"]

Batch = Mapping[str, Any]
Call = Callable[..., Any]
LossOfPairs = Callable[[Call, Call, Batch], torch.Tensor]
"""``loss(model, reference, batch)``: both are called as the trainer calls them."""
_BETA = 0.1  # no size depends on it
_MODEL_INPUTS = ("input_ids", "attention_mask")


def loss_of_pairs(method: Method) -> LossOfPairs:
    """The loss of a method, as its trainer computes it."""
    return _LOSSES[method]


def _fetch(_: torch.Tensor) -> float:
    """``value.item()``, which allocates nothing on the device."""
    return 0.0


# -- DPO -------------------------------------------------------------------------------------------


def _dpo(model: Call, reference: Call, inputs: Batch, *, averages: bool = False) -> torch.Tensor:
    """``DPOTrainer._compute_loss``; IPO ``averages`` over the tokens of an answer."""
    model_inputs = {name: inputs[name] for name in _MODEL_INPUTS}
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
    difference = chosen_ratios - rejected_ratios
    loss: Any = 0.0
    if averages:
        chosen_mask, rejected_mask = completion_mask.chunk(2, dim=0)
        chosen_average = chosen_ratios / chosen_mask.sum(dim=1).clamp(min=1.0)
        rejected_average = rejected_ratios / rejected_mask.sum(dim=1).clamp(min=1.0)
        average_difference = chosen_average - rejected_average
        of_pairs = (average_difference - 1 / (2 * _BETA)) ** 2
    else:
        of_pairs = -functional.logsigmoid(_BETA * difference)
    loss += of_pairs.mean() * 1.0
    if outputs.aux_loss is not None:
        loss = loss + 0.001 * outputs.aux_loss
    # the log, whose tensors stay bound
    entropies = outputs.entropy[:, -length:].detach()
    entropy = (entropies * shift_mask).sum()
    count: Any = shift_mask.sum()
    entropy, count = entropy.sum(), count.sum()
    _fetch(entropy / count if count > 0 else entropy)
    _fetch(inputs["attention_mask"].sum().sum())
    chosen_logits, rejected_logits = outputs.mean_logits[:, -length:].chunk(2, dim=0)
    chosen_mask, rejected_mask = shift_mask.chunk(2, dim=0)
    _fetch_sums(chosen_logits, chosen_mask, rejected_logits, rejected_mask)
    chosen_hits, rejected_hits = outputs.hits[:, -length:].chunk(2, dim=0)
    are_correct = chosen_hits & chosen_mask.bool()
    count = chosen_mask.sum()
    correct = are_correct.sum()
    total = count.sum()
    _fetch(correct.sum() / total if total > 0 else total)
    chosen_rewards = _BETA * chosen_ratios.detach()
    rejected_rewards = _BETA * rejected_ratios.detach()
    _fetch(chosen_rewards.mean())
    _fetch(rejected_rewards.mean())
    accuracies = (chosen_rewards > rejected_rewards).float()
    _fetch(accuracies.mean())
    margins = chosen_rewards - rejected_rewards
    for values in (margins, chosen, rejected):
        _fetch(values.mean())
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
        _fetch(sums.pop(0).sum())


# -- KTO -------------------------------------------------------------------------------------------


def _kto(model: Call, reference: Call, inputs: Batch) -> torch.Tensor:
    """``KTOTrainer._compute_loss``: half of the answers are wanted ones."""
    labels = inputs["label"]
    num_chosen = labels.sum()
    num_rejected = len(labels) - num_chosen
    kl_log_probs = _kl_log_probs(model, inputs)
    model_inputs = {name: inputs[name] for name in _MODEL_INPUTS}
    answer_labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORED)
    outputs = model(**model_inputs, labels=answer_labels)
    length = inputs["input_ids"].size(1) - 1
    per_token = outputs.log_probs[:, -length:]
    log_probs = per_token.sum(-1)
    is_chosen = torch.as_tensor(inputs["label"], dtype=torch.bool, device=per_token.device)
    chosen_rows = torch.nonzero(is_chosen, as_tuple=False).view(-1)
    rejected_rows = torch.nonzero(~is_chosen, as_tuple=False).view(-1)
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
    kl = (kl_log_probs - ref_kl_log_probs).mean().detach()
    kl = kl.mean().clamp(min=0)
    chosen_ratios = chosen - ref_chosen
    chosen_losses = 1 - functional.sigmoid(_BETA * (chosen_ratios - kl))
    chosen_rewards = _BETA * chosen_ratios.detach()
    rejected_ratios = rejected - ref_rejected
    rejected_losses = 1 - functional.sigmoid(_BETA * (kl - rejected_ratios))
    rejected_rewards = _BETA * rejected_ratios.detach()
    losses = torch.cat((1.0 * chosen_losses, 1.0 * rejected_losses), 0)
    mask = inputs["completion_mask"][:, 1:]
    entropies = outputs.entropy[:, -length:].detach()
    entropy = (entropies * mask).sum()
    count: Any = mask.sum()
    entropy, count = entropy.sum(), count.sum()
    _fetch(entropy / count if count > 0 else entropy)
    _fetch(inputs["attention_mask"].sum().sum())
    mean_logits = outputs.mean_logits[:, -length:]
    chosen_logits = mean_logits.index_select(0, chosen_rows)
    rejected_logits = mean_logits.index_select(0, rejected_rows)
    chosen_mask = mask.index_select(0, chosen_rows)
    rejected_mask = mask.index_select(0, rejected_rows)
    _fetch_sums(chosen_logits, chosen_mask, rejected_logits, rejected_mask)
    _fetch(num_chosen.sum())
    _fetch(num_rejected.sum())
    for values in (chosen_rewards, chosen, rejected_rewards, rejected):
        _fetch(values.nansum().nansum())
    loss = losses.nanmean()
    if outputs.aux_loss is not None:
        loss = loss + 0.001 * outputs.aux_loss
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


# -- ORPO, CPO, SimPO: all logits ------------------------------------------------------------------


class _SelectedLogProbs(torch.autograd.Function):
    """``_LogProbEntropyFunction``: two kernels, one row of logits each time."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        log_probs = torch.empty(logits.shape[:-1], device=logits.device, dtype=torch.float32)
        entropy = torch.empty_like(log_probs)
        log_z = torch.empty_like(log_probs)
        expected_logit = torch.empty_like(log_probs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, index, log_z, expected_logit)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, *_ = ctx.saved_tensors
        grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _ = [g.contiguous() for g in gradients if g is not None]
        return grad_logits, None


def _concatenated(inputs: Batch) -> dict[str, torch.Tensor]:
    """``concatenated_inputs``: chosen answers, then rejected ones."""
    names = ("input_ids", "attention_mask", "labels")
    return {
        name: torch.cat((inputs[f"chosen_{name}"], inputs[f"rejected_{name}"]), dim=0)
        for name in names
    }


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of the chosen answers."""
    logits = logits[..., :-1, :].contiguous()
    labels = labels[..., 1:].contiguous()
    logits = logits.view(-1, logits.shape[-1])
    labels = labels.view(-1)
    return functional.cross_entropy(logits, labels)


def _log_probs(
    logits: torch.Tensor, labels: torch.Tensor, *, averages: bool, in_place: bool
) -> torch.Tensor:
    """``get_batch_logps``: of whole answers, from all logits."""
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    mask = labels != IGNORED
    if in_place:
        labels[labels == IGNORED] = 0
    else:
        labels = torch.where(labels == IGNORED, 0, labels)
    per_token = _SelectedLogProbs.apply(logits, labels)[0]  # type: ignore[no-untyped-call]
    if averages:
        return (per_token * mask).sum(-1) / mask.sum(-1)
    total: torch.Tensor = (per_token * mask).sum(-1)
    return total


def _report(
    rewards: tuple[torch.Tensor, torch.Tensor],
    log_probs: tuple[torch.Tensor, torch.Tensor],
    logits: tuple[torch.Tensor, torch.Tensor],
    *others: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The log of a step, whose numbers wait on the device until all are there."""
    chosen, rejected = rewards
    accuracies = (chosen > rejected).float()
    return {
        "chosen": chosen.mean(),
        "rejected": rejected.mean(),
        "accuracies": accuracies.mean(),
        "margins": (chosen - rejected).mean(),
        "rejected log-probabilities": log_probs[1].detach().mean(),
        "chosen log-probabilities": log_probs[0].detach().mean(),
        "rejected logits": logits[1].detach().mean().mean(),
        "chosen logits": logits[0].detach().mean().mean(),
        **{str(number): value.detach().mean() for number, value in enumerate(others)},
    }


def _orpo(model: Call, _: Call, inputs: Batch) -> torch.Tensor:
    """``ORPOTrainer``: the loss of the chosen answers, and the odds of both."""
    batch = _concatenated(inputs)
    outputs = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    )
    all_logits, number = outputs.logits, inputs["chosen_labels"].shape[0]
    labels = batch["input_ids"].clone()
    labels = torch.where(batch["attention_mask"] == 1, labels, IGNORED)
    own_loss = _mean_loss(all_logits[:number], labels[:number])
    log_probs = _log_probs(all_logits, batch["labels"], averages=True, in_place=False)
    chosen, rejected = log_probs[:number], log_probs[number:]
    logits = all_logits[:number, :-1, :], all_logits[number:, :-1, :]
    del batch, outputs, labels, all_logits, log_probs
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    ratio = functional.logsigmoid(odds)
    losses = _BETA * ratio
    rewards = (_BETA * chosen).detach(), (_BETA * rejected).detach()
    means = torch.mean(ratio), torch.mean(odds)
    del ratio, odds
    loss = own_loss - losses.mean()
    _report(rewards, (chosen, rejected), logits, own_loss, *means)
    return loss


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """``log(1 - exp(x))``, by one way or the other."""
    return torch.where(x < -0.69, torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))


def _cpo(model: Call, _: Call, inputs: Batch, *, simple: bool = False) -> torch.Tensor:
    """``CPOTrainer``; SimPO averages over tokens, and has a margin in place of the own loss."""
    batch = _concatenated(inputs)
    outputs = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    )
    all_logits, number = outputs.logits, inputs["chosen_labels"].shape[0]
    labels = batch["labels"].clone()
    if simple:
        own_loss = torch.zeros((), device=all_logits.device)
    else:
        own_loss = _mean_loss(all_logits[:number], labels[:number])
    log_probs = _log_probs(all_logits, batch["labels"], averages=simple, in_place=True)
    chosen, rejected = log_probs[:number], log_probs[number:]
    logits = all_logits[:number], all_logits[number:]
    del batch, outputs, labels, all_logits, log_probs
    difference = chosen - rejected
    if simple:
        difference = difference - 0.5 / _BETA
    losses = (
        -functional.logsigmoid(_BETA * difference) * 1.0
        - functional.logsigmoid(-_BETA * difference) * 0.0
    )
    rewards = (_BETA * chosen).detach(), (_BETA * rejected).detach()
    del difference
    loss = losses.mean() + (0.0 if simple else 1.0) * own_loss
    _report(rewards, (chosen, rejected), logits, own_loss)
    return loss


# -- reward models ---------------------------------------------------------------------------------


def _reward(model: Call, _: Call, inputs: Batch) -> torch.Tensor:
    """``RewardTrainer.compute_loss``: one number a sequence."""
    outputs = model(**inputs, use_cache=False)
    chosen, rejected = torch.chunk(outputs.logits.squeeze(-1), chunks=2)
    loss = -functional.logsigmoid(chosen - rejected).mean()
    _fetch(inputs["attention_mask"].sum().sum())
    with torch.no_grad():
        rewards = outputs.logits
        _fetch(rewards.min())
        _fetch(rewards.mean())
        _fetch(rewards.max())
        accuracy = (chosen > rejected).float().mean()
        _fetch(accuracy.mean())
        margin = (chosen - rejected).mean()
        _fetch(margin.mean())
    return loss


_LOSSES: dict[Method, LossOfPairs] = {
    Method.DPO: _dpo,
    Method.IPO: partial(_dpo, averages=True),
    Method.KTO: _kto,
    Method.ORPO: _orpo,
    Method.CPO: _cpo,
    Method.SIMPO: partial(_cpo, simple=True),
    Method.REWARD: _reward,
}
