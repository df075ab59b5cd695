"""What verl's actor and critic compute of a micro-batch of answers, as its FSDP engine has it.

All sequences lie end to end in one row (``use_remove_padding``); the logits of all tokens are there
in the dtype of autocast, and flash-attn's kernel writes their gradients where they lie. The loss is
that of every estimate of advantages; the critic has a value of each token in the logits' place.
What a sample does by itself (its answer cut out of the row) is done here for all of them at once:
the same bytes in fewer allocations.

Source: verl 0.9.1 ``workers/engine/fsdp/transformer_impl.py`` (``forward_step``,
``prepare_model_inputs``, ``prepare_model_outputs``), ``workers/utils/losses.py`` (``ppo_loss``,
``value_loss``), ``workers/utils/padding.py``, ``trainer/ppo/core_algos.py``
(``compute_policy_loss_vanilla``, ``compute_value_loss``, ``agg_loss``, ``kl_penalty``); flash-attn
2.8 ``ops/triton/cross_entropy.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn import functional

from memest.trace.losses.preference_logits import Batch, Call, fetch

__all__ = ["score_by_verl", "score_values", "value_step", "verl_step"]

_CLIP = 0.2
_DUAL_CLIP = 3.0
_COEFFICIENT = 0.001
_TEMPERATURE = 1.0
_VALUE_CLIP = 0.5


class _CrossEntropy(torch.autograd.Function):
    """``CrossEntropyLoss``: two kernels, numbers of rows, and gradients in place of logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        log_z = torch.empty_like(losses)
        z_losses = torch.empty_like(losses)
        ctx.save_for_backward(logits, log_z, labels)
        ctx.mark_non_differentiable(z_losses)
        return losses, z_losses

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        logits, *_ = ctx.saved_tensors
        return logits, None


def verl_step(model: Call, _: Call, inputs: Batch) -> tuple[torch.Tensor, Any]:
    """``forward_step`` of a micro-batch that trains.

    Args:
        model: the actor.
        inputs: of :func:`memest.trace.inputs.completions.batch_of_completions`; what is on the
            device is the function's own, so the caller's names are taken from it.

    Returns:
        The loss, and what its caller keeps until the backward is done.
    """
    return _step(model, inputs, _log_probs, _loss)


def score_by_verl(model: Call | None, _: Call | None, inputs: Batch) -> None:
    """``compute_log_prob``: log-probabilities and entropies of a micro-batch, before the step.

    The compiled entropy reads the logits row by row and has a number of each. A reference is asked
    by itself, its weights on the host: it takes less than the actor beside its gradients.
    """
    assert model is not None
    with torch.no_grad():
        _log_probs(model, inputs, asks_entropies=True)


def value_step(model: Call, _: Call, inputs: Batch) -> tuple[torch.Tensor, Any]:
    """The same of the critic, which has a value of each token; as :func:`verl_step`."""
    return _step(model, inputs, _values, _value_loss)


def score_values(model: Call | None, _: Call | None, inputs: Batch) -> None:
    """``_compute_values``: the values of a micro-batch, before the step."""
    assert model is not None
    with torch.no_grad():
        _values(model, inputs)


def _step(
    model: Call,
    inputs: Batch,
    numbers_of: Callable[[Call, Batch], tuple[torch.Tensor, Any]],
    loss_of: Callable[[torch.Tensor, Batch], torch.Tensor],
) -> tuple[torch.Tensor, Any]:
    """The loss of the numbers of each token, and these."""
    batch = dict(inputs)
    cast("dict[str, Any]", inputs).clear()
    numbers, _kept = numbers_of(model, batch)
    loss = loss_of(numbers, batch)
    fetch(loss.detach())
    return loss, numbers.detach()


def _values(model: Call, batch: Batch) -> tuple[torch.Tensor, Any]:
    """Of every token of the row, (total,); and what the caller has names for."""
    output, *kept = _outputs(model, batch)
    return output.logits.squeeze(0).squeeze(-1), (output, kept)


def _log_probs(
    model: Call, batch: Batch, *, asks_entropies: bool = False
) -> tuple[torch.Tensor, Any]:
    """Of every token of the row, (total,), float32; and what the caller has names for."""
    output, rolled, temperature = _outputs(model, batch)
    logits = output.logits.squeeze(0)
    entropies = torch.empty(len(logits) if asks_entropies else 0, device=logits.device)
    losses, _ = _CrossEntropy.apply(logits, rolled)  # type: ignore[no-untyped-call]
    return -losses, (output, temperature, entropies)


