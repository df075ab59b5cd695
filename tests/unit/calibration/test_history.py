"""The allocator's history: taken from a snapshot, written, read, replayed."""

from __future__ import annotations

import gzip
import inspect
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from memest.calibration.recording.history import (
    History,
    HistoryCounters,
    HistoryMark,
    RecordedDevice,
    history_of,
    mark_counters,
    place_marks,
    read_history,
    start_history,
    take_history,
    write_history,
)
from memest.errors import ConfigError, DeviceError
from memest.replay import AllocatorConf, load_snapshot, replay_snapshot
from memest.replay.sites import site_of
from memest.replay.snapshot import TraceEvent
from support.made_up_stream import made_up_stream
from support.simulated_run import RealRun, record
from support.snapshots import for_each_recording

EXPANDABLE = AllocatorConf(expandable_segments=True)


def same(one: History, other: History) -> bool:
    sites = list(one.sites) == list(other.sites)
    return sites and all(
        getattr(one, name) == getattr(other, name)
        for name in History.__dataclass_fields__
        if name not in ("sites", "run")
    )


def taken(**options) -> History:
    recording = record(RealRun(made_up_stream()), **options)
    return history_of(
        recording.content, marks=recording.marks, begin=recording.begin, end=recording.end,
        max_entries=options.get("max_entries"), run="r1", case={"model": "m", "id": "m-1"},
        recorded_on=RecordedDevice(name="X", total_bytes=1 << 34, capability=(9, 0), torch="2.13"),
    )  # fmt: skip


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("conf", [AllocatorConf(), EXPANDABLE], ids=["default", "expandable"])
def test_a_history_comes_back_as_it_was_written(tmp_path, conf):
    """Events, frames, marks, segments, options: everything."""
    history = taken(conf=conf)

    write_history(tmp_path / "h.jsonl.gz", history)
    read = read_history(tmp_path / "h.jsonl.gz")

    assert same(read, history)
    assert read.run == "r1"
    assert replay_snapshot(read.snapshot())[0].is_exact


def test_equal_histories_make_equal_files(tmp_path):
    """No time of day is in them."""
    for name in ("a", "b"):
        write_history(tmp_path / name, taken())

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_without_frames_the_file_is_smaller_and_says_nothing_of_them(tmp_path):
    """Recording frames is the runner's choice."""
    history = taken(frames=False)

    write_history(tmp_path / "h", history)
    read = read_history(tmp_path / "h")

    assert read.frames == ()
    assert set(read.sites) == {-1}
    assert read.frame(0) == ""


def test_a_file_without_a_run_is_called_by_its_name(tmp_path):
    """Files are named after their runs."""
    write_history(tmp_path / "20260101-17.jsonl.gz", History(events=(), sites=()))

    assert read_history(tmp_path / "20260101-17.jsonl.gz").run == "20260101-17"


def test_actions_of_releases_to_come_are_kept(tmp_path):
    """Also addresses that are no multiple of 512, and streams."""
    events = (
        TraceEvent("workspace_alloc", 7, 3, 0),
        TraceEvent("alloc", 1 << 40, 700, 99),
        TraceEvent("free_requested", 1 << 40, 700, 99),
        TraceEvent("alloc", 1 << 41, 700, 0),
        TraceEvent("free_completed", 1 << 40, 700, 99),
        TraceEvent("free_requested", 1 << 41, 600, 0),
        TraceEvent("free_completed", 1 << 41, 600, 0),
        TraceEvent("free_requested", 1 << 42, 4, 5),
    )
    history = History(events=events, sites=[-1] * len(events))

    write_history(tmp_path / "h", history)

    assert read_history(tmp_path / "h").events == events


@for_each_recording(large_are_slow=True)
def test_a_recorded_snapshot_replays_from_its_history(tmp_path, path):
    """Address by address, with the same result as from the snapshot, in a hundredth of its size."""
    content = pickle.loads(path.read_bytes())
    snapshot = load_snapshot(path)
    expected = {found.device: found for found in replay_snapshot(snapshot)}

    for device, replayed in expected.items():
        write_history(tmp_path / "h", history_of(content, device))
        history = read_history(tmp_path / "h")

        assert history.events == snapshot.traces[device]
        assert history.conf == snapshot.conf
        assert replay_snapshot(history.snapshot()) == (replayed,)
        assert any(history.frame(i) for i, e in enumerate(history.events) if e.action == "alloc")
        assert (tmp_path / "h").stat().st_size < 50_000


