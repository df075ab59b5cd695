"""The stream the allocator sees: pieces played in order, workspaces at their operators.

A :class:`Course` is the stream without sizes: it depends on the structure of the steps, on their
number, and on which operators have workspaces, not on how large anything is. One course serves
every size of a batch at which the same kernels run.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate

from memest.events import (
    ALLOC,
    CALL,
    CATEGORY_ORDER,
    FREE,
    Category,
    Chain,
    Chains,
    Cue,
    CueKind,
    Mark,
    Part,
    SeamKind,
    Trace,
    on_stream,
    plain_name,
    stream_of,
)
from memest.profiles.pieces import MAX_REPEATS, Pieces, Span
from memest.workspaces.operator_call import (
    CONVOLUTION_WORKSPACE,
    Lifetime,
    Workspace,
)

__all__ = [
    "Course",
    "PlacedCue",
    "Player",
    "Shape",
    "Stream",
    "dispensable",
    "lay_out",
    "shape_of",
    "slack_of",
    "streams_of",
]

_WORKSPACE = CATEGORY_ORDER.index(Category.WORKSPACES)

_WRAPPERS_STREAMS = 63

# looking a state up costs as much as playing so many events
_WORTH_SKIPPING = 64

Shape = tuple[tuple[Workspace, ...], ...]
"""The workspaces of every call, with 1 in place of their sizes, 0 for those not needed."""


@dataclass(slots=True)
class PlacedCue:
    """A cue in a course: see :class:`memest.events.Cue`, and why it is not frozen.

    Attributes:
        position: index of the first event behind it.
        marks_before: how many marks stand before it.
        kind: what happens.
        index: of the module or the weight.
        number: of the allocation it is about, -1 for none.
    """

    position: int
    marks_before: int
    kind: CueKind
    index: int
    number: int


@dataclass(slots=True)
class Course:
    """A stream without sizes.

    Attributes:
        events: v >= 0 allocates number v, v < 0 frees number ~v.
        places: for each number, the place of its size: in the trace's table of sizes, or, at and
            above the length of that table, in the list of all workspaces.
        categories: index into ``CATEGORY_ORDER`` for each number.
        modules: index into the trace's ``module_names``.
        labels: index into ``label_names``: operator, or workspace by name.
        label_names: names for ``labels``.
        mark_positions: index of the first event of each mark.
        marks: the marks, steps and micro-steps as in the whole run.
        module_names: as in the trace.
        chains: parts that are copies of each other.
        cues: where wrappers of the model act, if they were asked for; a cue names the number that
            its storage has in the course.
    """

    events: array[int] = field(default_factory=lambda: array("q"))
    places: list[int] = field(default_factory=list)
    categories: bytearray = field(default_factory=bytearray)
    modules: array[int] = field(default_factory=lambda: array("l"))
    labels: array[int] = field(default_factory=lambda: array("l"))
    label_names: list[str] = field(default_factory=list)
    mark_positions: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    module_names: list[str] = field(default_factory=list)
    chains: Chains = field(default_factory=Chains)
    cues: list[PlacedCue] = field(default_factory=list)


@dataclass(slots=True)
class Stream(Course):
    """A course with sizes: what :func:`memest.replay.replay.replay` takes.

    Attributes:
        sizes: requested bytes of each number.
        workspace_slack_bytes: how much larger the largest single workspace may be than assumed.
        on_streams: CUDA stream of each number; empty where all are on the default one.
        empty_cache_at: events in front of which the allocator's cache is emptied.
    """

    sizes: list[int] = field(default_factory=list)
    workspace_slack_bytes: int = 0
    on_streams: bytes = b""
    empty_cache_at: tuple[int, ...] = ()

    @classmethod
    def of(cls, course: Course, sizes: list[int], slack: int) -> Stream:
        """Fill in the sizes."""
        course_fields = {each.name: getattr(course, each.name) for each in fields(Course)}
        streams = streams_of(course)
        return cls(**course_fields, sizes=sizes, workspace_slack_bytes=slack, on_streams=streams)


def streams_of(course: Course) -> bytes:
    """The CUDA stream of each number, by its label; empty where all are on the default one.

    Streams of one's own come behind those that wrappers of the model have.
    """
    own = [stream and stream + _WRAPPERS_STREAMS for stream in map(stream_of, course.label_names)]
    return bytes(own[label] for label in course.labels) if any(own) else b""


def dispensable(course: Course) -> frozenset[int]:
    """The numbers that a run goes on without where memory does not suffice for them.

    They are workspaces of convolutions: PyTorch catches the error, which has emptied the cache
    before, and asks cuDNN for the next algorithm, down to those that need none.

    Source: ``AlgoIterator::try_all`` of ATen/native/cudnn/Conv_v7.cpp, ``try_plans`` and
    ``try_configs`` of Conv_v8.cpp (1.8 to 2.13).
    """
    of_convolutions = {
        index
        for index, name in enumerate(course.label_names)
        if plain_name(name).endswith(CONVOLUTION_WORKSPACE)
    }
    if not of_convolutions:
        return frozenset()
    return frozenset(
        number for number, label in enumerate(course.labels) if label in of_convolutions
    )


def shape_of(call_workspaces: Sequence[tuple[Workspace, ...]]) -> Shape:
    """Which workspaces there are, whatever their sizes."""
    return tuple(
        tuple(replace(w, nbytes=1 if w.nbytes > 0 else 0, high_nbytes=None) for w in workspaces)
        for workspaces in call_workspaces
    )


def slack_of(call_workspaces: Sequence[tuple[Workspace, ...]]) -> int:
    """How much larger the largest single workspace may be than assumed, in bytes."""
    return max(
        (
            w.high_nbytes - w.nbytes
            for workspaces in call_workspaces
            for w in workspaces
            if w.high_nbytes is not None
        ),
        default=0,
    )


def lay_out(
    trace: Trace,
    shape: Shape,
    num_places: int,
    *,
    num_steps: int,
    grad_accum: int = 1,
    pieces: Pieces,
    cues: bool = False,
) -> Course:
    """The course of a run.

    Args:
        trace: spliced; ``sizes`` are places in a table of ``num_places`` sizes.
        shape: workspaces of the trace's calls.
        num_places: length of that table.
        num_steps: optimizer steps of the run.
        grad_accum: micro-steps of each step.
        pieces: of the trace.
        cues: say where wrappers of the model act.

    Raises:
        ValueError: the trace cannot be played for so many steps.
    """
    course = Course(module_names=trace.module_names, label_names=list(trace.op_names))
    player = Player(trace, shape, num_places, course, trace.cues if cues else ())
    _Run(player, pieces, grad_accum).play(num_steps)
    course.chains = Chains(player.chains(), course.places)
    return course


class _Run:
    """Plays the pieces of a run in their order."""

    def __init__(self, player: Player, pieces: Pieces, grad_accum: int) -> None:
        self._player = player
        self._pieces = pieces
        self._grad_accum = grad_accum
        self._samples: list[list[int]] = []

    def play(self, num_steps: int) -> None:
        """Load, then step after step."""
        if self._grad_accum > 1 and not self._pieces.repeats:
            raise ValueError("no second micro-step was traced")
        player = self._player
        player.play(self._pieces.load, 0, 0)
        for step in range(1, num_steps + 1):
            self._step(step)

    def _step(self, step: int) -> None:
        player, pieces, count = self._player, self._pieces, self._grad_accum
        source = 1 if step == 1 else 2
        column = 0 if step == 1 else 2
        player.play(pieces.opening(source), step, 0)
        if pieces.prefetches:
            self._fetch(step, source, column)
        player.play(pieces.piece(SeamKind.MICRO_STEP, source, 1), step, 1)
        player.bind_row(pieces.slots, column)
        self._keep(0, column)
        # batches that are added to grow with every micro-step: none is like the one before
        num_played = count if pieces.additions[0] else min(count, MAX_REPEATS + 1)
        for number in range(2, num_played + 1):
            last = number == num_played
            player.play(pieces.piece(SeamKind.MICRO_STEP, 1, 2), step, count if last else number)
            player.bind_row(pieces.slots, 1)
            self._keep(number - 1, 1)
        player.play(pieces.ending(source), step, count)
        if source == 2:
            player.bind(pieces.inheritance)

    def _keep(self, place: int, column: int) -> None:
        """What a micro-step put into its batch belongs to it now."""
        for index in self._pieces.additions[column]:
            number = self._player.number_of(index)
            assert number is not None
            self._samples[place].append(number)

    def _fetch(self, step: int, source: int, column: int) -> None:
        """All batches of a step, before the first of them is used."""
        player, pieces, count = self._player, self._pieces, self._grad_accum
        old_samples = self._samples
        self._samples = [player.play(pieces.piece(SeamKind.SAMPLE, source, 1), step, 0)]
        for _ in range(count - 1):
            self._samples.append(player.play(pieces.piece(SeamKind.SAMPLE, 1, 2), step, 0))
        if pieces.counts:
            player.play(pieces.piece(SeamKind.COUNT, source, 1), step, 0)
            player.bind_row(pieces.totals, column)
            for _ in range(count - 1):
                player.play(pieces.piece(SeamKind.COUNT, 1, 2), step, 0)
                player.bind_row(pieces.totals, 1)
            player.play(pieces.piece(SeamKind.COUNTED, source), step, 0)
        # a list lets go of its last item first; the very last is still bound to the loop's name
        first, second, _ = (s + a for s, a in zip(pieces.samples, pieces.additions, strict=True))
        for sample in reversed(old_samples[:-1]):
            player.assign(first, sample)
            player.play(pieces.piece(SeamKind.FETCHED, 2), step, 0)
        player.play(pieces.piece(SeamKind.RELEASED, source), step, 0)
        if old_samples:
            player.assign(second if pieces.repeats else first, old_samples[-1])


class Player:
    """Plays pieces; knows which stream number a trace allocation has now."""

    def __init__(
        self,
        trace: Trace,
        shape: Shape,
        num_places: int,
        course: Course,
        cues: Sequence[Cue] = (),
        persistent: Iterable[tuple[str, ...]] = (),
    ) -> None:
        self._trace = trace
        self._course = course
        self._shape = shape
        self._now: dict[int, int] = {}
        self._persistent: set[tuple[str, ...]] = set(persistent)
        self._label_index: dict[str, int] = {}
        self._outputs_start = 0
        self.held_numbers: set[int] = set()
        """Numbers that somebody beside the pieces holds: their frees are not played."""
        self.released_numbers: set[int] = set()
        """Those of them that the pieces have let go of."""
        self._chains: dict[tuple[Span, int, int], Chain] = {}
        self._first_place = list(
            accumulate((len(workspaces) for workspaces in shape), initial=num_places)
        )
        self._cues = cues
        self._cue_positions = [cue.position for cue in cues]

    def chains(self) -> list[Chain]:
        """The pieces that were played more than once.

        A workspace that is made once makes the first of two copies longer: that one is none.
        """
        return [chain for chain in self._chains.values() if len(chain.parts) > 1]

    def bind(self, pairs: Sequence[tuple[int, int]]) -> None:
        """What a repeated part drops (old) is what its predecessor left behind (new)."""
        now = self._now
        moves = [(old, now[new]) for old, new in pairs]
        for old, number in moves:
            now[old] = number

    def bind_row(self, rows: Sequence[tuple[int, int, int]], source: int) -> None:
        """All allocations of a row are the one that was just made."""
        now = self._now
        for row in rows:
            number = now[row[source]]
            for index in row:
                now[index] = number

    def number_of(self, index: int) -> int | None:
        """The number that an allocation of the trace has now; None where it is gone."""
        return self._now.get(index)

    def assign(self, indices: Sequence[int], numbers: Sequence[int]) -> None:
        """Say which numbers trace allocations have now."""
        self._now.update(zip(indices, numbers, strict=True))

    def play(self, span: Span, step: int | None, micro_step: int | None) -> list[int]:
        """Append the events of one piece.

        Args:
            span: of the trace.
            step: for its marks; None leaves them as they are.
            micro_step: for those of its marks that have one; None as above.

        Returns:
            The numbers allocated, workspaces not among them.
        """
        events, places = self._course.events, self._course.places
        allocations: list[int] = []
        begin, number_before = len(events), len(places)
        inherited_frees: list[int] = []
        start = span[0]
        for cue in self._cues_of(span):
            self._play_events(
                (start, cue.position), step, micro_step, allocations, inherited_frees, number_before
            )
            number = self._now.get(cue.allocation, -1)
            self._course.cues.append(
                PlacedCue(len(events), len(self._course.marks), cue.kind, cue.index, number)
            )
            start = cue.position
        self._play_events(
            (start, span[1]), step, micro_step, allocations, inherited_frees, number_before
        )
        length, count = len(events) - begin, len(places) - number_before
        if length >= _WORTH_SKIPPING:
            chain = self._chains.setdefault((span, length, count), Chain(length, count))
            chain.parts.append(Part(begin, number_before, tuple(inherited_frees)))
        return allocations

    def _cues_of(self, span: Span) -> Sequence[Cue]:
        """Those behind its first event, up to its end: what is at a seam belongs to what it ends.

        A piece begins with a mark, and cues lie behind it.
        """
        places = self._cue_positions
        return self._cues[bisect_right(places, span[0]) : bisect_right(places, span[1])]

    def _play_events(
        self,
        span: Span,
        step: int | None,
        micro_step: int | None,
        allocations: list[int],
        inherited_frees: list[int],
        number_before: int,
    ) -> None:
        """Append some events of a piece; ``allocations`` and ``inherited_frees`` are filled in."""
        trace, course, now = self._trace, self._course, self._now
        events, places = course.events, course.places
        append = events.append
        sizes, categories, modules, ops = trace.sizes, trace.categories, trace.modules, trace.ops
        for value in trace.events[span[0] : span[1]]:
            kind, index = value & 3, value >> 2
            if kind == ALLOC:
                number = now[index] = len(places)
                allocations.append(number)
                places.append(sizes[index])
                course.categories.append(categories[index])
                course.modules.append(modules[index])
                course.labels.append(ops[index])
                append(number)
            elif kind == FREE:
                number = now.pop(index)
                if number in self.held_numbers:
                    self.released_numbers.add(number)
                    continue
                if number < number_before:
                    inherited_frees.append(number)
                append(~number)
            elif kind == CALL:
                self._call(index)
                self._outputs_start = len(events)
            else:
                self._outputs_start = len(events)
                self._mark(trace.marks[index], step, micro_step)

    def _mark(self, mark: Mark, step: int | None, micro_step: int | None) -> None:
        micro = mark.micro_step
        if micro and micro_step is not None:
            micro = micro_step
        self._course.mark_positions.append(len(self._course.events))
        self._course.marks.append(Mark(mark.phase, mark.step if step is None else step, micro))

    def _call(self, site: int) -> None:
        call = self._trace.call_of_site[site]
        workspaces = self._shape[call]
        if not workspaces:
            return
        course = self._course
        temporary: list[tuple[int, Workspace]] = []
        early = workspaces[0].results_before is not None
        outputs = self._take_outputs(call) if early else array("q")
        num_made = 0
        for index, workspace in enumerate(workspaces):
            temporary = self._free_before(index, temporary)
            behind = workspace.results_before
            made = outputs[num_made:behind]
            course.events.extend(made)
            num_made += len(made)
            persistent = workspace.lifetime is Lifetime.PERSISTENT
            if not workspace.nbytes or (persistent and workspace.key in self._persistent):
                continue
            number = len(course.places)
            course.places.append(self._first_place[call] + index)
            course.categories.append(_WORKSPACE)
            course.modules.append(self._trace.site_modules[site])
            course.labels.append(self._label(self._workspace_label(call, workspace)))
            course.events.append(number)
            if persistent:
                self._persistent.add(workspace.key)
            else:
                temporary.append((number, workspace))
        course.events.extend(outputs[num_made:])
        temporary = self._free_before(len(workspaces), temporary)
        course.events.extend(~number for number, _ in reversed(temporary))

    def _free_before(
        self, index: int, temporary: list[tuple[int, Workspace]]
    ) -> list[tuple[int, Workspace]]:
        """Free what is freed before a place among the workspaces; returns what is left."""
        left, ends, ends_first = [], [], []
        for number, workspace in temporary:
            if workspace.freed_before is None or workspace.freed_before > index:
                left.append((number, workspace))
            elif workspace.in_expression:
                ends_first.append(~number)
            else:
                ends.append(~number)
        self._course.events.extend(ends_first)
        self._course.events.extend(reversed(ends))
        return left

    def _workspace_label(self, number: int, workspace: Workspace) -> str:
        call = self._trace.calls[number]
        return on_stream(f"{call.op}: {workspace.label}", stream_of(call.thread))

    def _take_outputs(self, call: int) -> array[int]:
        """Take the births of a call's results off the stream, to be put back after others."""
        course, made_by = self._course, self._trace.calls[call]
        op = on_stream(made_by.op, stream_of(made_by.thread))
        start = len(course.events)
        while start > self._outputs_start:
            number = course.events[start - 1]
            if number < 0 or course.label_names[course.labels[number]] != op:
                break
            start -= 1
        outputs = course.events[start:]
        del course.events[start:]
        return outputs

    def _label(self, text: str) -> int:
        index = self._label_index.get(text)
        if index is None:
            index = self._label_index[text] = len(self._course.label_names)
            self._course.label_names.append(text)
        return index
