"""Batches of answers that were preferred to others, as TRL's collators make them.

All answers are as long as the longest, and every token of one counts: an upper bound, as prompts
are not scored.

Source: TRL 1.16 ``DataCollatorForPreference`` of ``trainer/dpo_trainer.py`` and
``trainer/reward_trainer.py``, ``DataCollatorForUnpairedPreference`` of ``trainer/kto_trainer.py``,
``DPODataCollatorWithPadding`` of ``experimental/utils.py``; LLaMA-Factory 0.9.4
``PairwiseDataCollatorWithPadding`` and ``KTODataCollatorWithPadding`` of ``data/collator.py``;
torchtune 0.6.1
``padded_collate_dpo`` of ``data/_collate.py``; ms-swift 4.6.0 ``_rlhf_data_collator`` of
``template/base.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from memest.config.kinds import LogProbs, Method
from memest.config.setup import Setup
from memest.trace.inputs.tensors import TensorPlan

__all__ = ["PAIRS_NOTE", "batch_of_pairs"]

PAIRS_NOTE = (
    "answers are as long as each other and all their tokens are scored: an upper bound, as prompts "
    "are not; where lengths differ, masks reach the attention kernels (--padded)"
)

_READ = ("input_ids", "attention_mask")


def batch_of_pairs(
    plan: Callable[[Setup], tuple[TensorPlan, ...]], setup: Setup
) -> tuple[TensorPlan, ...]:
    """The tensors of one micro-batch, in the order a collator makes them.

    Args:
        plan: of a batch of as many sequences as a setup has samples.
        setup: counts pairs, or under KTO answers.
    """
    method, batch = setup.method, setup.batch
    if method is Method.KTO and setup.log_probs.is_put_together:
        once = _sequences(plan, setup, 1)
        labels = replace(once["input_ids"], name="labels")
        both = tuple(
            replace(each, name=start + each.name)
            for start in ("", "KL_")
            for each in (*once.values(), labels)
        )
        return both if setup.log_probs is LogProbs.SWIFT else (*both, _wanted(batch))
    if setup.log_probs.is_put_together:
        twice = _sequences(plan, setup, 2)
        if method is Method.REWARD and not setup.values_tokens:
            return tuple(twice.values())
        return (*twice.values(), replace(twice["input_ids"], name="labels"))
    once = _sequences(plan, setup, 1)
    if method.makes_all_logits:
        return tuple(
            replace(tensor, name=f"{side}_{name}")
            for side in ("chosen", "rejected", "prompt")
            for name, tensor in (*once.items(), ("labels", once["input_ids"]))
            if (side, name) != ("prompt", "labels")
        )
    if method is Method.KTO:
        out = [
            replace(each, name=start + each.name)
            for start in ("", "KL_")
            for each in _answers(once)
        ]
        return (*out, _wanted(batch), *_scores(setup, ("ref_logps", "ref_KL_logps")))
    twice = _sequences(plan, setup, 2)
    if method is Method.REWARD:
        return tuple(twice.values())
    return (*_answers(twice), *_scores(setup, ("ref_chosen_logps", "ref_rejected_logps")))


def _sequences(
    plan: Callable[[Setup], tuple[TensorPlan, ...]], setup: Setup, times: int
) -> dict[str, TensorPlan]:
    """What the model reads of so many times a batch."""
    tensors = plan(replace(setup, batch=times * setup.batch))
    return {tensor.name: tensor for tensor in tensors if tensor.name in _READ}


def _answers(sequences: dict[str, TensorPlan]) -> tuple[TensorPlan, ...]:
    """Sequences and which of their tokens count."""
    mask = TensorPlan(name="completion_mask", shape=sequences["input_ids"].shape, fill=1)
    return (*sequences.values(), mask)


def _scores(setup: Setup, names: tuple[str, ...]) -> tuple[TensorPlan, ...]:
    """What the reference said before training began."""
    if not setup.precompute_ref_log_probs:
        return ()
    return tuple(TensorPlan(name=name, shape=(setup.batch,), dtype=torch.float32) for name in names)


def _wanted(batch: int) -> TensorPlan:
    """Every other answer is a wanted one."""
    return TensorPlan(
        name="label",
        shape=(batch,),
        dtype=torch.bool,
        value=lambda: torch.arange(batch) % 2 == 0,
    )