# -- malformed files ------------------------------------------------------------------------------


def rewritten(tmp_path, change) -> Path:
    write_history(tmp_path / "good", taken())
    lines = [json.loads(x) for x in gzip.decompress((tmp_path / "good").read_bytes()).splitlines()]
    change(lines)
    path = tmp_path / "bad"
    path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x[0].update(format="other"), "header"),
        (lambda x: x[0].update(schema_version=99), "schema version 99"),
        (lambda x: x[0].update(events=5), "5"),
        (lambda x: x[0].update(events=10**12), "whole number"),
        (lambda x: x[0].update(events=10**6), "header says"),
        (lambda x: x[0].pop("marks"), "'marks' is missing"),
        (lambda x: x[0].update(marks=[[10**9, "forward", 1, 1]]), "whole number"),
        (lambda x: x[0].update(marks=[["forward"]]), "unpack"),
        (lambda x: x[0].update(conf={"nonsense": 1}), "is missing"),
        (lambda x: x[0]["conf"].update(nonsense=1), "nonsense"),
        (lambda x: x[0]["conf"].update(large_segment_size="big"), "not a history"),
        (lambda x: x[0]["conf"].update(garbage_collection_threshold=7), "between 0 and 1"),
        (lambda x: x[0].update(device={"index": 10**9}), "whole number"),
        (lambda x: x[0].update(device={"capability": 9}), "not a history"),
        (lambda x: x[0].update(case=[]), "object"),
        (lambda x: x[1].update(sizes=[-1]), "whole number"),
        (lambda x: x[1].update(sizes=[1.5]), "whole number"),
        (lambda x: x[1].update(sizes=["8"]), "whole number"),
        (lambda x: x[1].update(sizes=[]), "not a history"),
        (lambda x: x[1].update(frames=[]), "not in its table"),
        (lambda x: x[1].update(frames=[3]), "text"),
        (lambda x: x[1].update(actions={}), "is missing"),
        (lambda x: x[1]["actions"].update(f=["alloc"] * 1000), "one action, or for two"),
        (lambda x: x[2].update(ages=[10**6] * 10_000), "before the first"),
        (lambda x: x[2].update(ages=[]), "too few ages"),
        (lambda x: x[2].update(actions=7), "text"),
        (lambda x: x[2].update(actions="?"), "is missing"),
        (lambda x: x[2].pop("actions"), "'actions' is missing"),
        (lambda x: x[-1].update(segments=[[1]]), "not a history"),
        (lambda x: x[-1].update(segments=7), "not a history"),
        (lambda x: x.__delitem__(slice(1, None)), "ends after its header"),
        (lambda x: x.insert(2, [1, 2]), "not an object"),
    ],
)
def test_a_malformed_file_is_refused_in_a_sentence(tmp_path, change, said):
    """Whatever is wrong in it, nothing but a ConfigError comes out."""
    path = rewritten(tmp_path, change)

    with pytest.raises(ConfigError) as refused:
        read_history(path)

    assert str(path) in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"not gzip", *(gzip.compress(text, mtime=0) for text in (
        b"", b"{", b"[]", b"[" * 100_000, b"\xff\xfe"
    )), gzip.compress(b"{}", mtime=0)[:-4]],
    ids=["empty", "other", "nothing", "half", "list", "deep", "no text", "cut"],
)  # fmt: skip
def test_bytes_that_are_no_history(tmp_path, content):
    """Truncated, not JSON, too deep, not even gzip."""
    (tmp_path / "bad").write_bytes(content)

    with pytest.raises(ConfigError, match="bad"):
        read_history(tmp_path / "bad")


def test_a_file_that_is_not_there(tmp_path):
    """Said in words."""
    with pytest.raises(ConfigError, match="No such file"):
        read_history(tmp_path / "none")


def test_a_file_that_unpacks_to_too_much(tmp_path, monkeypatch):
    """It is not unpacked to the end."""
    monkeypatch.setattr("memest.calibration.recording.history_file.MAX_TEXT_BYTES", 1000)
    (tmp_path / "bomb").write_bytes(gzip.compress(bytes(10_000)))

    with pytest.raises(ConfigError, match="unpacks to more"):
        read_history(tmp_path / "bomb")


