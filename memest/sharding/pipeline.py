"""One GPU of a pipeline: pieces of its stages' traces in the order of a schedule.

What a piece allocates and frees was traced. What is held around the pieces is played here, as
``PipelineStage`` and the schedules of ``torch.distributed.pipelining`` (2.13) hold it: buffers for
what is received, one for each micro-batch, from the first step to the end; outputs that are being
sent, until somebody waits for the sending; gradients of inputs, likewise; losses, until the step is
over; outputs of the last stage, for those who want them returned.

A schedule of one stage (``ScheduleGPipe``, ``Schedule1F1B``) keeps what it sends in local
variables, and frees it when these are bound anew. The others (``_PipelineScheduleRuntime``) keep
every sending of a step until its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memest.config.parallelism import Schedule
from memest.errors import TraceError
from memest.events import (
    ALLOC,
    CATEGORY_ORDER,
    FREE,
    Category,
    CueKind,
    Mark,
    Phase,
    SeamKind,
    Trace,
)
from memest.profiles.pieces import MAX_REPEATS, JoinedTraces, Span, join, pair_up
from memest.profiles.pipeline_pieces import StagePieces, with_places
from memest.profiles.stream import Course, PlacedCue, Player, shape_of, slack_of, streams_of
from memest.sharding.engine import RankStream
from memest.sharding.schedules import Action, rank_order, sharded_order, stages_of
from memest.workspaces.operator_call import GpuTraits
from memest.workspaces.registry import workspaces_of

__all__ = ["PipelinePlan", "compose_rank"]

_SINGLE = (Schedule.GPIPE, Schedule.ONE_F_ONE_B)
_OF_STAGES = {
    "U": CueKind.STAGE_UNSHARD,
    "R": CueKind.STAGE_RESHARD,
    "G": CueKind.STAGE_REDUCE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """How a pipeline is run.

    Attributes:
        schedule: of the pipeline.
        ranks: its GPUs.
        per_rank: stages on each.
        micro_batches: of one step of the schedule.
        rounds: steps of the schedule for each update.
        num_steps: updates.
        returns_outputs: the last stage's outputs are kept and joined.
        drops_gradients: ``zero_grad`` lets go of gradients.
        wrapped: DDP or FSDP wraps each stage: the stream says where they act.
    """

    schedule: Schedule
    ranks: int
    per_rank: int
    micro_batches: int
    rounds: int
    num_steps: int
    returns_outputs: bool
    drops_gradients: bool
    wrapped: bool = False


def compose_rank(
    plan: PipelinePlan, rank: int, stages: Sequence[Trace], updates: Trace | None, gpu: GpuTraits
) -> RankStream:
    """The stream of one rank.

    Args:
        plan: of the pipeline.
        rank: whose stream.
        stages: traces of its stages, in the order of the model.
        updates: of the rank's optimizer; None where none runs.
        gpu: decides workspaces.
    """
    joined_traces = join([*stages, *([updates] if updates is not None else [])])
    numbered_trace, sizes = with_places(joined_traces)
    call_workspaces = [workspaces_of(call, gpu) for call in numbered_trace.calls]
    course = Course(
        module_names=numbered_trace.module_names, label_names=list(numbered_trace.op_names)
    )
    cues = numbered_trace.cues if plan.wrapped else ()
    player = Player(numbered_trace, shape_of(call_workspaces), len(sizes), course, cues)
    table = [*sizes, *(w.nbytes for workspaces in call_workspaces for w in workspaces)]
    numbers = stages_of(rank, plan.ranks, plan.per_rank)
    pieces = {
        number: StagePieces(
            trace, joined_traces.first_events[place], joined_traces.first_allocations[place]
        )
        for place, (number, trace) in enumerate(zip(numbers, stages, strict=True))
    }
    run = _RankRun(plan, rank, pieces, joined_traces, player, course, table)
    if updates is not None:
        run.update = _Update.of(updates, joined_traces, len(stages))
    run.run()
    return RankStream(
        events=course.events,
        categories=course.categories,
        modules=course.modules,
        labels=course.labels,
        label_names=course.label_names,
        mark_positions=course.mark_positions,
        marks=course.marks,
        module_names=course.module_names,
        sizes=[table[place] for place in course.places],
        workspace_slack_bytes=slack_of(call_workspaces),
        on_streams=streams_of(course),
        rank=rank,
        cues=course.cues,
    )


@dataclass(slots=True)
class _Update:
    """The optimizer's pieces, in numbers of the joined trace."""

    construction: tuple[int, int]
    first: tuple[int, int]
    later: tuple[int, int]
    inheritance: list[tuple[int, int]]

    @classmethod
    def of(cls, updates: Trace, joined_traces: JoinedTraces, place: int) -> _Update:
        at = {(s.kind, s.step): s.position for s in updates.seams}
        event, allocation = (
            joined_traces.first_events[place],
            joined_traces.first_allocations[place],
        )

        def span(begin: tuple[SeamKind, int], end: tuple[SeamKind, int]) -> tuple[int, int]:
            return at[begin] + event, at[end] + event

        later = at[SeamKind.UPDATE, 2], at[SeamKind.UPDATED, 2]
        allocations = {v >> 2 for v in updates.events[slice(*later)] if v & 3 == ALLOC}
        frees = [v >> 2 for v in updates.events[slice(*later)] if v & 3 == FREE]
        old = sorted(number for number in frees if number not in allocations)
        construction_start = at[SeamKind.OPTIMIZER_MADE, 0]
        inputs = {v >> 2 for v in updates.events[:construction_start] if v & 3 == ALLOC}
        if inputs & set(old):
            raise TraceError(
                "The optimizer lets go of weights or gradients during its step, which memest "
                "cannot compose. Please report it with the output of `memest env`."
            )
        new = sorted(allocations - set(frees))
        pairs = [(d + allocation, n + allocation) for d, n in pair_up(updates, old, new)]
        return cls(
            construction=span((SeamKind.OPTIMIZER_MADE, 0), (SeamKind.UPDATE, 1)),
            first=span((SeamKind.UPDATE, 1), (SeamKind.UPDATED, 1)),
            later=span((SeamKind.UPDATE, 2), (SeamKind.UPDATED, 2)),
            inheritance=pairs,
        )


