"""Expandable segments: growing by mapped pages, and giving whole pages back.

Source: ``find_expandable_block``, ``map_block``, ``try_allocate_expandable_block`` and
``unmap_block`` of ``CUDACachingAllocator.cpp``, torch 2.1 to 2.13.
"""

from __future__ import annotations

from memest.replay.blocks import Block, BlockPool, Heap

__all__ = ["allocate", "release"]


def allocate(heap: Heap, pool: BlockPool, size: int, stream: int) -> Block | None:
    """A free block of at least ``size`` bytes, in no list, made by mapping pages.

    Returns:
        The block, or None when the driver has no more memory. Pages that earlier steps of the
        same call mapped stay, as a free block.
    """
    block = _find_room(heap, pool, size, stream)
    if block.size < size and block.next is None:
        return None  # more than a whole range: more than the device has
    if not block.mapped and not _map(heap, block, min(block.size, size)):
        return None
    while block.size < size:
        behind = block.next
        # What lies behind a block that was too small is unmapped: mapping joins it to free blocks.
        assert behind is not None
        if not _map(heap, behind, min(size - block.size, behind.size)):
            return None
        block = behind
    pool.remove_free(block)
    return block


def _find_room(heap: Heap, pool: BlockPool, size: int, stream: int) -> Block:
    """The lowest run of free and unmapped blocks with room for ``size``, or a new segment."""
    for _, unmapped_block in pool.unmapped_blocks.get(stream, ()):
        start = unmapped_block
        if start.prev is not None and start.prev.is_available:
            start = start.prev
        room, at = 0, start
        while room < size and at.is_available:
            room += at.size
            if at.next is None:
                break
            at = at.next
        if room >= size:
            return start
    segment = heap.new_expandable_segment(pool)
    block = Block(segment.address, segment.size, stream, pool, segment, mapped=False)
    pool.insert_unmapped(block)
    return block


def _map(heap: Heap, block: Block, num_bytes: int) -> bool:
    """Map the whole pages that cover the first ``num_bytes`` bytes; they join free neighbours."""
    segment, pool = block.expandable, block.pool
    assert segment is not None
    size = -(-num_bytes // segment.page) * segment.page
    if not heap.driver.map(block.address, size):
        return False
    pool.remove_unmapped(block)
    block.mapped = True
    if size < block.size:
        rest = Block(
            block.address + size, block.size - size, block.stream, pool, segment, mapped=False
        )
        block.insert_after(rest)
        block.size = size
        pool.insert_unmapped(rest)
    heap.try_merge(block, block.prev)
    heap.try_merge(block, block.next)
    pool.insert_free(block)
    heap.take_from_driver(size, small=pool.small)
    return True


def release(heap: Heap, block: Block) -> None:
    """Unmap the pages that lie wholly inside a free block.

    The parts of pages at its ends stay free; a segment without a mapped page is forgotten.
    """
    segment, pool = block.expandable, block.pool
    assert segment is not None
    begin, end = segment.pages_within(block.address, block.address + block.size)
    if begin == end:
        return
    heap.driver.unmap(begin, end - begin)
    pool.remove_free(block)
    before, after = begin - block.address, block.address + block.size - end
    if before:
        front = Block(block.address, before, block.stream, pool, segment)
        block.insert_before(front)
        pool.insert_free(front)
    if after:
        back = Block(end, after, block.stream, pool, segment)
        block.insert_after(back)
        pool.insert_free(back)
    block.address, block.size, block.mapped = begin, end - begin, False
    heap.try_merge(block, block.prev)
    heap.try_merge(block, block.next)
    heap.return_to_driver(end - begin, small=pool.small)
    if block.is_split:
        pool.insert_unmapped(block)
