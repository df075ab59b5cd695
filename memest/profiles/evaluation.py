"""An evaluation of any length behind a training run, from a few traced batches.

From the second batch on every batch does the same: what was kept is concatenated with what is new,
so the tensors that pile up grow by the same bytes each time, and everything else repeats. Growth is
read off the last two traced batches.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import replace

from memest.errors import TraceError
from memest.events import ALLOC, FREE, OF_WEIGHTS, Chains, SeamKind, Trace
from memest.profiles.pieces import Span
from memest.profiles.stream import Course, Player, Shape, Stream, shape_of, slack_of, streams_of
from memest.workspaces.operator_call import GpuTraits, Lifetime
from memest.workspaces.registry import workspaces_of

__all__ = ["with_evaluation"]

_WITH_OLDER = 5
"""Batches that must be traced to follow what lives for two: the prompt and its token are others."""
_PLAYED = 16
"""Batches that are played as a whole; of those between the first ones and the last, the tensors
that grow are played alone: the rest is a copy of what was played before."""


def with_evaluation(
    stream: Stream,
    evaluation: Trace,
    gpu: GpuTraits,
    training_shape: Shape,
    *,
    batches: int,
    step: int,
    cues: bool = False,
) -> Stream:
    """The stream of a run that ends with an evaluation.

    Args:
        stream: of the training.
        evaluation: its first batches, traced.
        gpu: decides workspaces.
        training_shape: workspaces of the training, whose persistent ones are there already.
        batches: of the evaluation.
        step: optimizer step that it follows.
        cues: say where wrappers of the model act, as the stream does.

    Raises:
        TraceError: the batches do not repeat each other.
    """
    tail = _Tail(evaluation, gpu, training_shape, step, cues=cues)
    tail.play(batches)
    return tail.append_to(stream)


class _Tail:
    def __init__(
        self, trace: Trace, gpu: GpuTraits, training_shape: Shape, step: int, *, cues: bool
    ) -> None:
        self._trace = trace
        self._step = step
        call_workspaces = [workspaces_of(call, gpu) for call in trace.calls]
        self._slack = slack_of(call_workspaces)
        own = replace(trace)
        own.sizes = list(range(len(trace.sizes)))
        self._table = [
            *trace.sizes,
            *(w.nbytes for workspaces in call_workspaces for w in workspaces),
        ]
        self._course = Course(module_names=trace.module_names, label_names=list(trace.op_names))
        persistent_keys = {
            w.key
            for workspaces in training_shape
            for w in workspaces
            if w.lifetime is Lifetime.PERSISTENT and w.nbytes
        }
        self._player = Player(
            own,
            shape_of(call_workspaces),
            len(trace.sizes),
            self._course,
            cues=trace.cues if cues else (),
            persistent=persistent_keys,
        )
        self._sizes: list[int] = []
        self._spans = _spans(trace)
        before, last = (_allocations(trace, span) for span in self._spans[-2:])
        shapes = [[v & 3 for v in trace.events[slice(*span)]] for span in self._spans[-4:]]
        if shapes[-2] != shapes[-1]:
            raise TraceError(
                "The batches of an evaluation do not repeat each other, so it cannot be composed. "
                "Something in the model changes from batch to batch."
            )
        self._growth = {
            new: trace.sizes[new] - trace.sizes[old] for old, new in zip(before, last, strict=True)
        }
        self._faster = self._squares() if shapes == 4 * shapes[-1:] else {}
        thinned = array("q", self._thinned(self._spans[-1]))
        own.events = trace.events + thinned
        self._thin_span = len(trace.events), len(own.events)
        self._handover = self._match_batches(before, last)

    def _match_batches(self, before: list[int], last: list[int]) -> list[tuple[int, int]]:
        """What the last traced batch drops, and what takes its place for the next one.

        Of the batch before, it is what the last leaves itself in that place; what was made two
        batches before (beams that were reordered) is followed by what the one before made.
        """
        place = {index: number for number, index in enumerate(before)}
        out, older = [], []
        for index in _inherited_frees(self._trace, self._spans[-1]):
            if index in place:
                out.append((index, last[place[index]]))
            else:
                older.append(index)
        if not older or len(self._spans) < _WITH_OLDER:
            return out
        earlier = _allocations(self._trace, self._spans[-3])
        if len(earlier) != len(before):
            return out
        further = {index: number for number, index in enumerate(earlier)}
        for index in older:
            if index in further:
                number = further[index]
                out += [(index, before[number]), (before[number], last[number])]
        return out

    def _squares(self) -> dict[int, int]:
        """By how much the growth grows of what goes with the square of a length."""
        sizes = self._trace.sizes
        out = {}
        for four in zip(*(_allocations(self._trace, s) for s in self._spans[-4:]), strict=True):
            growths = [sizes[new] - sizes[old] for old, new in itertools.pairwise(four)]
            faster = [new - old for old, new in itertools.pairwise(growths)]
            if faster[0] == faster[1] != 0:
                out[four[-1]] = faster[0]
        return out

    def play(self, batches: int) -> None:
        """The first batches as they were traced, then copies of the last one."""
        for number, span in enumerate(self._spans[:batches], start=1):
            self._play_batch(span, number)
        num_traced = len(self._spans)
        for number in range(num_traced + 1, batches + 1):
            self._player.bind(self._handover)
            whole = number <= _PLAYED or number == batches
            span = self._spans[-1] if whole else self._thin_span
            self._play_batch(span, number, number - num_traced)

    def _play_batch(self, span: Span, number: int, later: int = 0) -> None:
        first = len(self._course.places)
        self._player.play(span, self._step, number)
        for place in self._course.places[first:]:
            size = self._table[place]
            faster = later * (later + 1) // 2 * self._faster.get(place, 0)
            self._sizes.append(size + later * self._growth.get(place, 0) + faster)

    def _thinned(self, span: Span) -> Iterator[int]:
        """A batch without what repeats: its mark, workspaces, births with deaths of one size."""
        events = self._trace.events[slice(*span)]
        dead = {v >> 2 for v in events if v & 3 == FREE}
        quiet = {i for i in _allocations(self._trace, span) if i in dead and not self._growth[i]}
        return (v for v in events if v & 3 in (ALLOC, FREE) and v >> 2 not in quiet)

    def append_to(self, stream: Stream) -> Stream:
        """The stream, and the evaluation after it."""
        course, base, length = self._course, len(stream.sizes), len(stream.events)
        events = stream.events[:]
        events.extend(v + base if v >= 0 else v - base for v in course.events)
        modules, module_names = _merge_names(stream.module_names, course.module_names)
        labels, label_names = _merge_names(stream.label_names, course.label_names)
        out = replace(stream)
        out.events = events
        out.sizes = [*stream.sizes, *self._sizes]
        out.places = [*stream.places, *([0] * len(self._sizes))]
        out.categories = stream.categories + course.categories
        out.modules = stream.modules[:]
        out.modules.extend(modules[m] for m in course.modules)
        out.labels = stream.labels[:]
        out.labels.extend(labels[label] for label in course.labels)
        out.module_names, out.label_names = module_names, label_names
        out.on_streams = streams_of(out)
        out.marks = [*stream.marks, *course.marks]
        out.cues = [
            *stream.cues,
            *(
                replace(
                    cue,
                    position=cue.position + length,
                    marks_before=cue.marks_before + len(stream.marks),
                    index=cue.index if cue.kind in OF_WEIGHTS else modules[cue.index],
                    number=cue.number + base if cue.number >= 0 else cue.number,
                )
                for cue in course.cues
            ),
        ]
        out.mark_positions = [*stream.mark_positions, *(p + length for p in course.mark_positions)]
        # the training part is what it was; what is remembered of it belongs to its own streams
        out.chains = Chains(stream.chains.chains)
        out.workspace_slack_bytes = max(stream.workspace_slack_bytes, self._slack)
        return out


def _spans(trace: Trace) -> list[Span]:
    seams = [s.position for s in trace.seams if s.kind is SeamKind.EVALUATED]
    ends = [s.position for s in trace.seams if s.kind is SeamKind.END]
    return list(zip(seams, [*seams[1:], *(ends or [len(trace.events)])], strict=True))


def _allocations(trace: Trace, span: Span) -> list[int]:
    return [v >> 2 for v in trace.events[slice(*span)] if v & 3 == ALLOC]


def _inherited_frees(trace: Trace, span: Span) -> list[int]:
    own = set(_allocations(trace, span))
    frees = [v >> 2 for v in trace.events[slice(*span)] if v & 3 == FREE]
    return [index for index in frees if index not in own]


def _merge_names(first: list[str], second: list[str]) -> tuple[list[int], list[str]]:
    """Where each name of the second list is now, and all names."""
    places = {name: index for index, name in enumerate(first)}
    names = list(first)
    where = []
    for name in second:
        if name not in places:
            places[name] = len(names)
            names.append(name)
        where.append(places[name])
    return where, names
