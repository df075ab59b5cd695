"""``memest.estimate``: the one place where model, setup, trace, replay and GPU meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from memest.catalog.gpu_counts import split_gpu_count
from memest.config.idle_options import refuse_stopped, smallest_batch
from memest.config.inputs import module_inputs_of
from memest.config.options import argument, merge_options
from memest.config.setup import Setup
from memest.errors import MissingDependencyError, UnfitGpuError
from memest.estimation.assumption import Usual
from memest.estimation.breakdown import (
    alive_at_peak,
    breakdown,
    layers,
    logits_bytes,
    moment,
    timeline,
)
from memest.estimation.gpu_target import Place, TargetGpu, common_target_gpus, target_gpus
from memest.estimation.kernel_notes import about_run
from memest.estimation.left_open import Alternatives, left_open
from memest.estimation.life import run_life
from memest.estimation.notes import assumptions_of, notes_of
from memest.estimation.peaks import calibration_facts, corrected_rows, peaks_of
from memest.estimation.pipeline import PipelineRun
from memest.estimation.profiler import Profiler
from memest.estimation.replay_cache import ReplayCache
from memest.estimation.run import Run
from memest.estimation.run_facts import Peaks
from memest.estimation.verdict import largest_batch, verdict_for
from memest.estimation.whole_run import resolve_run
from memest.profiles.known_profiles import each_size_alone
from memest.profiles.stream import Stream
from memest.replay.conf import parse_alloc_conf
from memest.replay.replay import Replay
from memest.report.life_result import RunLife
from memest.report.result import Estimate, GpuFit, Interval, Peak, RankPeak, Spot, Verdict
from memest.workspaces.operator_call import GpuTraits

if TYPE_CHECKING:
    import torch

    from memest.readers.run_config import RunConfig

__all__ = ["answer", "estimate", "read_run", "spot"]

Progress = Callable[[str], None]


def estimate(
    model: str | torch.nn.Module | RunConfig,
    setup: Setup | None = None,
    *,
    gpu: str | Sequence[str] | None = None,
    gpu_memory: int | str | None = None,
    device_context: int | str | None = None,
    calibration: str | None = None,
    inputs: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | str | None = None,
    step_fn: Callable[..., Any] | str | None = None,
    dims: Mapping[str, int] | Sequence[str] | None = None,
    model_args: Mapping[str, Any] | Sequence[str] | None = None,
    trust_remote_code: bool = False,
    max_batch: bool = True,
    snapshot: str | Path | None = None,
    alternatives: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Estimate:
    """Predict the GPU memory of a training run.

    Args:
        model: a catalogue name, hub id, folder, config.json, ``timm/NAME`` or
            ``torchvision/NAME``, ``package.module:factory``, or a live ``torch.nn.Module`` (which
            is not modified), or what :func:`memest.read_config` and :func:`memest.read_command`
            return.
        setup: the training configuration; ``options`` are an alternative way to give it.
        gpu: name of a GPU, ``local``, or several; the first one decides the verdict.
        gpu_memory: bytes the GPU has, in place of the catalogue's figure.
        device_context: CUDA context read after a first touch of the GPU, in place of the table.
            Kernels that load later are added where the software loads them lazily.
        calibration: file of a calibration that corrects the answer, or ``none``. Left out, a
            calibration that was measured on the GPU (or one like it) is looked for in the user's
            folder and in the package.
        inputs: what a module of one's own is fed: tensors by name (or in a tuple), specifications
            (``"x:float32[B,3,224,224]"``), or a function that makes them for a batch size.
        loss: where the outputs carry none: ``loss(outputs, batch)``, or a name (``"mse"``).
        step_fn: ``step(model, batch) -> loss`` in place of forward and loss; see
            ``docs/any-module.md`` for steps with several models and optimizers.
        dims: what the letters of specifications are; ``B`` is the batch, ``S`` the length.
        model_args: arguments of a factory.
        trust_remote_code: run code that the model's repository brings.
        max_batch: look for the largest batch when a GPU is named; not of a model that would be
            compiled or traced for each.
        snapshot: a file (.pickle or .json) that the predicted run is written to besides, in the
            structure of ``torch.cuda.memory._dump_snapshot``: as replayed, before a calibration
            profile corrects totals.
        alternatives: tell what the question leaves open, and what other choices would change: a
            replay each.
        progress: called with one line for each longer thing done.
        **options: fields of :class:`Setup` and the spellings of HF ``TrainingArguments``.

    Returns:
        The estimate.

    Raises:
        MemestError: with one paragraph that says what to do; see :mod:`memest.errors`.
    """
    calibration = argument("calibration", calibration, options)
    gpu, options = split_gpu_count(gpu, setup, options)
    run_config = read_run(model)
    if run_config is not None:
        parts = {"inputs": inputs, "loss": loss, "step_fn": step_fn}
        run_config = run_config.with_model(setup, {**options, **parts})
        model, setup, options = str(run_config.model), run_config.setup, {}
    setup = merge_options(setup, options)
    target = None
    if snapshot is not None:
        from memest.estimation.snapshot_export import check_snapshot_target

        target = check_snapshot_target(snapshot)
    profiler = Profiler.of(
        model,
        module_inputs=module_inputs_of(inputs, loss, step_fn, dims, model_args),
        trust_remote_code=trust_remote_code,
        progress=progress,
    )
    setup = profiler.with_own_parts(setup, options)
    with nullcontext() if run_config is None else run_config.telling_origins():
        result = answer(
            profiler,
            setup,
            gpu=gpu,
            gpu_memory=gpu_memory,
            device_context=device_context,
            calibration=calibration,
            max_batch=max_batch,
            snapshot=target,
            alternatives=alternatives,
        )
    if run_config is None:
        return result
    from memest.readers.origins import origins_of

    return replace(
        result,
        notes=(*result.notes, *run_config.notes),
        origins=origins_of(run_config, result.setup, result.model.family),
    )


def read_run(model: Any) -> RunConfig | None:
    """What :func:`memest.read_config` returned, where it stands in the model's place; else None."""
    if isinstance(model, str):
        return None
    from memest.readers.run_config import RunConfig

    return model if isinstance(model, RunConfig) else None


