"""Batches of prompts with completions that the model wrote, as TRL keeps them between updates.

All prompts are as long as each other, and all completions: an upper bound, as TRL pads them.

Source: TRL 1.16 ``_generate_and_score_completions`` of ``trainer/grpo_trainer.py`` and
``trainer/rloo_trainer.py``; ``_generate`` of ``experimental/online_dpo/online_dpo_trainer.py``;
ms-swift 4.6.0 ``GRPOBatch`` of ``rl_core``; verl 0.9.1 ``trainer/ppo/v1/trainer_base.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memest.config.kinds import LogProbs, Method
from memest.config.rollouts import Engine
from memest.config.setup import Setup
from memest.trace.inputs.tensors import WORD, TensorPlan

__all__ = ["batch_of_completions", "completions_note"]

_BOUND = "prompts are as long as each other, and so are completions: an upper bound; "
_COMPLETIONS_NOTE = (
    f"{_BOUND}what scores them before the step (old and reference log-probabilities) takes less "
    "than the step, and a reward model on the GPU is not counted"
)
_HANDED_OUT_NOTE = (
    f"{_BOUND}what scores them before the step (old and reference log-probabilities) is counted, "
    "and so are the weights that are gathered for what writes; a reward model on the GPU is not"
)
"""Where FSDP or DeepSpeed shard the weights."""
_BY_VERL_NOTE = (
    f"{_BOUND}old log-probabilities are counted; the reference's, "
    "whose weights come from the host unit by unit, take less than the step; a reward model on the "
    "GPU is not counted"
)
_WRITTEN_NOTE = f"{_BOUND}every prompt has two of them; a reward model on the GPU is not counted"


def completions_note(setup: Setup) -> str:
    """What is assumed of the completions that a run learns from."""
    if setup.method.writes_pairs:
        return _WRITTEN_NOTE
    if setup.log_probs is LogProbs.VERL:
        return _BY_VERL_NOTE
    return _HANDED_OUT_NOTE if setup.distributed.scores_completions else _COMPLETIONS_NOTE


def batch_of_completions(sequences: tuple[TensorPlan, ...], setup: Setup) -> tuple[TensorPlan, ...]:
    """The tensors of one micro-batch.

    Args:
        sequences: what the model reads of a plain batch of the same sizes.
        setup: counts completions, or prompts that get two each; its length is that of both.

    Raises:
        ConfigError: completions leave no room for a prompt.
    """
    assert setup.rollouts is not None
    tokens = next(tensor for tensor in sequences if tensor.name == "input_ids")
    batch, seq_len = tokens.shape
    length = setup.rollouts.completion_of(seq_len)
    if setup.method.writes_pairs:
        batch *= 2
    if setup.log_probs is LogProbs.VERL:
        told = ["values", "returns"] if setup.is_critic else ["old_log_probs", "advantages"]
        if setup.has_reference and not setup.is_critic:
            told.append("ref_log_prob")
        return _batch_of_verl(tokens, length, told)
    if setup.log_probs is LogProbs.SWIFT:
        return _batch_of_swift(sequences, (batch, length), asks=setup.has_reference)
    out = [
        TensorPlan(name=f"{part}_{name}", shape=(batch, count), fill=fill)
        for part, count in (("prompt", seq_len - length), ("completion", length))
        for name, fill in (("ids", WORD), ("mask", 1))
    ]
    if setup.method.writes_pairs:
        return tuple(out)
    numbers: dict[str, tuple[int, ...]] = {"advantages": (batch,)}
    if setup.method is Method.RLOO:
        numbers["old_logps"] = (batch,)
    else:
        out.append(TensorPlan(name="num_items_in_batch", shape=(), fill=1))
        if setup.rollouts.engine is not Engine.MODEL:
            numbers["old_per_token_logps"] = (batch, length)
            numbers["importance_sampling_ratio"] = (batch, 1)
            numbers["sampling_per_token_logps"] = (batch, length)
        if setup.has_reference:
            numbers["ref_per_token_logps"] = (batch, length)
    out += [
        TensorPlan(name=name, shape=shape, dtype=torch.float32) for name, shape in numbers.items()
    ]
    return tuple(out)


def _batch_of_swift(
    sequences: tuple[TensorPlan, ...], shape: tuple[int, int], *, asks: bool
) -> tuple[TensorPlan, ...]:
    """Whole sequences, and numbers of each token of a completion, as ms-swift keeps them."""
    names = ("advantages", "old_per_token_logps", *(("ref_per_token_logps",) * asks))
    numbers = [TensorPlan(name=name, shape=shape, dtype=torch.float32) for name in names]
    mask = TensorPlan(name="completion_mask", shape=shape, dtype=torch.bool, fill=1)
    read = [each for each in sequences if each.name in ("input_ids", "attention_mask")]
    return (*read, mask, *numbers)


def _batch_of_verl(
    tokens: TensorPlan, length: int, numbers: Sequence[str]
) -> tuple[TensorPlan, ...]:
    """Sequences end to end, and numbers of each token of an answer: values of nested tensors."""
    samples, seq_len = tokens.shape
    row, answers = samples * seq_len, samples * length

    def positions() -> torch.Tensor:
        return torch.arange(seq_len).repeat(samples)

    def offsets() -> torch.Tensor:
        return torch.arange(samples + 1) * seq_len

    return (
        TensorPlan(name="prompts", shape=(row - answers,), fill=WORD),
        TensorPlan(name="responses", shape=(answers,), fill=WORD),
        TensorPlan(name="response_mask", shape=(answers,), fill=1),
        TensorPlan(name="input_ids", shape=(row,), fill=WORD),
        TensorPlan(name="offsets", shape=(samples + 1,), value=offsets),
        TensorPlan(name="position_ids", shape=(row,), value=positions),
        *(TensorPlan(name=name, shape=(answers,), dtype=torch.float32) for name in numbers),
    )
