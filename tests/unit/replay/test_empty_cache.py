"""``torch.cuda.empty_cache`` inside a stream."""

from __future__ import annotations

from memest.replay.allocator import CachingAllocator
from memest.replay.replay import replay
from memest.units import MIB


def test_a_cache_that_is_emptied_is_taken_anew():
    """Two free segments of 30 MiB cannot serve 60 MiB; given back, they do not count."""
    events, sizes = [0, 1, ~0, ~1, 2], [30 * MIB, 30 * MIB, 60 * MIB]
    assert replay(events, sizes).peak_reserved_bytes == 120 * MIB
    assert replay(events, sizes, empty_cache_at=(4,)).peak_reserved_bytes == 60 * MIB


def test_what_is_alive_keeps_its_segment():
    events, sizes = [0, 1, ~0, 2], [6 * MIB, 6 * MIB, 30 * MIB]
    kept = replay(events, sizes, empty_cache_at=(3,))
    assert kept.peak_reserved_bytes == 50 * MIB
    assert kept.final_allocated_bytes == 36 * MIB


def test_every_call_counts_and_the_order_is_that_of_the_program():
    events = [0, ~0, 1, ~1, 2, ~2, 3]
    sizes = [64 * MIB, 50 * MIB, 40 * MIB, 30 * MIB]
    allocator, reserved = CachingAllocator(), []
    for index, event in enumerate(events):
        if index in (2, 6):
            allocator.empty_cache()
        if event >= 0:
            block = allocator.malloc(sizes[event])
        else:
            allocator.free(block)
        reserved.append(allocator.stats.reserved_bytes.all.current)
    found = replay(events, sizes, empty_cache_at=(2, 6), curve=True)
    assert list(found.reserved_curve) == reserved
    assert reserved[2] == 50 * MIB
    assert reserved[-1] == 30 * MIB
