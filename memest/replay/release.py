"""Giving memory back to the driver: empty_cache, the OOM retry, and garbage collection.

Source: ``release_cached_blocks``, ``release_available_cached_blocks`` and
``garbage_collect_cached_blocks`` of ``CUDACachingAllocator.cpp``, torch 2.1 to 2.13.
"""

from __future__ import annotations

from bisect import bisect_left

from memest.replay import expandable
from memest.replay.blocks import Block, BlockPool, Heap

__all__ = ["collect_garbage", "release_available", "release_block", "release_pools"]


def release_block(heap: Heap, block: Block) -> None:
    """CudaFree a segment whose only block is this free one."""
    small = block.pool.small
    block.pool.remove_free(block)
    heap.driver.free(block.address, block.size)
    heap.stats.segment.decrease(1, small=small)
    heap.return_to_driver(block.size, small=small)
    if heap.conf.max_split_size is not None and block.size >= heap.conf.max_split_size:
        heap.stats.oversize_segments.decrease(1)


def release_pools(heap: Heap) -> None:
    """Give back what can be: whole free segments, free pages, and private pools without users."""
    _release_pool(heap, heap.large)
    _release_pool(heap, heap.small)
    for name, pair in list(heap.private.items()):
        if pair.num_uses == 0:
            _release_pool(heap, pair.small)
            _release_pool(heap, pair.large)
            if not any(block.pool in (pair.small, pair.large) for block in heap.active):
                del heap.private[name]


def _release_pool(heap: Heap, pool: BlockPool) -> None:
    growing = []
    for block in pool.free_blocks():
        if block.expandable is not None:
            growing.append(block)
        elif not block.is_split:
            release_block(heap, block)
    # Last, because unmapping changes the free list that the loop above walks.
    for block in growing:
        expandable.release(heap, block)


def release_available(heap: Heap, pool: BlockPool, size: int, stream: int) -> bool:
    """With a maximal split size: free oversize blocks until the request could be met.

    Returns:
        Whether that many bytes were freed. What was freed stays freed either way.
    """
    max_split_size = heap.conf.max_split_size
    if max_split_size is None:
        return False
    num_bytes = max(size, max_split_size)
    entries = pool.free.get(stream, [])
    at = bisect_left(entries, (num_bytes, 0))
    if at < len(entries) and entries[at][2].expandable is None:
        release_block(heap, entries[at][2])
        return True
    released_bytes = 0
    for _, _, block in entries[:at][::-1]:
        if released_bytes >= num_bytes or block.size < max_split_size:
            break
        if block.expandable is None and not block.is_split:
            released_bytes += block.size
            release_block(heap, block)
    return released_bytes >= num_bytes


def collect_garbage(heap: Heap) -> None:
    """Free the large segments that have gone unused longest, once a share of the limit is taken.

    The age of a block is the number of look-ups since it became free. A round frees all blocks
    of at least the average age, even beyond what was needed.
    """
    if heap.limit_bytes is None:
        return
    excess = heap.reserved - int(heap.conf.garbage_collection_threshold * heap.limit_bytes)
    if excess <= 0:
        return
    pool = heap.large
    candidates = [
        block for block in pool.free_blocks() if not block.is_split and block.expandable is None
    ]
    reclaimed_bytes = 0
    while candidates and reclaimed_bytes < excess:
        ages = [pool.num_lookups - block.gc_base for block in candidates]
        mean = sum(ages) // len(ages)
        for block, age in zip(candidates, ages, strict=True):
            if age >= mean:
                reclaimed_bytes += block.size
                release_block(heap, block)
        candidates = [b for b, age in zip(candidates, ages, strict=True) if age < mean]