def _outputs(model: Call, batch: Batch) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """What the model says of the row; the tokens that follow, and temperatures."""
    input_ids, offsets = batch["input_ids"], batch["offsets"]
    temperature = torch.full((len(offsets) - 1,), _TEMPERATURE, device=input_ids.device)
    temperature = torch.repeat_interleave(temperature, offsets.diff(), dim=0)
    rolled = torch.roll(input_ids.unsqueeze(0), shifts=-1, dims=1).squeeze(0)
    output = model(
        input_ids=input_ids.unsqueeze(0),
        attention_mask=None,
        position_ids=batch["position_ids"].unsqueeze(0),
        use_cache=False,
    )
    return output, rolled, temperature


def _answers(of_tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
    """``no_padding_2_padding``: of each token of an answer, (samples, length)."""
    samples = len(batch["offsets"]) - 1
    length = len(batch["responses"]) // samples
    rows = of_tokens.view(samples, -1)
    # the number of a token stands at the one before it
    answers = functional.pad(rows[:, -length - 1 : -1], (0, 0))
    return answers.clone()  # padded one by one, and stacked


def _padder(batch: Batch) -> Callable[[str], torch.Tensor]:
    """``to_padded_tensor``: the numbers of a name, (samples, length), while this is there."""
    samples = len(batch["offsets"]) - 1
    data: dict[str, torch.Tensor] = {}  # which the function has a name for

    def padded(name: str) -> torch.Tensor:
        data[name] = batch[name].view(samples, -1).clone()
        return data[name]

    return padded


def _value_loss(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """``value_loss``, the mean over all tokens of answers of the step."""
    predicted = _answers(values, batch)
    padded = _padder(batch)
    old_values, returns = padded("values"), padded("returns")
    mask = padded("response_mask").to(torch.bool)
    low, high = old_values - _VALUE_CLIP, old_values + _VALUE_CLIP
    clipped = torch.max(torch.min(predicted, high), low)
    losses1 = (predicted - returns) ** 2
    losses2 = (clipped - returns) ** 2
    losses = torch.max(losses1, losses2)
    loss = 0.5 * _aggregate(losses, mask)
    clip_share = _masked_mean(torch.gt(losses2, losses1).float(), mask)
    del low, high, clipped, losses1, losses2, losses
    for value in (clip_share, _masked_mean(predicted, mask)):
        fetch(value.detach())
    return loss


def _loss(log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """``ppo_loss``, the mean over all tokens of answers of the step."""
    log_prob = _answers(log_probs, batch)
    padded = _padder(batch)
    mask = padded("response_mask").to(torch.bool)
    old_log_prob, advantages = padded("old_log_probs"), padded("advantages")
    diverges = "ref_log_prob" in batch
    ref_log_prob = padded("ref_log_prob") if diverges else log_prob
    loss = _policy_loss(log_prob, old_log_prob, advantages, mask)
    fetch(loss.detach())
    if diverges:
        divergence = _divergence(log_prob, ref_log_prob)
        kl_loss = _aggregate(divergence, mask)
        loss += kl_loss * _COEFFICIENT
        fetch(kl_loss.detach())
    return loss


def _policy_loss(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """``compute_policy_loss_vanilla``."""
    negative_kl = torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0)
    ratio = torch.exp(negative_kl)
    kl = _masked_mean(-negative_kl, mask)
    losses1 = -advantages * ratio
    losses2 = -advantages * torch.clamp(ratio, 1 - _CLIP, 1 + _CLIP)
    clipped1 = torch.maximum(losses1, losses2)
    clip_share = _masked_mean(torch.gt(losses2, losses1).float(), mask)
    losses3 = -advantages * _DUAL_CLIP
    clipped2 = torch.min(losses3, clipped1)
    low_share = _masked_mean(torch.gt(clipped1, losses3) * (advantages < 0).float(), mask)
    losses = torch.where(advantages < 0, clipped2, clipped1)
    loss = _aggregate(losses, mask)
    for value in (clip_share, kl, low_share):
        fetch(value.detach())
    return loss


def _divergence(log_prob: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
    """``kl_penalty``, ``low_var_kl``."""
    kl = torch.clamp(ref_log_prob - log_prob, min=-20, max=20)
    ratio = torch.exp(kl)
    return torch.clamp(ratio - kl - 1, min=-10, max=10)


def _masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (torch.where(mask, values, 0.0) * mask).sum()


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    total = _masked_sum(values, mask)
    return total / (mask.sum() + 1e-8)


def _aggregate(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``agg_loss``: by the tokens of all GPUs, whose number was counted before."""
    return _masked_sum(values, mask) / 1 * 1
