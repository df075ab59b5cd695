"""``torch.cuda.empty_cache`` inside a stream, and what a program goes on without."""

from __future__ import annotations

from memest.replay.allocator import CachingAllocator
from memest.replay.replay import peak_without, replay
from memest.units import GIB, MIB


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


class TestDispensable:
    """A workspace that a program goes on without, after the allocator has tried everything."""

    EVENTS = (0, 1, ~0, 2, ~2, 3)
    SIZES = (30 * MIB, 30 * MIB, 60 * MIB, 40 * MIB)

    def test_a_run_that_misses_it_completes(self):
        events, sizes = list(self.EVENTS), list(self.SIZES)

        assert replay(events, sizes, limit_bytes=80 * MIB).oom_index == 3
        found = replay(events, sizes, limit_bytes=80 * MIB, dispensable={2})
        assert found.num_ooms == 0
        assert found.oom_index is None
        assert found.block_bytes[2] == 0
        assert found.peak_reserved_bytes <= 80 * MIB

    def test_what_was_cached_is_gone_after_it(self):
        """The failing request released the 30 MiB that were free, so the last one gets its own."""
        found = replay(
            list(self.EVENTS), list(self.SIZES), limit_bytes=80 * MIB, dispensable={2}, curve=True
        )
        assert found.num_alloc_retries == 1
        assert found.reserved_curve[3] == 30 * MIB
        assert found.final_reserved_bytes == 70 * MIB

    def test_it_is_made_where_there_is_room(self):
        found = replay(list(self.EVENTS), list(self.SIZES), limit_bytes=GIB, dispensable={2})
        assert found == replay(list(self.EVENTS), list(self.SIZES))

    def test_what_is_not_one_still_ends_the_run(self):
        found = replay(list(self.EVENTS), list(self.SIZES), limit_bytes=60 * MIB, dispensable={2})
        assert found.num_ooms == 1
        assert found.oom_index == 5

    def test_the_peak_without_it(self):
        events, sizes = list(self.EVENTS), list(self.SIZES)
        found = replay(events, sizes)
        assert found.peak_allocated_bytes == 90 * MIB
        assert peak_without(found, events, {2}) == 70 * MIB
        assert peak_without(found, events, ()) == 90 * MIB
