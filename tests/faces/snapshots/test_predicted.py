"""``memest estimate --snapshot``: the predicted run in torch's structure."""

from __future__ import annotations

import errno
import os
import pickletools
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from memest.errors import ConfigError
from memest.estimation.snapshot_export import check_snapshot_target
from memest.files.whole import write_whole
from memest.replay import load_snapshot, replay_snapshot

RUNS = ("plain", "expandable", "rounded", "several GPUs", "evaluation")

# what the page's reader of pickles knows (`unpickle` of torch/utils/viz/MemoryViz.js)
PAGE_OPCODES = set(
    """APPENDS BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST FRAME LONG1 LONG_BINGET MARK
    MEMOIZE PROTO SETITEMS SHORT_BINUNICODE STOP TUPLE2 APPEND NEWFALSE BINPUT BINUNICODE
    EMPTY_TUPLE NEWTRUE NONE BINFLOAT TUPLE TUPLE1 TUPLE3 LONG_BINPUT LIST DICT SETITEM""".split()
)


@pytest.mark.slow(but=("json-expandable",))
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("suffix", ["pickle", "json"])
def test_a_replay_of_it_finds_the_peaks_of_the_estimate(written, name, suffix):
    run = written(name)
    (device,) = replay_snapshot(getattr(run, suffix))

    assert device.is_exact, device.first_mismatch
    assert device.peak_allocated_bytes == run.estimate["peak"]["allocated_bytes"]
    assert device.peak_reserved_bytes == run.estimate["peak"]["reserved_bytes"]


@pytest.mark.slow("several GPUs", "evaluation")
@pytest.mark.parametrize("name", RUNS)
def test_both_files_hold_the_same(written, name):
    run = written(name)

    assert load_snapshot(run.pickle) == load_snapshot(run.json)


def test_segments_and_blocks_add_up(written):
    content = written("plain").content
    for segment in content["segments"]:
        blocks = segment["blocks"]
        assert segment["total_size"] == sum(block["size"] for block in blocks)
        assert segment["allocated_size"] == sum(
            block["size"] for block in blocks if block["state"] == "active_allocated"
        )
        ends = [block["address"] + block["size"] for block in blocks]
        assert [block["address"] for block in blocks] == [segment["address"], *ends[:-1]]


def test_allocations_say_module_operator_phase_and_category(written):
    run = written("plain")
    (trace,) = run.content["device_traces"]
    allocations = [entry for entry in trace if entry["action"] == "alloc"]
    wanted = {row["category"] for row in run.estimate["breakdown"]} - {"rounding"}

    assert wanted <= {entry["category"] for entry in allocations}
    assert all(entry["user_metadata"] == entry["category"] for entry in allocations)
    deep = next(
        entry for entry in allocations
        if entry["frames"][0]["filename"] == "bert.encoder.layer.1.output.dense"
        and entry["frames"][-1]["name"] == "forward of step 1, micro-step 1"
    )  # fmt: skip
    assert deep["frames"][0]["name"].startswith("aten.")
    assert [frame["name"] for frame in deep["frames"][1:-1]] == [
        "dense", "output", "1", "layer", "encoder", "bert",
    ]  # fmt: skip


def test_phases_are_annotations_in_order(written):
    content = written("plain").content
    marks = content["external_annotations"]
    names = [mark["name"] for mark in marks if mark["stage"] == "START"]

    assert names[0] == "load"
    assert "backward of step 2, micro-step 1" in names
    times = [mark["time_us"] for mark in marks]
    assert times == sorted(times)
    assert times[-1] == len(content["device_traces"][0])


def test_the_options_of_the_allocator_are_listed_as_torch_lists_them(written):
    settings = written("rounded").content["allocator_settings"]

    assert settings["max_split_size"] == 64 << 20
    assert settings["roundup_power2_divisions"]["1"] == 4
    assert settings["roundup_power2_divisions"]["1024"] == 8
    assert written("expandable").content["allocator_settings"]["expandable_segments"] is True


@pytest.mark.slow("evaluation", "plain")
@pytest.mark.parametrize("name", RUNS)
def test_the_pickle_is_one_that_the_page_of_memory_viz_can_read(written, name):
    run = written(name)
    used = list(pickletools.genops(run.pickle.read_bytes()))

    assert {opcode.name for opcode, _, _ in used} <= PAGE_OPCODES
    assert used[0][1] <= 4
    # numbers of the page are doubles
    assert max(arg for _, arg, _ in used if isinstance(arg, int)) < 1 << 53
    # where no entry has it, the page adds the category itself, by a name that it misspells
    (trace,) = run.content["device_traces"]
    assert any(entry["category"] == "unknown" for entry in trace)


def _memory_viz(*words, cache):
    tool = Path(find_spec("torch").origin).parent / "cuda/_memory_viz.py"
    return subprocess.run(
        [sys.executable, str(tool), *words], capture_output=True, text=True, check=False,
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "HOME": str(cache)}, timeout=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache with a flamegraph.pl that prints what it is given: the real one is a download."""
    folder = tmp_path_factory.mktemp("cache")
    for place in (folder, folder / ".cache"):
        place.mkdir(exist_ok=True)
        script = place / "flamegraph.pl"
        script.write_text("#!/bin/sh\ncat\n")
        script.chmod(0o755)
    return folder


@pytest.mark.parametrize("name", ["plain", "expandable"])
def test_torchs_own_viewer_reads_it(written, cache, tmp_path, name):
    run = written(name)

    traced = _memory_viz("trace", str(run.pickle), cache=cache)
    assert traced.returncode == 0, traced.stderr
    assert "Device 0" in traced.stdout
    for command in ("segments", "memory"):
        picture = tmp_path / f"{command}.svg"
        done = _memory_viz(command, str(run.pickle), "-o", str(picture), cache=cache)
        assert done.returncode == 0, done.stderr
        lines = picture.read_text().splitlines()
        assert sum(int(line.rpartition(" ")[2]) for line in lines) == sum(
            segment["total_size"] for segment in run.content["segments"]
        )
        assert any("encoder" in line for line in lines)
    for command in ("trace_plot", "segment_plot"):
        page = tmp_path / f"{command}.html"
        done = _memory_viz(command, str(run.pickle), "-o", str(page), cache=cache)
        assert done.returncode == 0, done.stderr
        assert "add_local_files" in page.read_text()


def test_torchs_own_comparison_reads_its_segments(written):
    # the subcommand `compare` of torch 2.13 fails on every file: it goes through the keys of the
    # snapshot in place of its segments. What it means to call is this.
    from torch.cuda._memory_viz import compare

    segments = written("plain").content["segments"]
    lines = compare(segments[1:], segments, format_flamegraph=str)
    only_after = [line for line in lines.splitlines() if line.startswith("only_after")]
    assert sum(int(line.rpartition(" ")[2]) for line in only_after) == segments[0]["total_size"]


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    target = tmp_path / "run.pickle"
    target.write_bytes(b"before")

    def fails(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_whole(target, fails)
    assert target.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["run.pickle"]

    write_whole(target, lambda file: file.write(b"whole"))
    assert target.read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["run.pickle"]


@pytest.mark.parametrize("name", ["run.pkl", "run", "missing/run.pickle", "folder.json"])
def test_a_target_that_cannot_be_is_refused_first(tmp_path, name):
    (tmp_path / "folder.json").mkdir()

    with pytest.raises(ConfigError):
        check_snapshot_target(tmp_path / name)
