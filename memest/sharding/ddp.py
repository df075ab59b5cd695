"""DistributedDataParallel: gradient buckets, and what its constructor and its forward copy.

Sources: ``torch/nn/parallel/distributed.py`` (``_BucketCapacityConfig``, ``_ddp_init_helper``,
``_pre_forward``), ``torch/csrc/distributed/c10d/reducer.cpp`` (``initialize_buckets``,
``rebuild_buckets``, ``mark_variable_ready_dense``, ``compute_bucket_assignment_by_size``) and
``comm.cpp`` (``broadcast_coalesced``) of torch 2.13. All of it is on the stream of the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memest.events import Category, CueKind, Mark, Phase, Weight
from memest.sharding.engine import Wrapper, weight_bytes
from memest.units import MIB

__all__ = ["Ddp", "StageDdp", "assign_buckets"]

FIRST_BUCKET_BYTES = MIB
"""``kDefaultFirstBucketBytes``: the first bucket is small, so that communication begins early."""
BUCKET_BYTES = 25 * MIB
"""``_DEFAULT_BUCKET_CAP_MB``"""
BROADCAST_BYTES = 250 * MIB
"""``broadcast_bucket_size`` of the constructor."""
IN_FLIGHT = 2
"""``max_in_flight`` of ``broadcast_coalesced``."""
_ROOT = 0
_INT32_BYTES = 4


def assign_buckets(sizes: Sequence[tuple[str, int]], caps: Sequence[int]) -> list[list[int]]:
    """Which tensors share a bucket.

    A bucket is closed once it has reached its cap, so it exceeds it by up to one tensor; every
    dtype has buckets, and a count of caps, of its own. What is open at the end is closed in the
    order of the first tensors.

    Source: ``compute_bucket_assignment_by_size`` of ``reducer.cpp``.

    Args:
        sizes: (dtype, bytes) of each tensor, in order.
        caps: bytes at which the first, second, ... bucket is closed; the last one holds for all
            that follow.

    Returns:
        The tensors of each bucket, by their place in ``sizes``.
    """
    closed_buckets: list[list[int]] = []
    open_buckets: dict[str, list[int]] = {}
    bucket_bytes: dict[str, int] = {}
    number: dict[str, int] = {}
    for index, (dtype, nbytes) in enumerate(sizes):
        bucket = open_buckets.setdefault(dtype, [])
        bucket.append(index)
        bucket_bytes[dtype] = bucket_bytes.get(dtype, 0) + nbytes
        cap = caps[min(number.get(dtype, 0), len(caps) - 1)]
        if bucket_bytes[dtype] >= cap:
            closed_buckets.append(open_buckets.pop(dtype))
            bucket_bytes[dtype] = 0
            number[dtype] = number.get(dtype, 0) + 1
    return closed_buckets + [bucket for bucket in open_buckets.values() if bucket]


@dataclass(slots=True)
class _Bucket:
    """A bucket: its storage, and the gradients that are views of it."""

    number: int
    viewed_by: set[int] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Ddp(Wrapper):
    """One rank of DDP.

    Attributes:
        weights: parameters of the model, in the order of their registration.
        bucket_cap_mb: as for ``DistributedDataParallel``.
        find_unused: likewise.
        as_views: ``gradient_as_bucket_view``.
        skips_sync: all micro-steps but the last of a step run under ``no_sync``.
        last_micro_step: number of the last one.
        syncs: this micro-step does not run under ``no_sync``.
    """

    weights: Sequence[Weight]
    bucket_cap_mb: float | None
    find_unused: bool
    as_views: bool
    skips_sync: bool
    last_micro_step: int
    syncs: bool = True
    _sizes: dict[int, int] = field(default_factory=dict)
    _trained_weights: list[int] = field(default_factory=list)
    _buckets: list[_Bucket] = field(default_factory=list)
    _bucket_of: dict[int, _Bucket] = field(default_factory=dict)
    _gradient_of: dict[int, int] = field(default_factory=dict)
    _owner: dict[int, int] = field(default_factory=dict)
    _replaced_gradients: set[int] = field(default_factory=set)
    _buffers: list[int] = field(default_factory=list)
    _ready: list[int] = field(default_factory=list)
    _rebuilds: bool = False
    _synced_before: bool = True

    def __post_init__(self) -> None:
        self._sizes = {index: weight_bytes(weight) for index, weight in enumerate(self.weights)}
        self._trained_weights = [
            index for index, weight in enumerate(self.weights) if weight.trains
        ]

    # -- what the stream brings

    def allocates(self, number: int) -> bool:
        """See :meth:`Wrapper.allocates`."""
        if self.to.phase is Phase.LOAD and self.to.category(number) is Category.BUFFERS:
            self._buffers.append(number)
        return True

    def frees(self, number: int) -> bool:
        """See :meth:`Wrapper.frees`."""
        self._drop(number)
        stays = number in self._replaced_gradients  # its bucket took over
        self._replaced_gradients.discard(number)
        return not stays

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`."""
        if mark.phase is Phase.FORWARD:
            self.syncs = not self.skips_sync or mark.micro_step == self.last_micro_step

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """See :meth:`Wrapper.cue`."""
        if kind is CueKind.PLACED and index == len(self.weights) - 1:
            self._construct()
        elif (
            kind in (CueKind.ENTER, CueKind.ENTER_FED)
            and index == _ROOT
            and self.to.phase is Phase.FORWARD
        ):
            self.enter_forward()
        elif kind is CueKind.READY:
            self._gradient_ready(index, number)

    # -- what DDP does

    def _construct(self) -> None:
        """Rank 0 sends its weights and buffers to all; then the buckets are made."""
        sizes = [(weight.dtype, self._sizes[index]) for index, weight in enumerate(self.weights)]
        # the dtype of buffers is not written down: most are of the weights' own
        usual = self.weights[0].dtype
        sizes += [(usual, self.to.size(number)) for number in self._buffers]
        self._broadcast(sizes)
        if not self._trained_weights:
            return
        caps = self._caps if self.find_unused else [sum(self._sizes.values()) + 1]
        self._make_buckets(list(reversed(self._assign(self._trained_weights, caps))))
        if self.find_unused:
            # which parameters were used, as the ranks tell each other
            nbytes = _INT32_BYTES * len(self._trained_weights)
            self.to.alloc(nbytes, Category.COMMUNICATION, "ddp: used parameters")

    def _broadcast(self, sizes: Sequence[tuple[str, int]]) -> None:
        """``broadcast_coalesced``: flat copies, at most two of them at a time."""
        buckets = assign_buckets(sizes, [BROADCAST_BYTES])
        in_flight: list[int] = []
        for bucket in sorted(buckets, key=lambda members: members[0]):
            if len(in_flight) >= IN_FLIGHT:
                self.to.free(in_flight.pop(0))
            nbytes = sum(sizes[index][1] for index in bucket)
            in_flight.append(self.to.alloc(nbytes, Category.COMMUNICATION, "ddp: broadcast"))
        self.to.free(*in_flight)

    def enter_forward(self) -> None:
        """``_pre_forward``: buckets are made anew, and buffers sent."""
        if self._rebuilds and not self.find_unused:
            self._rebuild()
        if self._buffers and self._synced_before:
            sizes = [("", self.to.size(number)) for number in self._buffers]
            self._broadcast(sizes)
        self._synced_before = self.syncs

    @property
    def _caps(self) -> list[int]:
        """Bytes at which the first bucket is closed, and the others."""
        if self.bucket_cap_mb is None:
            return [FIRST_BUCKET_BYTES, BUCKET_BYTES]
        return [int(self.bucket_cap_mb * MIB)]

    def _assign(self, order: Sequence[int], caps: Sequence[int]) -> list[list[int]]:
        """Buckets of weights in an order."""
        sizes = [(self.weights[index].dtype, self._sizes[index]) for index in order]
        return [[order[place] for place in bucket] for bucket in assign_buckets(sizes, caps)]

    def _make_buckets(self, buckets: Sequence[Sequence[int]]) -> None:
        for members in buckets:
            nbytes = sum(self._sizes[index] for index in members)
            bucket = _Bucket(
                self.to.alloc(nbytes, Category.COMMUNICATION, "ddp: bucket of gradients")
            )
            self._buckets.append(bucket)
            self._bucket_of.update(dict.fromkeys(members, bucket))

    def _rebuild(self) -> None:
        """``Reducer::rebuild_buckets``, once, in the order in which gradients became ready.

        The old buckets go first, unless gradients are views of them: those are moved to the new
        ones as these are made, and the old storage goes with the last of them.
        """
        self._rebuilds = False
        old, self._buckets = self._buckets, []
        for bucket in old:
            if not bucket.viewed_by:
                self.to.free(bucket.number)
        self._make_buckets(self._assign(self._ready, self._caps))
        for bucket in old:
            for index in bucket.viewed_by:
                self._bucket_of[index].viewed_by.add(index)
            if bucket.viewed_by:
                self.to.free(bucket.number)

    def _gradient_ready(self, index: int, number: int) -> None:
        """The hook behind the accumulation: the gradient goes into its bucket."""
        if number >= 0:
            self._gradient_of[index] = number
            self._owner[number] = index
        if not self.syncs or not self._buckets:
            return
        if not self.find_unused and len(self._ready) < len(self._trained_weights):
            if index not in self._ready:
                self._ready.append(index)
            if len(self._ready) == len(self._trained_weights):
                self._rebuilds = True
        if self.as_views:
            self._point_into_bucket(index)

    def _point_into_bucket(self, index: int) -> None:
        """The gradient is copied to its place in the bucket, which takes over."""
        bucket = self._bucket_of[index]
        own = self._gradient_of.get(index)
        if own is not None and own not in self._replaced_gradients:
            self.to.free(own)
            self._replaced_gradients.add(own)
        bucket.viewed_by.add(index)

    def _drop(self, number: int) -> None:
        """``zero_grad`` drops a gradient."""
        index = self._owner.pop(number, None)
        if index is None or self._gradient_of.get(index) != number:
            return
        del self._gradient_of[index]
        if index in self._bucket_of:
            self._bucket_of[index].viewed_by.discard(index)


@dataclass(slots=True, kw_only=True)
class StageDdp(Ddp):
    """DDP around a stage of a pipeline: all but its last backward run under ``no_sync``."""

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`: what the phase of another stage is does not matter."""

    def enter_stage(self) -> None:
        """The forward of the stage begins."""
        self.syncs = False
        self.enter_forward()

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """See :meth:`Wrapper.cue`: the schedule says when gradients are reduced."""
        if kind is CueKind.STAGE_SYNC:
            self.syncs = True
        elif kind in (CueKind.PLACED, CueKind.READY):
            Ddp.cue(self, kind, index, number)
