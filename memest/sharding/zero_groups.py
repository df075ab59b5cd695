"""Flat groups of ZeRO: which parameters lie in which buffer, and how it is cut.

Source: ``DeepSpeedZeroOptimizer.__init__`` of DeepSpeed 0.19.8 (``stage_1_and_2.py``): one flat
buffer for each group of the optimizer, padded to a multiple of ``nccl_start_alignment_factor`` (2)
times the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from memest.errors import ConfigError
from memest.events import Weight
from memest.setup import Loop, Setup
from memest.sharding.shards import num_elements

__all__ = ["Group", "groups_of", "partition_weights"]

_ALIGNMENT = 2


@dataclass(frozen=True)
class Group:
    """A group of the optimizer.

    Attributes:
        weights: numbers of its parameters, in order.
        offsets: first element of each in the flat buffer.
        padded_elements: of the buffer.
        ranks: that it is cut for.
        dtype: of the buffer.
        decays: whether the group has weight decay.
    """

    weights: tuple[int, ...]
    offsets: tuple[int, ...]
    padded_elements: int
    ranks: int
    dtype: str
    decays: bool

    @property
    def partition_elements(self) -> int:
        """Elements of a rank."""
        return self.padded_elements // self.ranks

    @cached_property
    def places(self) -> dict[int, int]:
        """Where a weight stands in the group."""
        return {weight: place for place, weight in enumerate(self.weights)}


def groups_of(weights: Sequence[Weight], setup: Setup) -> tuple[Group, ...]:
    """The groups of a run: the Trainer has one with weight decay and one without.

    Raises:
        ConfigError: nothing trains, or parameters of several dtypes share a group.
    """
    trained = [index for index, weight in enumerate(weights) if weight.trains]
    if not trained:
        raise ConfigError(
            f"--zero {setup.distributed.zero} needs parameters that train: DeepSpeed's stages 1 "
            "and 2 partition what the optimizer has. Only stage 3 shards a model that does not "
            "train."
        )
    parted = [trained]
    if setup.loop is Loop.TRAINER:
        parted = [[i for i in trained if weights[i].decays is decays] for decays in (True, False)]
    return tuple(_group(weights, part, setup) for part in parted if part)


def _group(weights: Sequence[Weight], members: Sequence[int], setup: Setup) -> Group:
    dtypes = sorted({weights[index].dtype for index in members})
    if len(dtypes) > 1:
        raise ConfigError(
            f"--zero {setup.distributed.zero} flattens the parameters of a group into one buffer, "
            f"and these have {' and '.join(dtypes)}: convert them with --bf16, or use --fsdp "
            "full_shard."
        )
    offsets, at = [], 0
    for index in members:
        offsets.append(at)
        at += num_elements(weights[index].shape)
    unit = _ALIGNMENT * setup.distributed.num_gpus
    return Group(
        weights=tuple(members), offsets=tuple(offsets), padded_elements=-(-at // unit) * unit,
        ranks=setup.distributed.num_gpus, dtype=dtypes[0],
        decays=weights[members[0]].decays,
    )  # fmt: skip


def partition_weights(weights: Sequence[Weight], setup: Setup) -> tuple[Weight, ...]:
    """What the optimizer of a rank updates: one flat float32 tensor for each group."""
    return tuple(
        Weight(
            name=f"zero.partition.{place}",
            shape=(group.partition_elements,),
            stride=(1,),
            dtype="float32",
            trains=True,
            decays=group.decays,
            has_grad=True,
        )
        for place, group in enumerate(groups_of(weights, setup))
    )
