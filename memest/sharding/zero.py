"""DeepSpeed ZeRO-1 and ZeRO-2: partitioned optimizer states, and partitioned gradients.

Source: ``deepspeed/runtime/zero/stage_1_and_2.py`` of DeepSpeed 0.19.8; names here are those there.
Parameters of each optimizer group become slices of one flat buffer, of which every rank updates a
partition in float32. Gradients pass through a bucket (``ipg``), with ``overlap_comm`` through two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from memest.events import Category, Mark, Phase
from memest.sharding.engine import weight_bytes
from memest.sharding.zero_groups import MASTER_BYTES, NORM_BYTES, ZeroRank
from memest.workspaces.operator_call import DTYPE_BYTES

__all__ = ["REDUCE_BUCKET_ELEMENTS", "Zero"]

REDUCE_BUCKET_ELEMENTS = 500_000_000
"""``reduce_bucket_size`` of DeepSpeed where the file names none."""


@dataclass(slots=True, kw_only=True)
class Zero(ZeroRank):
    """One rank of ZeRO-1 or ZeRO-2: the one with the largest gradients.

    Attributes:
        stage: 1 or 2.
        sends_full: gradients are reduced in float32, as they are where ranks share sequences
            (``allreduce_bucket``).
    """

    stage: int
    sends_full: bool = False
    _slices: dict[int, dict[int, int]] = field(default_factory=dict)
    _number: int = 0
    _touched_weights: list[list[int]] = field(default_factory=list)
    _buffers: list[int] = field(default_factory=list)
    _partition_gradients: int | None = None
    _summed_gradients: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.on_host = "master weights, gradients, Adam's states and copies on their way"
        for group in self.groups:
            self._slices |= group.slices(self.weights)
        # gradients of weights on a border are whole
        most = [0] * self.ranks
        for weight, slices in self._slices.items():
            for number in slices:
                most[number] += self.elements(weight)
        self._number = self.to.out.rank = max(range(self.ranks), key=most.__getitem__)
        for group in self.groups:
            self._touched_weights.append(
                [w for w in group.weights if self._number in self._slices[w]]
            )

    def _bytes(self, weight: int) -> int:
        return weight_bytes(self.weights[weight])

    # -- what the stream brings

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`: norms come before an update, group by group."""
        ZeroRank.begins(self, mark)
        if mark.phase is Phase.OPTIMIZER:
            for weight in chain.from_iterable(self._touched_weights):
                nbytes = self._slices[weight][self._number] * NORM_BYTES
                self.alloc_and_free(nbytes, "zero: norm of a gradient")

    # -- construction

    def construct(self) -> None:
        """Parameters move into flat buffers; every rank makes a master copy of its part."""
        to = self.to
        for group in self.groups:
            nbytes = self.ranks * group.partition_elements * DTYPE_BYTES[group.dtype]
            to.empty_cache()
            to.alloc(nbytes, Category.PARAMETERS, "zero: flat parameters")
            for weight in group.weights:
                to.free(self.storages[weight])
            size = group.partition_elements
            half = to.alloc(
                size * DTYPE_BYTES[group.dtype], Category.MASTER_WEIGHTS, "zero: part of parameters"
            )
            if self.offloads_optimizer:
                to.free(half)
            elif group.dtype != "float32":
                to.alloc(size * MASTER_BYTES, Category.MASTER_WEIGHTS, "zero: master weights")
                to.free(half)
        if self.offloads_optimizer:
            self._construct_on_host()
            return
        # a zero gradient for every partition, let go of again
        zeros = [
            to.alloc(
                group.partition_elements * MASTER_BYTES, Category.TEMPORARIES, "zero: gradients"
            )
            for group in self.groups
        ]
        to.free(*zeros)

    def _construct_on_host(self) -> None:
        largest = max(self._slices, key=self.elements)
        self.to.alloc(
            self._bytes(largest), Category.COMMUNICATION, "zero: gradient on its way to the host"
        )
        for group, touched_weights in zip(self.groups, self._touched_weights, strict=True):
            size, half = group.partition_elements, DTYPE_BYTES[group.dtype]
            # master weights, their gradients, Adam's two moments, and what goes back
            self.to.out.host_bytes += size * (4 * MASTER_BYTES + half)
            if self.last_micro_step > 1:
                self.to.out.host_bytes += sum(map(self._bytes, touched_weights))
        self.to.out.host_bytes += self._bytes(largest)

    # -- backward

    def ready(self, weight: int) -> None:
        """``process_gradients``, the hook behind the accumulation."""
        self._setup_buckets()
        if self.stage == 2 or self.overlaps:
            self._to_bucket(weight)

    def _setup_buckets(self) -> None:
        if self._buffers:
            return
        size = self.bucket_elements * DTYPE_BYTES[self.groups[0].dtype]
        for _ in range(2 if self.overlaps else 1):
            self._buffers.append(
                self.to.alloc(size, Category.COMMUNICATION, "zero: bucket of gradients")
            )

    def _to_bucket(self, weight: int) -> None:
        if self.stage == 2 or self.is_boundary:
            self.to_bucket(weight)

    def reduce(self, members: list[int]) -> None:
        """``reduce_ipg_grads``."""
        self._average(members)
        for weight in members:
            if self._number in self._slices[weight]:
                self._copy_own_part(weight)
            elif self.stage == 2:
                self.take_gradient(weight)

    def _average(self, members: Sequence[int]) -> None:
        """``average_tensor``: slices of one bucket for several ranks are joined for the wire.

        One slice alone is sent as it is (``flatten_dense_tensors``).
        """
        slices: list[tuple[int, int]] = []
        for weight in members:
            for owner, size in self._slices[weight].items():
                if slices and slices[-1][0] == owner:
                    slices[-1] = owner, slices[-1][1] + size
                else:
                    slices.append((owner, size))
        pending: list[int] = []
        for _, size in slices:
            pending.append(size)
            if sum(pending) > self.bucket_elements:
                self._join(pending)
                pending = []
        self._join(pending)

    def _join(self, sizes: Sequence[int]) -> None:
        dtype, buffers = self.groups[0].dtype, []
        if len(sizes) > 1:
            buffers.append((DTYPE_BYTES[dtype], "zero: joined gradients"))
        if sizes and self.sends_full and dtype != "float32":
            buffers.append((DTYPE_BYTES["float32"], "zero: gradients sent in float32"))
        numbers = [
            self.to.alloc(sum(sizes) * item, Category.COMMUNICATION, label, stream=self.stream)
            for item, label in buffers
        ]
        self.to.free(*numbers)

    def _copy_own_part(self, weight: int) -> None:
        """Keep what belongs to the rank (``copy_grads_in_partition``)."""
        if self.offloads_optimizer:
            if self.is_boundary:
                size = self._slices[weight][self._number]
                self.alloc_and_free(
                    size * NORM_BYTES, "zero: norm of a gradient", stream=self.stream
                )
                if self.weights[weight].dtype != "float32":
                    self.alloc_and_free(
                        size * MASTER_BYTES, "zero: gradient in float32", stream=self.stream
                    )
        elif self._partition_gradients is None:
            total = sum(map(self._bytes, chain.from_iterable(self._touched_weights)))
            self._partition_gradients = self.to.alloc(
                total, Category.GRADIENTS, "zero: gradients of the partition", stream=self.stream
            )
        self.take_gradient(weight)

    def end_backward(self) -> None:
        """The epilogue; at the boundary stage 1 begins to reduce here."""
        if self.stage == 1 and not self.is_boundary and not self.overlaps:
            return
        if self.stage == 1 and not self.overlaps:
            for group in self.groups:
                for weight in group.weights:
                    if weight in self.gradients:
                        self._to_bucket(weight)
        self.flush()
        self.take_gradients(list(self.gradients))
        self.to.free(*self._buffers)
        self._buffers.clear()
        if self._partition_gradients is not None:
            # a later micro-step adds to the sum of those before it
            self._summed_gradients.append(self._partition_gradients)
            while len(self._summed_gradients) > 1:
                self.to.free(self._summed_gradients.pop())
            self._partition_gradients = None

    def begin_group(self, index: int) -> None:
        """The averaged gradients of a group flat, and in float32."""
        self.flatten(index, len(self._touched_weights[index]), self.groups[index].dtype)
        if index == len(self.groups) - 1:
            # averaged gradients of all groups are parts of the same storage
            while self._summed_gradients:
                self.to.free(self._summed_gradients.pop())
