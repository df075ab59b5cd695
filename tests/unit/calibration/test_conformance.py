"""Prediction and recording side by side: every kind of difference is found and named."""

from __future__ import annotations

import itertools
import json
import random
import time
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memest.calibration.recording.alignment import align, predicted_line
from memest.calibration.recording.conformance import Conformance, compare
from memest.calibration.recording.differences import EventMatch, Relation
from memest.calibration.recording.history import History, history_of
from memest.profiles.stream import Stream
from memest.replay import AllocatorConf
from support.made_up_stream import LAYERS, made_up_stream
from support.simulated_run import RealRun, record
from support.tools import load_tool

TOOL = load_tool("conformance_fixtures")
STREAM = made_up_stream()


def history(run: RealRun, **options) -> History:
    recording = record(run, **options)
    return history_of(
        recording.content, marks=recording.marks, begin=recording.begin, end=recording.end
    )


def found(run: RealRun, **options) -> Conformance:
    return compare(history(run, **options), STREAM)


def number(label: str, layer: int = 3, step: int = 2) -> int:
    """An allocation of the made-up run."""
    matching = [
        n
        for n in range(len(STREAM.sizes))
        if STREAM.label_names[STREAM.labels[n]] == label and STREAM.modules[n] == layer
    ]
    return matching[step - 1]


def consistent(comparison: Conformance) -> bool:
    """Every event is counted exactly once."""
    counts = comparison.counts
    both = counts.matched + counts.other_size + counts.other_partner + counts.moved
    both += counts.reordered
    recorded = counts.recorded - counts.only_recorded
    return both == recorded == counts.predicted - counts.only_predicted


# -- nothing differs ------------------------------------------------------------------------------


@pytest.mark.parametrize("expandable", [False, True])
def test_a_stream_compared_with_itself(expandable):
    """No difference, and equal peaks."""
    comparison = found(RealRun(STREAM), conf=AllocatorConf(expandable_segments=expandable))

    assert comparison.equal
    assert consistent(comparison)
    assert comparison.differences == ()
    assert comparison.peaks.predicted_allocated == comparison.peaks.recorded_allocated
    assert comparison.exact_replay
    assert "No event differs." in TOOL.to_markdown(comparison)


def test_an_empty_history():
    """Nothing was recorded: all is extra, nothing breaks."""
    comparison = compare(History(events=(), sites=()), STREAM)

    assert comparison.counts.matched == 0
    assert consistent(comparison)
    assert comparison.peaks.recorded_allocated is None
    assert "–" in TOOL.table_row(comparison)


@st.composite
def streams(draw) -> Stream:
    """Any births and deaths of few sizes, so that many are alike."""
    stream = Stream(module_names=["m"], label_names=["op"])
    alive = []
    for choice in draw(st.lists(st.integers(0, 9), max_size=60)):
        if alive and choice >= 6:
            stream.events.append(~alive.pop(choice % len(alive)))
        else:
            alive.append(len(stream.sizes))
            stream.events.append(len(stream.sizes))
            stream.sizes.append((0, 1, 512, 2_000_000, 2_000_000, 30_000_000)[choice % 6])
            stream.labels.append(0)
            stream.modules.append(0)
    return stream


@given(streams())
@settings(max_examples=60, deadline=None)
def test_no_stream_differs_from_itself(stream):
    """Whatever it does, and without any mark."""
    comparison = compare(history(RealRun(stream)), stream)

    assert comparison.equal
    assert comparison.differences == ()


def test_no_predicted_event_stands_for_two_recorded_ones():
    """Each run of equal births looks behind what the one before it has now, not had before."""
    one = _few([0, 1, 2], [512, 1, 512])
    other = _few([0, 1, ~0, 2], [512, 512, 512])

    assert consistent(compare(history(RealRun(one)), other, begin=0))


def _few(events, sizes):
    stream = Stream(module_names=["m"], label_names=["op"])
    stream.events.extend(events)
    stream.sizes.extend(sizes)
    stream.labels.extend([0] * len(sizes))
    stream.modules.extend([0] * len(sizes))
    return stream