@dataclass(slots=True)
class _RankRun:
    """The run of one rank, as it is played."""

    plan: PipelinePlan
    rank: int
    stages: dict[int, StagePieces]
    joined_traces: JoinedTraces
    player: Player
    course: Course
    table: list[int]
    update: _Update | None = None
    step: int = 0
    has_gradients: bool = False
    leads: int = 0
    references: Counter[int] = field(default_factory=Counter)
    inputs: dict[tuple[int, int], int] = field(default_factory=dict)
    output_gradients: dict[tuple[int, int], int] = field(default_factory=dict)
    batch: list[int] = field(default_factory=list)
    live_allocations: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    template: dict[tuple[int, int], int] = field(default_factory=dict)
    losses: list[int] = field(default_factory=list)
    user_losses: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    pending_sends: list[int] = field(default_factory=list)
    pending_gradient_sends: list[int] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    backwards: Counter[int] = field(default_factory=Counter)

    @property
    def _is_single(self) -> bool:
        """The schedule is one of a single stage on each rank."""
        return self.plan.schedule in _SINGLE

    # -- what wrappers are told

    def _cue(self, kind: CueKind, index: int, number: int = -1) -> None:
        if self.plan.wrapped:
            course = self.course
            place = len(course.events), len(course.marks)
            course.cues.append(PlacedCue(*place, kind, index, number))

    def _begins(self, action: Action) -> None:
        """Work on a stage begins, perhaps its last backward (``backward_counter``)."""
        self._cue(CueKind.STAGE_WORK, action.stage)
        if action.work == "B":
            self.backwards[action.stage] += 1
            if self.backwards[action.stage] == self.plan.micro_batches:
                self._cue(CueKind.STAGE_SYNC, action.stage)

    # -- what is held

    def _alloc(self, nbytes: int, category: Category, label: str) -> int:
        course = self.course
        number = len(course.places)
        self.table.append(nbytes)
        course.places.append(len(self.table) - 1)
        course.categories.append(CATEGORY_ORDER.index(category))
        course.modules.append(0)
        course.labels.append(self._label(label))
        course.events.append(number)
        self.references[number] = 1
        self.player.held_numbers.add(number)
        return number

    def _label(self, text: str) -> int:
        names = self.course.label_names
        if text not in names:
            names.append(text)
        return names.index(text)

    def _hold(self, number: int) -> int:
        """One more reference to an allocation; the traced ones do not count."""
        self.references[number] += 1
        self.player.held_numbers.add(number)
        return number

    def _drop(self, numbers: Iterable[int]) -> None:
        """References that go, one after the other."""
        for number in numbers:
            self.references[number] -= 1
            if self.references[number]:
                continue
            del self.references[number]
            self.player.held_numbers.discard(number)
            if number in self.player.released_numbers:
                self.player.released_numbers.discard(number)
                self.course.events.append(~number)

    def _bind(self, name: str, number: int | None) -> None:
        """A local variable of the schedule is bound anew: what it held before goes."""
        old = self.names.pop(name, None)
        if number is not None:
            self.names[name] = self._hold(number)
        if old is not None:
            self._drop([old])

    def _own(self, number: int) -> int:
        """An allocation that no piece frees."""
        self.player.released_numbers.add(number)
        return self._hold(number)

    def _size(self, number: int) -> int:
        return self.table[self.course.places[number]]

    # -- the run

    def run(self) -> None:
        """Load, then step after step."""
        self._mark(Phase.LOAD, 0)
        for number, pieces in self.stages.items():
            self._cue(CueKind.STAGE_WORK, number)
            begin, end = pieces.load
            self.player.play((begin + 1, end), 0, 0)  # its own mark excepted
        if self.update is not None:
            self.player.play(self.update.construction, 0, 0)
        rounds = min(self.plan.rounds, MAX_REPEATS)
        for step in range(1, self.plan.num_steps + 1):
            self.step = step
            for number in range(1, rounds + 1):
                self._schedule_step(first=number == 1 and step == 1)
            self._finish_step()

    def _mark(self, phase: Phase, micro_step: int) -> None:
        self.course.mark_positions.append(len(self.course.events))
        self.course.marks.append(Mark(phase, self.step, micro_step))

    def _schedule_step(self, *, first: bool) -> None:
        """``schedule.step``: what the last one left is dropped, then the order is played."""
        self._mark(Phase.BATCH, 0)
        self._fetch()
        self._clear()
        if first:
            self._make_buffers()
        plan = self.plan
        order = rank_order(plan.schedule, self.rank, plan.ranks, plan.per_rank, plan.micro_batches)
        # whose backward is the first finds no gradients; one micro-batch leads in all stages
        self.leads = next(action.micro_batch for action in order if action.work == "B")
        self.backwards.clear()
        if plan.wrapped and not self._is_single:
            order = sharded_order(order, plan.micro_batches)
        for action in order:
            if action.work in _OF_STAGES:
                self._cue(_OF_STAGES[action.work], action.stage)
                continue
            self._begins(action)
            if action.work == "F":
                self._forward(action)
            else:
                self._backward(action)
        if self._is_single:
            self._cue(CueKind.STAGE_REDUCE, *self.stages)
        self._wait()
        # _update_losses: the caller's list takes them over
        old, self.user_losses = self.user_losses, [self._hold(n) for n in self.losses]
        self._drop(old)
        self._drop(self.losses)
        self.losses = []
        if self.chunks:
            nbytes = sum(self._size(number) for number in self.chunks)
            joined_outputs = self._alloc(nbytes, Category.TEMPORARIES, "pipeline: joined outputs")
            self.player.released_numbers.add(joined_outputs)
            self._drop([joined_outputs])
        for pieces in self.stages.values():
            self.player.play(pieces.region_end, self.step, 0)

    def _fetch(self) -> None:
        """The batch of all micro-batches: token ids for the first stage, labels for the last."""
        old, self.batch = self.batch, []
        self._drop(old)
        for number, pieces in self.stages.items():
            cues = [CueKind.STAGE_INPUT] * (number == 0) + [CueKind.STAGE_TARGET]
            for kind in cues:
                allocation = pieces.allocation_of(kind, 0)
                if allocation is None:
                    continue
                nbytes = self.joined_traces.trace.sizes[allocation] * self.plan.micro_batches
                whole = self._alloc(nbytes, Category.INPUTS, "pipeline: batch")
                self.player.released_numbers.add(whole)
                self.batch.append(whole)

    def _clear(self) -> None:
        """``clear_runtime_states``: outputs are those of the last stage."""
        self._drop(self.chunks)
        self.chunks = []

    def _make_buffers(self) -> None:
        """``_setup_forward_recv_info`` stage after stage, then ``_setup_backward_recv_info``."""
        for numbers, kind, where in (
            (list(self.stages), CueKind.STAGE_INPUT, self.inputs),
            (list(reversed(self.stages)), CueKind.OUTPUT_GRADIENT, self.output_gradients),
        ):
            for stage in numbers:
                allocation = self.stages[stage].allocation_of(kind, 0)
                if allocation is None or (kind is CueKind.STAGE_INPUT and stage == 0):
                    continue
                for micro_batch in range(self.plan.micro_batches):
                    buffer = self._alloc(
                        self.joined_traces.trace.sizes[allocation],
                        Category.COMMUNICATION,
                        "pipeline: receive buffer",
                    )
                    self.player.released_numbers.add(buffer)
                    where[stage, micro_batch] = buffer

    # -- pieces

    def _play(self, action: Action, span: Span | None = None) -> None:
        """A piece, or a part of it, with what its micro-batch has made so far."""
        key = action.stage, action.micro_batch
        pieces, number = self.stages[action.stage], self.template[key]
        span = span or pieces.piece(action.work, number)
        live = self.live_allocations.setdefault(key, {})
        self.player.assign(list(live), list(live.values()))
        self.player.play(span, self.step, action.micro_batch + 1)
        allocations = pieces.allocations(span, self.joined_traces.trace)
        # gradients and casts are everybody's, the rest is this micro-batch's
        gradients = set(pieces.gradients) if number == 0 else set()
        for index in (*live, *allocations):
            now = self.player.number_of(index)
            if now is None:
                live.pop(index, None)
            elif index not in gradients:
                live[index] = now

    def _forward(self, action: Action) -> None:
        key = stage, micro_batch = action.stage, action.micro_batch
        pieces = self.stages[stage]
        template = 1
        if micro_batch == self.leads:
            template = pieces.casts_again if self.has_gradients else 0
        self.template[key] = template
        begin, end = pieces.piece("F", template)
        output_position = pieces.output_position(template)
        self._play(action, (begin, output_position))
        self._cue(CueKind.STAGE_LEFT, stage)
        output = pieces.allocation_of(CueKind.STAGE_OUTPUT, template)
        assert output is not None
        number = self.player.number_of(output)
        assert number is not None
        if self._is_single:
            self._bind("output", number)  # what it held goes before the loss is computed
        self._play(action, (output_position, end))
        loss = pieces.allocation_of(CueKind.STAGE_LOSS, template)
        last = loss is not None
        if last and self.plan.returns_outputs:
            self.chunks.append(self._hold(number))
        if loss is not None:
            loss_number = self.player.number_of(loss)
            assert loss_number is not None
            self.losses.append(self._own(loss_number))
        if self._is_single:
            if not last:
                self._sends_output(micro_batch, number)
        elif not last and stage + 1 not in self.stages:
            self.pending_sends.append(self._hold(number))
        elif stage + 1 in self.stages:
            # the next stage is here as well: it takes the output itself for its buffer
            old_buffer = self.inputs[stage + 1, micro_batch]
            self.inputs[stage + 1, micro_batch] = self._hold(number)
            self._drop([old_buffer])

    def _backward(self, action: Action) -> None:
        key = stage, micro_batch = action.stage, action.micro_batch
        pieces = self.stages[stage]
        self._play(action)
        allocation = pieces.allocation_of(CueKind.INPUT_GRADIENT, self.template[key])
        if allocation is None:
            if self._is_single:
                self._sends_gradient(micro_batch, None)
            return
        number = self.player.number_of(allocation)
        assert number is not None
        self._own(number)
        if self._is_single:
            self._sends_gradient(micro_batch, number)
        elif stage - 1 in self.stages:
            before = self.output_gradients[stage - 1, micro_batch]
            self.output_gradients[stage - 1, micro_batch] = number
            self._drop([before])
        else:
            self.pending_sends.append(number)

    def _sends_output(self, micro_batch: int, number: int) -> None:
        """``fwd_sends_to_wait`` of GPipe; ``fwd_sends`` and ``send_work`` of 1F1B."""
        if self.plan.schedule is Schedule.GPIPE:
            self.pending_sends.append(self._hold(number))
            return
        self._bind("fwd_sends", number)
        if micro_batch < self._ahead - 1:
            self._bind("send_work", number)

    def _sends_gradient(self, micro_batch: int, number: int | None) -> None:
        """``bwd_sends_to_wait`` of GPipe; ``bwd_sends`` and ``send_work`` of 1F1B.

        The first stage sends no gradient, and binds the names all the same.
        """
        if self.plan.schedule is Schedule.GPIPE:
            self.pending_gradient_sends += [] if number is None else [number]
            return
        self._bind("bwd_sends", number)
        if micro_batch >= self.plan.micro_batches - self._ahead:
            self._bind("send_work", number)
        self._drop([] if number is None else [number])

    @property
    def _ahead(self) -> int:
        """Forwards before the first backward under 1F1B (``warmup_chunks``)."""
        return min(self.plan.micro_batches, self.plan.ranks - self.rank)

    def _wait(self) -> None:
        """Everything that is being sent is waited for: the last first, or on return.

        GPipe's list of outputs goes first then, its names next, its list of gradients last.
        """
        self._drop(self.pending_sends if self._is_single else reversed(self.pending_sends))
        self.pending_sends = []
        for name in list(self.names):
            self._bind(name, None)
        self._drop(self.pending_gradient_sends)
        self.pending_gradient_sends = []
        self.has_gradients = True
        self.live_allocations.clear()

    # -- the update

    def _finish_step(self) -> None:
        """Optimizer and ``zero_grad``."""
        update = self.update
        if update is not None:
            self.player.play(update.first if self.step == 1 else update.later, self.step, 0)
            if self.step > 1:
                self.player.bind(update.inheritance)
        self._mark(Phase.ZERO_GRAD, 0)
        if not self.plan.drops_gradients:
            return
        for pieces in self.stages.values():
            for index in pieces.gradients:
                number = self.player.number_of(index)
                if number is not None:
                    self.course.events.append(~number)
        self.has_gradients = False