def answer(
    profiler: Profiler,
    request: Setup,
    *,
    max_batch: bool = True,
    vary: Sequence[str] = (),
    common: bool = True,
    snapshot: Path | None = None,
    alternatives: bool = False,
    **place: Unpack[Place],
) -> Estimate:
    """The estimate of a setup for a model whose traces a tracer keeps.

    Args:
        profiler: of the model.
        request: the setup as it was asked for.
        max_batch: look for the largest batch when a GPU is named; not of a model that would be
            compiled or traced for each.
        vary: sizes that further questions will change.
        common: say what it means for the GPUs that people have, where none is named.
        snapshot: a file that the run is written to besides.
        alternatives: tell what the question leaves open, and what that could change.
        **place: where the run is to fit.

    Raises:
        ConfigError: the trainer stops before the first step.
        MemestError: as for :func:`estimate`.
    """
    refuse_stopped(request)
    targets = target_gpus(request, **place)
    main, named_gpus = targets.main, targets.named_gpus
    wants_batch = bool(named_gpus) and max_batch
    looks_for_batch = wants_batch and not request.torch_compile  # each would be compiled for
    with main.naming_itself():
        further = ("batch", *vary) if looks_for_batch else vary
        run = resolve_run(profiler, request, main.traits, further)
    say = profiler.progress or (lambda _: None)
    say("replaying the allocator")
    setup, stream = run.setup, run.stream
    if snapshot is not None:
        from memest.estimation.snapshot_export import save_memory_history

        save_memory_history(stream, setup.alloc_conf, snapshot)
    replays = profiler.replays(parse_alloc_conf(setup.alloc_conf))
    result = replays.of(stream, curve=True)
    alive = alive_at_peak(stream, result)
    rows = breakdown(stream, result, alive)
    peaks = peaks_of(main, run, stream, result, rows)
    assert peaks.ranges is not None  # of whole runs there always are
    if peaks.parts:
        rows = corrected_rows(rows, peaks.parts)
    other_gpus: Sequence[TargetGpu] = named_gpus[1:]
    if not named_gpus and common and not setup.torch_compile:  # each would be compiled for
        other_gpus = common_target_gpus(setup.software.cuda, targets.torch, targets.context)
    known_runs = {main.traits: (run, stream)}
    fits, left_out = _fits_others(
        profiler, request, other_gpus, replays, known_runs, named=bool(named_gpus)
    )
    fit = verdict_for(main, setup, peaks, stream, result, replays.conf) if named_gpus else None
    batch = safe = None
    if looks_for_batch:
        batch_request = replace(request, batch=setup.batch)
        try:
            # where not even the smallest fits, no larger batch has to be traced
            fails = fit is not None and fit.verdict is Verdict.DOES_NOT_FIT
            is_out = fails and setup.batch <= smallest_batch(setup)
            by_sample = not (isinstance(run, PipelineRun) or is_out) and profiler.goes_by_sample(
                request, main.traits
            )
            if by_sample or (not setup.method.is_supervised and each_size_alone(setup)):
                left_out.append(_TRACED_ANEW)
            else:
                say("looking for the largest batch")
                batch, safe = largest_batch(main, profiler, batch_request, replays.conf)
        except MissingDependencyError:
            left_out.append(_NO_LARGEST)
    elif wants_batch:
        left_out.append(_COMPILED_ANEW)
    facts = profiler.facts(run)
    assumptions = (
        *assumptions_of(tuple(about_run(profiler.assumptions(request), run)), setup, targets),
        *left_out,
    )
    whole = Estimate(
        model=facts,
        setup=setup,
        gpu=fit,
        peak=_peak(peaks),
        interval=_interval(peaks),
        ranges=peaks.ranges,
        breakdown=rows,
        peak_at=moment(stream, result),
        layers=layers(stream, alive),
        timeline=timeline(stream, result),
        verdict=fit.verdict if fit else Verdict.UNKNOWN,
        context_bytes=peaks.process_expected_bytes,
        calibration=calibration_facts(main, peaks),
        ranks=_ranks(main, run, replays),
        max_batch=batch,
        safe_batch=safe,
        common_gpus=tuple(fits),
        traced=run.program.micro_steps.depth_words,
        notes=(
            *notes_of(run, main, rows, peaks),
            *(each.spec.match_note for each in named_gpus[1:] if each.spec.match_note),
        ),
        assumptions=assumptions,
        logits_bytes=logits_bytes(stream, alive),
        life=_life(profiler, run, replays, peaks),
        usual=tuple(text for text in assumptions if isinstance(text, Usual)),
    )
    if not alternatives or isinstance(run, PipelineRun) or setup.torch_compile:
        return whole

    def device_bytes(other: Setup) -> int:
        run = resolve_run(profiler, other, main.traits)
        return _peaks_alone(profiler, run, run.short_stream, main)[1].device_bytes

    with profiler.known_alone():
        return left_open(whole, targets, Alternatives(request, device_bytes))


