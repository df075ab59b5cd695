"""Groups of ZeRO: which parameters lie in which buffer, how it is cut, and how it is updated.

Source: ``DeepSpeedZeroOptimizer.__init__`` of DeepSpeed 0.19.8 (``stage_1_and_2.py``): one flat
buffer for each group of the optimizer, padded to a multiple of ``nccl_start_alignment_factor`` (2)
times the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memest.config.setup import Loop, Setup
from memest.errors import ConfigError
from memest.events import Category, Weight
from memest.sharding.engine import Rewriter, num_elements
from memest.workspaces.operator_call import DTYPE_BYTES

__all__ = [
    "MASTER_BYTES",
    "NORM_BYTES",
    "Group",
    "GroupUpdate",
    "SubGroup",
    "groups_of",
    "partition_weights",
    "sub_groups_of",
]

MASTER_BYTES = 4
"""Master weights and their gradients are float32 (``master_weights_and_grads_dtype``)."""
NORM_BYTES = 8
"""Norms are taken of a float64 copy of each gradient (``get_norm_dtype``)."""
_ALIGNMENT = 2
SUB_GROUP_ELEMENTS = 1_000_000_000
"""``sub_group_size`` of DeepSpeed where the file names none."""


@dataclass(frozen=True, slots=True)
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

    def slices(self, offset: int, elements: int) -> dict[int, int]:
        """Elements of a weight in each rank's partition, by rank.

        Args:
            offset: first element of the weight in the buffer.
            elements: of the weight.
        """
        out, at, stop = {}, offset, offset + elements
        while at < stop:
            rank = at // self.partition_elements
            end = min((rank + 1) * self.partition_elements, stop)
            out[rank] = end - at
            at = end
        return out


@dataclass(frozen=True, slots=True)
class SubGroup:
    """What ZeRO-3 updates at once (``_create_fp16_sub_groups`` of ``stage3.py``).

    Attributes:
        weights: numbers of its parameters, in order.
        partition_elements: of a rank, each parameter padded by itself.
        dtype: of the parameters.
        decays: whether the optimizer's group has weight decay.
    """

    weights: tuple[int, ...]
    partition_elements: int
    dtype: str
    decays: bool


def sub_groups_of(weights: Sequence[Weight], setup: Setup) -> tuple[SubGroup, ...]:
    """The groups of a run under ZeRO-3, cut where a rank's part reaches ``sub_group_size``.

    Raises:
        ConfigError: parameters of several dtypes: DeepSpeed joins their shards in one block.
    """
    ranks = setup.distributed.num_gpus
    most = setup.distributed.zero_setting("sub_group_size", SUB_GROUP_ELEMENTS)
    dtypes = sorted({weight.dtype for weight in weights if weight.trains})
    if len(dtypes) > 1:
        raise _mixed(setup, dtypes)
    out: list[SubGroup] = []
    for part in _parted(weights, setup):
        members: list[int] = []
        filled = 0
        for index in part:
            members.append(index)
            filled += -(-num_elements(weights[index].shape) // ranks)
            if filled >= most or index == part[-1]:
                decays = weights[members[0]].decays
                out.append(SubGroup(tuple(members), filled, dtypes[0], decays))
                members, filled = [], 0
    return tuple(out)


def _parted(weights: Sequence[Weight], setup: Setup) -> list[list[int]]:
    """What trains, by group of the optimizer: the Trainer has one with decay, one without."""
    trained = [index for index, weight in enumerate(weights) if weight.trains]
    if setup.loop is not Loop.TRAINER:
        return [trained] if trained else []
    parted = [[i for i in trained if weights[i].decays is decays] for decays in (True, False)]
    return [part for part in parted if part]


def _mixed(setup: Setup, dtypes: Sequence[str]) -> ConfigError:
    """Where DeepSpeed stops: ``flatten``, or ``defragment`` of stage 3."""
    adapter = setup.adapter
    if setup.partitions_parameters and adapter is not None and adapter.autocast_adapter_dtype:
        return ConfigError(
            "--zero 3 joins the shards of what trains in one buffer, and these have "
            f"{' and '.join(dtypes)}: peft makes adapters float32, and DeepSpeed casts nothing of "
            "a model that it partitioned while it was built, so the run stops there. Add "
            "--no-autocast-adapter-dtype, or use --zero 2, which casts all."
        )
    return ConfigError(
        f"--zero {setup.distributed.zero} flattens the parameters of a group into one buffer, and "
        f"these have {' and '.join(dtypes)}: convert them with --bf16, or use --fsdp full_shard."
    )


def groups_of(weights: Sequence[Weight], setup: Setup) -> tuple[Group, ...]:
    """The groups of a run: the Trainer has one with weight decay and one without.

    Raises:
        ConfigError: nothing trains, or parameters of several dtypes share a group.
    """
    parted = _parted(weights, setup)
    if not parted:
        raise ConfigError(
            f"--zero {setup.distributed.zero} needs parameters that train: DeepSpeed's stages 1 "
            "and 2 partition what the optimizer has. Only stage 3 shards a model that does not "
            "train."
        )
    return tuple(_group(weights, part, setup) for part in parted)


def _group(weights: Sequence[Weight], members: Sequence[int], setup: Setup) -> Group:
    dtypes = sorted({weights[index].dtype for index in members})
    if len(dtypes) > 1:
        raise _mixed(setup, dtypes)
    offsets, at = [], 0
    for index in members:
        offsets.append(at)
        at += num_elements(weights[index].shape)
    unit = _ALIGNMENT * setup.distributed.num_gpus
    return Group(
        weights=tuple(members),
        offsets=tuple(offsets),
        padded_elements=-(-at // unit) * unit,
        ranks=setup.distributed.num_gpus,
        dtype=dtypes[0],
        decays=weights[members[0]].decays,
    )


def partition_weights(weights: Sequence[Weight], setup: Setup) -> tuple[Weight, ...]:
    """What the optimizer of a rank updates: one flat float32 tensor for each group."""
    groups: Sequence[Group | SubGroup] = (
        sub_groups_of(weights, setup) if setup.distributed.zero == 3 else groups_of(weights, setup)
    )
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
        for place, group in enumerate(groups)
    )


@dataclass(slots=True)
class GroupUpdate:
    """What lives from the beginning of a group's update to the next group's.

    Source: DeepSpeed 0.19.8: ``step`` of ``stage_1_and_2.py`` and
    ``_prepare_fp32_grad_for_sub_group`` of ``stage3.py``; both flatten with
    ``flatten_dense_tensors``, which gives back one tensor alone as it is.

    Attributes:
        to: the stream that is written.
    """

    to: Rewriter
    _alive: list[int] = field(default_factory=list)

    def begin(self, group: Group | SubGroup, tensors: int, dtype: str) -> None:
        """The gradients of a group, after those of the group before it have gone.

        Args:
            group: whose turn it is.
            tensors: gradients that are made flat; of one alone there is no copy.
            dtype: of the gradients.
        """
        self.end()
        size, flat = group.partition_elements, None
        if tensors != 1:
            flat = self.to.alloc(
                size * DTYPE_BYTES[dtype], Category.GRADIENTS, "zero: flat gradients"
            )
        if dtype != "float32":
            self._alive.append(
                self.to.alloc(size * MASTER_BYTES, Category.GRADIENTS, "zero: gradients in float32")
            )
            if flat is not None:
                self.to.free(flat)
        elif flat is not None:
            self._alive.append(flat)

    def end(self) -> None:
        """The update of the last group is done."""
        while self._alive:
            self.to.free(self._alive.pop())
