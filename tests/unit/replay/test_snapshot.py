"""Recorded memory snapshots: reading them safely, and replaying them exactly.

Recordings made by torch are local validation data (``MEMEST_SNAPSHOTS`` names their folder);
without them, recordings made by the model itself still test rewinding and comparing.
"""

from __future__ import annotations

import os
import pickle
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from memest.errors import ReplayError
from memest.replay import (
    AllocatorConf,
    CachingAllocator,
    EventPolicy,
    OutOfMemory,
    fit,
    load_snapshot,
    replay_snapshot,
)
from memest.replay.blocks import SimpleDriver
from support.snapshots import RECORDINGS, content_of, for_each_recording

MIB = 1 << 20
recorded = for_each_recording()
load = cache(load_snapshot)


def cut(snapshot, start: int):
    """The same recording with a shorter memory: the first events are lost."""
    return replace(snapshot, traces=tuple(trace[start:] for trace in snapshot.traces))


class TestRecordedByTorch:
    @for_each_recording(large_are_slow=True)
    def test_every_decision_is_the_recorded_one(self, path):
        """Each address, each driver call, each out of memory, and the blocks at the end."""
        for found in replay_snapshot(path):
            assert found.first_mismatch is None
            assert found.is_exact
            assert found.peak_reserved_bytes >= found.peak_allocated_bytes > 0

    @recorded
    @pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
    def test_from_the_middle(self, path, share):
        """However much of the beginning is lost, the rest is rewound and replayed.

        Exactly in all recordings known; the bound is for others, see ``rewind``.
        """
        snapshot = load(path)
        for device, trace in enumerate(snapshot.traces):
            for found in replay_snapshot(cut(snapshot, int(share * len(trace)))):
                if found.device == device:
                    assert found.address_mismatches <= 0.01 * found.num_allocations

    @pytest.mark.slow
    @pytest.mark.skipif(not RECORDINGS, reason="no recorded snapshots here")
    def test_one_byte_off_is_noticed(self, monkeypatch):
        """Splitting off a rest of exactly 1 MiB, or any rest in the large pool, is wrong."""
        found = [r for path in RECORDINGS for r in replay_snapshot(load(path))]
        assert all(r.is_exact for r in found)
        monkeypatch.setattr(fit, "SMALL_SIZE", MIB - 1)
        found = [r for path in RECORDINGS for r in replay_snapshot(load(path))]
        assert not all(r.is_exact for r in found)
        monkeypatch.setattr(fit, "SMALL_SIZE", 511)
        found = [r for path in RECORDINGS for r in replay_snapshot(load(path))]
        assert sum(r.address_mismatches for r in found) > 10
        assert any(r.first_mismatch for r in found)


class _Recorder(SimpleDriver):
    """A driver that notes its calls, with addresses in no order."""

    def __init__(self, capacity_bytes: int | None, rng: random.Random) -> None:
        super().__init__(capacity_bytes=capacity_bytes)
        self.rng = rng
        self.trace: list[dict] = []
        self.places = rng.sample(range(1, 1 << 15, 8), 3000)  # further apart than a range is long
        self.stream = 0
        self.streams: dict[int, int] = {}

    def note(self, action: str, address: int, size: int, stream: int | None = None) -> None:
        self.trace.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": self.streams[address >> 44] if stream is None else stream,
                "time_us": len(self.trace),
                "frames": [{"name": "f", "filename": "f.py", "line": 1}],
            }
        )

    def reserve(self, size: int) -> int:
        place = self.places.pop()
        self.streams[place] = self.stream
        return place << 44

    def malloc(self, size: int) -> int | None:
        address = super().malloc(size)
        if address is not None:
            self.note("segment_alloc", address, size)
        return address

    def free(self, address: int, size: int) -> None:
        super().free(address, size)
        self.note("segment_free", address, size)

    def map(self, address: int, size: int) -> bool:
        if not super().map(address, size):
            return False
        self.note("segment_map", address, size)
        return True

    def unmap(self, address: int, size: int) -> None:
        super().unmap(address, size)
        self.note("segment_unmap", address, size)


