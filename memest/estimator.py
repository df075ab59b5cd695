"""``memest.estimate``: the one place where model, setup, trace, replay and GPU meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memest.assemble import alive_at_peak, breakdown, layers, moment, timeline
from memest.attention import RingKernelError
from memest.cards import Card, cards_of, common_cards
from memest.estimate_notes import assumed, noted
from memest.feed import feed_of
from memest.fit import largest_batch, verdict_for
from memest.needs import Needs, calibration_facts, corrected_rows, needs_of
from memest.options import given_setup
from memest.replay.conf import parse_alloc_conf
from memest.replays import Replays
from memest.result import Estimate, Interval, Peak, RankPeak, Spot, Verdict
from memest.setup import Setup
from memest.tracing import Found, Tracer
from memest.whole_run import whole_run

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
    profile: str | None = None,
    inputs: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | str | None = None,
    step_fn: Callable[..., Any] | str | None = None,
    dims: Mapping[str, int] | Sequence[str] | None = None,
    model_args: Mapping[str, Any] | Sequence[str] | None = None,
    trust_remote_code: bool = False,
    max_batch: bool = True,
    snapshot: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Estimate:
    """Predict the GPU memory of a training run.

    Args:
        model: a catalogue name, hub id, folder, config.json, ``package.module:factory``, or a
            live ``torch.nn.Module`` (which is not modified), or what :func:`memest.read_config`
            and :func:`memest.read_command` return.
        setup: the training configuration; ``options`` are an alternative way to give it.
        gpu: name of a GPU, ``local``, or several; the first one decides the verdict.
        gpu_memory: bytes the GPU has, in place of the catalogue's figure.
        device_context: CUDA context read after a first touch of the GPU, in place of the table.
            Kernels that load later are added where the software loads them lazily.
        profile: file of a calibration profile that corrects the answer, or ``none``. Left out, a
            profile that was measured on the GPU (or one like it) is looked for in the user's
            folder and in the package.
        inputs: what a module of one's own is fed: tensors by name (or in a tuple), specifications
            (``"x:float32[B,3,224,224]"``), or a function that makes them for a batch size.
        loss: where the outputs carry none: ``loss(outputs, batch)``, or a name (``"mse"``).
        step_fn: ``step(model, batch) -> loss`` in place of forward and loss; see
            ``docs/any-module.md`` for steps with several models and optimizers.
        dims: what the letters of specifications are; ``B`` is the batch, ``S`` the length.
        model_args: arguments of a factory.
        trust_remote_code: run code that the model's repository brings.
        max_batch: look for the largest batch when a GPU is named.
        snapshot: a file (.pickle or .json) that the predicted run is written to besides, in the
            structure of ``torch.cuda.memory._dump_snapshot``: as replayed, before a calibration
            profile corrects totals.
        progress: called with one line for each longer thing done.
        **options: fields of :class:`Setup` and the spellings of HF ``TrainingArguments``.

    Returns:
        The estimate.

    Raises:
        MemestError: with one paragraph that says what to do; see :mod:`memest.errors`.
    """
    run = read_run(model)
    if run is not None:
        run = run.with_model(setup, options)
        model, setup, options = str(run.model), run.setup, {}
    setup = given_setup(setup, options)
    target = None
    if snapshot is not None:
        from memest.memory_history import check_snapshot_target

        target = check_snapshot_target(snapshot)
    tracer = Tracer.of(
        model, feed=feed_of(inputs, loss, step_fn, dims, model_args),
        trust_remote_code=trust_remote_code, progress=progress,
    )  # fmt: skip
    setup = tracer.with_own_batch(setup, options)
    found = answer(
        tracer, setup, gpu=gpu, gpu_memory=gpu_memory, device_context=device_context,
        profile=profile, max_batch=max_batch, snapshot=target,
    )  # fmt: skip
    if run is None:
        return found
    from memest.readers.origins import origins_of

    return replace(found, notes=(*found.notes, *run.notes), origins=origins_of(run, found.setup))


def read_run(model: Any) -> RunConfig | None:
    """What :func:`memest.read_config` returned, where it stands in the model's place; else None."""
    if isinstance(model, str):
        return None
    from memest.readers.run_config import RunConfig

    return model if isinstance(model, RunConfig) else None


