"""The run that a question is about: its steps, steps of other lengths, and what follows them.

Of batches of different lengths, steps of an epoch are played one after the other. The allocator
keeps blocks in the sizes of earlier batches, so what is reserved depends on the order of lengths. A
number of drawn steps is played with the largest batch there can be among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from memest.config.kinds import Dtype, LogProbs, Method
from memest.config.parallelism import Distributed, Strategy, check_stages_task
from memest.config.setup import Setup
from memest.estimation.life import with_life
from memest.estimation.pipeline import PipelineRun, StageFamily, StageProgram, parts_of, pipeline_of
from memest.estimation.profiler import Profiler
from memest.estimation.question import Question
from memest.estimation.run import Run
from memest.estimation.turns import with_critic
from memest.events import Trace, Weight
from memest.profiles.joined import STEPS_NEEDED, join_runs
from memest.profiles.stream import Stream
from memest.units import plural
from memest.workspaces.operator_call import GpuTraits

__all__ = ["generation_notes", "generation_setup", "length_notes", "resolve_run", "steps_run"]

_SHARE = 0.05
"""Batches laid flat are told with a bound that an epoch exceeds with this chance at most."""


def resolve_run(
    profiler: Profiler,
    request: Setup,
    gpu: GpuTraits,
    vary: Sequence[str] | None = (),
) -> Run:
    """The steps of a setup with everything around them that it names.

    Whatever is asked (an estimate, a sweep, a largest batch) is asked of this run.

    Args:
        profiler: of the model.
        request: the setup as it was asked for.
        gpu: whose kernels run.
        vary: sizes that further questions will change; None where none will have these sizes.

    Raises:
        MemestError: as for :func:`memest.estimate`.
    """
    run = steps_run(profiler, request, gpu, vary)
    run = _with_generation(profiler, _with_varied_lengths(profiler, request, run, gpu), gpu)
    return with_critic(profiler, request, with_life(run, profiler.config), vary)


def steps_run(
    profiler: Profiler, request: Setup, gpu: GpuTraits, vary: Sequence[str] | None = ()
) -> Run:
    """The steps of a setup alone; arguments as for :func:`resolve_run`."""
    question = profiler.question(request, gpu, vary)
    if question.setup.distributed.pp > 1:
        return _pipeline_run(profiler, question)
    return profiler.run(question)


def _pipeline_run(profiler: Profiler, question: Question) -> PipelineRun:
    """What answers a question whose setup names a pipeline.

    Raises:
        ConfigError: a model that cannot be cut, or not so.
    """
    setup = question.setup
    check_stages_task(setup.task)
    model = profiler.meta_model(question).model
    from memest.trace.model.adapters import base_of
    from memest.trace.parallel.pipeline_stage import layers_of

    layers = layers_of(base_of(model))
    stages = []
    for part in parts_of(setup.distributed, layers):
        ranks = setup.distributed.tp
        tensor_ranks = Distributed(num_gpus=ranks, tp=ranks, stage=part)
        stage = replace(setup, distributed=tensor_ranks, grad_accum=1)
        mark = [part.start, part.stop, part.first, part.last]
        profile = profiler.stage_profile(question.profile, stage, mark)
        of_stage = replace(question, setup=stage, profile=profile)
        stages.append(StageFamily(part, *profiler.families.of(of_stage)))

    def updates_of(weights: tuple[Weight, ...]) -> Trace | None:
        if setup.optimizer == "none":
            return None
        return profiler.optimizers.of_weights(weights, setup, question.gpu).at(())

    first = stages[0]
    run = profiler.run_of(question, first.family, first.point, StageProgram(first))
    return pipeline_of(run, stages, updates_of)


@dataclass(frozen=True)
class _RunOfLengths(Run):
    """A run whose steps have lengths of their own."""

    steps: tuple[Stream, ...] = ()

    @property
    def stream(self) -> Stream:
        """The steps one after the other, and what follows them."""
        return self.with_around(self.with_tails(join_runs(self.steps)))

    short_stream = stream


def _with_varied_lengths(profiler: Profiler, request: Setup, run: Run, gpu: GpuTraits) -> Run:
    """The run with steps of drawn lengths in place of the largest batch alone.

    Where the setup has no lengths, or nothing to draw, it is the run itself.

    Raises:
        TraceError: steps of different lengths cannot be put together.
    """
    batching = request.batching
    if batching is None or batching.steps < 2 or _alone(request):
        return run
    lengths = batching.draw(request.batch, batching.steps)
    if len(set(lengths)) == 1:
        return run
    streams = {}
    for length in sorted(set(lengths)):
        length_setup = replace(request, batching=None, seq_len=length, num_steps=STEPS_NEEDED)
        streams[length] = steps_run(profiler, length_setup, gpu).short_stream
    runs = (lengths[0], *lengths)  # the first two steps of a run are its own
    values = {field.name: getattr(run, field.name) for field in fields(Run)}
    return _RunOfLengths(**values, steps=tuple(streams[length] for length in runs))


def _alone(request: Setup) -> bool:
    """Where the largest batch is answered alone."""
    return request.distributed.strategy is not Strategy.NONE or request.eval_batch is not None


def length_notes(request: Setup) -> Iterator[str]:
    """What there is to know of the lengths: the worst batch, the usual one, their chances."""
    batching, batch = request.batching, request.batch
    if batching is None:
        return
    cut = batching.cut
    tokens = f"{cut.counts[0][0]:,} to {cut.longest:,} tokens, {cut.mean:,.0f} on average"
    yield f"lengths: {cut.samples:,} samples of {tokens}."
    epoch = batching.batches(batch)
    if batch > cut.samples:
        yield (
            f"lengths: {plural(cut.samples, 'sample')} make no batch of {batch}: figures are of "
            f"{batch}, as if there were more of them."
        )
    if batching.flat:
        total = cut.sum_of_longest(batch)
        bound = batching.flat_at_most(batch, _SHARE)
        yield (
            f"the largest batch there can be has {total:,} tokens, the {batch} longest samples; "
            f"one of an epoch's {epoch:,} batches exceeds {bound:,} with a chance of "
            f"{_SHARE:.0%} at most; the usual batch has {batch * cut.mean:,.0f}."
        )
    else:
        mean_length = batching.mean_padded_length(batch)
        worst = batching.worst(batch)
        batches = f"{epoch:,} {'batch' if epoch == 1 else 'batches'}"
        yield (
            f"the largest batch is padded to {worst:,} tokens, and every epoch has one, because "
            f"every sample is seen ({batches}; dropping the last may leave it out); the usual one "
            f"is padded to {mean_length:,.0f}."
        )
        if mean_length < 0.95 * worst:
            chance = batching.chance_above(batch, int(0.95 * worst), 100)
            yield (
                f"the chance that the first 100 batches have one above {int(0.95 * worst):,} "
                f"tokens is {chance:.1%}: a short trial may look safe and the epoch run out."
            )
    if _alone(request) or batching.steps < 2:
        yield "lengths: the largest batch alone is played, not a mixture of lengths."
    else:
        yield (
            f"lengths: {batching.steps} steps drawn with seed {batching.seed} are played, the "
            f"largest batch {'first' if batching.group_by_length else 'last'}; a longer epoch can "
            "leave the allocator with more blocks that no later batch fits (--length-steps), and "
            "micro-batches of one step have one length."
        )


def _with_generation(profiler: Profiler, run: Run, gpu: GpuTraits) -> Run:
    """The run with the generation that its setup names; the run itself where there is none.

    Raises:
        ConfigError: the model cannot generate.
        TraceError: something that a trace cannot follow.
    """
    setup = generation_setup(run.setup)
    if setup is None or setup.generation is None:
        return run
    trace = profiler.generation(
        replace(setup, padded=False, batching=None, padding_free=False), gpu
    )
    return replace(run, generation=trace, new_tokens=setup.generation.new_tokens)


def generation_setup(setup: Setup) -> Setup | None:
    """The setup of the generation alone, its batch and its prompts; None where there is none."""
    if setup.generation is not None:
        return replace(setup, batch=setup.eval_batch or setup.batch)
    if setup.rollouts is None or setup.seq_len is None:
        return None
    generation = setup.rollouts.generation_of(setup.seq_len)
    if generation is None:
        return None
    batch = setup.batch * (setup.rollouts.steps_per_generation or setup.grad_accum)
    if setup.method.writes_pairs:  # in every micro-step
        batch = 2 * setup.batch
        generation = replace(
            generation,
            caches=not setup.checkpoint_every,
            in_step=True,
            beside_gradients=setup.grad_accum > 1,
        )
    return replace(
        setup,
        method=Method.SUPERVISED,
        log_probs=LogProbs.FUSED,
        ref_dtype=Dtype.AUTO,
        rollouts=None,
        generation=generation,
        batch=batch,
        seq_len=setup.seq_len - generation.new_tokens,
    )


def generation_notes(setup: Setup) -> Iterator[str]:
    """What there is to know of the generation."""
    generating = generation_setup(setup)
    if generating is None or generating.generation is None:
        return
    generation, batch = generating.generation, generating.batch
    if generating.seq_len is not None:
        prompts = (
            f"prompts of {generating.seq_len:,} tokens (dense: padding changes the mask alone)"
        )
    elif generating.audio_seconds is not None:
        prompts = f"clips of {generating.audio_seconds:g} seconds"
    else:
        prompts = "samples"
    yield (
        f"generation: {batch} {prompts}, {generation.words}, until the end: sequences that finish "
        "early are carried along."
    )
    if setup.generation is not None and generation.cache == "dynamic":
        yield (
            "generation: a dynamic cache is concatenated anew at every step, layer by layer, into "
            "blocks that grow, so the allocator keeps smaller ones that nothing fits; "
            "--cache-implementation static allocates once."
        )
