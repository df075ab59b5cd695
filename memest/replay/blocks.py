"""The allocator's state: blocks, pools of free blocks, and the driver that gives memory.

Source: ``Block``, ``BlockPool`` and ``ExpandableSegment`` of ``CUDACachingAllocator.cpp``. Upstream
orders free blocks by (stream, size, address); all look-ups stay within one stream, so one sorted
list per stream is the same thing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from memest.replay.conf import AllocatorConf
from memest.replay.sizes import UNBOUNDED_RANGE, expandable_range, page_size
from memest.replay.stats import AllocatorStats

__all__ = [
    "Block",
    "BlockPool",
    "Driver",
    "ExpandableSegment",
    "Heap",
    "PrivatePools",
    "SimpleDriver",
]


class Driver(Protocol):
    """What the allocator asks of the CUDA driver; every call is one it would really make."""

    def malloc(self, size: int) -> int | None:
        """Address of ``size`` new bytes (cudaMalloc), or None when there are not so many."""

    def free(self, address: int, size: int) -> None:
        """Take back what malloc gave (cudaFree)."""

    def reserve(self, size: int) -> int:
        """Address of a range without memory behind it (cuMemAddressReserve)."""

    def map(self, address: int, size: int) -> bool:
        """Put memory behind a part of a range (cuMemCreate, cuMemMap), all of it or none."""

    def unmap(self, address: int, size: int) -> None:
        """Take that memory back."""


@dataclass(slots=True)
class SimpleDriver:
    """A driver with so much memory, each segment below the last.

    So cudaMalloc places them for the most part: recorded on an H200 (driver 580) and on H100s. It
    matters where free blocks are of one size, of which the allocator takes the lowest.

    Attributes:
        capacity_bytes: what it can give in all; None for no bound.
        used_bytes: what it has given.
        lowest_address: where the last segment begins.
    """

    capacity_bytes: int | None = None
    used_bytes: int = 0
    lowest_address: int = 1 << 52  # readers of snapshots count to 2**53

    def malloc(self, size: int) -> int | None:
        """See :class:`Driver`."""
        if not self._take(size):
            return None
        return self.reserve(size)

    def free(self, address: int, size: int) -> None:  # noqa: ARG002 - the protocol has it
        """See :class:`Driver`."""
        self.used_bytes -= size

    def reserve(self, size: int) -> int:
        """See :class:`Driver`."""
        self.lowest_address -= size
        return self.lowest_address

    def map(self, address: int, size: int) -> bool:  # noqa: ARG002 - the protocol has it
        """See :class:`Driver`."""
        return self._take(size)

    def unmap(self, address: int, size: int) -> None:  # noqa: ARG002 - the protocol has it
        """See :class:`Driver`."""
        self.used_bytes -= size

    def _take(self, size: int) -> bool:
        if self.capacity_bytes is not None and self.used_bytes + size > self.capacity_bytes:
            return False
        self.used_bytes += size
        return True


@dataclass(slots=True, eq=False)
class ExpandableSegment:
    """A range of virtual addresses whose pages are mapped when they are needed."""

    address: int
    size: int
    page: int

    def pages_within(self, begin: int, end: int) -> tuple[int, int]:
        """The addresses of the first whole page at or after begin and the last before end."""
        first = -(-(begin - self.address) // self.page) * self.page
        last = (end - self.address) // self.page * self.page
        return self.address + first, self.address + max(first, last)


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses inside one segment: handed out, free, or not mapped.

    Attributes:
        prev: the neighbour below in the same segment, if any.
        next: the neighbour above.
        foreign_streams: streams named by record_stream and not yet turned into events.
        num_events: events still to pass before the block is free.
        gc_base: number of look-ups in the pool when the block became free.
    """

    address: int
    size: int
    stream: int
    pool: BlockPool
    expandable: ExpandableSegment | None = None
    requested: int = 0
    allocated: bool = False
    mapped: bool = True
    prev: Block | None = field(default=None, repr=False)
    next: Block | None = field(default=None, repr=False)
    foreign_streams: set[int] = field(default_factory=set)
    num_events: int = 0
    gc_base: int = 0

    @property
    def is_split(self) -> bool:
        """Whether the segment holds other blocks too."""
        return self.prev is not None or self.next is not None

    @property
    def is_available(self) -> bool:
        """Neither handed out nor waiting for another stream."""
        return not self.allocated and not self.num_events and not self.foreign_streams

    @property
    def reach(self) -> int:
        """The size it has or could grow to: with the unmapped space behind it."""
        if self.next is not None and not self.next.mapped:
            return self.size + self.next.size
        return self.size

    def insert_before(self, other: Block) -> None:
        """Link ``other`` between this block and the one below."""
        other.prev, other.next = self.prev, self
        if self.prev is not None:
            self.prev.next = other
        self.prev = other

    def insert_after(self, other: Block) -> None:
        """Link ``other`` between this block and the one above."""
        other.prev, other.next = self, self.next
        if self.next is not None:
            self.next.prev = other
        self.next = other


