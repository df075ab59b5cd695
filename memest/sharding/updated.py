"""What the optimizer of a rank works on: its shards of the parameters, or its flat partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memest.distributed import Strategy
from memest.events import Landmarks, Weight
from memest.setup import Loop, Precision, Setup
from memest.sharding.fsdp1 import flat_weights
from memest.sharding.shards import num_elements, padded_elements, stored_dtype
from memest.sharding.zero_groups import partition_weights

__all__ = ["as_updated", "updated_weights", "updates_on_device"]


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
    ranks = setup.distributed.shard_ranks
    return tuple(_shard(weight, setup, ranks) for weight in weights)


def _shard(weight: Weight, setup: Setup, ranks: int) -> Weight:
    padded_elements(weight, ranks)
    first, *rest = weight.shape
    shape = (min(-(-first // ranks), first), *rest)
    stride = tuple(num_elements(shape[place + 1 :]) for place in range(len(shape)))
    return replace(weight, shape=shape, stride=stride, dtype=stored_dtype(weight, setup))


def updates_on_device(setup: Setup) -> bool:
    """Whether clipping and optimizer work in the GPU's memory."""
    return not (setup.distributed.fsdp_offload or setup.distributed.offload_optimizer)


def as_updated(setup: Setup) -> Setup:
    """The setup whose updates are traced: DeepSpeed scales and clips by itself, in place."""
    if setup.distributed.strategy is not Strategy.ZERO:
        return setup
    return replace(
        setup, max_grad_norm=0.0, loop=Loop.PLAIN, master_weights=False, precision=Precision.FP32
    )