class _Recording:
    """Runs a random program and dumps it as torch would."""

    def __init__(self, seed: int, conf: AllocatorConf, capacity_bytes: int | None) -> None:
        self.rng = random.Random(seed)
        self.driver = _Recorder(capacity_bytes, self.rng)
        self.allocator = CachingAllocator(
            conf, capacity_bytes=capacity_bytes, driver=self.driver, events=EventPolicy.AT_SYNC
        )
        self.alive: list = []
        self.waiting: list = []

    def malloc(self, size: int, stream: int) -> None:
        self.driver.stream = stream
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemory:
            self.driver.note("oom", 0, size, stream)
            return
        self.driver.note("alloc", block.address, size, stream)
        self.alive.append(block)

    def free(self, block, *, foreign: bool) -> None:
        requested, address = block.requested, block.address
        if foreign:
            self.allocator.record_stream(block, 9)
        self.driver.note("free_requested", address, requested, block.stream)
        self.allocator.free(block)
        if foreign:
            self.waiting.append((block, address, requested))
        else:
            self.driver.note("free_completed", address, requested, block.stream)

    def settle(self) -> None:
        for block, address, requested in self.waiting:
            self.allocator.complete(block)
            self.driver.note("free_completed", address, requested, block.stream)
        self.waiting.clear()

    def run(self, num_steps: int, *, foreign: bool, streams: tuple[int, ...] = (0,)) -> None:
        rng = self.rng
        for _ in range(num_steps):
            step = rng.random()
            if step < 0.55:
                # Upstream notes these frees before the driver calls of a retry; see torch.
                self.settle()
                size = rng.choice((rng.randrange(1, 2 * MIB), rng.randrange(1, 45 * MIB)))
                self.malloc(size, rng.choice(streams))
            elif step < 0.97 and self.alive:
                block = self.alive.pop(rng.randrange(len(self.alive)))
                self.free(block, foreign=foreign and rng.random() < 0.3)
            elif step >= 0.985:
                self.settle()
                self.allocator.empty_cache()

    def dump(self, path: Path) -> Path:
        path.write_bytes(pickle.dumps(content_of(self.allocator, [self.driver.trace, []])))
        return path


CONFS = {
    "default": AllocatorConf(),
    "expandable": AllocatorConf(expandable_segments=True),
    "divisions": AllocatorConf(roundup_power2_divisions=(4,) * 16),
    "split": AllocatorConf(max_split_size=24 * MIB),
}


class TestRecordedByTheModel:
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("capacity", [None, 300 * MIB], ids=["endless", "small"])
    @pytest.mark.parametrize("foreign", [False, True], ids=["own", "foreign"])
    @pytest.mark.parametrize("conf", CONFS.values(), ids=CONFS)
    def test_exact_wherever_it_starts(self, tmp_path, conf, foreign, capacity, seed):
        """Retries, empty_cache, out of memory and record_stream, whole and cut."""
        if conf.max_split_size is not None and capacity is not None:
            pytest.skip("why a part of the cache went is not in a recording")
        recording = _Recording(seed, conf, capacity)
        recording.run(250, foreign=foreign, streams=(0, 4) if seed % 2 else (0,))
        snapshot = load_snapshot(recording.dump(tmp_path / "s.pickle"))
        assert snapshot.conf == conf
        whole = replay_snapshot(snapshot, total_bytes=capacity)[0]
        assert whole.is_exact, whole.first_mismatch
        assert whole.num_ooms == recording.allocator.stats.num_ooms
        peak = recording.allocator.stats.reserved_bytes.all.peak
        assert whole.peak_reserved_bytes == peak
        for start in (40, 200, 350):
            for found in replay_snapshot(cut(snapshot, start), total_bytes=capacity):
                assert found.is_exact, (start, found.first_mismatch)

    def test_private_pools(self, tmp_path):
        """Allocations go to the pool whose segment holds them at the end."""
        recording = _Recording(1, AllocatorConf(), None)
        recording.malloc(30 * MIB, 0)
        recording.allocator.begin_pool(7)
        for size in (5 * MIB, 100, 30 * MIB):
            recording.malloc(size, 0)
        recording.allocator.end_pool(7)
        recording.free(recording.alive[0], foreign=False)
        recording.free(recording.alive[3], foreign=False)
        path = recording.dump(tmp_path / "s.pickle")
        assert replay_snapshot(path)[0].is_exact
        assert replay_snapshot(cut(load_snapshot(path), 5))[0].is_exact

    def test_garbage_collection(self, tmp_path):
        """Releases whose reason is not recorded are followed, and checked to be possible."""
        conf = AllocatorConf(garbage_collection_threshold=0.5, per_process_memory_fraction=0.9)
        recording = _Recording(2, conf, None)
        recording.allocator.heap.limit_bytes = 120 * MIB
        for size in (40, 30, 20):
            recording.malloc(size * MIB, 0)
        for block in recording.alive:
            recording.free(block, foreign=False)
        recording.malloc(50 * MIB, 0)
        path = recording.dump(tmp_path / "s.pickle")
        actions = [event.action for event in load_snapshot(path).traces[0]]
        assert "segment_free" in actions
        found = replay_snapshot(path)[0]
        assert found.is_exact, found.first_mismatch

    def test_a_wrong_option_is_noticed(self, tmp_path):
        """Replaying with other options than the run's shows."""
        recording = _Recording(3, AllocatorConf(), 300 * MIB)
        recording.run(200, foreign=False)
        path = recording.dump(tmp_path / "s.pickle")
        other = AllocatorConf(roundup_power2_divisions=(2,) * 16)
        found = replay_snapshot(path, other)[0]
        assert not found.is_exact
        assert "event" in found.first_mismatch

    @pytest.mark.parametrize("seed", range(8))
    def test_a_damaged_trace(self, tmp_path, seed):
        """Events that are missing in the middle are noticed or refused, never a crash."""
        recording = _Recording(seed, CONFS["expandable" if seed % 2 else "default"], 300 * MIB)
        recording.run(200, foreign=True)
        rng = random.Random(seed)
        for _ in range(6):
            del recording.driver.trace[rng.randrange(len(recording.driver.trace))]
        path = recording.dump(tmp_path / "s.pickle")
        try:
            found = replay_snapshot(path)[0]
        except ReplayError:
            return
        assert not found.is_exact


