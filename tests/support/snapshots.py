"""Memory snapshots: those that the model of the allocator makes, and those that torch recorded.

The latter are validation data, not part of the repository. ``MEMEST_SNAPSHOTS`` names their folder,
else they lie beside the checkout. Where there are none, the tests of them are skipped.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from memest.replay import CachingAllocator
from memest.replay.blocks import Block
from support.paths import SHARED

__all__ = ["FOLDER", "RECORDINGS", "content_of", "for_each_recording"]

FOLDER = Path(os.environ.get("MEMEST_SNAPSHOTS") or SHARED / "snapshots")
RECORDINGS = sorted(FOLDER.glob("*.pickle"))
_LARGE = 2_000_000
_NONE = pytest.param(None, marks=pytest.mark.skip(reason="no recorded snapshots here"), id="none")


def for_each_recording(*, large_are_slow: bool = False) -> pytest.MarkDecorator:
    """A test's ``path`` is every recording in turn.

    Args:
        large_are_slow: leave those of more than two megabytes to ``--full``.
    """
    cases = [
        pytest.param(
            path,
            id=path.stem,
            marks=[pytest.mark.slow] if large_are_slow and path.stat().st_size > _LARGE else [],
        )
        for path in RECORDINGS
    ]
    return pytest.mark.parametrize("path", cases or [_NONE])


def content_of(allocator: CachingAllocator, traces: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot`` would return: these traces, and how they ended."""
    conf = allocator.conf
    return {
        "segments": [_segment(run, allocator) for run in allocator.segments()],
        "device_traces": traces,
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": conf.max_split_size or -1,
            "garbage_collection_threshold": conf.garbage_collection_threshold,
            "expandable_segments": conf.expandable_segments,
            "roundup_power2_divisions": {
                str(1 << place): parts for place, parts in enumerate(conf.roundup_power2_divisions)
            },
        },
    }


def _segment(run: list[Block], allocator: CachingAllocator) -> dict[str, Any]:
    first = run[0]
    pools = allocator.heap.private.items()
    own = ((0, name) for name, pair in pools if first.pool in (pair.small, pair.large))
    return {
        "device": 0,
        "address": first.address,
        "total_size": sum(block.size for block in run),
        "stream": first.stream,
        "segment_type": "small" if first.pool.small else "large",
        "segment_pool_id": next(own, (0, 0)),
        "is_expandable": first.expandable is not None,
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": _state(block),
                "frames": [],
            }
            for block in run
        ],
    }


def _state(block: Block) -> str:
    if block.is_available:
        return "inactive"
    return "active_allocated" if block.allocated else "active_pending_free"
