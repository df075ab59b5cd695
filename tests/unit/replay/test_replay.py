"""The replay of streams: contradictions, fast loops equal to the full model, and invariants."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memest.errors import ReplayError
from memest.replay import AllocatorConf, CachingAllocator, EventPolicy, OutOfMemory, replay
from memest.replay.replay import replay_reference

EXPANDABLE = AllocatorConf(expandable_segments=True)
MODES = [AllocatorConf(), EXPANDABLE]
both_modes = pytest.mark.parametrize("conf", MODES, ids=["default", "expandable"])
QUICK = settings(max_examples=120, deadline=None)
KIB, MIB = 1 << 10, 1 << 20
EDGES = (0, 1, 511, 512, 513, MIB - 1, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 19 * MIB, 20 * MIB)


def sizes(*, zero: bool = True) -> st.SearchStrategy[int]:
    found = (
        st.sampled_from(EDGES)
        | st.integers(1, 8 * KIB)
        | st.integers(1, 3 * MIB)
        | st.integers(MIB, 90 * MIB)
        | st.integers(1, 40).map(lambda n: n * MIB)
    )
    return found if zero else found.filter(bool)


@st.composite
def streams(draw, max_size: int = 60) -> tuple[list[int], list[int]]:
    """A valid stream: each number is allocated once, and freed at most once, later."""
    table = draw(st.lists(sizes(), min_size=1, max_size=max_size))
    events: list[int] = []
    alive: list[int] = []
    for number in range(len(table)):
        events.append(number)
        alive.append(number)
        for _ in range(min(draw(st.integers(0, 2)), len(alive))):
            place = draw(st.integers(0, len(alive) - 1))
            events.append(~alive.pop(place))
    if draw(st.booleans()):
        events.extend(~number for number in alive)
    return events, table


def random_stream(seed: int, num_allocations: int) -> tuple[list[int], list[int]]:
    """A long stream with repeated sizes and a changing number of live blocks."""
    rng = random.Random(seed)
    menu = [rng.choice((KIB, 64 * KIB, MIB, 4 * MIB, 30 * MIB)) for _ in range(12)]
    menu = [rng.randrange(1, 2 * size) for size in menu] + [0]
    events: list[int] = []
    table: list[int] = []
    alive: list[int] = []
    while len(table) < num_allocations:
        if alive and rng.random() < (0.3 if (len(table) // 100) % 2 else 0.6):
            events.append(~alive.pop(rng.randrange(max(0, len(alive) - 20), len(alive))))
        else:
            alive.append(len(table))
            events.append(len(table))
            table.append(rng.choice(menu) if rng.random() < 0.8 else rng.randrange(1, 8 * MIB))
    return events, table


class TestStream:
    def test_a_small_stream(self):
        """Every field, worked out by hand."""
        result = replay([0, 1, ~0, 2], [30 * MIB, 5 * MIB, 19 * MIB], curve=True)
        assert result.peak_allocated_bytes == 35 * MIB
        assert result.peak_allocated_index == 1
        assert result.peak_reserved_bytes == 50 * MIB
        assert result.final_allocated_bytes == 24 * MIB
        assert result.final_reserved_bytes == 50 * MIB
        assert (result.num_alloc_retries, result.num_ooms, result.oom_index) == (0, 0, None)
        assert result.block_bytes == [30 * MIB, 5 * MIB, 19 * MIB]
        assert result.num_segments == 2
        assert result.allocated_curve == array("q", [n * MIB for n in (30, 35, 5, 24)])
        assert result.reserved_curve == array("q", [n * MIB for n in (30, 50, 50, 50)])

    @both_modes
    def test_nothing_happens(self, conf):
        """An empty stream has no peak, and a size of 0 is no event."""
        empty = replay([], [], conf, curve=True)
        assert (empty.peak_allocated_bytes, empty.peak_reserved_bytes) == (0, 0)
        assert empty.allocated_curve == array("q")
        zero = replay([0, 1, ~0], [0, 0], conf, curve=True)
        assert zero.reserved_curve == array("q", [0, 0, 0])
        assert zero.block_bytes == [0, 0]

    def test_the_first_moment_of_a_peak(self):
        """A peak that is reached twice is reported where it is reached first."""
        result = replay([0, 1, ~1, 2], [512, MIB, MIB])
        assert result.peak_allocated_index == 1

    def test_arrays_are_accepted(self):
        """Any sequences of integers will do."""
        result = replay(array("q", [0, ~0]), array("q", [5]))
        assert result.block_bytes == [512]

    @pytest.mark.parametrize("run", [replay, replay_reference])
    @both_modes
    @pytest.mark.parametrize(
        ("events", "table", "words"),
        [
            ([0, ~0, ~0], [8], "event 2: free of allocation number 0, but it is free already"),
            ([0, ~1], [8, 8], "event 1: free of allocation number 1, but it was never allocated"),
            ([0, 1, 0], [8, 8], "event 2: allocation number 0 is allocated again"),
            ([0, ~0, 0], [8, 8], "event 2: allocation number 0 is allocated again"),
            ([~0, 0], [8], "event 0: free of allocation number 0"),
            ([0, ~0, ~0], [0], "event 2: free of allocation number 0, but it is free already"),
            ([0, 2], [8, 8], "event 1: allocation number 2 has no size; there are 2"),
            ([~5], [8, 8], "event 0: allocation number 5 has no size"),
            ([0, 1], [8, -1], "event 1: allocation number 1 has -1 bytes"),
        ],
    )
    def test_contradictions_name_the_event(self, run, conf, events, table, words):
        """A stream that cannot have happened is refused, with the place."""
        with pytest.raises(ReplayError, match=words):
            run(events, table, conf)

    def test_a_negative_size_that_is_never_used(self):
        """Still refused: the table is wrong."""
        with pytest.raises(ReplayError, match="number 1 has -5 bytes"):
            replay([0], [8, -5])


class TestOutOfMemory:
    @both_modes
    def test_stops_at_the_event(self, conf):
        """The replay ends where memory does, and says where."""
        result = replay([0, 1, 2], [40 * MIB] * 3, conf, limit_bytes=100 * MIB, curve=True)
        assert (result.num_ooms, result.oom_index, result.num_alloc_retries) == (1, 2, 1)
        assert result.final_allocated_bytes == 80 * MIB
        assert result.block_bytes == [40 * MIB, 40 * MIB, 0]
        assert len(result.allocated_curve) == len(result.reserved_curve) == 3

    def test_released_caches_are_a_retry(self):
        """Cached segments go back before the driver is asked again."""
        result = replay([0, ~0, 1], [60 * MIB, 80 * MIB], limit_bytes=100 * MIB)
        assert (result.num_ooms, result.num_alloc_retries) == (0, 1)
        assert result.peak_reserved_bytes == 80 * MIB

    def test_a_fraction_is_a_limit(self):
        """The allocator's own limit is a share of the whole device."""
        half = AllocatorConf(per_process_memory_fraction=0.5)
        assert replay([0], [60 * MIB], half, limit_bytes=100 * MIB).num_ooms == 1
        assert replay([0], [60 * MIB], half, total_bytes=120 * MIB).num_ooms == 0
        assert replay([0], [60 * MIB], half).num_ooms == 0

    def test_the_error_names_the_state(self):
        """What was asked for, what was taken, what is left."""
        allocator = CachingAllocator(capacity_bytes=70 * MIB)
        allocator.malloc(50 * MIB)
        with pytest.raises(OutOfMemory, match="30 MiB more were asked for") as caught:
            allocator.malloc(30 * MIB)
        assert caught.value.allocated_bytes == caught.value.reserved_bytes == 50 * MIB
        assert caught.value.limit_bytes == 70 * MIB
        assert caught.value.largest_free_bytes == 0
        assert allocator.malloc(20 * MIB).size == 20 * MIB