@given(streams(), streams())
@settings(max_examples=60, deadline=None)
def test_every_event_is_counted_once_whatever_is_compared(one, other):
    """Two runs that have nothing to do with each other."""
    comparison = compare(history(RealRun(one)), other, begin=0)

    assert consistent(comparison)
    assert json.dumps(asdict(comparison))
    assert TOOL.to_markdown(comparison)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_alignments_are_longest_common_subsequences(a, b):
    """Against the table of the textbook."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, first in enumerate(a):
        for j, second in enumerate(b):
            longer = max(table[i][j + 1], table[i + 1][j])
            table[i + 1][j + 1] = table[i][j] + 1 if first == second else longer

    pairs = align(a, b)

    assert all(a[i] == b[j] for i, j in pairs)
    assert all(p[0] < q[0] and p[1] < q[1] for p, q in itertools.pairwise(pairs))
    assert len(pairs) == table[-1][-1]


# -- one difference -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "label", ["aten.addmm.default", "aten.gelu.default", "aten.mm.default", "aten.sqrt.default"]
)
def test_what_is_not_there_is_extra_in_the_prediction(label):
    """Its birth is the difference, its death a consequence."""
    comparison = found(RealRun(STREAM).drop(number(label)))
    (difference,) = comparison.differences

    assert consistent(comparison)
    assert comparison.counts.only_predicted == 2
    assert comparison.counts.matched == comparison.counts.recorded
    assert difference.relation is Relation.EXTRA
    assert difference.operator == label
    assert difference.module == "encoder.layer.*.mlp"
    assert difference.bytes == STREAM.sizes[number(label)]


def test_what_is_there_too_is_missing_in_the_prediction():
    """It is named by its Python frame and by what both sides have before it."""
    run = RealRun(STREAM).insert(number("aten.gelu.default"), 5_000_000, life=3)

    comparison = found(run)
    (difference,) = comparison.differences

    assert comparison.counts.only_recorded == 2
    assert difference.relation is Relation.MISSING
    assert difference.frame.startswith("modeling_tiny.py:9999 surprise")
    assert difference.near == "aten.addmm.default: scratch encoder.layer.*.mlp"
    assert difference.bytes == 5_000_000


def test_without_frames_the_neighbour_says_where_it_is():
    """As in a backward, which runs no Python."""
    run = RealRun(STREAM).insert(number("aten.mm.default"), 5_000_000)

    (difference,) = found(run, frames=False).differences

    assert difference.frame == ""
    assert difference.near == "aten.gelu_backward.default encoder.layer.*.mlp"


@pytest.mark.parametrize("factor", [0.25, 1.5, 4])
def test_another_size_is_a_ratio(factor):
    """Birth and death are one difference."""
    place = number("aten.gelu.default")
    size = int(STREAM.sizes[place] * factor)

    comparison = found(RealRun(STREAM).resize(place, size))
    (difference,) = comparison.differences

    assert comparison.counts.other_size == 2
    assert difference.relation is Relation.SIZE
    assert difference.operator == "aten.gelu.default"
    assert difference.ratio == pytest.approx(1 / factor, abs=1e-3)
    assert difference.bytes == abs(size - STREAM.sizes[place])


def test_two_births_in_the_other_order():
    """One of them is at another place."""
    run = RealRun(STREAM).swap(number("aten.addmm.default"), number("aten.addmm.default: scratch"))

    comparison = found(run)
    (difference,) = comparison.differences

    assert comparison.counts.moved == 1
    assert difference.relation is Relation.MOVED
    assert difference.operator.startswith("aten.addmm.default")


@pytest.mark.parametrize("later", [False, True])
def test_a_death_at_another_place(later):
    """Seen from the prediction: it frees earlier, or later."""
    product, inner = number("aten.addmm.default"), number("aten.gelu_backward.default")
    behind = number("aten.sqrt.default", 1) if not later else inner

    comparison = found(RealRun(STREAM).move(~product, behind))
    (difference,) = comparison.differences

    assert consistent(comparison)
    assert difference.relation is (Relation.LATER if later else Relation.EARLIER)
    assert difference.operator == "aten.addmm.default"


def test_a_death_that_only_one_side_has():
    """The birth is there on both."""
    gradient = number("aten.mm.default")
    run = RealRun(STREAM)
    run.events.remove(~gradient)

    (difference,) = found(run).differences

    assert difference.relation is Relation.DROPPED
    assert difference.operator == "aten.mm.default"


def test_another_one_of_the_same_size_dies():
    """Sizes and order are equal; which birth a death ends is not."""
    first, second = number("aten.gelu.default", 2), number("aten.gelu.default", 5)

    comparison = found(RealRun(STREAM).swap(~first, ~second))
    (difference,) = comparison.differences

    assert comparison.counts.other_partner == 2
    assert difference.relation is Relation.PARTNER
    assert difference.operator == "aten.gelu.default"
    assert difference.count == 2


def test_deaths_in_another_order_are_no_other_deaths():
    """As when autocast's cache is emptied: a hash table of addresses decides."""
    last = [e for e in STREAM.events[STREAM.mark_positions[-1] :] if e < 0][:LAYERS]
    run = RealRun(STREAM).swap(last[0], last[3]).swap(last[1], last[5])

    comparison = found(run)
    (difference,) = comparison.differences

    assert consistent(comparison)
    assert comparison.counts.reordered == 4
    assert comparison.counts.matched == comparison.counts.recorded - 4
    assert difference.relation is Relation.ORDER
    assert difference.operator == "aten.mm.default"
    assert difference.peak_bytes == 0


