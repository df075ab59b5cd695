"""Predicted streams against the histories that calibration runs left behind.

Histories are data of the repository; while there are none, a run that is recorded by the model of
the allocator shows that the comparison finds what differs, and nothing else.
"""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path

import pytest

from support.paths import ROOT

pytest.importorskip("torch")

from memest.calibration.case import case_from_dict
from memest.calibration.recording.conformance import Conformance, compare
from memest.calibration.recording.differences import Relation
from memest.calibration.recording.history import (
    History,
    RecordedDevice,
    history_of,
    read_history,
    write_history,
)
from memest.config.installed import release
from memest.events import Phase
from memest.profiles.stream import Stream
from memest.replay import replay_snapshot
from support.simulated_run import RealRun, record
from support.tools import load_tool

TOOL = load_tool("conformance_fixtures")
FOLDER = ROOT / "data" / "measurements" / "events"
KEPT = sorted(FOLDER.glob("*.jsonl.gz"))
CASE = case_from_dict(
    {
        "model": "prajjwal1/bert-tiny",
        "setup": {"batch": 4, "seq_len": 32, "num_steps": 3, "precision": "bf16"},
        "record_events": True,
    }
)
DEVICE = RecordedDevice(
    name="NVIDIA H100 80GB HBM3", total_bytes=80 << 30, capability=(9, 0), sm_count=132,
    max_threads_per_sm=2048, torch="2.13.0", transformers="5.17.0", cuda="13.0",
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


QUICK = ("bert-tiny", "gpt2-n-layer-2")
BY_HEURISTICS = ("convnext", "resnet", "wav2vec2", "whisper")
"""Convolutions all over: cuDNN decides what they take."""
OTHER_CODE = ("t5-",)
"""transformers before 5.23 hands T5's bias to attention strided, which then takes math."""


def kept_case(path: Path):
    name = str(read_history(path).case["id"])
    marks = () if name.startswith(QUICK) else (pytest.mark.slow,)
    return pytest.param(path, name, id=name, marks=marks)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name.partition(".")[0])
def test_a_kept_history_replays_to_the_address(path):
    (recorded,) = replay_snapshot(read_history(path).snapshot())

    assert recorded.is_exact


@pytest.mark.parametrize(("path", "name"), map(kept_case, KEPT))
def test_a_kept_history_is_predicted(path, name):
    """Its events and its peaks."""
    history = read_history(path)

    found = compare(history, TOOL.predict_stream(history))

    if name.startswith(OTHER_CODE) and history.device.transformers != release("transformers"):
        return
    convolutions = name.startswith(BY_HEURISTICS)
    counts, peaks = found.counts, found.peaks
    assert counts.matched + counts.reordered > (0.85 if convolutions else 0.95) * counts.recorded
    off = peaks.predicted_allocated - peaks.recorded_allocated
    assert abs(off) < 0.005 * peaks.recorded_allocated
    off = peaks.predicted_reserved - peaks.recorded_reserved
    assert abs(off) < (0.05 if convolutions else 0.03) * peaks.recorded_reserved


@functools.cache
def predicted() -> Stream:
    return TOOL.predict_stream(History(events=(), sites=(), case=CASE.to_dict(), device=DEVICE))


def kept(run: RealRun, folder: Path, **options) -> History:
    """The history of a run, through the file."""
    recording = record(run, **options)
    taken = history_of(
        recording.content, 0, marks=recording.marks, begin=recording.begin, end=recording.end,
        max_entries=options.get("max_entries"), recorded_on=DEVICE, run="simulated",
        case=CASE.to_dict() | {"id": CASE.id},
    )  # fmt: skip
    path = folder / "simulated.jsonl.gz"
    write_history(path, taken)
    return read_history(path)


def laid_beside(run: RealRun, folder: Path, **options) -> Conformance:
    history = kept(run, folder, **options)
    return compare(history, TOOL.predict_stream(history))


def test_a_run_as_predicted_has_no_difference(tmp_path):
    """From process start to end, through the file, predicted from the header alone."""
    history = kept(RealRun(predicted()), tmp_path)
    (recorded,) = replay_snapshot(history.snapshot())

    found = compare(history, TOOL.predict_stream(history))

    assert recorded.is_exact
    assert found.equal
    assert found.differences == ()
    assert found.exact_replay
    assert found.complete
    assert found.peaks.predicted_allocated == found.peaks.recorded_allocated
    assert found.peaks.recorded_allocated == recorded.peak_allocated_bytes


def position(phase: Phase, step: int) -> int:
    stream = predicted()
    return next(
        at
        for mark, at in zip(stream.marks, stream.mark_positions, strict=True)
        if mark.phase is phase and mark.step == step
    )


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER])
def test_a_recording_that_begins_later_finds_its_place(tmp_path, phase):
    """The second step only: what was there before is known to both sides."""
    begin = position(phase, 2)

    found = laid_beside(RealRun(predicted()), tmp_path, begin=begin)

    assert found.begin == begin
    assert found.equal
    assert found.exact_replay
    assert found.peaks.predicted_allocated == found.peaks.recorded_allocated


def test_the_last_events_of_a_run_that_overflowed_the_ring(tmp_path):
    """What is left is compared, and what is lost is said."""
    history = kept(RealRun(predicted()), tmp_path, max_entries=1500)

    found = compare(history, TOOL.predict_stream(history))

    assert not history.complete
    assert history.lost > 0
    assert not found.complete
    assert "not complete" in TOOL.to_markdown(found)
    assert found.equal


def births(word: str, module: str = "", step: int = 2) -> list[int]:
    """Numbers of a step whose operator has a word in its name."""
    stream = predicted()
    first = position(Phase.FORWARD, step)
    return [
        value
        for value in stream.events[first:]
        if value >= 0
        and word in stream.label_names[stream.labels[value]]
        and module in stream.module_names[stream.modules[value]]
        and ~value in stream.events
    ]


def test_an_allocation_that_is_not_predicted_is_named_by_its_frame(tmp_path):
    """Its neighbour's operator and its own line say where it is."""
    neighbour = births("gelu")[0]

    run = RealRun(predicted()).insert(neighbour, 3_000_000, life=4)
    (difference,) = laid_beside(run, tmp_path).differences

    assert difference.relation is Relation.MISSING
    assert difference.frame.startswith("modeling_tiny.py:9999 surprise < trainer.py")
    assert (difference.count, difference.bytes) == (1, 3_000_000)
    assert difference.near


def test_one_operator_of_every_layer_is_one_cause(tmp_path):
    """Layers differ in their numbers only."""
    run = RealRun(predicted())
    layers = births("gelu.default", "intermediate")
    assert len(layers) >= 2
    for number in layers:
        run.resize(number, run.sizes[number] * 2)

    (difference,) = laid_beside(run, tmp_path).differences

    assert difference.relation is Relation.SIZE
    assert "gelu" in difference.operator
    assert ".layer.*." in difference.module
    assert difference.ratio == 0.5
    assert difference.count == len(layers)


def test_the_page_tells_what_differs(tmp_path):
    """Markdown and data say the same."""
    number = births("gelu", "intermediate")[0]

    found = laid_beside(RealRun(predicted()).drop(number), tmp_path)
    page, data = TOOL.to_markdown(found), asdict(found)

    assert "extra in prediction" in page
    assert "gelu" in page
    assert data["differences"][0]["operator"] == found.differences[0].operator
    assert data["counts"]["only_predicted"] == 2