class TestCudaStreams:
    @both_modes
    def test_a_block_is_not_lent_to_another_stream(self, conf):
        apart = replay([0, ~0, 1], [30 * MIB, 30 * MIB], conf, streams=bytes([0, 7]))
        together = replay([0, ~0, 1], [30 * MIB, 30 * MIB], conf, streams=bytes([7, 7]))
        assert apart.peak_reserved_bytes == 2 * together.peak_reserved_bytes
        assert apart.peak_allocated_bytes == together.peak_allocated_bytes == 30 * MIB


class TestFastEqualsReference:
    @both_modes
    @pytest.mark.parametrize("seed", range(12))
    def test_long_streams(self, conf, seed):
        """Every field of the result, in streams that cut and join many blocks."""
        events, table = random_stream(seed, 1200)
        assert replay(events, table, conf, curve=True) == replay_reference(
            events, table, conf, curve=True
        )

    @both_modes
    @QUICK
    @given(stream=streams())
    def test_any_stream(self, conf, stream):
        """Sizes at every edge of the rules."""
        assert replay(*stream, conf, curve=True) == replay_reference(*stream, conf, curve=True)

    @both_modes
    @QUICK
    @given(stream=streams(), data=st.data(), limit=st.none() | st.integers(1, 500 * MIB))
    def test_several_cuda_streams(self, conf, stream, data, limit):
        """Blocks stay with the stream they were made on."""
        count = len(stream[1])
        own = bytes(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
        bounds = {"limit_bytes": limit, "curve": True, "streams": own}
        assert replay(*stream, conf, **bounds) == replay_reference(*stream, conf, **bounds)

    @both_modes
    @QUICK
    @given(stream=streams(), limit=st.integers(1, 500 * MIB), total=st.none() | st.integers(0, MIB))
    def test_any_limit(self, conf, stream, limit, total):
        """Near a limit caches are released, and the full model decides over growing segments."""
        bounds = {"limit_bytes": limit, "total_bytes": None if total is None else limit + total}
        fast = replay(*stream, conf, **bounds, curve=True)
        assert fast == replay_reference(*stream, conf, **bounds, curve=True)
        assert fast.peak_reserved_bytes <= limit
        assert fast.final_allocated_bytes >= 0

    @QUICK
    @given(stream=streams(), data=st.data(), limit=st.none() | st.integers(1, 500 * MIB))
    def test_memory_given_back(self, stream, data, limit):
        """Under a limit, by the program, on streams, and with what a program goes on without."""
        events, sizes = stream
        places, numbers = st.integers(0, len(events)), st.integers(0, len(sizes))
        count = len(sizes)
        options = {
            "limit_bytes": limit,
            "curve": True,
            "streams": bytes(
                data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
            ),
            "empty_cache_at": sorted(data.draw(st.sets(places, max_size=4))),
            "dispensable": data.draw(st.sets(numbers, max_size=8)),
        }
        assert replay(*stream, **options) == replay_reference(*stream, **options)

    @pytest.mark.slow("expandable")
    @both_modes
    @QUICK
    @given(stream=streams(), megabytes=st.integers(20, 2000))
    def test_a_known_device(self, conf, stream, megabytes):
        """Without a limit but with a device: the range of an expandable segment ends."""
        total = megabytes * MIB
        assert replay(*stream, conf, total_bytes=total) == replay_reference(
            *stream, conf, total_bytes=total
        )

    @QUICK
    @given(
        stream=streams(),
        expandable=st.booleans(),
        divisions=st.sampled_from([0, 1, 2, 4, 8]),
        segment=st.sampled_from([12, 20, 32]),
        split=st.none() | st.integers(32, 100),
        collect=st.sampled_from([0.0, 0.3, 0.8]),
        fraction=st.sampled_from([0.4, 1.0]),
        limit=st.none() | st.integers(MIB, 600 * MIB),
    )
    def test_any_options(
        self, stream, expandable, divisions, segment, split, collect, fraction, limit
    ):
        """Whatever the options, the same answer."""
        conf = AllocatorConf(
            expandable_segments=expandable,
            roundup_power2_divisions=(divisions,) * 16,
            large_segment_size=segment * MIB,
            max_split_size=None if split is None else split * MIB,
            garbage_collection_threshold=collect,
            per_process_memory_fraction=fraction,
        )
        fast = replay(*stream, conf, limit_bytes=limit)
        assert fast == replay_reference(*stream, conf, limit_bytes=limit)


def check_state(allocator: CachingAllocator) -> None:
    """Blocks do not overlap, free neighbours are joined, statistics are sums over blocks."""
    blocks = allocator.blocks()
    stats = allocator.stats.as_dict()
    for low, high in pairwise(blocks):
        assert low.address + low.size <= high.address
        if low.next is high:
            assert high.prev is low
            assert low.address + low.size == high.address
            assert not (low.is_available and high.is_available)
    allocated = [b for b in blocks if b.allocated]
    assert stats["reserved_bytes.all.current"] == sum(b.size for b in blocks)
    assert stats["allocated_bytes.all.current"] == sum(b.size for b in allocated)
    assert stats["allocation.all.current"] == len(allocated)
    active = [b for b in blocks if not b.is_available]
    assert stats["active_bytes.all.current"] == sum(b.size for b in active)
    assert stats["requested_bytes.all.current"] == sum(b.requested for b in active)
    inactive = [b for b in blocks if b.is_available and b.is_split and b.expandable is None]
    assert stats["inactive_split.all.current"] == len(inactive)
    assert stats["inactive_split_bytes.all.current"] == sum(b.size for b in inactive)
    fixed = [run for run in allocator.segments() if run[0].expandable is None]
    assert stats["segment.all.current"] == len(fixed)
    for name in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
        parts = (f"{name}.small_pool.current", f"{name}.large_pool.current")
        assert stats[f"{name}.all.current"] == sum(stats[part] for part in parts)
        assert all(stats[part] >= 0 for part in parts)


class TestInvariants:
    @both_modes
    @QUICK
    @given(stream=streams())
    def test_order_of_the_three(self, conf, stream):
        """At every event reserved >= allocated >= asked for; live blocks are what is allocated."""
        events, table = stream
        result = replay(events, table, conf, curve=True)
        assert result.peak_reserved_bytes >= result.peak_allocated_bytes
        alive: set[int] = set()
        for index, event in enumerate(events):
            alive ^= {event if event >= 0 else ~event}
            allocated = result.allocated_curve[index]
            assert allocated == sum(result.block_bytes[number] for number in alive)
            assert result.reserved_curve[index] >= allocated >= sum(table[n] for n in alive)

    @pytest.mark.slow("expandable")
    @both_modes
    @QUICK
    @given(stream=streams())
    def test_freeing_everything(self, conf, stream):
        """Nothing is allocated then, and an emptied cache holds nothing."""
        events, table = stream
        allocator = CachingAllocator(conf)
        blocks = [allocator.malloc(size) for size in table]
        random.Random(len(events)).shuffle(blocks)
        for block in filter(None, blocks):
            allocator.free(block)
        check_state(allocator)
        assert allocator.stats.allocated_bytes.all.current == 0
        allocator.empty_cache()
        assert allocator.stats.reserved_bytes.all.current == 0
        assert allocator.blocks() == []

    @both_modes
    @QUICK
    @given(stream=streams())
    def test_deterministic(self, conf, stream):
        """The same stream gives the same answer."""
        assert replay(*stream, conf, curve=True) == replay(*stream, conf, curve=True)

    @QUICK
    @given(stream=streams(), extra=sizes())
    def test_one_more_allocation(self, stream, extra):
        """Allocated never falls by it, where no block has slack.

        Reserved may: a new block can move others to places that fit better.
        """
        conf = AllocatorConf(expandable_segments=True)
        events, table = stream
        before = replay(events, table, conf)
        after = replay([len(table), *events], [*table, extra], conf)
        assert after.peak_allocated_bytes >= before.peak_allocated_bytes

    @pytest.mark.slow
    @settings(max_examples=150, deadline=None)
    @given(
        seed=st.integers(0, 2**32),
        expandable=st.booleans(),
        policy=st.sampled_from(EventPolicy),
        split=st.sampled_from([None, 40 * MIB]),
        capacity=st.sampled_from([None, 200 * MIB]),
        collect=st.sampled_from([0.0, 0.5]),
    )
    def test_everything_at_once(self, seed, expandable, policy, split, capacity, collect):
        """Streams, pools, limits, switches: the state stays consistent at every step."""
        rng = random.Random(seed)
        confs = [
            AllocatorConf(
                expandable_segments=mode,
                max_split_size=split,
                garbage_collection_threshold=collect,
                per_process_memory_fraction=0.9 if collect else 1.0,
            )
            for mode in (expandable, not expandable)
        ]
        allocator = CachingAllocator(confs[0], capacity_bytes=capacity, events=policy)
        alive, pools, begun = [], [], []
        for _ in range(90):
            step = rng.random()
            if step < 0.45:
                size = rng.choice(EDGES) if rng.random() < 0.3 else rng.randrange(1, 45 * MIB)
                try:
                    block = allocator.malloc(size, rng.choice((0, 0, 7)))
                except OutOfMemory:
                    continue
                if block is not None:
                    alive.append(block)
            elif step < 0.8 and alive:
                block = alive.pop(rng.randrange(len(alive)))
                if rng.random() < 0.3:
                    allocator.record_stream(block, rng.choice((0, 3, 7)))
                allocator.free(block)
            elif step < 0.85:
                allocator.empty_cache()
            elif step < 0.88:
                allocator.set_conf(rng.choice(confs))
            elif step < 0.92 and not begun:
                begun.append(len(pools))
                pools.append(len(pools))
                allocator.begin_pool(pools[-1], rng.choice((None, 0)))
            elif step < 0.96 and begun:
                allocator.end_pool(begun.pop())
            elif pools and not begun:
                allocator.release_pool(pools.pop())
            check_state(allocator)
            assert capacity is None or allocator.heap.reserved <= capacity
        for pool in begun:
            allocator.end_pool(pool)
        for pool in pools:
            allocator.release_pool(pool)
        for block in alive:
            allocator.free(block)
        allocator.empty_cache()
        check_state(allocator)
        assert allocator.heap.reserved == 0
        assert allocator.heap.private == {}


class TestMisuse:
    def test_free_twice(self):
        """A block that is free cannot be freed."""
        allocator = CachingAllocator()
        block = allocator.malloc(1)
        allocator.free(block)
        with pytest.raises(ReplayError, match="not allocated"):
            allocator.free(block)

    def test_negative_size(self):
        """No block has less than nothing."""
        with pytest.raises(ReplayError, match="-1 bytes"):
            CachingAllocator().malloc(-1)

    def test_pools_that_were_never_begun(self):
        """Ends and releases need a beginning."""
        allocator = CachingAllocator()
        with pytest.raises(ReplayError, match="not begun"):
            allocator.end_pool("g")
        with pytest.raises(ReplayError, match="no user"):
            allocator.release_pool("g")

    def test_releasing_one_segment(self):
        """Only a whole free segment can go back on its own."""
        allocator = CachingAllocator()
        block = allocator.malloc(30 * MIB)
        assert not allocator.release_at(block.address)
        allocator.free(block)
        assert allocator.release_at(block.address)
        assert allocator.stats.reserved_bytes.all.current == 0

    def test_completing_without_an_event(self):
        """Only a block that waits can be completed."""
        allocator = CachingAllocator()
        with pytest.raises(ReplayError, match="waits for no event"):
            allocator.complete(allocator.malloc(1))


class TestCapture:
    def test_frees_with_foreign_streams_wait_for_the_end(self):
        """During a capture no event is recorded; the block stays active until after it."""
        allocator = CachingAllocator()
        block = allocator.malloc(30 * MIB)
        allocator.record_stream(block, 3)
        allocator.begin_pool("g")
        allocator.free(block)
        allocator.malloc(1)
        assert allocator.stats.active_bytes.all.current == 30 * MIB + 512
        allocator.end_pool("g")
        allocator.malloc(1)
        assert allocator.stats.active_bytes.all.current == 1024

    def test_no_last_step_of_the_retry(self):
        """A capture cannot release caches: it runs out of memory instead."""
        allocator = CachingAllocator(capacity_bytes=50 * MIB)
        allocator.free(allocator.malloc(30 * MIB))
        allocator.begin_pool("g")
        with pytest.raises(OutOfMemory):
            allocator.malloc(30 * MIB)
        assert allocator.stats.num_alloc_retries == 0
        allocator.end_pool("g")
        assert allocator.malloc(30 * MIB).size == 30 * MIB
