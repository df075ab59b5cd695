"""What the optimizer of a rank works on: its shards of the parameters, or its flat partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memest.distributed import Strategy
from memest.events import Landmarks, Weight
from memest.setup import Loop, Precision, Setup
from memest.sharding.flat import flat_weights
from memest.sharding.shards import num_elements, padded_elements, stored_dtype
from memest.sharding.zero_groups import partition_weights

__all__ = ["as_updated", "updated_weights"]


def updated_weights(
    weights: Sequence[Weight], setup: Setup, landmarks: Landmarks
) -> tuple[Weight, ...]:
    """The weights as the optimizer of rank 0 sees them, which holds the most of all ranks.

    Args:
        weights: as they were traced.
        setup: the run.
        landmarks: of the model: FSDP1 has the units that they make.
    """
    if setup.distributed.strategy is Strategy.ZERO:
        return partition_weights(weights, setup)
    if setup.distributed.strategy is not Strategy.FSDP:
        return tuple(weights)
    if setup.distributed.fsdp_version == 1:
        return flat_weights(weights, setup, landmarks)
    spread = setup.distributed
    experts = [names for names, _, of_experts in landmarks.units if of_experts]
    inside = tuple(f"{name}." for names in experts for name in names)
    return tuple(
        _shard(
            weight, setup,
            spread.expert_shard_ranks if weight.name.startswith(inside) else spread.shard_ranks,
        )
        for weight in weights
    )  # fmt: skip


def _shard(weight: Weight, setup: Setup, ranks: int) -> Weight:
    padded_elements(weight, ranks)
    first, *rest = weight.shape
    shape = (min(-(-first // ranks), first), *rest)
    stride = tuple(num_elements(shape[place + 1 :]) for place in range(len(shape)))
    return replace(weight, shape=shape, stride=stride, dtype=stored_dtype(weight, setup))


def as_updated(setup: Setup) -> Setup:
    """The setup whose updates are traced: DeepSpeed scales and clips by itself, in place."""
    if setup.distributed.strategy is not Strategy.ZERO:
        return setup
    return replace(
        setup, max_grad_norm=0.0, loop=Loop.PLAIN, master_weights=False, precision=Precision.FP32,
        # an evaluation is the Trainer's, and no matter of an update
        eval_batch=None, eval_samples=None, eval_accumulation_steps=None,
    )  # fmt: skip
