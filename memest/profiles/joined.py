"""A run whose steps differ in size, from runs whose steps do not.

A step is the same program whatever the lengths of its batch, so what one leaves behind for the next
corresponds one to one: weights, states, the last batch, what the loop still holds. Steps of
several runs are put one behind the other, each dropping what its predecessor left. Whether two
runs correspond is checked by what stands at their seams: names, categories and number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memest.errors import TraceError
from memest.events import Chains, Mark
from memest.profiles.stream import Stream, streams_of

__all__ = ["STEPS_NEEDED", "join_runs"]

STEPS_NEEDED = 3
"""Optimizer steps that the runs must have: the third is one that repeats."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where the third step of a run begins and ends, and what is alive there, in order.

    Attributes:
        start: index of its first event.
        stop: index behind its last.
        first_mark: of the step.
        last_mark: behind it.
        before: numbers alive at its start.
        after: numbers alive at its end.
    """

    start: int
    stop: int
    first_mark: int
    last_mark: int
    before: tuple[int, ...]
    after: tuple[int, ...]


def join_runs(runs: Sequence[Stream]) -> Stream:
    """One run that has, step after step, the sizes of these runs.

    Args:
        runs: a run of :data:`STEPS_NEEDED` steps of one size for each step wanted; the same object
            may stand more than once. The first two steps are those of the first run.

    Returns:
        Its stream; places and cues, which belong to one trace, are left out.

    Raises:
        TraceError: the runs do not correspond: something in the model depends on the length.
    """
    first = runs[0]
    cuts = {id(run): _cut(run) for run in runs}
    own = cuts[id(first)]
    out = replace(first)
    out.events = array("q", first.events[: own.start])
    num_allocs = 1 + max((v for v in out.events if v >= 0), default=-1)
    out.sizes = first.sizes[:num_allocs]
    out.places = [0] * num_allocs
    out.categories = bytearray(first.categories[:num_allocs])
    out.modules = array("l", first.modules[:num_allocs])
    out.labels = array("l", first.labels[:num_allocs])
    out.marks = first.marks[: own.first_mark]
    out.mark_positions = first.mark_positions[: own.first_mark]
    out.chains = Chains()
    out.cues = []
    modules, labels = list(first.module_names), list(first.label_names)
    left: Sequence[int] = own.before
    seam = _describe(first, own.before)
    # the first two are there: the first run's own
    for step, run in enumerate(runs[2:], start=3):
        cut = cuts[id(run)]
        if _describe(run, cut.before) != seam or _describe(run, cut.after) != seam:
            raise TraceError(
                "Steps with batches of other lengths do not leave the same things behind, so a "
                "run of both cannot be composed."
            )
        left = _append(out, run, cut, step, left, modules, labels)
    out.module_names, out.label_names = modules, labels
    out.on_streams = streams_of(out)
    out.workspace_slack_bytes = max(run.workspace_slack_bytes for run in runs)
    return out


def _cut(run: Stream) -> _Cut:
    steps = [mark.step for mark in run.marks]
    if max(steps, default=0) != STEPS_NEEDED:
        raise ValueError(f"a run of {STEPS_NEEDED} steps is needed")
    first = steps.index(STEPS_NEEDED)
    start = run.mark_positions[first]
    return _Cut(
        start,
        len(run.events),
        first,
        len(run.marks),
        tuple(_alive(run, start)),
        tuple(_alive(run, len(run.events))),
    )


def _alive(run: Stream, stop: int) -> list[int]:
    alive: dict[int, None] = {}
    for event in run.events[:stop]:
        if event >= 0:
            alive[event] = None
        else:
            del alive[~event]
    return list(alive)


def _describe(run: Stream, numbers: Sequence[int]) -> list[tuple[int, str, str]]:
    """What stands at a seam, without sizes."""
    return [
        (run.categories[n], run.module_names[run.modules[n]], run.label_names[run.labels[n]])
        for n in numbers
    ]


def _append(
    out: Stream,
    run: Stream,
    cut: _Cut,
    step: int,
    left: Sequence[int],
    modules: list[str],
    labels: list[str],
) -> list[int]:
    """Play the third step of a run at the end of another; returns what it leaves behind."""
    now = dict(zip(cut.before, left, strict=True))
    module_places = {name: index for index, name in enumerate(modules)}
    label_places = {name: index for index, name in enumerate(labels)}
    shift = len(out.events) - cut.start
    for event in run.events[cut.start : cut.stop]:
        if event < 0:
            out.events.append(~now.pop(~event))
            continue
        number = len(out.sizes)
        now[event] = number
        out.events.append(number)
        out.sizes.append(run.sizes[event])
        out.places.append(0)
        out.categories.append(run.categories[event])
        out.modules.append(_index(run.module_names[run.modules[event]], modules, module_places))
        out.labels.append(_index(run.label_names[run.labels[event]], labels, label_places))
    for number in range(cut.first_mark, cut.last_mark):
        mark = run.marks[number]
        out.marks.append(Mark(mark.phase, step, mark.micro_step))
        out.mark_positions.append(run.mark_positions[number] + shift)
    return [now[number] for number in cut.after]


def _index(name: str, names: list[str], places: dict[str, int]) -> int:
    if name not in places:
        places[name] = len(names)
        names.append(name)
    return places[name]
