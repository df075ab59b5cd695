"""Pure size rules of PyTorch's CUDA caching allocator.

Source of every rule: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h``,
torch 2.1 to 2.13, in which none of them changed in a way that moves a block.
"""

from __future__ import annotations

from collections.abc import Sequence

from memest.units import MIB

__all__ = [
    "DEFAULT_LARGE_SEGMENT_SIZE",
    "MIN_BLOCK_SIZE",
    "MIN_LARGE_ALLOC",
    "NO_DIVISIONS",
    "NUM_DIVISIONS",
    "ROUND_LARGE",
    "SMALL_SEGMENT_SIZE",
    "SMALL_SIZE",
    "UNBOUNDED_RANGE",
    "alloc_size",
    "expandable_range",
    "is_small",
    "page_size",
    "round_size",
]

MIN_BLOCK_SIZE = 512  # kMinBlockSize: every request is rounded up to a multiple of it
SMALL_SIZE = MIB  # kSmallSize: the largest rounded size of the small pool
SMALL_SEGMENT_SIZE = 2 * MIB  # kSmallBuffer: segment, or expandable page, of the small pool
DEFAULT_LARGE_SEGMENT_SIZE = 20 * MIB  # kLargeBuffer: segment for large requests below 10 MiB
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own
ROUND_LARGE = 2 * MIB  # kRoundLarge: rounding of that own segment

UNBOUNDED_RANGE = 1 << 46  # bytes of virtual addresses where the device's size is not known

NUM_DIVISIONS = 16
NO_DIVISIONS = (0,) * NUM_DIVISIONS


def round_size(num_bytes: int, divisions: Sequence[int] = NO_DIVISIONS) -> int:
    """The block size wanted for a request: the next multiple of 512 B, or of a power-of-two step.

    Source: ``DeviceCachingAllocator::round_size``. With ``roundup_power2_divisions`` the range
    between two powers of two is cut into that many equal steps.

    Args:
        num_bytes: the requested size, above 0 (a request of 0 never reaches the allocator).
        divisions: 16 numbers; index i is for sizes in [2**i, 2**(i+1)) MiB, index 0 for less too.

    Example:
        >>> round_size(513)
        1024
        >>> round_size(1200 * MIB, (4,) * 16) // MIB
        1280
    """
    if num_bytes < MIN_BLOCK_SIZE:
        return MIN_BLOCK_SIZE
    exponent = num_bytes.bit_length() - 1
    parts = divisions[min(max(exponent - 20, 0), NUM_DIVISIONS - 1)]
    if parts > 1 and num_bytes > MIN_BLOCK_SIZE * parts:
        floor = 1 << exponent
        if num_bytes == floor:
            return num_bytes
        step = floor >> (parts.bit_length() - 1)
        return 2 * floor if step == 0 else -(-num_bytes // step) * step
    return -(-num_bytes // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE


def is_small(size: int) -> bool:
    """Whether a rounded size belongs to the small pool. Source: ``get_pool``."""
    return size <= SMALL_SIZE


def alloc_size(size: int, large_segment_size: int = DEFAULT_LARGE_SEGMENT_SIZE) -> int:
    """Bytes asked of the driver when no cached block serves a rounded size.

    Source: ``DeviceCachingAllocator::get_allocation_size``.

    Example:
        >>> [alloc_size(n * MIB) // MIB for n in (1, 2, 10, 11)]
        [2, 20, 10, 12]
    """
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT_SIZE
    if size < MIN_LARGE_ALLOC:
        return large_segment_size
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def page_size(*, small: bool, large_segment_size: int = DEFAULT_LARGE_SEGMENT_SIZE) -> int:
    """Bytes that an expandable segment grows by. Source: ``find_expandable_block``."""
    return SMALL_SEGMENT_SIZE if small else large_segment_size


def expandable_range(total_bytes: int) -> int:
    """Addresses an expandable segment reserves, before rounding up to pages.

    Source: the constructor of ``ExpandableSegment``: 1.125 times the device's memory.
    """
    return total_bytes * 9 // 8
