"""Stages of a pipeline that DDP or FSDP2 has wrapped, each by itself.

The stream of a rank has work on one stage after the other. Each stage has a wrapper of its own,
which sees what its stage does, and what the schedule asks of it.

Sources: ``torch/distributed/pipelining/stage.py`` of torch 2.13 (``forward_maybe_with_nosync``,
``backward_maybe_with_nosync``, ``perform_reduce_grad``) and ``schedules.py``
(``_PipelineScheduleRuntime._step_microbatches``: ``UNSHARD``, ``RESHARD``, ``REDUCE_GRAD``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memest.distributed import Strategy
from memest.events import CueKind, Landmarks, Mark, Phase, Weight
from memest.setup import Loop, Setup
from memest.sharding.ddp import Ddp
from memest.sharding.fsdp import COPY_IN_STREAM, Fsdp2, State, Unit
from memest.sharding.rewrite import DEFAULT_STREAM, RankStream, Rewriter, Wrapper, rewrite
from memest.sharding.shards import stored_dtype
from memest.sharding.units import ROOT, units_of

__all__ = ["StageFacts", "staged_stream"]


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What a wrapper asks of a stage.

    Attributes:
        weights: its parameters, as they were traced.
        landmarks: of the model.
    """

    weights: tuple[Weight, ...]
    landmarks: Landmarks


def staged_stream(stream: RankStream, setup: Setup, stages: Mapping[int, StageFacts]) -> RankStream:
    """What a rank of a pipeline allocates where its stages are wrapped.

    Args:
        stream: of the rank with stages as they are, with cues.
        setup: the run.
        stages: of the rank, by their number.
    """
    to = Rewriter(stream)
    script = replace(setup, loop=Loop.PLAIN)  # no library's loop has a pipeline
    wrapper = _Stages(to=to, stages={n: _wrapper(to, script, s) for n, s in stages.items()})
    out = rewrite(stream, to, wrapper)
    out.rank = stream.rank
    return out


def _wrapper(to: Rewriter, setup: Setup, stage: StageFacts) -> StageDdp | StageFsdp2:
    spread = setup.distributed
    if spread.strategy is Strategy.DDP:
        return StageDdp(
            to=to, weights=stage.weights, bucket_cap_mb=spread.ddp_bucket_cap_mb,
            find_unused=False, as_views=spread.ddp_gradient_as_bucket_view,
            skips_sync=True, last_micro_step=0,
        )  # fmt: skip
    return StageFsdp2(
        to=to, weights=stage.weights,
        stored=[stored_dtype(weight, setup) for weight in stage.weights],
        plans=units_of(setup, stage.weights, stage.landmarks), ranks=spread.shard_ranks,
        replicated=False, offloads=False, skips_sync=True, last_micro_step=0,
        tensor_ranks=spread.tp,
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Stages(Wrapper):
    """The wrappers of a rank's stages; what happens is the matter of the one that is at work.

    Attributes:
        stages: by the number of the stage.
    """

    stages: Mapping[int, StageDdp | StageFsdp2]
    _at_work: int = -1

    def allocates(self, number: int) -> bool:
        """See :meth:`Wrapper.allocates`."""
        stage = self.stages.get(self._at_work)
        return stage is None or stage.allocates(number)

    def frees(self, number: int) -> bool:
        """See :meth:`Wrapper.frees`; each knows its own."""
        kept = [stage.frees(number) for stage in self.stages.values()]
        return all(kept)

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`."""
        for stage in self.stages.values():
            stage.begins(mark)
        if mark.phase is Phase.FORWARD:
            self.stages[self._at_work].enters()

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """See :meth:`Wrapper.cue`."""
        if kind is CueKind.STAGE_WORK:
            self._at_work = index
        stage = index if kind >= CueKind.STAGE_WORK else self._at_work
        self.stages[stage].cue(kind, index, number)


@dataclass(slots=True, kw_only=True)
class StageDdp(Ddp):
    """DDP around a stage: every forward and every backward but the last under ``no_sync``."""

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`: the schedule says when gradients are reduced."""

    def enters(self) -> None:
        """The forward of the stage begins."""
        self._syncs = False
        self._enter_forward()

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """See :meth:`Wrapper.cue`."""
        if kind is CueKind.STAGE_SYNC:
            self._syncs = True
        elif kind in (CueKind.PLACED, CueKind.READY):
            Ddp.cue(self, kind, index, number)


@dataclass(slots=True, kw_only=True)
class StageFsdp2(Fsdp2):
    """FSDP2 around a stage.

    No backward reduces gradients or gives parameters back (``set_requires_gradient_sync``,
    ``set_reshard_after_backward``, ``set_is_last_backward``, all False); gradients stay whole, and
    ``perform_reduce_grad`` reduces those of all units, in the order of the modules.
    """

    _unsharding: list[Unit] = field(default_factory=list)
    _reduces: bool = False

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`."""
        self._in_backward = mark.phase is Phase.BACKWARD
        self._began = False

    def enters(self) -> None:
        """The forward of the stage begins: its module is the root of the units."""
        self._enter(ROOT, fed=False)

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """See :meth:`Wrapper.cue`."""
        if kind is CueKind.STAGE_WORK:
            self._assert_unsharded()
        elif kind is CueKind.STAGE_LEFT:
            self._leave(ROOT)
        elif kind is CueKind.OUTPUT_REACHED:
            for unit in self._by_module[ROOT]:
                self._pre_backward(unit)
        elif kind is CueKind.STAGE_UNSHARD:
            self._unshard_all()
        elif kind is CueKind.STAGE_RESHARD:
            for unit in self._in_module_order():
                self._reshard(unit)
        elif kind is CueKind.STAGE_REDUCE:
            self._perform_reduce_grad()
        elif not self._is_roots(kind, index):
            Fsdp2.cue(self, kind, index, number)

    def _is_roots(self, kind: CueKind, index: int) -> bool:
        """The root is the stage, whatever part of it the trace calls."""
        hooks = (CueKind.ENTER, CueKind.ENTER_FED, CueKind.LEAVE)
        return kind in hooks and self._name(index) == ROOT

    def _say_called_twice(self, module: str) -> None:
        """Every micro-batch calls every module, before the last of them has been backward."""

    def _autograd_at(self, module: str) -> None:
        self._began = True  # the loss is none of the root's
        Fsdp2._autograd_at(self, module)

    # -- what the schedule asks for

    def _unshard_all(self) -> None:
        """``unshard(async_op=True)`` of every unit: buffers lie in the stream of the kernels."""
        self._gather_stream = DEFAULT_STREAM
        for unit in self._in_module_order():
            self._unshard(unit)
            self._unsharding.append(unit)
        self._gather_stream = COPY_IN_STREAM

    def _assert_unsharded(self) -> None:
        """What is being gathered is waited for before anything is computed."""
        while self._unsharding:
            self._wait(self._unsharding.pop(0))

    def _post_backward(self, unit: Unit) -> None:
        if self._reduces:
            Fsdp2._post_backward(self, unit)
        else:
            unit.state = State.POST_BACKWARD

    def _perform_reduce_grad(self) -> None:
        self._syncs = self._reduces = True
        for unit in self._in_module_order():
            self._post_backward(unit)
        self._began = True
        Fsdp2._final_callback(self)
        self._reduces = False

    def _final_callback(self) -> None:
        """Behind a backward that is not the last: what is prefetched stays."""
        self._began = False
        for unit in self._units:
            unit.state = State.IDLE
            unit.fed_by, unit.reached = None, False
