"""Preference losses of TRL's trainers that make the logits of all tokens, written anew.

``orpo``, ``cpo`` and ``simpo`` do at present; ``dpo`` did in TRL 1.6 to 1.13, ``kto`` as it is here
in 1.9 to 1.13.

Source: TRL 1.16 ``experimental/orpo/orpo_trainer.py``, ``experimental/cpo/cpo_trainer.py``
(``concatenated_forward``, ``get_batch_loss_metrics``), ``kernels/logprob_entropy.py``; TRL 1.13
``trainer/dpo_trainer.py``, ``trainer/kto_trainer.py``, ``trainer/utils.py``
(``selective_log_softmax``, ``entropy_from_logits``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch.nn import functional

from memest.config.kinds import Method
from memest.trace.losses.fused_head import IGNORED

__all__ = [
    "BETA",
    "LOSSES_OF_LOGITS",
    "MODEL_INPUTS",
    "Batch",
    "Call",
    "LossOfPairs",
    "cpo",
    "fetch",
    "fetch_entropy",
    "kto_losses",
    "loss_of_ratios",
    "orpo",
    "rows_of_answers",
    "selected",
]

Batch = Mapping[str, Any]
Call = Callable[..., Any]
LossOfPairs = Callable[[Call, Call, Batch], torch.Tensor]
"""``loss(model, reference, batch)``: both are called as the trainer calls them."""
Select = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Log-probabilities of the words that an index names."""
BETA = 0.1  # no size depends on it
MODEL_INPUTS = ("input_ids", "attention_mask")
_ENTROPY_ROWS = 128


def fetch(_: torch.Tensor) -> float:
    """``value.item()``, which allocates nothing on the device."""
    return 0.0


def fetch_entropy(entropies: torch.Tensor, mask: torch.Tensor) -> None:
    """The mean entropy of the answers' tokens, for the log."""
    entropy, count = (entropies * mask).sum(), mask.sum()
    entropy, count = entropy.sum(), count.sum()
    fetch(entropy / count if count > 0 else entropy)


def loss_of_ratios(
    chosen: torch.Tensor, rejected: torch.Tensor, completion_mask: torch.Tensor | None
) -> torch.Tensor:
    """DPO's loss of log-ratios of B pairs; with the mask IPO's, of their means over tokens."""
    difference = chosen - rejected
    loss: Any = 0.0
    if completion_mask is None:
        of_pairs = -functional.logsigmoid(BETA * difference)
    else:
        masks = completion_mask.chunk(2, dim=0)
        averages = [
            ratios / mask.sum(dim=1).clamp(min=1.0)
            for ratios, mask in zip((chosen, rejected), masks, strict=True)
        ]
        of_pairs = (averages[0] - averages[1] - 1 / (2 * BETA)) ** 2
    loss += of_pairs.mean() * 1.0
    return cast("torch.Tensor", loss)


