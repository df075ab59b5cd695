"""Timeline, holes and other options of a recording, on recordings made by the model itself."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memest.errors import ConfigError
from memest.replay import load_snapshot, parse_alloc_conf, replay
from memest.replay.inspection import inspect
from memest.replay.recording import AllocationLabel, record
from memest.replay.snapshot import read_content
from memest.units import GIB, MIB

DEFAULT, EXPANDABLE = parse_alloc_conf(""), parse_alloc_conf("expandable_segments:True")
SOMETHING = AllocationLabel([{"name": "op", "filename": "module", "line": 0}], "activations")


def recorded(events, sizes, conf=DEFAULT, streams=b""):
    return record(events, sizes, conf, label_of=lambda *_: SOMETHING, streams=streams)


@st.composite
def runs(draw):
    """Allocations and frees that make sense, on up to three streams."""
    sizes, events, alive = [], [], []
    for _ in range(draw(st.integers(1, 40))):
        if alive and draw(st.booleans()):
            events.append(~alive.pop(draw(st.integers(0, len(alive) - 1))))
        else:
            alive.append(len(sizes))
            events.append(len(sizes))
            sizes.append(draw(st.sampled_from([1, 600, 1 << 20, 3 * MIB, 11 * MIB, 25 * MIB])))
    return events, sizes, bytes(draw(st.integers(0, 2)) for _ in sizes)


@given(runs(), st.sampled_from([DEFAULT, EXPANDABLE]), st.sampled_from([DEFAULT, EXPANDABLE]))
def test_other_options_give_what_a_replay_under_them_gives(run, conf, other):
    events, sizes, streams = run
    (found,) = inspect(
        read_content(recorded(events, sizes, conf, streams)), [("other", other)], points=7
    )
    assert found.comparison.is_exact, found.comparison.first_mismatch
    for row, options in zip(found.options, (conf, other), strict=True):
        wanted = replay(events, sizes, options, streams=streams)
        assert row.peak_allocated_bytes == wanted.peak_allocated_bytes
        assert row.peak_reserved_bytes == wanted.peak_reserved_bytes
        assert row.survives is None
    assert max(p.allocated_bytes for p in found.timeline) == found.comparison.peak_allocated_bytes
    assert max(p.reserved_bytes for p in found.timeline) == found.comparison.peak_reserved_bytes
    assert len(found.timeline) <= 7
    for picture in found.pictures:
        assert picture.cached_bytes == picture.releasable_bytes + picture.stuck_bytes
        assert picture.largest_free_bytes <= picture.cached_bytes


def test_holes_and_whole_segments_are_told_apart():
    # 12 MiB blocks have segments of their own; two of 4 MiB share one
    content = recorded([0, 1, 2, ~0, ~1], [12 * MIB, 4 * MIB, 4 * MIB])
    (found,) = inspect(read_content(content))
    end = found.pictures[-1]

    assert end.moment == "end"
    assert end.allocated_bytes == 4 * MIB
    assert end.releasable_bytes == 12 * MIB
    assert end.stuck_bytes == 16 * MIB
    assert end.largest_free_bytes == 12 * MIB


def fragmented():
    """Ten segments of 30 MiB, each half in use, then a request for 100 MiB."""
    sizes = [30 * MIB] * 10 + [16 * MIB] * 10
    events = [*range(10), *(~number for number in range(10)), *range(10, 20)]
    content = recorded(events, sizes)
    entry = {"action": "oom", "device_free": 6 * MIB, "size": 100 * MIB, "stream": 0}
    content["device_traces"][0].append(entry | {"frames": [], "time_us": 0})
    return content


def test_expandable_segments_serve_a_request_that_fragmentation_refused():
    found = inspect(
        read_content(fragmented()), [("expandable", EXPANDABLE), ("split", parse_alloc_conf(""))]
    )[0]
    reserved = found.comparison.final_reserved_bytes

    assert found.limit_bytes == reserved + 6 * MIB
    assert [row.survives for row in found.options] == [False, True, False]
    assert "out of memory" in [picture.moment for picture in found.pictures]


def test_blocks_from_before_the_recording_are_laid_anew():
    content = recorded([0, 1, 2, ~1], [30 * MIB, 25 * MIB, 11 * MIB])
    trace = content["device_traces"][0]
    # the last two entries are the free; all before it was before the recording
    content["device_traces"] = [trace[-2:]]
    (found,) = inspect(read_content(content))

    assert found.comparison.is_exact
    assert found.earlier_bytes == 66 * MIB
    # segments are multiples of 2 MiB, and rests of up to 1 MiB stay with their blocks
    assert found.options[0].peak_allocated_bytes == 68 * MIB


def test_a_timeline_needs_a_point():
    with pytest.raises(ConfigError, match="at least 1"):
        inspect(read_content(recorded([0], [1])), points=0)


def test_json_and_pickle_are_read_alike(tmp_path):
    content = fragmented()
    (tmp_path / "a.json").write_text(json.dumps(content))
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(content))

    assert load_snapshot(tmp_path / "a.json") == load_snapshot(tmp_path / "a.pickle")


def test_the_settings_come_back():
    conf = dataclasses.replace(
        parse_alloc_conf("roundup_power2_divisions:[1:2,4:8,>:16],max_split_size_mb:40"),
        garbage_collection_threshold=0.5,
    )
    assert read_content(recorded([0], [GIB], conf)).conf == conf
