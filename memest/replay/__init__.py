"""Replay of PyTorch's CUDA caching allocator: from a stream of allocations to reserved memory.

Needs neither torch nor numpy. :func:`replay` answers for a single stream, fast;
:class:`CachingAllocator` is the complete model; :func:`replay_snapshot` checks it against a
recording made by ``torch.cuda.memory._dump_snapshot``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memest.replay.conf import AllocatorConf, parse_alloc_conf
from memest.replay.replay import Replay, replay
from memest.replay.sizes import alloc_size, round_size

if TYPE_CHECKING:
    from memest.replay.allocator import CachingAllocator, EventPolicy
    from memest.replay.oom import OutOfMemory
    from memest.replay.retrace import SnapshotReplay, replay_snapshot
    from memest.replay.snapshot import Snapshot, load_snapshot

__all__ = [
    "AllocatorConf",
    "CachingAllocator",
    "EventPolicy",
    "OutOfMemory",
    "Replay",
    "Snapshot",
    "SnapshotReplay",
    "alloc_size",
    "load_snapshot",
    "parse_alloc_conf",
    "replay",
    "replay_snapshot",
    "round_size",
]

# most questions are answered by the fast loops alone
_HOMES = {
    "CachingAllocator": "allocator",
    "EventPolicy": "allocator",
    "OutOfMemory": "oom",
    "Snapshot": "snapshot",
    "SnapshotReplay": "retrace",
    "load_snapshot": "snapshot",
    "replay_snapshot": "retrace",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memest.replay' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"memest.replay.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
