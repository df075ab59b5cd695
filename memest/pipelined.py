"""A run on a pipeline: every stage traced, every GPU composed, the fullest one in front.

Each stage is a model of its own with traces, families and places in the store as any other; what a
GPU does with its stages is composed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from memest.distributed import Distributed, Fsdp, Strategy
from memest.errors import ConfigError
from memest.events import CueKind, Trace, Weight
from memest.found import Found
from memest.hidden.call import GpuTraits
from memest.parallel import StagePart
from memest.replay.conf import parse_alloc_conf
from memest.replays import Replays
from memest.setup import Setup, Task, ZeroGrad
from memest.sharding.pipeline import PipelinePlan, compose_rank
from memest.sharding.rewrite import RankStream
from memest.sharding.schedules import stages_of
from memest.sharding.staged import StageFacts, staged_stream
from memest.sharding.updated import updated_weights
from memest.shelf import Steps
from memest.sizes import sizes_of
from memest.steps.family import Family, Point
from memest.steps.program import Program
from memest.steps.stream import Stream
from memest.units import format_size

if TYPE_CHECKING:
    from memest.tracing import Tracer

__all__ = [
    "Pipelined", "RankRun", "StageFamily", "parts_of", "pipeline_of", "pipelined", "rank_runs",
]  # fmt: skip


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
class Pipelined(Found):
    """As its base, of several GPUs that differ; the streams are those of the fullest one."""

    runs: tuple[RankRun, ...] = ()
    worst: int = 0
    said: tuple[str, ...] = ()

    @property
    def stream(self) -> Stream:
        """The stream of the GPU that needs the most."""
        return self.runs[self.worst].stream

    @property
    def short_stream(self) -> Stream:
        """The same: it is short already."""
        return self.stream

    @property
    def spread_notes(self) -> list[str]:
        """What there is to say of the pipeline."""
        return list(self.said)


def parts_of(spread: Distributed, layers: int) -> tuple[StagePart, ...]:
    """The layers of each stage: as even as can be, and of what is left one for each of the first.

    Args:
        spread: names the pipeline.
        layers: of the model.

    Raises:
        ConfigError: more stages than layers, or a split of another number of layers.
    """
    stages = spread.pp * spread.stages_per_gpu
    counts: Sequence[int] = spread.pp_split
    if not counts:
        if stages > layers:
            raise ConfigError(
                f"--pp {spread.pp} makes {stages} stages, and the model has {layers} layers: each "
                f"stage needs one. Take --pp {max(layers // spread.stages_per_gpu, 1)} or less."
            )
        counts = [layers // stages + (number < layers % stages) for number in range(stages)]
    if sum(counts) != layers:
        given = ",".join(map(str, counts))
        raise ConfigError(
            f"--pp-split {given} is {sum(counts)} layers, and the model has {layers}."
        )
    splits = spread.pipeline_schedule.splits_backward
    starts = [sum(counts[:number]) for number in range(stages + 1)]
    return tuple(
        StagePart(start, stop, number == 0, number == stages - 1, splits)
        for number, (start, stop) in enumerate(pairwise(starts))
    )


def plan_of(setup: Setup, torch_version: tuple[int, int]) -> PipelinePlan:
    """How the pipeline of a setup is run."""
    spread = setup.distributed
    drops = setup.zero_grad is ZeroGrad.NONE or (
        setup.zero_grad is ZeroGrad.AUTO and torch_version >= (2, 0)
    )
    return PipelinePlan(
        schedule=spread.pipeline_schedule, ranks=spread.pp, per_rank=spread.stages_per_gpu,
        micro_batches=spread.microbatches, rounds=setup.grad_accum, num_steps=setup.num_steps,
        returns_outputs=spread.pp_return_outputs, drops_gradients=drops,
        wrapped=spread.strategy is not Strategy.NONE,
    )  # fmt: skip


class _StageProgram(Program):
    """The first stage, for what is asked of a program beside streams: counts and notes."""

    def __init__(self, stage: StageFamily) -> None:
        self.micro_steps = stage.family
        self.trace = stage.trace

    def enough(self, grad_accum: int) -> int:
        """As :meth:`Program.enough`; the composed streams are short already."""
        return grad_accum


def pipeline_of(
    found: Found, stages: Sequence[StageFamily], updates_of: Any, said: Sequence[str] = ()
) -> Pipelined:
    """The GPUs of a pipeline.

    Args:
        found: of the setup, with the first stage's program.
        stages: traced, in the order of the model.
        updates_of: traces the optimizer on the weights of a GPU; None where none runs.
        said: what there is to say already.
    """
    setup = found.setup
    traces = [stage.trace for stage in stages]
    weights = [stage.weights for stage in stages]
    runs = rank_runs(
        setup, [stage.part for stage in stages], traces, weights, updates_of, found.gpu
    )
    replays = Replays(parse_alloc_conf(setup.alloc_conf))
    results = [replays.of(run.stream) for run in runs]
    peaks = [(result.peak_reserved_bytes, result.peak_allocated_bytes) for result in results]
    worst = peaks.index(max(peaks))
    return Pipelined(
        found.setup, found.gpu, found.program, found.point, found.card, found.family,
        runs=tuple(runs), worst=worst, said=(*said, *_notes(setup, traces)),
    )  # fmt: skip


def rank_runs(
    setup: Setup, parts: Sequence[StagePart], traces: Sequence[Trace],
    weights: Sequence[tuple[Weight, ...]], updates_of: Any, gpu: GpuTraits,
) -> tuple[RankRun, ...]:  # fmt: skip
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
        own = stages_of(plan.schedule, rank, plan.ranks, plan.per_rank)
        updated = tuple(
            weight
            for number in own
            for weight in updated_weights(weights[number], setup, traces[number].landmarks)
        )
        stream = compose_rank(
            plan, rank, [traces[number] for number in own], updates_of(updated), gpu
        )
        if plan.wrapped:
            facts = {n: StageFacts(weights[n], traces[n].landmarks) for n in own}
            stream = staged_stream(stream, setup, facts)
        runs.append(RankRun(rank, "; ".join(parts[number].words for number in own), stream))
    return tuple(runs)


def _notes(setup: Setup, traces: Sequence[Trace]) -> list[str]:
    spread = setup.distributed
    out, count = [], spread.microbatches
    if spread.strategy is Strategy.FSDP:
        out.append(
            "pipeline: stages under FSDP2 keep gradients whole until the last micro-batch of a "
            "step, and then reduce them (perform_reduce_grad)"
            + (
                "; parameters are gathered anew for every micro-batch: --fsdp shard_grad_op keeps "
                "them, as torchtitan does under pipelines."
                if spread.fsdp is Fsdp.FULL_SHARD
                else "; parameters stay gathered as long."
            )
        )
    outputs = [
        trace.sizes[cue.allocation]
        for trace in traces[-1:]
        for cue in trace.cues
        if cue.kind is CueKind.STAGE_OUTPUT and cue.index == 0
    ]
    if spread.pp_return_outputs and outputs:
        kept = format_size(2 * outputs[0] * spread.microbatches)
        out.append(
            f"pipeline: schedule.step() keeps the last stage's outputs of all {count} "
            f"micro-batches and joins them, {kept} in all; step(..., return_outputs=False) does "
            "not: --no-pp-return-outputs."
        )
    return out


def pipelined(
    tracer: Tracer, whole: Steps, asked: Setup, setup: Setup, gpu: GpuTraits,
    vary: Sequence[str] | None,
) -> Pipelined:  # fmt: skip
    """What answers a setup with a pipeline.

    Args:
        tracer: of the model.
        whole: what is known of the whole model.
        asked: as the user gave it.
        setup: with the sizes that are taken.
        gpu: whose kernels run.
        vary: as for :meth:`Tracer.find`.

    Raises:
        ConfigError: a model that cannot be cut, or not so.
    """
    if setup.task is not Task.CAUSAL_LM:
        raise ConfigError(
            f"--pp is priced for language models alone, and --task is {setup.task}: stages pass on "
            "hidden states, and the last one has the labels of the next words."
        )
    from memest.trace.adapters import base_of
    from memest.trace.stages import layers_of

    parts = parts_of(setup.distributed, layers_of(base_of(tracer.run(whole, asked).model)))
    sizes, stages = sizes_of(setup), []
    for part in parts:
        ranks = setup.distributed.tp
        own = Distributed(num_gpus=ranks, tp=ranks, stage=part)
        stage = replace(setup, distributed=own, grad_accum=1)
        mark = [part.start, part.stop, part.first, part.last, part.splits]
        steps = tracer.stage_steps(whole, stage, mark)
        family, point = tracer.family(steps, asked, stage, gpu, sizes, vary)
        stages.append(StageFamily(part, family, point))

    def updates_of(weights: tuple[Weight, ...]) -> Trace | None:
        if setup.optim == "none":
            return None
        return tracer.updates.of_weights(weights, setup, gpu).at(())

    program = _StageProgram(stages[0])
    found = tracer.answered(whole, asked, setup, gpu, program, stages[0].point)
    return pipeline_of(found, stages, updates_of)
