"""A run on a pipeline: every stage traced, every GPU composed, the fullest one in front.

Each stage is a model of its own with traces, families and places in the store as any other; what a
GPU does with its stages is composed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from memest.config.parallelism import Distributed, Fsdp, StagePart, Strategy
from memest.config.setup import Setup, ZeroGrad
from memest.errors import ConfigError
from memest.estimation.replay_cache import ReplayCache
from memest.estimation.run import Run
from memest.events import CueKind, Trace, Weight
from memest.profiles.family import Family, Point
from memest.profiles.program import Program
from memest.profiles.stream import Stream
from memest.replay.conf import parse_alloc_conf
from memest.sharding.engine import RankStream
from memest.sharding.pipeline import PipelinePlan, compose_rank
from memest.sharding.rank import StageFacts, staged_stream, updated_weights
from memest.sharding.schedules import stages_of
from memest.units import format_size
from memest.workspaces.operator_call import GpuTraits

__all__ = [
    "PipelineRun",
    "RankRun",
    "StageFamily",
    "StageProgram",
    "parts_of",
    "pipeline_of",
    "rank_runs",
]


@dataclass(frozen=True, slots=True)
class StageFamily:
    """One stage, traced: a family and the point to take from it."""

    part: StagePart
    family: Family
    point: Point

    @property
    def trace(self) -> Trace:
        """The stage's trace at its sizes."""
        return self.family.at(self.point)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Its parameters."""
        return self.family.weights_at(self.family.numbers_at(self.point))


@dataclass(frozen=True, slots=True)
class RankRun:
    """One GPU of the pipeline.

    Attributes:
        rank: its number.
        parts: what it has, in words.
        stream: what it allocates.
    """

    rank: int
    parts: str
    stream: RankStream


@dataclass(frozen=True, slots=True)
class PipelineRun(Run):
    """As its base, of several GPUs that differ; the streams are those of the fullest one."""

    ranks: tuple[RankRun, ...] = ()
    worst: int = 0
    pipeline_notes: tuple[str, ...] = ()

    @property
    def stream(self) -> Stream:
        """The stream of the GPU that needs the most."""
        return self.ranks[self.worst].stream

    @property
    def short_stream(self) -> Stream:
        """The same: it is short already."""
        return self.stream

    @property
    def spread_notes(self) -> list[str]:
        """What there is to say of the pipeline."""
        return list(self.pipeline_notes)


def parts_of(distributed: Distributed, layers: int) -> tuple[StagePart, ...]:
    """The layers of each stage: as even as can be, and of what is left one for each of the first.

    Args:
        distributed: names the pipeline.
        layers: of the model.

    Raises:
        ConfigError: more stages than layers, or a split of another number of layers.
    """
    stages = distributed.pp * distributed.stages_per_gpu
    counts: Sequence[int] = distributed.pp_split
    if not counts:
        if stages > layers:
            raise ConfigError(
                f"--pp {distributed.pp} makes {stages} stages, and the model has {layers} layers: "
                "each "
                f"stage needs one. Take --pp {max(layers // distributed.stages_per_gpu, 1)} or "
                "less."
            )
        counts = [layers // stages + (number < layers % stages) for number in range(stages)]
    if sum(counts) != layers:
        counts_text = ",".join(map(str, counts))
        raise ConfigError(
            f"--pp-split {counts_text} is {sum(counts)} layers, and the model has {layers}."
        )
    starts = [sum(counts[:number]) for number in range(stages + 1)]
    return tuple(
        StagePart(start, stop, number == 0, number == stages - 1)
        for number, (start, stop) in enumerate(pairwise(starts))
    )


def plan_of(setup: Setup, torch_version: tuple[int, int]) -> PipelinePlan:
    """How the pipeline of a setup is run."""
    distributed = setup.distributed
    drops = setup.zero_grad is ZeroGrad.NONE or (
        setup.zero_grad is ZeroGrad.AUTO and torch_version >= (2, 0)
    )
    return PipelinePlan(
        schedule=distributed.pipeline_schedule,
        ranks=distributed.pp,
        per_rank=distributed.stages_per_gpu,
        micro_batches=distributed.microbatches,
        rounds=setup.grad_accum,
        num_steps=setup.num_steps,
        returns_outputs=distributed.pp_return_outputs,
        drops_gradients=drops,
        wrapped=distributed.strategy is not Strategy.NONE,
    )


class StageProgram(Program):
    """The first stage, for what is asked of a program beside streams: counts and notes."""

    def __init__(self, stage: StageFamily) -> None:
        self.micro_steps = stage.family
        self.trace = stage.trace

    def enough_micro_steps(self, grad_accum: int) -> int:
        """As :meth:`Program.enough_micro_steps`; the composed streams are short already."""
        return grad_accum


def pipeline_of(
    run: Run, stages: Sequence[StageFamily], updates_of: Any, notes: Sequence[str] = ()
) -> PipelineRun:
    """The GPUs of a pipeline.

    Args:
        run: of the setup, with the first stage's program.
        stages: traced, in the order of the model.
        updates_of: traces the optimizer on the weights of a GPU; None where none runs.
        notes: what there is to say already.
    """
    setup = run.setup
    traces = [stage.trace for stage in stages]
    weights = [stage.weights for stage in stages]
    ranks = rank_runs(setup, [stage.part for stage in stages], traces, weights, updates_of, run.gpu)
    replays = ReplayCache(parse_alloc_conf(setup.alloc_conf))
    results = [replays.of(rank.stream) for rank in ranks]
    peaks = [(result.peak_reserved_bytes, result.peak_allocated_bytes) for result in results]
    return PipelineRun(
        setup,
        run.gpu,
        run.program,
        run.point,
        run.card,
        run.family,
        ranks=ranks,
        worst=peaks.index(max(peaks)),
        pipeline_notes=(*notes, *_notes(setup, traces)),
    )


def rank_runs(
    setup: Setup,
    parts: Sequence[StagePart],
    traces: Sequence[Trace],
    weights: Sequence[tuple[Weight, ...]],
    updates_of: Any,
    gpu: GpuTraits,
) -> tuple[RankRun, ...]:
    """What every GPU of one pipeline allocates; those of other copies do the same.

    Args:
        setup: the run.
        parts: the stages, in the order of the model.
        traces: of each.
        weights: of each.
        updates_of: as for :func:`pipeline_of`.
        gpu: decides workspaces.
    """
    plan, runs = plan_of(setup, gpu.torch), []
    for rank in range(plan.ranks):
        numbers = stages_of(rank, plan.ranks, plan.per_rank)
        rank_weights = tuple(
            weight
            for number in numbers
            for weight in updated_weights(weights[number], setup, traces[number].landmarks)
        )
        stream = compose_rank(
            plan, rank, [traces[number] for number in numbers], updates_of(rank_weights), gpu
        )
        if plan.wrapped:
            facts = {n: StageFacts(weights[n], traces[n].landmarks) for n in numbers}
            stream = staged_stream(stream, setup, facts)
        runs.append(RankRun(rank, "; ".join(parts[number].words for number in numbers), stream))
    return tuple(runs)


def _notes(setup: Setup, traces: Sequence[Trace]) -> list[str]:
    distributed = setup.distributed
    notes, count = [], distributed.microbatches
    if distributed.strategy is Strategy.FSDP:
        notes.append(
            "pipeline: stages under FSDP2 keep gradients whole until the last micro-batch of a "
            "step, and then reduce them (perform_reduce_grad)"
            + (
                "; parameters are gathered anew for every micro-batch: --fsdp shard_grad_op keeps "
                "them, as torchtitan does under pipelines."
                if distributed.fsdp is Fsdp.FULL_SHARD
                else "; parameters stay gathered as long."
            )
        )
    outputs = [
        trace.sizes[cue.allocation]
        for trace in traces[-1:]
        for cue in trace.cues
        if cue.kind is CueKind.STAGE_OUTPUT and cue.index == 0
    ]
    if distributed.pp_return_outputs and outputs:
        size = format_size(2 * outputs[0] * distributed.microbatches)
        notes.append(
            f"pipeline: schedule.step() keeps the last stage's outputs of all {count} "
            f"micro-batches and joins them, {size} in all; step(..., return_outputs=False) does "
            "not: --no-pp-return-outputs."
        )
    return notes
