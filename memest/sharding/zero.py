"""DeepSpeed ZeRO-1 and ZeRO-2: partitioned optimizer states, and partitioned gradients.

Source: ``deepspeed/runtime/zero/stage_1_and_2.py`` of DeepSpeed 0.19.8; names here are those there.
Parameters of each optimizer group become slices of one flat buffer, of which every rank updates a
partition in float32. Gradients are copied into a bucket (``ipg``) as they come; where it is full,
it is reduced, and what belongs to the rank is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memest.events import Category, CueKind, Mark, Phase
from memest.hidden.call import DTYPE_BYTES
from memest.sharding.gradients import GradientWrapper
from memest.sharding.group_update import MASTER_BYTES, GroupUpdate
from memest.sharding.rewrite import DEFAULT_STREAM
from memest.sharding.shards import num_elements
from memest.sharding.zero_groups import Group

__all__ = ["REDUCE_BUCKET_ELEMENTS", "REDUCTION_STREAM", "Zero"]

REDUCE_BUCKET_ELEMENTS = 500_000_000
"""``reduce_bucket_size`` of DeepSpeed where the file names none."""
REDUCTION_STREAM = 2
_NORM_BYTES = 8
"""Norms are taken of a float64 copy of each gradient (``get_norm_dtype``)."""


@dataclass(slots=True)
class _Partition:
    """What the rank has of a group.

    Attributes:
        group: the group.
        start: first element of the partition in it.
        touched: weights that lie in it, at least in part.
    """

    group: Group
    start: int
    touched: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Zero(GradientWrapper):
    """One rank of ZeRO-1 or ZeRO-2: the one with the largest gradients.

    Attributes:
        stage: 1 or 2.
        groups: optimizer groups, flat.
        ranks: of the data-parallel group.
        bucket_elements: ``reduce_bucket_size``.
        overlaps: ``overlap_comm``: two buckets, and reductions on a stream of their own.
        offloads: optimizer states and master weights are in host memory.
        last_micro_step: number of the last micro-step of a step.
        sends_full: gradients are reduced in float32, as they are where ranks share sequences
            (``allreduce_bucket``).
    """

    stage: int
    groups: Sequence[Group]
    ranks: int
    bucket_elements: int
    overlaps: bool
    offloads: bool
    last_micro_step: int
    sends_full: bool = False
    _mine: list[_Partition] = field(default_factory=list)
    _owned: set[int] = field(default_factory=set)
    _placed: dict[int, int] = field(default_factory=dict)
    _buffers: list[int] = field(default_factory=list)
    _bucket: list[int] = field(default_factory=list)
    _filled: int = 0
    _kept: int | None = None
    _summed: list[int] = field(default_factory=list)
    _update: GroupUpdate = field(init=False)
    _boundary: bool = True

    def __post_init__(self) -> None:
        self._update = GroupUpdate(self.to)
        self.to.out.rank = self._largest_rank()
        self.on_host = "master weights, gradients, Adam's states and copies on their way"
        rank = self.to.out.rank
        for group in self.groups:
            start = rank * group.partition_elements
            touched = tuple(
                weight
                for weight, offset in zip(group.weights, group.offsets, strict=True)
                if offset < start + group.partition_elements
                and offset + self._elements(weight) > start
            )
            self._mine.append(_Partition(group, start, touched))
            self._owned.update(touched)

    def _largest_rank(self) -> int:
        """The rank whose partitions touch the most: gradients of weights on a border are whole."""
        most = [0] * self.ranks
        for group in self.groups:
            for weight, offset in zip(group.weights, group.offsets, strict=True):
                first = offset // group.partition_elements
                last = (offset + self._elements(weight) - 1) // group.partition_elements
                for rank in range(first, last + 1):
                    most[rank] += self._elements(weight)
        return max(range(self.ranks), key=most.__getitem__)

    def _elements(self, weight: int) -> int:
        return num_elements(self.weights[weight].shape)

    def _bytes(self, weight: int) -> int:
        return self._elements(weight) * DTYPE_BYTES[self.weights[weight].dtype]

    # -- what the stream brings

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`."""
        if mark.phase is Phase.FORWARD:
            self._boundary = mark.micro_step == self.last_micro_step
        elif mark.phase is Phase.OPTIMIZER:
            self._begin_update()

    def leaves(self, phase: Phase) -> None:
        """See :meth:`Wrapper.leaves`."""
        if phase is Phase.OPTIMIZER:
            self._update.end()

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """See :meth:`Wrapper.cue`."""
        if kind is CueKind.PLACED:
            self._placed[index] = number
            if index == len(self.weights) - 1:
                self._construct()
        elif kind is CueKind.GRADIENT:
            self.computed(index, number)
        elif kind is CueKind.READY:
            self.accumulated(index, number)
        elif kind is CueKind.DONE:
            self._end_backward()
        elif kind is CueKind.UPDATE:
            self._begin_group(index)

    # -- construction

    def _construct(self) -> None:
        """Parameters move into flat buffers; every rank makes a master copy of its part."""
        to = self.to
        for part in self._mine:
            group = part.group
            nbytes = group.padded_elements * DTYPE_BYTES[group.dtype]
            to.empty_cache()
            to.alloc(nbytes, Category.PARAMETERS, "zero: flat parameters")
            for weight in group.weights:
                to.free(self._placed[weight])
            size = group.partition_elements
            half = to.alloc(
                size * DTYPE_BYTES[group.dtype], Category.MASTER_WEIGHTS, "zero: part of parameters"
            )
            if self.offloads:
                to.free(half)
            elif group.dtype != "float32":
                to.alloc(size * MASTER_BYTES, Category.MASTER_WEIGHTS, "zero: master weights")
                to.free(half)
        if self.offloads:
            self._construct_on_host()
            return
        # a zero gradient for every partition, let go of again
        zeros = [
            to.alloc(
                p.group.partition_elements * MASTER_BYTES, Category.TEMPORARIES, "zero: gradients"
            )
            for p in self._mine
        ]
        for number in zeros:
            to.free(number)

    def _construct_on_host(self) -> None:
        weights = [weight for group in self.groups for weight in group.weights]
        largest = max(weights, key=self._elements, default=None)
        if largest is None:
            return
        self.to.alloc(
            self._bytes(largest), Category.COMMUNICATION, "zero: gradient on its way to the host"
        )
        for part in self._mine:
            size, half = part.group.partition_elements, DTYPE_BYTES[part.group.dtype]
            # master weights, their gradients, Adam's two moments, and what goes back
            self.to.out.host_bytes += size * (4 * MASTER_BYTES + half)
            if self.last_micro_step > 1:
                self.to.out.host_bytes += sum(map(self._bytes, part.touched))
        self.to.out.host_bytes += self._bytes(largest)

    # -- backward

    def ready(self, weight: int) -> None:
        """``process_gradients``, the hook behind the accumulation."""
        self._setup_buckets()
        if self.stage == 2 or self.overlaps:
            self._reduce_ready(weight)

    def _setup_buckets(self) -> None:
        if self._buffers:
            return
        size = self.bucket_elements * DTYPE_BYTES[self.groups[0].dtype]
        for _ in range(2 if self.overlaps else 1):
            self._buffers.append(
                self.to.alloc(size, Category.COMMUNICATION, "zero: bucket of gradients")
            )

    def _reduce_ready(self, weight: int) -> None:
        if self.stage == 1 and not self._boundary:
            return
        size = self._elements(weight)
        if self._filled + size > self.bucket_elements:
            self._flush()
        if size <= self.bucket_elements:
            # the gradient is a slice of the bucket from now on
            self.consume(weight)
        self._bucket.append(weight)
        self._filled += size

    def _flush(self) -> None:
        """Reduce what is in the bucket (``reduce_ipg_grads``)."""
        if not self._bucket:
            return
        self._average()
        stream = REDUCTION_STREAM if self.overlaps else DEFAULT_STREAM
        for weight in self._bucket:
            if weight in self._owned:
                self._copy_owned(weight, stream)
            elif self.stage == 2 and weight in self.gradients:
                self.consume(weight)
        self._bucket.clear()
        self._filled = 0

    def _average(self) -> None:
        """``average_tensor``: slices of one bucket for several ranks are joined for the wire.

        One slice alone is sent as it is (``flatten_dense_tensors``).
        """
        stream = REDUCTION_STREAM if self.overlaps else DEFAULT_STREAM
        dtype = self.groups[0].dtype
        slices: list[tuple[int, int]] = []
        for weight in self._bucket:
            for owner, size in self._slices(weight):
                if slices and slices[-1][0] == owner:
                    slices[-1] = owner, slices[-1][1] + size
                else:
                    slices.append((owner, size))
        pending: list[int] = []
        for _, size in slices:
            pending.append(size)
            if sum(pending) > self.bucket_elements:
                self._join(pending, dtype, stream)
                pending = []
        self._join(pending, dtype, stream)

    def _join(self, sizes: Sequence[int], dtype: str, stream: int) -> None:
        sent = []
        if len(sizes) > 1:
            sent.append((DTYPE_BYTES[dtype], "zero: joined gradients"))
        if sizes and self.sends_full and dtype != "float32":
            sent.append((DTYPE_BYTES["float32"], "zero: gradients sent in float32"))
        numbers = [
            self.to.alloc(sum(sizes) * item, Category.COMMUNICATION, label, stream=stream)
            for item, label in sent
        ]
        for number in numbers:
            self.to.free(number)

    def _slices(self, weight: int) -> list[tuple[int, int]]:
        """(rank, elements) of a weight, by partition."""
        for group in self.groups:
            if weight in group.places:
                offset, size = group.offsets[group.places[weight]], self._elements(weight)
                out = []
                at = offset
                while at < offset + size:
                    rank = at // group.partition_elements
                    stop = min((rank + 1) * group.partition_elements, offset + size)
                    out.append((rank, stop - at))
                    at = stop
                return out
        return []

    def _copy_owned(self, weight: int, stream: int) -> None:
        """Keep what belongs to the rank (``copy_grads_in_partition``)."""
        if self.offloads:
            if self._boundary:
                size = self._owned_elements(weight)
                self._passing(size * _NORM_BYTES, "zero: norm of a gradient", stream)
                if self.weights[weight].dtype != "float32":
                    self._passing(size * MASTER_BYTES, "zero: gradient in float32", stream)
            if weight in self.gradients:
                self.consume(weight)
            return
        if self._kept is None:
            total = sum(self._bytes(w) for part in self._mine for w in part.touched)
            self._kept = self.to.alloc(
                total, Category.GRADIENTS, "zero: gradients of the partition", stream=stream
            )
        if weight in self.gradients:
            self.consume(weight)

    def _owned_elements(self, weight: int) -> int:
        for part in self._mine:
            if weight in part.group.places:
                offset = part.group.offsets[part.group.places[weight]]
                low = max(offset, part.start)
                high = min(
                    offset + self._elements(weight), part.start + part.group.partition_elements
                )
                return max(high - low, 0)
        return 0

    def _passing(self, nbytes: int, label: str, stream: int = DEFAULT_STREAM) -> None:
        self.to.free(self.to.alloc(nbytes, Category.TEMPORARIES, label, stream=stream))

    def _end_backward(self) -> None:
        """The epilogue; at the boundary stage 1 begins to reduce here."""
        if self.stage == 1 and not self._boundary and not self.overlaps:
            return
        if self.stage == 1 and not self.overlaps:
            for group in self.groups:
                for weight in group.weights:
                    if weight in self.gradients:
                        self._reduce_ready(weight)
        self._flush()
        for weight in list(self.gradients):
            self.consume(weight)
        for number in self._buffers:
            self.to.free(number)
        self._buffers.clear()
        if self._kept is not None:
            # a later micro-step adds to the sum of those before it
            self._summed.append(self._kept)
            while len(self._summed) > 1:
                self.to.free(self._summed.pop())
            self._kept = None

    # -- update

    def _begin_update(self) -> None:
        """``step``: norms; the groups follow one by one."""
        for part in self._mine:
            for weight in part.touched:
                size = self._owned_elements(weight)
                self._passing(size * _NORM_BYTES, "zero: norm of a gradient")

    def _begin_group(self, index: int) -> None:
        """The averaged gradients of a group flat, and in float32."""
        part = self._mine[index]
        self._update.begin(part.group, len(part.touched), part.group.dtype)
        if index == len(self._mine) - 1:
            # averaged gradients of all groups are parts of the same storage
            while self._summed:
                self.to.free(self._summed.pop())
