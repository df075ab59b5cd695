"""Record a run of the modelled allocator as ``torch.cuda.memory._snapshot()`` records a real one.

The structure is torch's (``memory_snapshot.cpp``, ``c10/cuda/CUDACachingAllocator.cpp``, 2.13), so
PyTorch's own viewers open it. Two things are no part of a prediction and are said so: there is no
clock, ``time_us`` counts entries, and frames name what allocates, not lines of source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memest.replay.allocator import CachingAllocator
from memest.replay.blocks import Block, SimpleDriver
from memest.replay.conf import AllocatorConf
from memest.replay.sizes import NUM_DIVISIONS
from memest.replay.snapshot import DEFAULT_POOL

__all__ = ["NO_CATEGORY", "AllocationLabel", "Annotation", "Frames", "record"]

NO_CATEGORY = "unknown"
"""The category of what is no tensor. The page of memory_viz adds a category of this name where none
has it, and fails in doing so (``annotate_snapshot`` of ``MemoryViz.js``): driver calls have it."""

Frames = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class AllocationLabel:
    """What is said of an allocation: frames, innermost first, and its category."""

    frames: Frames
    category: str


@dataclass(frozen=True, slots=True)
class Annotation:
    """A part of the run: its name, its first event, and the event behind its last one."""

    name: str
    start: int
    stop: int


@dataclass(slots=True)
class _Recorder(SimpleDriver):
    """A driver that writes down what it is asked for, between the allocator's own entries."""

    trace: list[dict[str, Any]] = field(default_factory=list)
    stream: int = 0
    frames: Frames = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=dict)

    def malloc(self, size: int) -> int | None:
        """See :class:`memest.replay.blocks.Driver`."""
        address = self.reserve(size)
        self._segment("segment_alloc", address, size)
        return address

    def map(self, address: int, size: int) -> bool:
        """See :class:`memest.replay.blocks.Driver`."""
        self._segment("segment_map", address, size)
        return True

    def free(self, address: int, size: int) -> None:
        """See :class:`memest.replay.blocks.Driver`."""
        self._segment("segment_free", address, size)

    def unmap(self, address: int, size: int) -> None:
        """See :class:`memest.replay.blocks.Driver`."""
        self._segment("segment_unmap", address, size)

    def entry(
        self, action: str, address: int, size: int, label: AllocationLabel, stream: int
    ) -> None:
        """Add an entry of the trace, with the keys that torch's has."""
        self.trace.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": stream,
                "time_us": len(self.trace),
                "compile_context": "N/A",
                "user_metadata": label.category,
                "category": label.category,
                "frames": label.frames,
            }
        )

    def _segment(self, action: str, address: int, size: int) -> None:
        stream = self.streams.setdefault(address, self.stream)
        self.entry(action, address, size, AllocationLabel(self.frames, NO_CATEGORY), stream)


def record(
    events: Sequence[int],
    sizes: Sequence[int],
    conf: AllocatorConf,
    *,
    label_of: Callable[[int, int], AllocationLabel],
    streams: bytes = b"",
    annotations: Sequence[Annotation] = (),
    conf_text: str = "",
) -> dict[str, Any]:
    """Run a stream of allocations and write everything down.

    Args:
        events: as for :func:`memest.replay.replay`: v >= 0 allocates, v < 0 frees ``~v``.
        sizes: requested bytes of each allocation number.
        conf: options of the allocator.
        label_of: what to say of an allocation, by the index of its event and its number.
        streams: CUDA stream of each allocation number; empty where all are on one.
        annotations: parts of the run.
        conf_text: ``conf`` as ``PYTORCH_CUDA_ALLOC_CONF`` spells it.

    Returns:
        What ``torch.cuda.memory._snapshot()`` would return: plain containers.
    """
    driver = _Recorder()
    allocator = CachingAllocator(conf, driver=driver)
    blocks: dict[int, Block] = {}
    labels: dict[int, AllocationLabel] = {}
    times = []
    for index, event in enumerate(events):
        times.append(len(driver.trace))
        number = event if event >= 0 else ~event
        size = sizes[number]
        if not size:
            continue
        stream = streams[number] if streams else 0
        if event >= 0:
            label = labels[number] = label_of(index, number)
            driver.stream, driver.frames = stream, label.frames
            block = allocator.malloc(size, stream)
            assert block is not None
            blocks[number] = block
            driver.entry("alloc", block.address, size, label, stream)
        else:
            block, label = blocks.pop(number), labels.pop(number)
            for action in ("free_requested", "free_completed"):
                driver.entry(action, block.address, size, label, stream)
            allocator.free(block)
    times.append(len(driver.trace))
    owners = {block.address: labels[number] for number, block in blocks.items()}
    return {
        "segments": [_segment(run, owners) for run in allocator.segments()],
        "device_traces": [driver.trace],
        "allocator_settings": _settings(conf, conf_text),
        "external_annotations": [
            {"stage": stage, "name": part.name, "device": 0, "time_us": times[at]}
            for part in annotations
            for stage, at in (("START", part.start), ("END", part.stop))
        ],
    }


def _segment(run: list[Block], owners: dict[int, AllocationLabel]) -> dict[str, Any]:
    """One segment with its blocks, as ``_memory_snapshot`` lists it."""
    first = run[0]
    allocated = sum(block.size for block in run if block.allocated)
    return {
        "device": 0,
        "address": first.address,
        "total_size": sum(block.size for block in run),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block.requested for block in run),
        "stream": first.stream,
        "segment_type": "small" if first.pool.small else "large",
        "segment_pool_id": DEFAULT_POOL,
        "is_expandable": first.expandable is not None,
        "frames": [],
        "blocks": [_block(block, owners) for block in run],
    }


def _block(block: Block, owners: dict[int, AllocationLabel]) -> dict[str, Any]:
    label = owners.get(block.address) if block.allocated else None
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": "active_allocated" if block.allocated else "inactive",
        "category": NO_CATEGORY if label is None else label.category,
        "user_metadata": "" if label is None else label.category,
        "frames": [] if label is None else label.frames,
    }


def _settings(conf: AllocatorConf, text: str) -> dict[str, Any]:
    """The options under the names that torch lists them by."""
    divisions = conf.roundup_power2_divisions
    return {
        "PYTORCH_CUDA_ALLOC_CONF": text,
        "max_split_size": -1 if conf.max_split_size is None else conf.max_split_size,
        "garbage_collection_threshold": conf.garbage_collection_threshold,
        "expandable_segments": conf.expandable_segments,
        "roundup_power2_divisions": {
            str(1 << place): divisions[place] for place in range(NUM_DIVISIONS)
        },
    }