def rows_of_answers(
    labels: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows of TRL's KTO batch are wanted answers, and which are not.

    Args:
        labels: true for the wanted ones.
        device: where the rows are asked for.
    """
    is_chosen = torch.as_tensor(labels, dtype=torch.bool, device=device)
    return (
        torch.nonzero(is_chosen, as_tuple=False).view(-1),
        torch.nonzero(~is_chosen, as_tuple=False).view(-1),
    )


def kto_losses(
    policy: tuple[torch.Tensor, ...], reference: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """KTO's loss of each answer, its divergence, and rewards of both kinds.

    Args:
        policy: log-probabilities of chosen and rejected answers and of the divergence's.
        reference: the same by the reference.
    """
    chosen, rejected, kl_log_probs = policy
    ref_chosen, ref_rejected, ref_kl_log_probs = reference
    kl = (kl_log_probs - ref_kl_log_probs).mean().detach()
    kl = kl.mean().clamp(min=0)
    chosen_ratios = chosen - ref_chosen
    chosen_losses = 1 - functional.sigmoid(BETA * (chosen_ratios - kl))
    chosen_rewards = BETA * chosen_ratios.detach()
    rejected_ratios = rejected - ref_rejected
    rejected_losses = 1 - functional.sigmoid(BETA * (kl - rejected_ratios))
    rejected_rewards = BETA * rejected_ratios.detach()
    losses = torch.cat((1.0 * chosen_losses, 1.0 * rejected_losses), 0)
    return losses, kl, (chosen_rewards, rejected_rewards)


# -- ORPO, CPO and SimPO of TRL --------------------------------------------------------------------


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
    if "labels" in inputs:  # ms-swift's collator has put them together
        return dict(inputs)
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


def _fused_selected(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``selective_log_softmax`` since TRL 1.14."""
    log_probs: torch.Tensor = _SelectedLogProbs.apply(logits, index)[0]  # type: ignore[no-untyped-call]
    return log_probs


def _log_probs(
    logits: torch.Tensor, labels: torch.Tensor, *, averages: bool, in_place: bool, select: Select
) -> torch.Tensor:
    """``get_batch_logps``: of whole answers, from all logits."""
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    mask = labels != IGNORED
    if in_place:
        labels[labels == IGNORED] = 0
    else:
        labels = torch.where(labels == IGNORED, 0, labels)
    per_token = select(logits, labels)
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


def orpo(model: Call, _: Call, inputs: Batch, *, select: Select = _fused_selected) -> torch.Tensor:
    """``ORPOTrainer``: the loss of the chosen answers, and the odds of both."""
    batch = _concatenated(inputs)
    outputs = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    )
    all_logits, number = outputs.logits, len(batch["labels"]) // 2
    labels = batch["input_ids"].clone()
    labels = torch.where(batch["attention_mask"] == 1, labels, IGNORED)
    own_loss = _mean_loss(all_logits[:number], labels[:number])
    log_probs = _log_probs(
        all_logits, batch["labels"], averages=True, in_place=False, select=select
    )
    chosen, rejected = log_probs[:number], log_probs[number:]
    logits = all_logits[:number, :-1, :], all_logits[number:, :-1, :]
    del batch, outputs, labels, all_logits, log_probs
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    ratio = functional.logsigmoid(odds)
    losses = BETA * ratio
    rewards = (BETA * chosen).detach(), (BETA * rejected).detach()
    means = torch.mean(ratio), torch.mean(odds)
    del ratio, odds
    loss = own_loss - losses.mean()
    _report(rewards, (chosen, rejected), logits, own_loss, *means)
    return loss


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """``log(1 - exp(x))``, by one way or the other."""
    return torch.where(x < -0.69, torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))


def cpo(
    model: Call,
    _: Call,
    inputs: Batch,
    *,
    simple: bool = False,
    select: Select = _fused_selected,
) -> torch.Tensor:
    """``CPOTrainer``; SimPO averages over tokens, and has a margin in place of the own loss."""
    batch = _concatenated(inputs)
    outputs = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    )
    all_logits, number = outputs.logits, len(batch["labels"]) // 2
    labels = batch["labels"].clone()
    if simple:
        own_loss = torch.zeros((), device=all_logits.device)
    else:
        own_loss = _mean_loss(all_logits[:number], labels[:number])
    log_probs = _log_probs(
        all_logits, batch["labels"], averages=simple, in_place=True, select=select
    )
    chosen, rejected = log_probs[:number], log_probs[number:]
    logits = all_logits[:number], all_logits[number:]
    del batch, outputs, labels, all_logits, log_probs
    difference = chosen - rejected
    if simple:
        difference = difference - 0.5 / BETA
    losses = (
        -functional.logsigmoid(BETA * difference) * 1.0
        - functional.logsigmoid(-BETA * difference) * 0.0
    )
    rewards = (BETA * chosen).detach(), (BETA * rejected).detach()
    del difference
    loss = losses.mean() + (0.0 if simple else 1.0) * own_loss
    _report(rewards, (chosen, rejected), logits, own_loss)
    return loss


