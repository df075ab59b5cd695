"""What the stages of ZeRO share: groups of the optimizer, the bucket of gradients, the update.

Sources: ``DeepSpeedZeroOptimizer.__init__`` of DeepSpeed 0.19.8 (``stage_1_and_2.py``): one flat
buffer for each group of the optimizer, padded to a multiple of ``nccl_start_alignment_factor`` (2)
times the ranks; ``_create_fp16_sub_groups`` of ``stage3.py``: each parameter padded by itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memest.config.setup import Loop, Setup
from memest.errors import ConfigError
from memest.events import Category, CueKind, Phase, Weight
from memest.sharding.engine import DEFAULT_STREAM, ShardedRank, num_elements
from memest.workspaces.operator_call import DTYPE_BYTES

__all__ = [
    "MASTER_BYTES",
    "NORM_BYTES",
    "Group",
    "ZeroRank",
    "groups_of",
    "partition_weights",
]

MASTER_BYTES = 4
"""Master weights and their gradients are float32 (``master_weights_and_grads_dtype``)."""
NORM_BYTES = 8
"""Norms are taken of a float64 copy of each gradient (``get_norm_dtype``)."""
_ALIGNMENT = 2
_REDUCTION_STREAM = 2
SUB_GROUP_ELEMENTS = 1_000_000_000
"""``sub_group_size`` of DeepSpeed where the file names none."""


@dataclass(frozen=True, slots=True)
class Group:
    """What is updated at once: a group of the optimizer; of stage 3 a part of one.

    Attributes:
        weights: numbers of its parameters, in order.
        partition_elements: of a rank.
        dtype: of the parameters.
        decays: whether the group has weight decay.
    """

    weights: tuple[int, ...]
    partition_elements: int
    dtype: str
    decays: bool

    def slices(self, weights: Sequence[Weight]) -> dict[int, dict[int, int]]:
        """Elements of each weight in each rank's partition of the flat buffer, by rank."""
        out: dict[int, dict[int, int]] = {}
        at = 0
        for weight in self.weights:
            out[weight] = {}
            stop = at + num_elements(weights[weight].shape)
            while at < stop:
                rank = at // self.partition_elements
                end = min((rank + 1) * self.partition_elements, stop)
                out[weight][rank] = end - at
                at = end
        return out


