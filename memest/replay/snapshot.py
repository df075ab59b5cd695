"""Read the files of ``torch.cuda.memory._dump_snapshot``, as pickle or as JSON.

They are plain containers: the last events of each device with their addresses, and
the segments at the end. The reader builds nothing but containers, strings and numbers; a pickle
that asks for anything else is refused. Source of the fields: torch's ``memory_snapshot.cpp``.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from memest.errors import ConfigError, ReplayError
from memest.files.texts import lfs_problem
from memest.replay.conf import AllocatorConf, parse_alloc_conf
from memest.replay.sizes import NO_DIVISIONS

__all__ = [
    "DEFAULT_POOL",
    "RecordedBlock",
    "RecordedSegment",
    "Snapshot",
    "TraceEvent",
    "load_content",
    "load_snapshot",
    "read_content",
]

DEFAULT_POOL = (0, 0)  # segment_pool_id of everything outside CUDA graphs and MemPools


class TraceEvent(NamedTuple):
    """One entry of a device's trace; ``address`` is 0 where the action has none.

    Where memory ran out, ``address`` is what the driver said it still had, in bytes: torch's own
    ``TraceEntry`` keeps it there, and its snapshots write it as ``device_free``.
    """

    action: str
    address: int
    size: int
    stream: int


class RecordedBlock(NamedTuple):
    """One block of a segment at the end of the recording."""

    address: int
    size: int
    requested: int
    state: str


class RecordedSegment(NamedTuple):
    """One segment, or run of mapped pages, at the end of the recording."""

    device: int
    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    pool: tuple[int, int]
    blocks: tuple[RecordedBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A recording: what happened on each device, and how it ended.

    Attributes:
        conf: the allocator's options as the recording states them.
        traces: events per device, oldest first; often only the last of a longer run.
        segments: the segments of all devices after the last event.
    """

    conf: AllocatorConf
    traces: tuple[tuple[TraceEvent, ...], ...]
    segments: tuple[RecordedSegment, ...]


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise ReplayError(f"it asks for {module_name}.{global_name}, which a snapshot never needs")


_START = 64

# Everything the unpickler can raise on bytes that are not a pickle of plain containers.
_UNREADABLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    ReplayError,
    TypeError,
    ValueError,
)


def load_snapshot(path: str | Path) -> Snapshot:
    """Read a memory snapshot without running anything that it contains.

    Raises:
        ReplayError: when the file cannot be read, holds anything but plain containers, or is not
            a memory snapshot. The message says which.
    """
    return load_content(path)[0]


_MAKE_ONE = (
    "Make one with torch.cuda.memory._record_memory_history() before the step and "
    "torch.cuda.memory._dump_snapshot(path) after it."
)


def load_content(path: str | Path) -> tuple[Snapshot, Any]:
    """A memory snapshot, and the containers it was read from: they have the frames.

    Raises:
        ReplayError: as for :func:`load_snapshot`.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(_START)
            is_json = start.lstrip().startswith((b"{", b"["))  # no opcodes of a pickle
            file.seek(0)
            problem = lfs_problem(path, start)
            content = json.load(file) if is_json else problem or _PlainUnpickler(file).load()
    except OSError as error:
        raise ReplayError(
            f"cannot read the memory snapshot {path}: {error.strerror}. {_MAKE_ONE}"
        ) from error
    except _UNREADABLE as error:
        why = str(error).rstrip(".") or type(error).__name__
        raise ReplayError(
            f"{path} is not a memory snapshot of plain containers: {why}. {_MAKE_ONE}"
        ) from error
    if problem:
        raise ReplayError(problem)
    if isinstance(content, dict) and "traceEvents" in content:
        raise ReplayError(
            f"{path} is a trace of torch.profiler: it has times, and no addresses to replay. "
            "Record allocations with torch.cuda.memory._record_memory_history() before the step "
            "and torch.cuda.memory._dump_snapshot('snapshot.pickle') after it."
        )
    try:
        return read_content(content), content
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ReplayError(
            f"{path} is {'JSON' if is_json else 'a pickle'}, but not of a memory snapshot "
            f"({type(error).__name__}: {error}). "
            "It needs 'segments' and 'device_traces', as torch.cuda.memory._dump_snapshot(path) "
            "writes them."
        ) from error


def read_content(content: Any) -> Snapshot:
    """The snapshot in what ``torch.cuda.memory._snapshot()`` returns, or a file of it holds.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError, AttributeError: it is none.
    """
    traces = tuple(
        tuple(
            TraceEvent(
                str(entry["action"]),
                int(entry.get("addr", entry.get("device_free", 0))),
                int(entry.get("size", 0)),
                int(entry.get("stream", 0)),
            )
            for entry in trace
        )
        for trace in content["device_traces"]
    )
    segments = tuple(_read_segment(entry) for entry in content["segments"])
    settings = content.get("allocator_settings") or {}
    expandable = any(segment.expandable for segment in segments) or any(
        event.action == "segment_map" for trace in traces for event in trace
    )
    conf = _read_conf(settings, expandable=expandable)
    return Snapshot(conf=conf, traces=traces, segments=segments)


def _read_segment(entry: Mapping[str, Any]) -> RecordedSegment:
    first, second = entry.get("segment_pool_id", DEFAULT_POOL)
    address = int(entry["address"])
    blocks = []
    for block in entry["blocks"]:
        size = int(block["size"])
        # Old recordings list no addresses and no requested sizes: blocks follow each other.
        at = int(block.get("address", address))
        requested = int(block.get("requested_size", size))
        blocks.append(RecordedBlock(at, size, requested, str(block["state"])))
        address = at + size
    return RecordedSegment(
        int(entry.get("device", 0)),
        int(entry["address"]),
        int(entry["total_size"]),
        int(entry.get("stream", 0)),
        entry["segment_type"] == "small",
        bool(entry.get("is_expandable", False)),
        (int(first), int(second)),
        tuple(blocks),
    )


def _read_conf(settings: Mapping[str, Any], *, expandable: bool) -> AllocatorConf:
    """Options in the words of the environment variable, then as the allocator had parsed them."""
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF") or ""
    try:
        base = parse_alloc_conf(text)
    except ConfigError:
        base = AllocatorConf()  # an option of another version; the parsed values follow
    split = int(settings.get("max_split_size", -1))
    divisions = settings.get("roundup_power2_divisions") or {}
    places = tuple(int(divisions.get(str(1 << place), 0)) for place in range(len(NO_DIVISIONS)))
    return AllocatorConf(
        expandable_segments=bool(settings.get("expandable_segments", expandable)),
        max_split_size=split if 0 < split < 1 << 60 else base.max_split_size,
        roundup_power2_divisions=places if divisions else base.roundup_power2_divisions,
        garbage_collection_threshold=float(settings.get("garbage_collection_threshold", 0.0)),
        per_process_memory_fraction=base.per_process_memory_fraction,
        large_segment_size=base.large_segment_size,
        max_non_split_rounding=base.max_non_split_rounding,
    )
