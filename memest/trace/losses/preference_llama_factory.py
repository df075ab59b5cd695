"""LLaMA-Factory's losses over pairs and single answers, written anew operator by operator.

All logits are made float32 and the logarithms of all of them are taken. A reward model makes all
logits too (:mod:`memest.trace.model.value_head`), and collated labels have it compute its own loss
of them, which nobody asks for.

Source: LLaMA-Factory 0.9.4 ``train/dpo/trainer.py``, ``train/kto/trainer.py``,
``train/rm/trainer.py``, ``train/trainer_utils.py`` (``get_batch_logps``);
TRL 0.24 ``trainer/kto_trainer.py`` (``kto_loss``).
"""

from __future__ import annotations

from functools import partial

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
    fetch,
    kto_losses,
)

__all__ = ["FACTORY_LOSSES"]

# -- pairs -----------------------------------------------------------------------------------------


def _pairs(
    model: Call, reference: Call, inputs: Batch, *, averages: bool, asks: bool
) -> torch.Tensor:
    """``CustomDPOTrainer.get_batch_loss_metrics``.

    Args:
        model: that trains.
        reference: that is asked, where the method ``asks``.
        inputs: of pairs.
        averages: over the tokens of an answer.
        asks: whether there is a reference.
    """
    (chosen, rejected), logits, sft_loss = _concatenated_forward(
        model, inputs, averages=averages, clones=asks
    )
    if asks:
        with torch.no_grad():
            (ref_chosen, ref_rejected), *_ = _concatenated_forward(
                reference, inputs, averages=averages, clones=True
            )
        difference = (chosen - rejected) - (ref_chosen - ref_rejected)
        losses = -functional.logsigmoid(BETA * difference)
        rewards = BETA * (chosen - ref_chosen).detach(), BETA * (rejected - ref_rejected).detach()
    else:
        difference = (chosen - rejected) - (
            torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
        )
        # ORPO's; SimPO's differs in numbers of a pair
        losses = sft_loss + BETA * -functional.logsigmoid(difference)
        rewards = BETA * chosen.detach(), BETA * rejected.detach()
    for values in (*rewards, chosen, rejected, *logits):
        fetch(values.mean())
    return losses.mean()


def _concatenated_forward(
    model: Call, inputs: Batch, *, averages: bool, clones: bool
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor]:
    """Log-probabilities and logits of chosen and rejected answers, and the chosen ones' loss."""
    batch = {name: value.detach().clone() if clones else value for name, value in inputs.items()}
    labels = batch.pop("labels")
    all_logits = model(**batch, use_cache=False).logits.to(torch.float32)
    log_probs, lengths = _of_answers(all_logits, labels)
    if averages:
        log_probs = log_probs / lengths
    number = labels.size(0) // 2
    both = log_probs.split(number, dim=0)
    chosen_lengths, _ = lengths.split(number, dim=0)
    average = both[0] if averages else both[0] / chosen_lengths
    return both, all_logits.split(number, dim=0), -average


def _of_answers(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``get_batch_logps``: logarithms of all probabilities, of which the labels' are taken."""
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    mask = labels != IGNORED
    labels[labels == IGNORED] = 0
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    lengths = mask.sum(-1)
    return (per_token * mask).sum(-1), lengths


# -- KTO -------------------------------------------------------------------------------------------


def _kto(model: Call, reference: Call, inputs: Batch) -> torch.Tensor:
    """``CustomKTOTrainer.get_batch_loss_metrics``: half of the answers are wanted ones."""
    chosen, rejected, chosen_logits, rejected_logits, kl_log_probs, _ = _of_all(model, inputs)
    with torch.no_grad():
        ref_chosen, ref_rejected, _, _, ref_kl_log_probs, _ = _of_all(reference, inputs)
    losses, kl, rewards = kto_losses(
        (chosen, rejected, kl_log_probs), (ref_chosen, ref_rejected, ref_kl_log_probs)
    )
    loss = losses.nanmean()
    logged = (rewards[0], chosen, chosen_logits, rewards[1], rejected, rejected_logits)
    for values in logged:
        fetch(values.nansum())
    fetch(kl)
    return loss


def _of_all(model: Call, inputs: Batch) -> tuple[torch.Tensor, ...]:
    """``concatenated_forward``: of wanted and unwanted answers, and of the divergence's."""
    logits, log_probs, averages = _answers(model, inputs, "")
    with torch.no_grad():
        _, kl_log_probs, _ = _answers(model, inputs, "KL_")
    tags = inputs["label"]
    chosen_logits = logits[tags]
    chosen = log_probs[tags]
    rejected_logits = logits[~tags]
    rejected = log_probs[~tags]
    return chosen, rejected, chosen_logits, rejected_logits, kl_log_probs, averages[tags]


def _answers(model: Call, inputs: Batch, prefix: str) -> tuple[torch.Tensor, ...]:
    """``forward``: logits, their sums over answers, and the means."""
    batch = {name: value.detach().clone() for name, value in inputs.items()}
    model_inputs = {name: batch[prefix + name] for name in MODEL_INPUTS}
    logits = model(**model_inputs, use_cache=False).logits.to(torch.float32)
    log_probs, lengths = _of_answers(logits, batch[f"{prefix}labels"])
    return logits, log_probs, log_probs / lengths


# -- reward models ---------------------------------------------------------------------------------


def _reward(model: Call, _: Call, inputs: Batch) -> torch.Tensor:
    """``PairwiseTrainer.compute_loss``: the value of the last token of each answer."""
    _, _, values = model(**inputs, use_cache=False)  # the second one stays: the model's own loss
    number = inputs["input_ids"].size(0) // 2
    masks = torch.split(inputs["attention_mask"], number, dim=0)
    chosen, rejected = (
        rewards.gather(dim=-1, index=mask.sum(dim=-1, keepdim=True) - 1).squeeze()
        for rewards, mask in zip(torch.split(values, number, dim=0), masks, strict=True)
    )
    return -functional.logsigmoid(chosen.float() - rejected.float()).mean()


FACTORY_LOSSES: dict[Method, LossOfPairs] = {
    Method.DPO: partial(_pairs, averages=False, asks=True),
    Method.IPO: partial(_pairs, averages=True, asks=True),
    Method.KTO: _kto,
    Method.ORPO: partial(_pairs, averages=True, asks=False),
    Method.SIMPO: partial(_pairs, averages=True, asks=False),
    Method.REWARD: _reward,
}
"""LLaMA-Factory's, of ``stage: dpo``, ``kto`` and ``rm``."""