def groups_of(weights: Sequence[Weight], setup: Setup) -> tuple[Group, ...]:
    """The groups of a run: the Trainer has one with weight decay and one without.

    Under ZeRO-3 they are cut where a rank's part reaches ``sub_group_size``.

    Raises:
        ConfigError: nothing trains, or parameters of several dtypes share a group; under ZeRO-3
            nothing need train, and the shards of all groups are joined in one block.
    """
    distributed, trained_weights = setup.distributed, [n for n, w in enumerate(weights) if w.trains]
    ranks = distributed.num_gpus
    parts = [trained_weights]
    if setup.loop is Loop.TRAINER:
        parts = [
            [n for n in trained_weights if weights[n].decays is decays] for decays in (True, False)
        ]
    parts = [part for part in parts if part]
    if not parts and distributed.zero != 3:
        raise ConfigError(
            f"--zero {distributed.zero} needs parameters that train: DeepSpeed's stages 1 "
            "and 2 partition what the optimizer has. Only stage 3 shards a model that does not "
            "train."
        )
    for members in [trained_weights] if distributed.zero == 3 else parts:
        dtypes = sorted({weights[index].dtype for index in members})
        if len(dtypes) > 1:
            raise _mixed_dtypes_error(setup, dtypes)
    most = distributed.zero_setting("sub_group_size", SUB_GROUP_ELEMENTS)
    out = []
    for part in parts:
        sizes = [num_elements(weights[index].shape) for index in part]
        first, partition_elements = 0, 0
        if distributed.zero != 3:
            unit = _ALIGNMENT * ranks
            out.append(_group(weights, part, -(-sum(sizes) // unit) * unit // ranks))
            continue
        for place, size in enumerate(sizes, 1):
            partition_elements += -(-size // ranks)
            if partition_elements >= most or place == len(part):
                out.append(_group(weights, part[first:place], partition_elements))
                first, partition_elements = place, 0
    return tuple(out)


def _group(weights: Sequence[Weight], members: Sequence[int], partition_elements: int) -> Group:
    first = weights[members[0]]
    return Group(tuple(members), partition_elements, first.dtype, first.decays)


def _mixed_dtypes_error(setup: Setup, dtypes: Sequence[str]) -> ConfigError:
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


@dataclass(slots=True, kw_only=True)
class ZeroRank(ShardedRank):
    """One rank of ZeRO, of any stage.

    Gradients are copied into a bucket as they come; where it is full, it is reduced, and what
    belongs to the rank is kept.

    Attributes:
        groups: of the optimizer; empty where nothing trains.
        ranks: of the data-parallel group.
        bucket_elements: ``reduce_bucket_size``.
        overlaps: ``overlap_comm``: reductions on a stream of their own.
        offloads_optimizer: states, master weights and gradients are in host memory.
    """

    groups: Sequence[Group]
    ranks: int
    bucket_elements: int
    overlaps: bool
    offloads_optimizer: bool
    _bucket: list[int] = field(default_factory=list)
    _bucket_fill: int = 0
    _update_buffers: list[int] = field(default_factory=list)

    @abstractmethod
    def reduce(self, members: list[int]) -> None:
        """The gradients of weights are reduced, and what belongs to the rank is kept."""

    @abstractmethod
    def begin_group(self, index: int) -> None:
        """The update of a group begins."""

    def leaves(self, phase: Phase) -> None:
        """See :meth:`Wrapper.leaves`."""
        if phase is Phase.OPTIMIZER:
            self._end_group()

    def hook(self, kind: CueKind, index: int) -> None:
        """See :meth:`ShardedRank.hook`."""
        if kind is CueKind.UPDATE:
            self.begin_group(index)

    def elements(self, weight: int) -> int:
        """Elements of a weight."""
        return num_elements(self.weights[weight].shape)

    @property
    def stream(self) -> int:
        """On which gradients are reduced."""
        return _REDUCTION_STREAM if self.overlaps else DEFAULT_STREAM

    def alloc_and_free(self, nbytes: int, label: str, *, stream: int = DEFAULT_STREAM) -> None:
        """A storage that is let go of at once."""
        self.to.free(self.to.alloc(nbytes, Category.TEMPORARIES, label, stream=stream))

    def to_bucket(self, weight: int, *, copied: bool = True) -> None:
        """A gradient becomes a slice of the bucket, if it finds a place there."""
        size = self.elements(weight)
        if self._bucket_fill + size > self.bucket_elements:
            self.flush()
        if copied and self._bucket_fill + size <= self.bucket_elements:
            self.take_gradient(weight)
        self._bucket.append(weight)
        self._bucket_fill += size

    def flush(self) -> None:
        """Reduce what is in the bucket."""
        members, self._bucket, self._bucket_fill = self._bucket, [], 0
        if members:
            self.reduce(members)

    def take_gradients(self, weights: Iterable[int]) -> None:
        """Gradients go, one after the other."""
        for weight in weights:
            self.take_gradient(weight)

    def flatten(self, index: int, tensors: int, dtype: str) -> None:
        """The gradients of a group flat and in float32, after those of the one before have gone.

        Source: DeepSpeed 0.19.8: ``step`` of ``stage_1_and_2.py`` and
        ``_prepare_fp32_grad_for_sub_group`` of ``stage3.py``; both flatten with
        ``flatten_dense_tensors``, which gives back one tensor alone as it is.

        Args:
            index: of the group.
            tensors: gradients that are made flat; of one alone there is no copy.
            dtype: of the gradients.
        """
        self._end_group()
        size, storages = self.groups[index].partition_elements, []
        if tensors != 1:
            storages.append((size * DTYPE_BYTES[dtype], "zero: flat gradients"))
        if dtype != "float32":
            storages.append((size * MASTER_BYTES, "zero: gradients in float32"))
        numbers = [self.to.alloc(n, Category.GRADIENTS, label) for n, label in storages]
        self.to.free(*numbers[:-1])
        self._update_buffers = numbers[-1:]

    def _end_group(self) -> None:
        self.to.free(*self._update_buffers)
        self._update_buffers = []