def answer(
    tracer: Tracer, asked: Setup, *, gpu: str | Sequence[str] | None = None,
    gpu_memory: int | str | None = None, device_context: int | str | None = None,
    profile: str | None = None, max_batch: bool = True, vary: Sequence[str] = (),
    common: bool = True, snapshot: Path | None = None,
) -> Estimate:  # fmt: skip
    """The estimate of a setup for a model whose traces a tracer keeps.

    Args:
        tracer: of the model.
        asked: the setup as it was asked for.
        gpu: as for :func:`estimate`.
        gpu_memory: likewise.
        device_context: likewise.
        profile: likewise.
        max_batch: look for the largest batch when a GPU is named.
        vary: sizes that further questions will change.
        common: say what it means for the GPUs that people have, where none is named.
        snapshot: a file that the run is written to besides.
    """
    cards = cards_of(asked, gpu, gpu_memory, device_context, profile)
    main, named = cards.main, cards.named
    looks_for_batch = bool(named) and max_batch
    vary = ("batch", *vary) if looks_for_batch else vary
    found = whole_run(tracer, asked, main.traits, vary)
    setup = found.setup
    conf = parse_alloc_conf(setup.alloc_conf)
    replays = tracer.replays(conf)
    stream = found.stream
    if snapshot is not None:
        from memest.memory_history import save_memory_history

        save_memory_history(stream, setup.alloc_conf, snapshot)
    result = replays.of(stream, curve=True)
    alive = alive_at_peak(stream, result)
    rows = breakdown(stream, result, alive)
    needs = needs_of(main, found, stream, result, rows)
    if needs.corrected is not None:
        rows = corrected_rows(rows, needs.corrected.parts)
    fits = []
    others = named[1:]
    if not named and common and not setup.torch_compile:  # each would be compiled for
        others = common_cards(setup, cards.torch, cards.context)
    left_out = []
    for card in others:
        try:
            run = whole_run(tracer, asked, card.traits)
        except RingKernelError:
            if named:
                raise
            left_out.append(card.name)
            continue
        other = run.stream
        replayed = replays.of(other)
        fits.append(verdict_for(card, needs_of(card, run, other, replayed), other, replayed, conf))
    chosen = verdict_for(main, needs, stream, result, conf) if named else None
    batch = safe = None
    if looks_for_batch:
        batch, safe = largest_batch(main, tracer, replace(asked, batch=setup.batch), conf)
    return Estimate(
        model=tracer.facts(found),
        setup=setup,
        gpu=chosen,
        peak=_peak(needs),
        interval=_interval(needs),
        breakdown=rows,
        peak_at=moment(stream, result),
        layers=layers(stream, alive),
        timeline=timeline(stream, result),
        verdict=chosen.verdict if chosen else Verdict.UNKNOWN,
        context_bytes=needs.process_expected_bytes,
        calibration=calibration_facts(main, needs),
        ranks=_ranks(main, found, replays),
        max_batch=batch,
        safe_batch=safe,
        common_gpus=tuple(fits),
        notes=tuple(noted(found, main, rows, needs)),
        assumptions=(*assumed(tracer.assumptions(asked), setup, cards), *_without(left_out)),
    )


def _without(cards: Sequence[str]) -> tuple[str, ...]:
    """What to say of GPUs that people have and that cannot run this."""
    if not cards:
        return ()
    return (f"left out, because ring attention has no kernel for them: {', '.join(cards)}",)


def _ranks(main: Card, found: Found, replays: Replays) -> tuple[RankPeak, ...]:
    """All GPUs of a pipeline, the fullest first; empty where there is none."""
    if found.setup.distributed.pp == 1:
        return ()
    from memest.pipelined import Pipelined

    assert isinstance(found, Pipelined)
    out = []
    for run in found.runs:
        needs = needs_of(main, found, run.stream, replays.of(run.stream))
        out.append(
            RankPeak(
                rank=run.rank, parts=run.parts, allocated_bytes=needs.allocated_bytes,
                reserved_bytes=needs.reserved_bytes, device_bytes=needs.device_bytes,
            )
        )  # fmt: skip
    worst = found.runs[found.worst].rank
    return tuple(sorted(out, key=lambda r: (r.rank != worst, -r.device_bytes, r.rank)))


def spot(
    tracer: Tracer, asked: Setup, *, gpu: str | Sequence[str] | None = None,
    gpu_memory: int | str | None = None, device_context: int | str | None = None,
    profile: str | None = None, vary: Sequence[str] = (),
) -> Spot:  # fmt: skip
    """The peaks and the verdict of :func:`answer` alone, in a third of the time.

    Args:
        tracer: of the model.
        asked: the setup as it was asked for.
        gpu: as for :func:`estimate`; the first one counts.
        gpu_memory: likewise.
        device_context: likewise.
        profile: likewise.
        vary: sizes that further questions will change.
    """
    cards = cards_of(asked, gpu, gpu_memory, device_context, profile)
    found = whole_run(tracer, asked, cards.main.traits, vary)
    conf = parse_alloc_conf(found.setup.alloc_conf)
    stream = found.short_stream
    result = tracer.replays(conf).of(stream)
    main = cards.main
    needs = needs_of(main, found, stream, result)
    return Spot(
        setup=found.setup,
        gpu=verdict_for(main, needs, stream, result, conf) if cards.named else None,
        peak=_peak(needs),
        interval=_interval(needs),
    )


def _peak(needs: Needs) -> Peak:
    return Peak(
        allocated_bytes=needs.allocated_bytes,
        reserved_bytes=needs.reserved_bytes,
        device_bytes=needs.device_bytes,
        managed_bytes=needs.managed_bytes,
    )


def _interval(needs: Needs) -> Interval:
    return Interval(
        level=needs.level, low_bytes=needs.low_bytes, high_bytes=needs.high_bytes,
        basis=needs.basis,
    )  # fmt: skip
