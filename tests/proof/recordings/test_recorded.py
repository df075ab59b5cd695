"""Predicted streams against allocator histories that were recorded on real GPUs.

The recordings are not part of the repository: MEMEST_SNAPSHOTS names their folder, else
``shared/snapshots`` beside the checkout is tried, and without it these tests are skipped. What
they show is written up in ``docs/conformance.md``.
"""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("torch")

from memest.replay import Snapshot, load_snapshot, replay, replay_snapshot
from memest.replay.blocks import Block, SimpleDriver
from memest.replay.rewind import rewind
from support.recorded_events import Event, predicted_events, recorded_events
from support.recorded_runs import CASES, Case, predict
from support.snapshots import FOLDER

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no recorded snapshots at hand")

BELOW_ALL = 1 << 46  # no address of a recording lies down there
KEPT = ("cuBLAS workspace",)


each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)


@functools.cache
def recording(case: Case) -> Snapshot:
    path = FOLDER / f"{case.file}.pickle"
    if not path.is_file():
        pytest.skip(f"{path.name} is not at hand")
    return load_snapshot(path)


def split(events: list[Event]) -> tuple[list[Event], list[Event], list[Event]]:
    """Until the last birth, the deaths after it as a set (sorted), and the final death."""
    last = max(i for i, event in enumerate(events) if event.is_birth) + 1
    return events[:last], sorted(events[last:-1], key=lambda e: e.number), events[-1:]


@pytest.mark.slow("h100_lm3b_fp32_ctx128_fullstep", "h100_lm3b_fp32_ctx256_fullstep")
@each
def test_every_event_is_the_recorded_one(case):
    """Births and deaths, their order, their sizes, and which birth each death belongs to."""
    recorded = recorded_events(recording(case).traces[0])
    stream, begin, end = predict(case)

    predicted = predicted_events(stream, begin, end, without=KEPT if case.used else ())

    if case.unordered_end:
        assert split(predicted) == split(recorded)
    else:
        assert predicted == recorded


@pytest.mark.slow("h100_lm3b_fp32_ctx128_fullstep", "h100_lm3b_fp32_ctx256_fullstep")
@each
def test_peaks_from_an_empty_allocator(case):
    """The whole prediction, model included, against the whole recording."""
    (recorded,) = replay_snapshot(recording(case))
    assert recorded.is_exact
    stream, _, end = predict(case)

    result = replay(stream.events[:end], stream.sizes)

    allocated, reserved = case.off
    assert result.peak_allocated_bytes - recorded.peak_allocated_bytes == allocated
    assert result.peak_reserved_bytes - recorded.peak_reserved_bytes == reserved
    assert abs(allocated) < 0.002 * recorded.peak_allocated_bytes
    assert abs(reserved) < 0.005 * recorded.peak_reserved_bytes


@pytest.mark.slow("h100_lm3b_fp32_ctx256_fullstep")
@pytest.mark.parametrize("case", [c for c in CASES if c.used], ids=lambda case: case.file)
def test_peaks_from_the_recorded_start(case):
    """The predicted step in the allocator that an earlier run had left behind."""
    snapshot = recording(case)
    (recorded,) = replay_snapshot(snapshot)
    driver = SimpleDriver(lowest_address=BELOW_ALL)
    allocator, _ = rewind(snapshot.traces[0], list(snapshot.segments), snapshot.conf, driver)
    stream, begin, end = predict(case)
    blocks: dict[int, Block] = {}

    allocator.empty_cache()  # the script calls it before its step
    for event in predicted_events(stream, begin, end, without=KEPT):
        if event.is_birth:
            block = allocator.malloc(event.size)
            assert block is not None
            blocks[event.number] = block
        else:
            allocator.free(blocks.pop(event.number))

    assert allocator.stats.allocated_bytes.all.peak == recorded.peak_allocated_bytes
    assert allocator.stats.reserved_bytes.all.peak == recorded.peak_reserved_bytes
    assert allocator.stats.reserved_bytes.all.current == recorded.final_reserved_bytes
