"""The exact model of PyTorch's CUDA caching allocator (backend ``native``), torch 2.1 to 2.13.

Deterministic and complete: streams, ``record_stream``, private pools, limits, the whole chain of
steps on running out of memory, and expandable segments. Source: ``DeviceCachingAllocator`` of
``c10/cuda/CUDACachingAllocator.cpp``; checked against recorded traces with their addresses.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from memest.errors import ReplayError
from memest.replay import expandable
from memest.replay.blocks import Block, BlockPool, Driver, Heap, PrivatePools, SimpleDriver
from memest.replay.conf import AllocatorConf
from memest.replay.fit import should_split, take_free_block
from memest.replay.oom import OutOfMemory
from memest.replay.release import collect_garbage, release_available, release_block, release_pools
from memest.replay.sizes import alloc_size, is_small, round_size
from memest.replay.stats import AllocatorStats

__all__ = ["CachingAllocator", "EventPolicy", "OutOfMemory"]


class EventPolicy(StrEnum):
    """When a block that another stream used is free again; the truth lies between the two."""

    NEXT_MALLOC = "next-malloc"
    AT_SYNC = "at-sync"


@dataclass(slots=True, eq=False)
class _Capture:
    """A CUDA graph capture or ``use_mem_pool`` under way; stream None means every stream."""

    pool: object
    stream: int | None


class CachingAllocator:
    """One device's allocator.

    Args:
        conf: options, as ``PYTORCH_CUDA_ALLOC_CONF`` sets them.
        capacity_bytes: what the driver can give; None for no bound. Ignored with a ``driver``.
        limit_bytes: the allocator's own limit (``set_per_process_memory_fraction``), compared
            with reserved bytes plus the next segment. By default
            ``conf.per_process_memory_fraction`` of ``total_bytes`` when it is below 1.
        total_bytes: the device's whole memory; by default ``capacity_bytes``.
        events: when blocks used on other streams become free.
        driver: where memory comes from; by default an endless row of falling addresses.

    Example:
        >>> allocator = CachingAllocator()
        >>> block = allocator.malloc(1)
        >>> block.size, allocator.stats.reserved_bytes.all.current
        (512, 2097152)
    """

    def __init__(
        self,
        conf: AllocatorConf | None = None,
        *,
        capacity_bytes: int | None = None,
        limit_bytes: int | None = None,
        total_bytes: int | None = None,
        events: EventPolicy = EventPolicy.NEXT_MALLOC,
        driver: Driver | None = None,
    ) -> None:
        conf = AllocatorConf() if conf is None else conf
        total_bytes = capacity_bytes if total_bytes is None else total_bytes
        self.capacity_bytes = capacity_bytes
        self._given_limit_bytes = limit_bytes
        self.heap = Heap(
            conf,
            driver or SimpleDriver(capacity_bytes),
            self._limit(conf, total_bytes),
            total_bytes,
        )
        self.events = events
        self._pending: dict[int, deque[Block]] = {}
        self._captures: list[_Capture] = []
        self._deferred_frees: list[Block] = []

    @property
    def stats(self) -> AllocatorStats:
        """All statistics, as ``torch.cuda.memory_stats`` has them."""
        return self.heap.stats

    @property
    def conf(self) -> AllocatorConf:
        """The options in force."""
        return self.heap.conf

    def set_conf(self, conf: AllocatorConf) -> None:
        """Change options while blocks are alive (``torch.cuda.memory._set_allocator_settings``)."""
        self.heap.conf = conf
        self.heap.limit_bytes = self._limit(conf, self.heap.total_bytes)

    def _limit(self, conf: AllocatorConf, total_bytes: int | None) -> int | None:
        if self._given_limit_bytes is None and total_bytes is not None:
            if conf.per_process_memory_fraction < 1.0:
                return int(conf.per_process_memory_fraction * total_bytes)
            return None
        return self._given_limit_bytes

    # Allocating

    def malloc(self, num_bytes: int, stream: int = 0) -> Block | None:
        """Hand out a block, as ``DeviceCachingAllocator::malloc`` does.

        Returns:
            The block, or None for 0 bytes (torch gives a null pointer and counts nothing).

        Raises:
            OutOfMemory: when every step of the chain failed; the state stays usable.
            ReplayError: for a negative size.
        """
        if num_bytes <= 0:
            if num_bytes < 0:
                raise ReplayError(f"an allocation of {num_bytes} bytes: sizes start at 0")
            return None
        if not self._captures:
            self._process_events()
        heap = self.heap
        size = round_size(num_bytes, heap.conf.roundup_power2_divisions)
        pool = self._pool(size, stream)
        block = take_free_block(heap, pool, size, stream)
        if block is None:
            block = self._get_new_block(pool, size, stream)
        if block is None:
            heap.stats.num_ooms += 1
            raise OutOfMemory.of(heap, num_bytes, self.capacity_bytes)
        return self._hand_out(block, num_bytes, size)

    def _pool(self, size: int, stream: int) -> BlockPool:
        small = is_small(size)
        for capture in reversed(self._captures):
            if capture.stream is None or capture.stream == stream:
                pair = self.heap.private[capture.pool]
                return pair.small if small else pair.large
        return self.heap.small if small else self.heap.large

    def _get_new_block(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Ask the driver, giving cached memory back to it step by step when it refuses."""
        heap = self.heap
        if heap.limit_bytes is not None and heap.conf.garbage_collection_threshold > 0:
            collect_garbage(heap)
        block = self._alloc_block(pool, size, stream)
        if block is None and release_available(heap, pool, size, stream):
            block = self._alloc_block(pool, size, stream)
        if block is None and not self._captures:
            self._release_cached_blocks()
            heap.stats.num_alloc_retries += 1
            block = self._alloc_block(pool, size, stream)
        return block

    def _alloc_block(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        heap = self.heap
        segment_size = alloc_size(size, heap.conf.large_segment_size)
        if heap.limit_bytes is not None and heap.reserved + segment_size > heap.limit_bytes:
            return None
        if heap.conf.expandable_segments:
            return expandable.allocate(heap, pool, size, stream)
        address = heap.driver.malloc(segment_size)
        if address is None:
            return None
        heap.take_from_driver(segment_size, small=pool.small)
        heap.stats.segment.increase(1, small=pool.small)
        if heap.conf.max_split_size is not None and segment_size >= heap.conf.max_split_size:
            heap.stats.oversize_segments.increase(1)
        return Block(address, segment_size, stream, pool)

    def _hand_out(self, block: Block, num_bytes: int, size: int) -> Block:
        """Cut the front off a block that is in no list, and count it."""
        stats, pool, small = self.heap.stats, block.pool, block.pool.small
        was_split = block.is_split
        counts_as_split = block.expandable is None
        if should_split(self.heap.conf, block, size):
            rest = block
            block = Block(rest.address, size, rest.stream, pool, rest.expandable)
            rest.insert_before(block)
            rest.address += size
            rest.size -= size
            pool.insert_free(rest)
            if counts_as_split and was_split:
                stats.inactive_split_bytes.decrease(size, small=small)
            elif counts_as_split:
                stats.inactive_split_bytes.increase(rest.size, small=small)
                stats.inactive_split.increase(1, small=small)
        elif counts_as_split and was_split:
            stats.inactive_split_bytes.decrease(block.size, small=small)
            stats.inactive_split.decrease(1, small=small)
        block.requested = num_bytes
        self.adopt(block)
        return block

    def adopt(self, block: Block, *, pending_on: int | None = None) -> None:
        """Count a block, whose neighbours are linked and which is in no list, as handed out.

        Args:
            block: the block.
            pending_on: a stream whose event it waits for, if it was freed already.
        """
        stats, small = self.heap.stats, block.pool.small
        self.heap.active.add(block)
        stats.active.increase(1, small=small)
        stats.active_bytes.increase(block.size, small=small)
        stats.requested_bytes.increase(block.requested, small=small)
        if pending_on is not None:
            block.foreign_streams.add(pending_on)
            self._insert_events(block)
            return
        block.allocated = True
        stats.allocation.increase(1, small=small)
        stats.allocated_bytes.increase(block.size, small=small)
        if self._is_oversize(block):
            stats.oversize_allocations.increase(1)

    def _is_oversize(self, block: Block) -> bool:
        max_split_size = self.heap.conf.max_split_size
        return max_split_size is not None and block.size >= max_split_size

    # Freeing

    def free(self, block: Block) -> None:
        """Take a block back; it stays active while other streams may still use it.

        Raises:
            ReplayError: for a block that is not handed out.
        """
        if not block.allocated:
            raise ReplayError(f"free of the block at {block.address:#x}, which is not allocated")
        block.allocated = False
        small = block.pool.small
        self.heap.stats.allocation.decrease(1, small=small)
        self.heap.stats.allocated_bytes.decrease(block.size, small=small)
        if self._is_oversize(block):
            self.heap.stats.oversize_allocations.decrease(1)
        if not block.foreign_streams:
            self._free_block(block)
        elif self._captures:
            self._deferred_frees.append(block)
        else:
            self._insert_events(block)

    def _free_block(self, block: Block) -> None:
        stats, pool, small = self.heap.stats, block.pool, block.pool.small
        size = block.size
        num_merged, merged_bytes = 0, 0
        for neighbour in (block.prev, block.next):
            gained_bytes = self.heap.try_merge(block, neighbour)
            if gained_bytes:
                num_merged += 1
                merged_bytes += gained_bytes
        self.heap.active.remove(block)
        pool.insert_free(block)
        if block.expandable is None:
            # Whole free pages of an expandable segment can go back: they are never "split".
            if num_merged:
                stats.inactive_split.decrease(num_merged, small=small)
                stats.inactive_split_bytes.decrease(merged_bytes, small=small)
            if block.is_split:
                stats.inactive_split.increase(1, small=small)
                stats.inactive_split_bytes.increase(block.size, small=small)
        stats.active.decrease(1, small=small)
        stats.active_bytes.decrease(size, small=small)
        stats.requested_bytes.decrease(block.requested, small=small)
        block.requested = 0

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``: wait for events, then give all whole free memory back."""
        self._release_cached_blocks()

    def release_at(self, address: int) -> bool:
        """Give back the one unsplit free segment at an address; whether there was one.

        This lets a replay follow recorded releases whose reason (garbage collection, or the
        release of oversize blocks) depends on a limit that the record does not hold.
        """
        for pool in self.heap.pools():
            for block in pool.free_blocks():
                if block.address == address and not block.is_split and block.expandable is None:
                    release_block(self.heap, block)
                    return True
        return False

    def _release_cached_blocks(self) -> None:
        self.synchronize()
        release_pools(self.heap)

    # Other streams

    def record_stream(self, block: Block, stream: int) -> None:
        """``Tensor.record_stream``: another stream uses the block until an event after its free."""
        if stream != block.stream:
            block.foreign_streams.add(stream)

    def synchronize(self) -> None:
        """Wait for every event, upstream's ``synchronize_and_free_events``."""
        self.heap.stats.num_sync_all_streams += 1
        self._process_events(force=True)

    def complete(self, block: Block) -> None:
        """Let the events of one freed block pass, as a recording says they did.

        Raises:
            ReplayError: for a block that waits for no event.
        """
        if not block.num_events:
            raise ReplayError(f"the block at {block.address:#x} waits for no event")
        for queue in self._pending.values():
            while block in queue:
                queue.remove(block)
        block.num_events = 0
        self._free_block(block)

    def _insert_events(self, block: Block) -> None:
        for stream in sorted(block.foreign_streams):
            block.num_events += 1
            self._pending.setdefault(stream, deque()).append(block)
        block.foreign_streams = set()

    def _process_events(self, *, force: bool = False) -> None:
        if self._deferred_frees and not self._captures:
            deferred_frees, self._deferred_frees = self._deferred_frees, []
            for block in deferred_frees:
                self._insert_events(block)
        if not self._pending or (not force and self.events is EventPolicy.AT_SYNC):
            return
        for stream in sorted(self._pending):
            for block in self._pending.pop(stream):
                block.num_events -= 1
                if not block.num_events:
                    self._free_block(block)

    # Private pools

    def begin_pool(self, pool: object, stream: int | None = None) -> None:
        """Send allocations of a stream (None: of all) to a private pool, made if need be.

        A capture of a CUDA graph and ``torch.cuda.use_mem_pool`` both do this
        (``beginAllocateToPool``); the newest one that matches wins.
        """
        pair = self.heap.private.get(pool)
        if pair is None:
            pair = PrivatePools(BlockPool(small=True), BlockPool(small=False))
            self.heap.private[pool] = pair
        pair.num_uses += 1
        self._captures.append(_Capture(pool, stream))

    def end_pool(self, pool: object) -> None:
        """Stop sending allocations there; the pool keeps its memory."""
        for capture in reversed(self._captures):
            if capture.pool == pool:
                self._captures.remove(capture)
                return
        raise ReplayError(f"end of the private pool {pool!r}, which was not begun")

    def release_pool(self, pool: object) -> None:
        """Give up one use; without a user its memory goes back at the next release."""
        pair = self.heap.private.get(pool)
        if pair is None or not pair.num_uses:
            raise ReplayError(f"release of the private pool {pool!r}, which has no user")
        pair.num_uses -= 1

    # Reading

    def blocks(self) -> list[Block]:
        """Every block with memory behind it, by address."""
        blocks = [b for pool in self.heap.pools() for b in pool.free_blocks()]
        blocks.extend(self.heap.active)
        return sorted(blocks, key=lambda block: block.address)

    def segments(self) -> list[list[Block]]:
        """The blocks of :meth:`blocks` in runs of neighbours, as a memory snapshot lists them."""
        runs: list[list[Block]] = []
        for block in self.blocks():
            if runs and runs[-1][-1].next is block:
                runs[-1].append(block)
            else:
                runs.append([block])
        return runs