class _Evil:
    def __reduce__(self):
        return (os.mkdir, ("should-not-exist",))


class TestUnreadableFiles:
    def test_globals_are_refused(self, tmp_path, monkeypatch):
        """A pickle that would call something is refused before it does."""
        monkeypatch.chdir(tmp_path)
        path = tmp_path / "evil.pickle"
        path.write_bytes(pickle.dumps({"segments": [_Evil()], "device_traces": []}))
        with pytest.raises(ReplayError, match=r"asks for \w+\.mkdir, which a snapshot never needs"):
            load_snapshot(path)
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"PK\x03\x04 a zip file",
            b"not a pickle at all",
            pickle.dumps({"segments": []})[:-4],
            b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff",
            b"cos\nsystem\n(S'true'\ntR.",
            b"(d}b.",
            b"\x82\x01.",
        ],
    )
    def test_not_a_pickle(self, tmp_path, content):
        """One paragraph that says how to make a snapshot."""
        path = tmp_path / "file.pickle"
        path.write_bytes(content)
        with pytest.raises(ReplayError, match="not a memory snapshot") as caught:
            load_snapshot(path)
        assert "_dump_snapshot" in str(caught.value)

    @pytest.mark.parametrize(
        "content",
        [
            [],
            {},
            5,
            {"segments": [], "device_traces": [[{}]]},
            {"segments": [{}], "device_traces": []},
            {"segments": None, "device_traces": []},
            {"segments": [], "device_traces": [[{"action": "alloc", "addr": "x"}]]},
            {"segments": [], "device_traces": [], "allocator_settings": {"max_split_size": 5}},
            {"segments": [], "device_traces": [], "allocator_settings": [1]},
        ],
    )
    def test_a_pickle_of_something_else(self, tmp_path, content):
        """Plain, but no snapshot."""
        path = tmp_path / "file.pickle"
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(ReplayError, match="but not of a memory snapshot"):
            load_snapshot(path)

    def test_no_file(self, tmp_path):
        """The path is named."""
        with pytest.raises(ReplayError, match=r"cannot read the memory snapshot .*nothing"):
            load_snapshot(tmp_path / "nothing.pickle")

    @pytest.mark.parametrize(
        ("trace", "words"),
        [
            ([("alloc", 8)], "event 0: alloc at 0x8 leads to no block"),
            ([("free_requested", 8)], "event 0: free at 0x8 was never completed"),
            ([("free_completed", 8), ("free_completed", 8)], "event 0: .*alive after it"),
            ([("segment_alloc", 8)], "event 0: the segment at 0x8 is not there"),
            ([("segment_map", 8)], "event 0: the pages at 0x8 are not mapped"),
            ([("free_completed", 8)], "no segment around it"),
        ],
    )
    def test_a_trace_that_contradicts_its_end(self, tmp_path, trace, words):
        """Refused with the event."""
        entries = [{"action": a, "addr": at, "size": 512, "stream": 0} for a, at in trace]
        path = tmp_path / "file.pickle"
        path.write_bytes(pickle.dumps({"segments": [], "device_traces": [entries]}))
        with pytest.raises(ReplayError, match=words):
            replay_snapshot(path)

    def test_overlapping_blocks(self, tmp_path):
        """Two blocks cannot be in one place."""
        blocks = [
            {"address": 0, "size": 1024, "requested_size": 1024, "state": "active_allocated"},
            {"address": 512, "size": 512, "requested_size": 512, "state": "active_allocated"},
        ]
        segment = {
            "address": 0,
            "total_size": 2 * MIB,
            "segment_type": "small",
            "blocks": blocks,
        }
        path = tmp_path / "file.pickle"
        entries = [{"action": "snapshot"}]
        path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [entries]}))
        with pytest.raises(ReplayError, match="blocks at 0x0 and 0x200 overlap"):
            replay_snapshot(path)