@dataclass(slots=True, eq=False)
class BlockPool:
    """The free and the unmapped blocks of one kind, in order.

    Attributes:
        free: per stream, sorted (size, address, block).
        unmapped_blocks: per stream, sorted (address, block).
        num_lookups: searches for a free block, the clock of garbage collection.
    """

    small: bool
    free: dict[int, list[tuple[int, int, Block]]] = field(default_factory=dict)
    unmapped_blocks: dict[int, list[tuple[int, Block]]] = field(default_factory=dict)
    num_lookups: int = 0

    def insert_free(self, block: Block) -> None:
        """Make a mapped block available."""
        block.gc_base = self.num_lookups
        entries = self.free.setdefault(block.stream, [])
        insort(entries, (block.size, block.address, block))  # addresses differ: no tie

    def remove_free(self, block: Block) -> None:
        """Take a block out; its size and address must be those it was inserted with."""
        entries = self.free[block.stream]
        del entries[bisect_left(entries, (block.size, block.address))]

    def insert_unmapped(self, block: Block) -> None:
        """Remember a range without memory."""
        insort(self.unmapped_blocks.setdefault(block.stream, []), (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Forget it."""
        entries = self.unmapped_blocks[block.stream]
        del entries[bisect_left(entries, (block.address,))]

    def free_blocks(self) -> list[Block]:
        """Every free block, in upstream's order of (stream, size, address)."""
        return [entry[2] for stream in sorted(self.free) for entry in self.free[stream]]


@dataclass(slots=True, eq=False)
class PrivatePools:
    """The two pools of one CUDA graph or MemPool, and how many users keep them."""

    small: BlockPool
    large: BlockPool
    num_uses: int = 0


@dataclass(slots=True, eq=False)
class Heap:
    """All that the allocator knows: pools, statistics, and the bytes taken from the driver."""

    conf: AllocatorConf
    driver: Driver
    limit_bytes: int | None = None
    total_bytes: int | None = None
    stats: AllocatorStats = field(default_factory=AllocatorStats)
    small: BlockPool = field(default_factory=lambda: BlockPool(small=True))
    large: BlockPool = field(default_factory=lambda: BlockPool(small=False))
    private: dict[object, PrivatePools] = field(default_factory=dict)
    active: set[Block] = field(default_factory=set)

    @property
    def reserved(self) -> int:
        """Bytes taken from the driver, upstream's ``total_allocated_memory``."""
        return self.stats.reserved_bytes.all.current

    def pools(self) -> Iterator[BlockPool]:
        """Every pool, the default ones first."""
        yield self.large
        yield self.small
        for pair in self.private.values():
            yield pair.small
            yield pair.large

    def new_expandable_segment(
        self, pool: BlockPool, address: int | None = None
    ) -> ExpandableSegment:
        """A range of 1.125 times the device's memory, in whole pages.

        Args:
            pool: whose pages it will have.
            address: where it begins, if that is known; otherwise the driver says.
        """
        page = page_size(small=pool.small, large_segment_size=self.conf.large_segment_size)
        total = self.total_bytes
        num_bytes = UNBOUNDED_RANGE if total is None else expandable_range(total)
        size = -(-num_bytes // page) * page
        return ExpandableSegment(
            self.driver.reserve(size) if address is None else address, size, page
        )

    def ranges(self, stream: int, *, small: bool) -> set[ExpandableSegment]:
        """The growing segments of a stream. Each has unmapped addresses, or blocks, or both."""
        segments = {
            b.expandable for b in self.active if b.stream == stream and b.pool.small == small
        }
        for pool in self.pools():
            if pool.small == small:
                segments.update(block.expandable for _, _, block in pool.free.get(stream, ()))
                segments.update(
                    block.expandable for _, block in pool.unmapped_blocks.get(stream, ())
                )
        return {segment for segment in segments if segment is not None}

    def take_from_driver(self, size: int, *, small: bool) -> None:
        """Count bytes that the driver gave."""
        self.stats.reserved_bytes.increase(size, small=small)
        self.stats.num_device_alloc += 1

    def return_to_driver(self, size: int, *, small: bool) -> None:
        """Count bytes that the driver got back."""
        self.stats.reserved_bytes.decrease(size, small=small)
        self.stats.num_device_free += 1

    def try_merge(self, block: Block, other: Block | None) -> int:
        """Let ``block``, which is in no list, swallow a neighbour; the bytes it gained.

        Source: ``try_merge_blocks``.
        """
        if other is None or not other.is_available or block.mapped != other.mapped:
            return 0
        if other.mapped:
            block.pool.remove_free(other)
        else:
            block.pool.remove_unmapped(other)
        if block.prev is other:
            block.address = other.address
            block.prev = other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.size += other.size
        return other.size