def test_one_operator_in_all_layers_is_one_cause():
    """And what weighs most at the peak comes first."""
    run = RealRun(STREAM)
    for layer in range(1, LAYERS + 1):
        run.drop(number("aten.mm.default", layer))
    run.insert(number("aten.gelu.default"), 900_000)

    comparison = found(run)
    extra, missing = comparison.differences

    assert consistent(comparison)
    assert (extra.operator, extra.count) == ("aten.mm.default", LAYERS)
    assert extra.bytes == LAYERS * 3_000_000
    # when the peak is reached, one gradient is there; all are summed up in ``bytes``
    assert extra.peak_bytes == 3_000_000
    assert missing.relation is Relation.MISSING
    assert missing.peak_bytes == 0
    assert comparison.peaks.predicted_allocated > comparison.peaks.recorded_allocated


def test_which_of_many_equal_births_is_missing_follows_from_the_deaths():
    """Otherwise every later death would end another birth."""
    stream = Stream(module_names=[""], label_names=["a", "b"])
    stream.sizes = [4] * 400
    stream.labels.extend([0, 1] * 200)
    stream.modules.extend([0] * 400)
    stream.events.extend([*range(400), *(~n for n in range(400))])

    comparison = compare(history(RealRun(stream).drop(201)), stream)
    (difference,) = comparison.differences

    assert comparison.counts.other_partner == 0
    assert comparison.counts.only_predicted == 2
    assert difference.count == 1


# -- parts of a run -------------------------------------------------------------------------------


def test_a_history_without_marks_finds_its_first_events():
    """It begins in the first step; loading is recognised."""
    begin = STREAM.mark_positions[1]
    kept = record(RealRun(STREAM), begin=begin)

    comparison = compare(history_of(kept.content), STREAM)

    assert comparison.begin == begin
    assert comparison.equal


def test_what_the_process_had_before_can_be_left_out():
    """Workspaces that an earlier run left behind."""
    run = RealRun(STREAM)
    for layer in range(1, LAYERS + 1):
        for step in (1, 2):
            run.drop(number("aten.addmm.default: scratch", layer, step))

    assert compare(history(run), STREAM, without=("scratch",)).equal


def test_the_end_of_the_process_is_not_compared():
    """Weights die when the process ends; nobody predicts that."""
    run = RealRun(STREAM)
    run.events += [~n for n in run.events if n >= 0 and ~n not in run.events]

    comparison = found(run)

    assert comparison.equal
    assert "not compared" in comparison.notes[0]


def test_a_run_out_of_memory_is_compared_up_to_there():
    """What the prediction would have done after it is no difference."""
    cut = STREAM.mark_positions[-2] - 10
    run = RealRun(STREAM)
    run.events = run.events[:cut]
    recording = record(run)
    trace = recording.content["device_traces"][0]
    trace.insert(len(trace) - 1, {"action": "oom", "size": 1 << 40, "stream": 0, "device_free": 0})
    marks = [m for m, p in zip(recording.marks, STREAM.mark_positions, strict=True) if p < cut]

    comparison = compare(
        history_of(recording.content, marks=marks, begin=recording.begin, end=recording.end), STREAM
    )

    assert comparison.equal
    assert any("out of memory" in note for note in comparison.notes)


# -- many differences -----------------------------------------------------------------------------


@pytest.mark.slow
def test_fifty_thousand_events_with_hundreds_of_differences():
    """Seconds, not minutes."""
    stream = made_up_stream(layers=420, steps=10)
    rng = random.Random(3)
    run = RealRun(stream)
    for n in rng.sample(range(len(stream.sizes)), 150):
        run.drop(n)
    for n in rng.sample([e for e in run.events if e >= 0], 150):
        run.resize(n, run.sizes[n] * 3)
    for n in rng.sample([e for e in run.events if e >= 0], 150):
        run.insert(n, rng.randrange(1, 1 << 20), rng.randrange(1, 30))
    recorded = history(run)
    assert len(stream.events) > 50_000

    started = time.perf_counter()
    comparison = compare(recorded, stream)

    assert time.perf_counter() - started < 20
    assert consistent(comparison)
    assert comparison.counts.matched > 0.95 * comparison.counts.recorded


def test_lines_that_have_nothing_in_common():
    """They are taken in bites; nothing is forgotten."""
    one, other = predicted_line(STREAM), predicted_line(made_up_stream(layers=2))
    other.tokens = [token + (1 << 30) for token in other.tokens]

    counts = EventMatch(one, other, align(one.tokens, other.tokens)).counts

    assert counts.matched == 0
    assert align(list(range(3000)), list(range(3000, 6000))) == []