# -- snapshots ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        None,
        {},
        [],
        {"device_traces": 3},
        {"device_traces": []},
        {"device_traces": [[{"addr": 1}]], "segments": []},
    ],
)
def test_content_that_is_no_snapshot(content):
    """Said in a sentence."""
    with pytest.raises(ConfigError, match="snapshot"):
        history_of(content)


def test_fields_of_old_releases():
    """No settings, no addresses of blocks, no pool, no frames."""
    content = {
        "device_traces": [[{"action": "alloc", "addr": 4096, "size": 100, "stream": 0},
                           {"action": "oom", "size": 5, "stream": 0, "device_free": 7}]],
        "segments": [{"address": 4096, "total_size": 2 << 20, "segment_type": "small", "stream": 0,
                      "blocks": [{"size": 512, "state": "active_allocated"}]}],
    }  # fmt: skip

    history = history_of(content)

    # what the driver had left stands where other events have their address
    assert history.events[1] == TraceEvent("oom", 7, 5, 0)
    assert history.segments[0].blocks[0].address == 4096


def test_marks_are_where_the_stream_has_them():
    """The counters at a mark tell how many allocations and frees came before."""
    stream = made_up_stream()
    history = taken()
    counted = [i for i, e in enumerate(history.events) if e.action in ("alloc", "free_requested")]

    for mark, theirs, position in zip(
        history.marks, stream.marks, stream.mark_positions, strict=True
    ):
        assert (mark.phase, mark.step) == (theirs.phase, theirs.step)
        assert sum(i < mark.position for i in counted) == position
        # what a free completes belongs to the phase of the free
        assert history.events[mark.position].action != "free_completed"


def test_marks_before_the_first_event_left_are_dropped():
    """They are counted from the end, so the others are right."""
    whole, rest = taken(), taken(max_entries=200)
    left = rest.marks[-1]

    assert 0 < len(rest.marks) < len(whole.marks)
    assert len(rest.events) - left.position == len(whole.events) - whole.marks[-1].position


def test_driver_calls_belong_to_the_allocation_behind_them():
    """A mark lies in front of the segment that the phase's first allocation takes."""
    events = [TraceEvent(name, 1, 1, 0) for name in
              ("segment_alloc", "alloc", "free_requested", "free_completed", "segment_alloc",
               "alloc")]  # fmt: skip
    marks = [("load", 0, 0, HistoryCounters(7, 3)), ("forward", 1, 1, HistoryCounters(8, 4))]

    placed = place_marks(events, marks, HistoryCounters(9, 4))

    assert placed == (HistoryMark(0, "load", 0, 0), HistoryMark(4, "forward", 1, 1))


def test_a_ring_that_overflowed_is_noticed():
    """By the counters, and without them by its being full."""
    assert taken().complete
    assert taken().lost == 0
    lost = taken(max_entries=100)
    assert not lost.complete
    assert lost.lost > 0
    recording = record(RealRun(made_up_stream()), max_entries=100)
    assert not history_of(recording.content, max_entries=100).complete
    assert history_of(recording.content).complete


def test_counters_that_were_reset_meanwhile_say_nothing():
    """Nothing is lost by them."""
    recording = record(RealRun(made_up_stream()))

    history = history_of(
        recording.content, begin=HistoryCounters(10**9, 10**9), end=recording.end, max_entries=10**6
    )

    assert history.lost == 0
    assert history.complete


# -- torch ----------------------------------------------------------------------------------------