def _life(profiler: Profiler, run: Run, replays: ReplayCache, peaks: Peaks) -> RunLife | None:
    """What is said of the run around its steps, where it was asked for."""
    if run.setup.life is None or not run.setup.life.is_asked:
        return None
    steps_peak = peaks.allocated_bytes
    if run.around:
        steps_peak = replays.of(replace(run, around=()).stream).peak_allocated_bytes
    return run_life(run, profiler.config, steps_peak)


def _peaks_alone(
    profiler: Profiler, run: Run, stream: Stream, main: TargetGpu
) -> tuple[Replay, Peaks]:
    """What the stream with the fewest steps that show a run's peaks comes to."""
    result = profiler.replays(parse_alloc_conf(run.setup.alloc_conf)).of(stream)
    return result, peaks_of(main, run, stream, result)


def _fits_others(
    profiler: Profiler,
    request: Setup,
    targets: Sequence[TargetGpu],
    replays: ReplayCache,
    known_runs: dict[GpuTraits, tuple[Run, Stream]],
    *,
    named: bool,
) -> tuple[list[GpuFit], list[str]]:
    """The verdicts for further GPUs, and what to say of those that are left out.

    GPUs that differ in their memory alone share a run and its stream, which ``known_runs`` keeps.

    Raises:
        MemestError: a GPU that was named has no answer.
    """
    fits: list[GpuFit] = []
    names_by_reason: dict[str, list[str]] = {}
    for target in targets:
        try:
            if target.traits not in known_runs:
                with target.naming_itself():
                    run = resolve_run(profiler, request, target.traits)
                known_runs[target.traits] = run, run.stream
            run, stream = known_runs[target.traits]
            result = replays.of(stream)
            peaks = peaks_of(target, run, stream, result)
        except (UnfitGpuError, MissingDependencyError) as error:
            if named:
                raise
            why = error.why if isinstance(error, UnfitGpuError) else _NO_TRACE
            names_by_reason.setdefault(why, []).append(target.name)
            continue
        fits.append(verdict_for(target, run.setup, peaks, stream, result, replays.conf))
    left_out = [
        f"left out, because {why}: {', '.join(names)}" for why, names in names_by_reason.items()
    ]
    return fits, left_out