# -- DPO and KTO of TRL 1.6 to 1.13 ----------------------------------------------------------------


def _dpo(model: Call, reference: Call, inputs: Batch, *, averages: bool = False) -> torch.Tensor:
    """``DPOTrainer._compute_loss``; IPO ``averages`` over the tokens of an answer."""
    model_inputs = {name: inputs[name] for name in MODEL_INPUTS}
    outputs = model(**model_inputs, use_cache=False)
    input_ids, completion_mask = inputs["input_ids"], inputs["completion_mask"]
    logits, labels = outputs.logits[..., :-1, :], input_ids[..., 1:]
    mask = completion_mask[..., 1:]
    per_token = selected(logits, labels)
    per_token[mask == 0] = 0.0
    log_probs = per_token.sum(dim=1)
    chosen, rejected = log_probs.chunk(2, dim=0)
    if "ref_chosen_logps" in inputs:
        ref_chosen, ref_rejected = inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
    else:
        with torch.no_grad():
            ref_outputs = reference(**model_inputs, use_cache=False)
        ref_logits = ref_outputs.logits[..., :-1, :]
        ref_per_token = selected(ref_logits, labels)
        ref_per_token[mask == 0] = 0.0
        ref_log_probs = ref_per_token.sum(dim=1)
        ref_chosen, ref_rejected = ref_log_probs.chunk(2, dim=0)
    mask_of_answers = completion_mask if averages else None
    loss = loss_of_ratios(chosen - ref_chosen, rejected - ref_rejected, mask_of_answers)
    # the log, whose tensors stay bound and go in the order of their names
    chosen_mask, rejected_mask = mask.chunk(2, dim=0)
    entropies = _entropies(logits.detach())
    fetch((entropies * mask).sum())
    chosen_logits, rejected_logits = logits.detach().chunk(2, dim=0)
    fetch(chosen_logits[chosen_mask.bool()].mean(-1).sum())
    fetch(rejected_logits[rejected_mask.bool()].mean(-1).sum())
    predictions = chosen_logits.argmax(dim=-1)
    chosen_mask = mask[: len(mask) // 2].bool()
    are_correct = (predictions == labels[: len(labels) // 2]) & chosen_mask
    fetch(are_correct.sum())
    return loss


def selected(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``selective_log_softmax``: one sequence after the other."""
    index = index.unsqueeze(-1)
    if logits.dtype is torch.float32:
        selected = torch.gather(logits, dim=-1, index=index)
        sums = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
        return (selected - sums.unsqueeze(-1)).squeeze(-1)
    per_token: Any = []
    for row, labels in zip(logits, index, strict=True):
        row_log_probs = functional.log_softmax(row, dim=-1)
        row_per_token = row_log_probs.gather(dim=-1, index=labels)
        per_token.append(row_per_token)
    per_token = torch.stack(per_token)
    per_token = per_token.squeeze(-1)
    return cast("torch.Tensor", per_token)


def _entropies(logits: torch.Tensor) -> torch.Tensor:
    """``entropy_from_logits``: rows of a copy, some at a time."""
    shape = logits.shape[:-1]
    rows = logits.reshape(-1, logits.shape[-1])
    entropies = []
    for chunk in rows.split(_ENTROPY_ROWS, dim=0):
        log_p = functional.log_softmax(chunk, dim=-1)
        chunk_entropy = -(torch.exp(log_p) * log_p).sum(-1)
        entropies.append(chunk_entropy)
    return torch.cat(entropies, dim=0).reshape(shape)


def _kto(model: Call, reference: Call, inputs: Batch) -> torch.Tensor:
    """``KTOTrainer._compute_loss`` of TRL 1.9 to 1.13: half of the answers are wanted ones."""
    labels = inputs["label"]
    num_chosen = labels.sum()
    num_rejected = len(labels) - num_chosen
    kl_log_probs = _kl_log_probs(model, inputs)
    model_inputs = {name: inputs[name] for name in MODEL_INPUTS}
    outputs = model(**model_inputs)
    logits = outputs.logits[:, :-1, :]
    per_token = selected(logits, inputs["input_ids"][:, 1:])
    per_token[inputs["completion_mask"][:, 1:] == 0] = 0.0
    log_probs = per_token.sum(-1)
    chosen_rows, rejected_rows = rows_of_answers(labels, logits.device)
    chosen = log_probs.index_select(0, chosen_rows)
    rejected = log_probs.index_select(0, rejected_rows)
    if "ref_logps" in inputs:
        ref_chosen = inputs["ref_logps"].index_select(0, chosen_rows)
        ref_rejected = inputs["ref_logps"].index_select(0, rejected_rows)
        ref_kl_log_probs = inputs["ref_KL_logps"]
    else:
        with torch.no_grad():
            ref_kl_log_probs = _kl_log_probs(reference, inputs)
            ref_outputs = reference(**model_inputs)
        ref_logits = ref_outputs.logits[:, :-1, :]
        ref_per_token = selected(ref_logits, inputs["input_ids"][:, 1:])
        ref_per_token[inputs["completion_mask"][:, 1:] == 0] = 0.0
        ref_log_probs = ref_per_token.sum(-1)
        ref_chosen = ref_log_probs.index_select(0, chosen_rows)
        ref_rejected = ref_log_probs.index_select(0, rejected_rows)
    losses, kl, rewards = kto_losses(
        (chosen, rejected, kl_log_probs), (ref_chosen, ref_rejected, ref_kl_log_probs)
    )
    fetch(kl)
    # the log, whose tensors stay bound
    entropies = _entropies(logits.detach())
    mask = inputs["completion_mask"][:, 1:]
    fetch_entropy(entropies, mask)
    fetch(inputs["attention_mask"].sum().sum())
    chosen_logits = logits.detach().index_select(0, chosen_rows)
    rejected_logits = logits.detach().index_select(0, rejected_rows)
    chosen_mask = mask.index_select(0, chosen_rows)
    rejected_mask = mask.index_select(0, rejected_rows)
    sums = (
        chosen_logits[chosen_mask.bool()].mean(-1).sum(),
        chosen_mask.sum(),
        rejected_logits[rejected_mask.bool()].mean(-1).sum(),
        rejected_mask.sum(),
    )
    for value in (*sums, num_chosen, num_rejected):
        fetch(value.sum())
    for values in (rewards[0], chosen, rewards[1], rejected):
        fetch(values.nansum().nansum())
    return losses.nanmean()


def _kl_log_probs(model: Call, inputs: Batch) -> torch.Tensor:
    """``_compute_kl_logps``: of answers to other prompts, without gradients."""
    with torch.no_grad():
        logits = model(
            input_ids=inputs["KL_input_ids"], attention_mask=inputs["KL_attention_mask"]
        ).logits
    logits = logits[:, :-1, :]
    per_token = selected(logits, inputs["KL_input_ids"][:, 1:])
    per_token[inputs["KL_completion_mask"][:, 1:] == 0] = 0.0
    log_probs: torch.Tensor = per_token.sum(-1)
    return log_probs


LOSSES_OF_LOGITS: dict[Method, LossOfPairs] = {
    Method.DPO: _dpo,
    Method.IPO: partial(_dpo, averages=True),
    Method.KTO: _kto,
    Method.ORPO: partial(orpo, select=selected),
    Method.CPO: partial(cpo, select=selected),
    Method.SIMPO: partial(cpo, simple=True, select=selected),
}
"""Losses of TRL's trainers while they made all logits; of rewards there are none."""
