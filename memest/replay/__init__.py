"""Replay of PyTorch's CUDA caching allocator: from a stream of allocations to reserved memory.

Needs neither torch nor numpy. :func:`replay` answers for a single stream, fast;
:class:`CachingAllocator` is the complete model; :func:`replay_snapshot` checks it against a
recording made by ``torch.cuda.memory._dump_snapshot``.
"""

from __future__ import annotations

from memest.replay.allocator import CachingAllocator, EventPolicy
from memest.replay.conf import AllocatorConf, parse_alloc_conf
from memest.replay.oom import OutOfMemory
from memest.replay.replay import Replay, replay
from memest.replay.retrace import SnapshotReplay, replay_snapshot
from memest.replay.sizes import alloc_size, round_size
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
