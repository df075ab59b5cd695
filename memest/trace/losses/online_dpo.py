"""What TRL's OnlineDPOTrainer computes of two completions of each prompt, in a step of its own.

Its ``training_step`` has the completions written, scores them by model and reference with all
logits, and runs the backward itself: what it binds stays alive until it returns, behind the
backward. Rewards are numbers that functions on the host give; numbers that TRL fetches for its log
are computed and not fetched.

Source: TRL 1.16 ``experimental/online_dpo/online_dpo_trainer.py`` (``training_step``, ``_forward``,
``_calculate_rewards_from_functions``), with the defaults of ``OnlineDPOConfig``
(``loss_type="sigmoid"``; ``"ipo"`` differs in numbers of a pair).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from memest.trace.losses.preference_logits import BETA, Batch, Call, fetch

__all__ = ["TrainingStep", "online_dpo_step"]

TrainingStep = Callable[[Call, Call, Batch, Callable[[torch.Tensor], None]], torch.Tensor]
"""``step(model, reference, batch, backward)``: a trainer's ``training_step``, its loss detached."""


def online_dpo_step(
    model: Call, reference: Call, inputs: Batch, backward: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """``OnlineDPOTrainer.training_step`` behind the writing.

    Args:
        model: that trains.
        reference: that is always asked.
        inputs: the first completion of every prompt, then the second.
        backward: ``Accelerator.backward``.
    """
    # each name as there, unused ones too: names hold tensors
    prompt_ids, prompt_mask = inputs["prompt_ids"], inputs["prompt_mask"]
    completion_ids, completion_mask = inputs["completion_ids"], inputs["completion_mask"]
    batch_size, device = completion_ids.size(0) // 2, completion_ids.device
    contain_eos_token = torch.any(
        torch.isin(completion_ids, torch.tensor([0], device=device)), dim=-1
    )
    logprobs = _forward(model, prompt_ids, prompt_mask, completion_ids, completion_mask)
    with torch.no_grad():
        ref_logprobs = _forward(reference, prompt_ids, prompt_mask, completion_ids, completion_mask)
    rewards = _rewards(2 * batch_size, device)
    first_half, second_half = rewards.split(batch_size)
    mask = first_half >= second_half
    batch_range = torch.arange(batch_size, device=device)
    chosen_indices = batch_range + (~mask * batch_size)
    rejected_indices = batch_range + (mask * batch_size)
    cr_indices = torch.cat((chosen_indices, rejected_indices), dim=0)
    cr_logprobs = logprobs[cr_indices]
    cr_ref_logprobs = ref_logprobs[cr_indices]
    padding_mask = ~completion_mask.bool()
    cr_padding_mask = padding_mask[cr_indices]
    cr_logprobs_sum = (cr_logprobs * ~cr_padding_mask).sum(1)
    cr_ref_logprobs_sum = (cr_ref_logprobs * ~cr_padding_mask).sum(1)
    chosen_sum, rejected_sum = torch.split(cr_logprobs_sum, batch_size)
    chosen_ref_sum, rejected_ref_sum = torch.split(cr_ref_logprobs_sum, batch_size)
    pi_logratios = chosen_sum - rejected_sum
    ref_logratios = chosen_ref_sum - rejected_ref_sum
    logits = pi_logratios - ref_logratios
    losses = -functional.logsigmoid(BETA * logits)
    loss = losses.mean()
    # the log
    scores_margin = rewards[chosen_indices] - rewards[rejected_indices]
    for values in (scores_margin, rewards):
        fetch(values.mean().mean())  # the second one of what all processes have
    for values in (contain_eos_token.float(), chosen_sum, rejected_sum):
        fetch(values.mean())
    kl = logprobs - ref_logprobs
    mean_kl = kl.sum(1).mean()
    fetch(mean_kl.mean())
    non_score_reward = (-BETA * kl).sum(1)
    mean_non_score_reward = non_score_reward.mean()
    fetch(mean_non_score_reward.mean())
    rlhf_reward = rewards + non_score_reward
    fetch(rlhf_reward.mean())
    mean_entropy = -logprobs.sum(1).mean()
    fetch(mean_entropy.mean())
    chosen_rewards = BETA * (chosen_sum - chosen_ref_sum)
    fetch(chosen_rewards.mean())
    rejected_rewards = BETA * (rejected_sum - rejected_ref_sum)
    fetch(rejected_rewards.mean())
    margin = chosen_rewards - rejected_rewards
    fetch(margin.mean())
    accuracy = margin > 0
    fetch(accuracy.float().mean())
    backward(loss)
    return loss.detach() / 1  # by the number of micro-steps; no size depends on it


def _forward(
    model: Call,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
) -> torch.Tensor:
    """Log-probabilities of the completions' tokens, of the logarithms of all of them."""
    ids = torch.cat((prompt_ids, completion_ids), dim=1)
    attention_mask = torch.cat((prompt_mask, completion_mask), dim=1)
    output = model(input_ids=ids, attention_mask=attention_mask)
    logits = output.logits[:, prompt_ids.size(1) - 1 : -1]
    index = completion_ids.unsqueeze(-1)
    return torch.take_along_dim(logits.log_softmax(dim=-1), index, dim=2).squeeze(-1)


def _rewards(count: int, device: torch.device) -> torch.Tensor:
    """Rewards of all completions, by one function on the host."""
    of_functions = torch.zeros(count, 1, device=device)
    of_functions[:, 0] = torch.tensor([0.0] * count, dtype=torch.float32, device=device)
    return (of_functions * torch.ones(1).to(device).unsqueeze(0)).nansum(dim=1)
