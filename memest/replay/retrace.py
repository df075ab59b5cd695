"""Replay a recorded trace and compare every decision with the recorded one.

The driver follows the recording: it gives the recorded address when the allocator asks for
memory at the recorded moment, and refuses where the recording shows that memory had to be
released first. Whatever differs is counted: zero means that the model made every choice of torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from memest.replay.allocator import CachingAllocator
from memest.replay.blocks import Block, Heap
from memest.replay.conf import AllocatorConf
from memest.replay.oom import OutOfMemory
from memest.replay.rewind import RECORDED_STREAM, rewind
from memest.replay.sizes import SMALL_SEGMENT_SIZE, is_small, round_size
from memest.replay.snapshot import (
    DEFAULT_POOL,
    RecordedSegment,
    Snapshot,
    TraceEvent,
    load_snapshot,
)

__all__ = ["SnapshotReplay", "Watch", "replay_snapshot"]

Watch = Callable[[int, int, CachingAllocator], None]
"""Called with the device, the index of an event, and the allocator after that event."""

_RELEASES = ("segment_free", "segment_unmap")
_DRIVER_CALLS = ("segment_alloc", "segment_map", *_RELEASES)
_FABRICATED = 1 << 60  # addresses for memory that the recording never gave


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReplay:
    """How the model and one device's recording compare.

    Attributes:
        device: index of the device.
        num_events: entries of the trace.
        num_allocations: allocations among them.
        num_frees: frees among them.
        num_driver_calls: segments and pages taken or given back.
        address_mismatches: allocations for which the model chose another address.
        driver_mismatches: driver calls only one of the two made, or made differently.
        first_mismatch: the first of these, in words; None when there is none.
        final_layout_equal: whether the blocks at the end are the recorded ones.
        peak_allocated_bytes: as replayed, from the first event on.
        peak_reserved_bytes: as replayed, from the first event on.
        final_allocated_bytes: as replayed.
        final_reserved_bytes: as replayed.
        num_ooms_recorded: times the run ran out of memory.
        num_ooms: those that the model ran out of memory at too.
    """

    device: int
    num_events: int
    num_allocations: int
    num_frees: int
    num_driver_calls: int
    address_mismatches: int
    driver_mismatches: int
    first_mismatch: str | None
    final_layout_equal: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    final_allocated_bytes: int
    final_reserved_bytes: int
    num_ooms_recorded: int
    num_ooms: int

    @property
    def has_choices(self) -> bool:
        """Whether the allocator chose anything that can be compared."""
        return bool(self.num_allocations or self.num_driver_calls or self.num_ooms_recorded)

    @property
    def is_exact(self) -> bool:
        """Whether nothing differs."""
        return (
            not self.address_mismatches
            and not self.driver_mismatches
            and self.final_layout_equal
            and self.num_ooms == self.num_ooms_recorded
        )


@dataclass(slots=True)
class _Findings:
    index: int = 0
    address: int = 0
    driver: int = 0
    first: str | None = None

    def count_address(self, what: str) -> None:
        self.address += 1
        self.first = self.first or f"event {self.index}: {what}"

    def count_driver(self, what: str, times: int = 1) -> None:
        self.driver += times
        self.first = self.first or f"event {self.index}: {what}"


@dataclass(slots=True)
class _RecordedDriver:
    """The driver as recorded: ``script`` holds its calls since the last allocation or free.

    ``request`` is the stream of the allocation under way, and whether it is a small one.
    """

    findings: _Findings
    trace: tuple[TraceEvent, ...] = ()
    request: tuple[int, bool] = (0, False)
    heap: Heap | None = None
    script: deque[TraceEvent] = field(default_factory=deque)
    refuse: bool = False
    next_address: int = _FABRICATED

    def malloc(self, size: int) -> int | None:
        """The recorded address of the next segment."""
        if self._must_refuse():
            return None
        if self.script and self.script[0].action == "segment_alloc":
            call = self.script.popleft()
            if call.size != size:
                self.findings.count_driver(f"cudaMalloc of {size}, recorded {call.size}")
            return call.address
        self.findings.count_driver(f"cudaMalloc of {size}, recorded none")
        return self.reserve(size)

    def map(self, address: int, size: int) -> bool:
        """Whether the recording maps pages here."""
        if self._must_refuse():
            return False
        if self.script and self.script[0].action == "segment_map":
            call = self.script.popleft()
            if (call.address, call.size) != (address, size):
                self.findings.count_driver(f"map of {size} at {address:#x}, recorded {call}")
        else:
            self.findings.count_driver(f"map of {size} at {address:#x}, recorded none")
        return True

    def reserve(self, size: int) -> int:
        """Where the recording next maps such pages: a new range begins there.

        That may be later than now: a range made for an allocation that failed stays.
        """
        for call in chain(self.script, islice(self.trace, self.findings.index, None)):
            if call.action != "segment_map" or self._is_taken(call.address):
                continue
            if (call.stream, call.size == SMALL_SEGMENT_SIZE) == self.request:
                return call.address
        self.next_address += size
        return self.next_address - size

    def free(self, address: int, size: int) -> None:
        """A release that the recording should have too."""
        self._release("segment_free", address, size)

    def unmap(self, address: int, size: int) -> None:
        """A release that the recording should have too."""
        self._release("segment_unmap", address, size)

    def _is_taken(self, address: int) -> bool:
        assert self.heap is not None
        ranges = self.heap.ranges(self.request[0], small=self.request[1])
        return any(r.address <= address < r.address + r.size for r in ranges)

    def _must_refuse(self) -> bool:
        return self.script[0].action in _RELEASES if self.script else self.refuse

    def _release(self, action: str, address: int, size: int) -> None:
        for call in self.script:
            if call.action not in _RELEASES:
                break
            if call[:3] == (action, address, size):
                self.script.remove(call)
                return
        self.findings.count_driver(f"{action} of {size} at {address:#x}, recorded none")


def replay_snapshot(
    snapshot: Snapshot | str | Path,
    conf: AllocatorConf | None = None,
    *,
    total_bytes: int | None = None,
    watch: Watch | None = None,
) -> tuple[SnapshotReplay, ...]:
    """Replay every device of a recording.

    Args:
        snapshot: a recording, or the path of a file of ``torch.cuda.memory._dump_snapshot``.
        conf: options to replay with; by default those of the recording.
        total_bytes: memory of each device, if known. It decides how far an expandable segment
            can grow, which matters only when a device is nearly full.
        watch: looks at the allocator after every event.

    Returns:
        One comparison per device that has events.

    Raises:
        ReplayError: when the file is no snapshot, or its trace contradicts its segments.
    """
    if not isinstance(snapshot, Snapshot):
        snapshot = load_snapshot(snapshot)
    conf = snapshot.conf if conf is None else conf
    replays = []
    for device, trace in enumerate(snapshot.traces):
        if trace:
            segments = [s for s in snapshot.segments if s.device == device]
            replays.append(_Retrace(device, trace, segments, conf, total_bytes, watch).run())
    return tuple(replays)


class _Retrace:
    def __init__(
        self,
        device: int,
        trace: tuple[TraceEvent, ...],
        segments: list[RecordedSegment],
        conf: AllocatorConf,
        total_bytes: int | None,
        watch: Watch | None,
    ) -> None:
        self.watch = watch
        self.device = device
        self.trace = trace
        self.segments = segments
        self.findings = _Findings()
        self.driver = _RecordedDriver(self.findings, trace)
        self.allocator, self.live = rewind(trace, segments, conf, self.driver, total_bytes)
        self.driver.heap = self.allocator.heap
        self.num_ooms = 0
        self.private = [
            (s.address, s.address + s.size, s.pool) for s in segments if s.pool != DEFAULT_POOL
        ]

    def run(self) -> SnapshotReplay:
        """Go through the trace once."""
        for index, event in enumerate(self.trace):
            self.findings.index = index
            if event.action in _DRIVER_CALLS:
                self.driver.script.append(event)
            elif event.action == "alloc":
                self._alloc(event)
            elif event.action == "oom":
                self._run_out(event)
            elif event.action in ("free_requested", "free_completed"):
                self._settle()
                self._free(index, event)
            if self.watch is not None:
                self.watch(self.device, index, self.allocator)
        self._settle()
        actions = [event.action for event in self.trace]
        stats = self.allocator.stats
        return SnapshotReplay(
            device=self.device,
            num_events=len(self.trace),
            num_allocations=actions.count("alloc"),
            num_frees=actions.count("free_requested"),
            num_driver_calls=sum(action in _DRIVER_CALLS for action in actions),
            address_mismatches=self.findings.address,
            driver_mismatches=self.findings.driver,
            first_mismatch=self.findings.first,
            final_layout_equal=_layout(self.allocator) == _recorded_layout(self.segments),
            peak_allocated_bytes=stats.allocated_bytes.all.peak,
            peak_reserved_bytes=stats.reserved_bytes.all.peak,
            final_allocated_bytes=stats.allocated_bytes.all.current,
            final_reserved_bytes=stats.reserved_bytes.all.current,
            num_ooms_recorded=actions.count("oom"),
            num_ooms=self.num_ooms,
        )

    def _alloc(self, event: TraceEvent) -> None:
        self._prepare(event)
        pool = self._private_pool(event.address)
        if pool is not None:
            self.allocator.begin_pool(pool)
        try:
            block = self.allocator.malloc(event.size, event.stream)
        except OutOfMemory:
            block = None
            self.findings.count_address(f"no memory for the block at {event.address:#x}")
        finally:
            if pool is not None:
                self.allocator.end_pool(pool)
                self.allocator.release_pool(pool)
        if block is not None:
            if block.address != event.address:
                self.findings.count_address(
                    f"{event.size} bytes at {block.address:#x}, recorded {event.address:#x}"
                )
            self.live[event.address] = block
        self._drop_script()

    def _run_out(self, event: TraceEvent) -> None:
        self._prepare(event)
        self.driver.refuse = True
        try:
            block = self.allocator.malloc(event.size, event.stream)
        except OutOfMemory:
            self.num_ooms += 1
        else:
            self.findings.count_driver("memory was found where the run had none")
            if block is not None:
                self.allocator.free(block)
        self.driver.refuse = False
        self._drop_script()

    def _free(self, index: int, event: TraceEvent) -> None:
        block = self.live.get(event.address)
        if block is None:
            # Only after an earlier difference: rewinding has seen that every free has its block.
            self.findings.count_address(f"free of {event.address:#x}, which was not allocated")
        elif event.action == "free_completed":
            if block.num_events:
                self.allocator.complete(block)
            del self.live[event.address]
        else:
            following = self.trace[index + 1] if index + 1 < len(self.trace) else None
            # A free that is not completed at once waits for the streams of record_stream.
            if following is None or following[:2] != ("free_completed", event.address):
                self.allocator.record_stream(block, RECORDED_STREAM)
            self.allocator.free(block)

    def _prepare(self, event: TraceEvent) -> None:
        self._follow_releases()
        size = round_size(event.size, self.allocator.conf.roundup_power2_divisions)
        self.driver.request = (event.stream, is_small(size))

    def _settle(self) -> None:
        """Driver calls that no allocation made: only a release of the cache can be."""
        self._follow_releases()
        self._drop_script()

    def _follow_releases(self) -> None:
        """Releases at the head of the script: empty_cache, or the first step of an OOM retry.

        Doing them before the allocation comes to the same: it found no free block even with
        what they gave back.
        """
        script, conf = self.driver.script, self.allocator.conf
        if not script or script[0].action not in _RELEASES:
            return
        if conf.max_split_size is not None or conf.garbage_collection_threshold > 0.0:
            # Part of the cache may go, by limits that the recording does not hold.
            for call in [call for call in script if call.action == "segment_free"]:
                if not self.allocator.release_at(call.address):
                    self.findings.count_driver(f"cudaFree at {call.address:#x} is not possible")
        else:
            self.allocator.empty_cache()
        while script and script[0].action in _RELEASES:
            self.findings.count_driver(f"recorded {script.popleft()}, not made")

    def _drop_script(self) -> None:
        if self.driver.script:
            self.findings.count_driver(
                f"recorded {self.driver.script[0]}, not made", len(self.driver.script)
            )
            self.driver.script.clear()

    def _private_pool(self, address: int) -> tuple[int, int] | None:
        for begin, end, pool in self.private:
            if begin <= address < end:
                return pool
        return None


_Layout = set[tuple[int, int, str, int]]


def _layout(allocator: CachingAllocator) -> _Layout:
    blocks = allocator.blocks()
    return {(block.address, block.size, _state(block), block.requested) for block in blocks}


def _state(block: Block) -> str:
    if block.allocated:
        return "allocated"
    return "free" if block.is_available else "pending"


def _recorded_layout(segments: list[RecordedSegment]) -> _Layout:
    layout: _Layout = set()
    for segment in segments:
        for address, size, requested, state in segment.blocks:
            if state == "inactive":
                # Upstream leaves the last request in a block that is free.
                layout.add((address, size, "free", 0))
            else:
                name = "allocated" if state == "active_allocated" else "pending"
                layout.add((address, size, name, requested))
    return layout
