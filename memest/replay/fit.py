"""Which free block serves a request, and whether it is cut.

Source: ``get_free_block`` and ``should_split`` of ``CUDACachingAllocator.cpp``, torch 2.1 to 2.13.
"""

from __future__ import annotations

from bisect import bisect_left

from memest.replay.blocks import Block, BlockPool, Heap
from memest.replay.conf import AllocatorConf
from memest.replay.sizes import MIN_BLOCK_SIZE, SMALL_SIZE

__all__ = ["should_split", "take_free_block"]


def take_free_block(heap: Heap, pool: BlockPool, size: int, stream: int) -> Block | None:
    """Best fit: the smallest, then lowest, block that is large enough.

    A block in front of unmapped space counts as large as it could grow, so it is used only
    when nothing else fits. Source: ``get_free_block``.

    Returns:
        The block, taken out of its list, or None.
    """
    conf = heap.conf
    pool.num_lookups += 1
    entries = pool.free.get(stream)
    if not entries:
        return None
    at = bisect_left(entries, (size, 0))
    if at == len(entries):
        return None
    block = entries[at][2]
    if block.expandable is not None:
        at += 1
        if conf.expandable_segments:
            while (
                block.expandable is not None
                and at < len(entries)
                and entries[at][2].reach < block.reach
            ):
                block = entries[at][2]
                at += 1
        else:
            # Expandable segments were switched off: their blocks are not to be used.
            while at < len(entries) and entries[at][2].expandable is not None:
                at += 1
            if at == len(entries):
                return None
            block = entries[at][2]
    max_split_size = conf.max_split_size
    if max_split_size is not None:
        if size < max_split_size <= block.size:
            return None
        if size >= max_split_size and block.size >= size + conf.non_split_rounding:
            return None
    pool.remove_free(block)
    return block


def should_split(conf: AllocatorConf, block: Block, size: int) -> bool:
    """Whether what a request of ``size`` leaves of a block becomes a free block of its own.

    In the large pool a rest of up to 1 MiB stays with the request, unless segments are expandable.
    """
    remaining = block.size - size
    if block.pool.small or conf.expandable_segments:
        return remaining >= MIN_BLOCK_SIZE
    max_split_size = conf.max_split_size
    return (max_split_size is None or size < max_split_size) and remaining > SMALL_SIZE
