"""Running out of memory, as a result that names the state it happened in."""

from __future__ import annotations

from memest.errors import ReplayError
from memest.replay.blocks import Heap
from memest.units import format_size

__all__ = ["OutOfMemory"]


class OutOfMemory(ReplayError):  # noqa: N818 - named as torch.cuda.OutOfMemoryError is known
    """A request that neither the cache nor the driver could serve.

    Attributes:
        requested_bytes: what was asked for.
        allocated_bytes: in use at that moment.
        reserved_bytes: taken from the driver at that moment, after caches were released.
        limit_bytes: the smallest bound that was set; None when the driver refused on its own.
        largest_free_bytes: the largest cached block, too small or in the wrong pool or stream.
    """

    def __init__(
        self,
        *,
        requested_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
        limit_bytes: int | None,
        largest_free_bytes: int,
    ) -> None:
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes
        self.largest_free_bytes = largest_free_bytes
        limit_text = "" if limit_bytes is None else f" of {format_size(limit_bytes)}"
        super().__init__(
            f"out of memory: {format_size(requested_bytes)} more were asked for with "
            f"{format_size(allocated_bytes)} allocated and {format_size(reserved_bytes)} "
            f"reserved{limit_text}; the largest free block has {format_size(largest_free_bytes)}"
        )

    @classmethod
    def of(cls, heap: Heap, num_bytes: int, capacity_bytes: int | None) -> OutOfMemory:
        """The error for a request of ``num_bytes`` that failed in this state."""
        limits = [limit for limit in (heap.limit_bytes, capacity_bytes) if limit is not None]
        return cls(
            requested_bytes=num_bytes,
            allocated_bytes=heap.stats.allocated_bytes.all.current,
            reserved_bytes=heap.reserved,
            limit_bytes=min(limits, default=None),
            largest_free_bytes=max(
                (block.size for pool in heap.pools() for block in pool.free_blocks()), default=0
            ),
        )