class FakeCuda:
    """The calls of torch.cuda that a recording makes, on a run that is there already."""

    def __init__(self, monkeypatch, *, options=("clear_history",)) -> None:
        torch = pytest.importorskip("torch")
        self.recording = record(RealRun(made_up_stream()))
        self.counters = self.recording.begin
        self.calls: list[tuple[object, dict]] = []

        def switch(enabled="all", context="all", stacks="all", max_entries=1, **more):
            assert set(more) <= set(options)
            self.calls.append((enabled, {"max_entries": max_entries, "stacks": stacks} | more))

        known = ["enabled", "context", "stacks", "max_entries", *options]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        switch.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in known])
        memory, cuda = torch.cuda.memory, torch.cuda
        monkeypatch.setattr(memory, "_record_memory_history", switch)
        monkeypatch.setattr(memory, "_snapshot", lambda: self.recording.content)
        monkeypatch.setattr(memory, "memory_stats_as_nested_dict", self.stats)
        monkeypatch.setattr(cuda, "init", lambda: None)
        monkeypatch.setattr(cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(cuda, "device_count", lambda: 1)
        monkeypatch.setattr(cuda, "get_device_properties", lambda index: SimpleNamespace(
            name="NVIDIA X", total_memory=1 << 34, major=9, minor=0, multi_processor_count=132,
        ))  # fmt: skip

    def stats(self, device=None):
        allocated, freed = self.counters
        return {"allocation": {"all": {"allocated": allocated, "freed": freed, "current": 1}}}


@pytest.mark.parametrize("options", [("clear_history",), ()], ids=["now", "2.1"])
def test_a_recording_from_start_to_end(monkeypatch, options):
    """The calls in the order in which a worker makes them, for releases old and new."""
    cuda = FakeCuda(monkeypatch, options=options)

    start_history(4_000_000)
    marks = []
    for phase, step, micro_step, counters in cuda.recording.marks:
        cuda.counters = counters
        marks.append((phase, step, micro_step, mark_counters()))
    cuda.counters = cuda.recording.end
    history = take_history(0, marks, run="r7", case={"model": "m"})

    assert cuda.calls[0][0] == "all"
    assert cuda.calls[0][1]["max_entries"] == 4_000_000
    assert cuda.calls[0][1].get("clear_history", True)
    assert cuda.calls[-1][0] is None
    assert history.complete
    assert len(history.marks) == len(cuda.recording.marks)
    assert history.device.capability == (9, 0)
    assert history.device.max_threads_per_sm is None
    assert history.run == "r7"
    assert replay_snapshot(history.snapshot())[0].is_exact


def test_the_installed_torch_takes_the_options():
    """Names of private functions and their parameters."""
    torch = pytest.importorskip("torch")

    parameters = inspect.signature(torch.cuda.memory._record_memory_history).parameters

    assert {"enabled", "context", "stacks", "max_entries", "clear_history"} <= set(parameters)
    assert callable(torch.cuda.memory._snapshot)
    assert callable(torch.cuda.memory.memory_stats_as_nested_dict)


def test_an_allocator_that_keeps_no_history(monkeypatch):
    """cudaMallocAsync: said in a sentence."""
    cuda = FakeCuda(monkeypatch)
    torch = pytest.importorskip("torch")

    def refuse(*_, **__):
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory\nmore")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", refuse)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", refuse)

    with pytest.raises(DeviceError, match="keeps no history: cudaMallocAsync does not"):
        start_history(10)
    with pytest.raises(DeviceError, match="gives no history"):
        take_history(0, cuda.recording.marks)


# -- frames ---------------------------------------------------------------------------------------

SITE = "/opt/venv/lib/python3.12/site-packages"


def frame(filename, name="f", line=1):
    return {"filename": filename, "name": name, "line": line}


@pytest.mark.parametrize(
    ("frames", "site"),
    [
        ([], ""),
        ([frame("??", "thread_start"), frame("x.cpp", "malloc")], ""),
        (
            [frame(f"{SITE}/torch/nn/functional.py"), frame(f"{SITE}/transformers/bert.py", "g", 9),
             frame(f"{SITE}/torch/nn/modules/module.py"), frame("/home/me/train.py", "main", 3),
             frame("/home/me/train.py", "<module>", 30)],
            "bert.py:9 g < train.py:3 main",
        ),
        (
            [frame(f"{SITE}/torch/optim/adamw.py", "step", 7),
             frame(f"{SITE}/torch/optim/optimizer.py", "wrapper"),
             frame(f"{SITE}/torch/utils/_contextlib.py"), frame("C:\\work\\loop.py", "plain", 2)],
            "adamw.py:7 step < loop.py:2 plain",
        ),
        ([frame("<string>"), frame("/usr/lib/python3.11/threading.py"), frame("/a/b.py")],
         "b.py:1 f"),
        (
            [frame("??", "at::_ops::empty_strided::call(x)"), frame("??", "at::_ops::mm::call(x)"),
             frame("/a/b.py"), frame("??", "at::_ops::add::call(x)")],
            "b.py:1 f [mm]",
        ),
        ([frame("??", "torch::autograd::generated::SigmoidBackward0::apply(x)")],
         "[SigmoidBackward0]"),
    ],
)  # fmt: skip
def test_the_code_behind_an_allocation(frames, site):
    """The innermost Python code outside torch, its caller, the operator where it is known."""
    assert site_of(frames) == site