_NO_TRACE = (
    "no profile that comes with memest has their attention kernels, and what traces models is not "
    "installed"
)
_COMPILED_ANEW = (
    "the largest batch is not looked for: every batch is compiled anew; memest max-batch takes the "
    "minutes"
)
_TRACED_ANEW = (
    "the largest batch is not looked for: model or loss work piece by piece, so that every batch "
    "is traced anew; memest max-batch takes the minutes"
)
_NO_LARGEST = (
    "the largest batch is not looked for: it lies beyond the profiles that come with memest, and "
    "what traces models is not installed"
)


def _ranks(main: TargetGpu, run: Run, replays: ReplayCache) -> tuple[RankPeak, ...]:
    """All GPUs of a pipeline, the fullest first; empty where there is none."""
    if not isinstance(run, PipelineRun):
        return ()
    rows = []
    for rank in run.ranks:
        peaks = peaks_of(main, run, rank.stream, replays.of(rank.stream))
        rows.append(
            RankPeak(
                rank=rank.rank,
                parts=rank.parts,
                allocated_bytes=peaks.allocated_bytes,
                reserved_bytes=peaks.reserved_bytes,
                device_bytes=peaks.device_bytes,
            )
        )
    worst = run.ranks[run.worst].rank
    return tuple(sorted(rows, key=lambda r: (r.rank != worst, -r.device_bytes, r.rank)))


def spot(
    profiler: Profiler, request: Setup, *, vary: Sequence[str] = (), **place: Unpack[Place]
) -> Spot:
    """The peaks and the verdict of :func:`answer` alone, in a third of the time.

    Args:
        profiler: of the model.
        request: the setup as it was asked for.
        vary: sizes that further questions will change.
        **place: where the run is to fit; the first GPU counts.

    Raises:
        ConfigError: the trainer stops before the first step.
        MemestError: as for :func:`estimate`.
    """
    refuse_stopped(request)
    targets = target_gpus(request, **place)
    main = targets.main
    with main.naming_itself():
        run = resolve_run(profiler, request, main.traits, vary)
    stream = run.short_stream
    result, peaks = _peaks_alone(profiler, run, stream, main)
    return Spot(
        setup=run.setup,
        gpu=(
            verdict_for(
                main,
                run.setup,
                peaks,
                stream,
                result,
                parse_alloc_conf(run.setup.alloc_conf),
            )
            if targets.named_gpus
            else None
        ),
        peak=_peak(peaks),
        interval=_interval(peaks),
    )


def _peak(peaks: Peaks) -> Peak:
    return Peak(
        allocated_bytes=peaks.allocated_bytes,
        reserved_bytes=peaks.reserved_bytes,
        device_bytes=peaks.device_bytes,
        managed_bytes=peaks.managed_bytes,
        engine_bytes=peaks.engine_bytes,
    )


def _interval(peaks: Peaks) -> Interval:
    return Interval(
        level=peaks.level,
        low_bytes=peaks.low_bytes,
        high_bytes=peaks.high_bytes,
        basis=peaks.basis,
    )
