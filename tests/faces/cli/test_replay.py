"""``memest replay``: what it prints and how it ends."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from support.paths import SHARED

FOLDER = Path(os.environ.get("MEMEST_SNAPSHOTS", SHARED / "snapshots"))


def test_a_recorded_snapshot_is_identical(cli):
    path = FOLDER / "small_lm_fp32_fwd_bwd.pickle"
    if not path.is_file():
        pytest.skip("the recorded snapshots are not here")

    done = cli("replay", str(path), "--json")
    (device,) = json.loads(done.stdout)["devices"]
    assert done.returncode == 0
    assert device["is_exact"]
    assert device["address_mismatches"] == 0
    assert "identical" in cli("replay", str(path)).stdout


def test_a_snapshot_without_history_says_how_to_record_one(cli, tmp_path):
    path = tmp_path / "empty.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))

    done = cli("replay", str(path))
    assert done.returncode == 2
    assert "_record_memory_history" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps(Path("x"))])
def test_a_foreign_file_is_refused(cli, tmp_path, content):
    path = tmp_path / "foreign.pickle"
    path.write_bytes(content)

    done = cli("replay", str(path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "git lfs pull"),
        (json.dumps({"schemaVersion": 1, "traceEvents": []}).encode(), "torch.profiler"),
    ],
    ids=["Git LFS", "profiler"],
)
def test_a_file_that_stands_for_another_is_told_as_what_it_is(cli, tmp_path, content, words):
    path = tmp_path / "run.json"
    path.write_bytes(content)

    done = cli("replay", str(path))
    assert done.returncode == 2
    assert words in done.stderr
    assert "plain containers" not in done.stderr


@pytest.mark.parametrize("history", [[], [{"action": "snapshot", "addr": 0, "size": 0}]])
def test_nothing_to_compare_is_no_agreement(cli, tmp_path, history):
    path = recording(tmp_path)
    content = pickle.loads(path.read_bytes())
    content["device_traces"] = [history]
    path.write_bytes(pickle.dumps(content))

    done = cli("replay", str(path))
    assert done.returncode == 7
    assert "nothing was compared" in done.stdout
    assert "identical" not in done.stdout
    document = json.loads(cli("replay", str(path), "--json").stdout)
    (shown,) = document["devices"][0]["cache"][-1:] if history else document["segments"]
    held = sum(block["size"] for each in content["segments"] for block in each["blocks"])
    assert shown["reserved_bytes"] == held > shown["allocated_bytes"] > 0


def recording(tmp_path, name="run.pickle"):
    """Ten segments of 30 MiB, each half in use; then a request for 100 MiB that fails."""
    from memest.replay import AllocatorConf
    from memest.replay.recording import AllocationLabel, record

    events = [*range(10), *(~number for number in range(10)), *range(10, 20)]
    content = record(
        events, [30 << 20] * 10 + [16 << 20] * 10, AllocatorConf(),
        label_of=lambda *_: AllocationLabel(
            [{"name": "op", "filename": "m", "line": 0}], "activations"
        ),
    )  # fmt: skip
    content["device_traces"][0].append(
        {"action": "oom", "device_free": 6 << 20, "size": 100 << 20, "stream": 0, "frames": []}
    )
    path = tmp_path / name
    if path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(pickle.dumps(content))
    return path


@pytest.mark.parametrize("name", ["run.pickle", "run.json"])
def test_timeline_holes_and_other_options_are_shown(cli, tmp_path, name):
    path = recording(tmp_path, name)
    done = cli("replay", str(path), "--alloc-conf", "max_split_size_mb:20", "--ascii")

    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "out of memory 1 x as recorded" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "expandable_segments:True" in line]
    assert "the request fits" in line
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  as recorded")]
    assert "out of memory" in line
    # blocks that are never split leave whole segments behind, which can be given back
    (line,) = [line for line in done.stdout.splitlines() if "max_split_size_mb:20" in line]
    assert "the request fits" in line

    document = json.loads(cli("replay", str(path), "--json").stdout)
    (device,) = document["devices"]
    at_oom = next(row for row in device["cache"] if row["moment"] == "out of memory")
    # as much is free, but not in one piece
    assert at_oom["cached_bytes"] >= 100 << 20
    assert at_oom["largest_free_bytes"] < 100 << 20
    assert [row["survives"] for row in device["other_options"]] == [False, True]


def test_options_that_torch_refuses_are_refused(cli, tmp_path):
    done = cli("replay", str(recording(tmp_path)), "--alloc-conf", "expandable_segment:True")

    assert done.returncode == 2
    assert "expandable_segments" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ['{"segments": []}', "{", '{"segments": 1, "device_traces": 2}'])
def test_json_that_is_no_snapshot_is_refused(cli, tmp_path, text):
    path = tmp_path / "foreign.json"
    path.write_text(text)
    done = cli("replay", str(path))

    assert done.returncode == 2
    assert "snapshot" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
