"""``memest.estimate``: the one place where model, setup, trace, replay and GPU meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memest.assemble import alive_at_peak, breakdown, layers, moment, timeline
from memest.cards import NO_PROFILE, Card, card_for, common_cards, reference_card
from memest.epochs import length_notes, varied
from memest.errors import ConfigError
from memest.events import Category
from memest.feed import feed_of
from memest.fit import largest_batch, verdict_for
from memest.generated import generated, generation_notes
from memest.installed import installed_version, unverified
from memest.loaded import host_notes
from memest.memory_history import check_snapshot_target, save_memory_history
from memest.needs import Needs, calibration_facts, corrected_rows, needs_of
from memest.options import given_setup, read_size
from memest.pipelined import Pipelined
from memest.readers.origins import origins_of
from memest.readers.run_config import RunConfig
from memest.replay.conf import parse_alloc_conf
from memest.replays import Replays
from memest.result import Estimate, Interval, Peak, RankPeak, Row, Spot, Verdict
from memest.setup import Loop, Setup
from memest.tracing import Found, Tracer
from memest.units import format_size

if TYPE_CHECKING:
    import torch

__all__ = ["Cards", "answer", "cards_of", "estimate", "not_modelled", "one_of_several", "spot"]

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
    run = model if isinstance(model, RunConfig) else None
    if run is not None:
        run = _given(run, setup, options)
        model, setup, options = str(run.model), run.setup, {}
    setup = given_setup(setup, options)
    target = None if snapshot is None else check_snapshot_target(snapshot)
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
    return replace(found, notes=(*found.notes, *run.notes), origins=origins_of(run, found.setup))


def _given(run: RunConfig, setup: Setup | None, options: Mapping[str, Any]) -> RunConfig:
    if setup is not None:
        raise ConfigError("Give either a Setup or a configuration that was read, not both.")
    run = run.given(**options) if options else run
    if run.model is None:
        raise ConfigError(
            f"{', '.join(run.sources)} names no model: give it, memest.read_config(..., "
            "model='...')."
        )
    return run


def not_modelled(setup: Setup) -> str:
    """What no answer covers; a communicator is part of one on several GPUs."""
    nccl = "of NCCL, " if setup.distributed.num_gpus == 1 else ""
    return (
        f"not modelled: memory of other processes, {nccl}and of libraries that allocate on their "
        "own."
    )


def one_of_several(setup: Setup) -> list[str]:
    """What to say where samples of a step are counted and there are several GPUs."""
    count = setup.distributed.data_ranks
    if count == 1:
        return []
    said = f"sizes are those of one GPU: with {count}, an optimizer step has {count} times as many"
    return [f"{said} samples."]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """The GPUs of a question.

    Attributes:
        main: decides kernels and, where one is named, the verdict.
        named: those that were named; empty where none was.
        torch: (major, minor) of PyTorch.
        context: that was given, in bytes; None for the table.
    """

    main: Card
    named: list[Card]
    torch: tuple[int, int]
    context: int | None


def cards_of(
    setup: Setup, gpu: str | Sequence[str] | None, gpu_memory: int | str | None,
    device_context: int | str | None, profile: str | None = None,
) -> Cards:  # fmt: skip
    """The GPUs that a question names, by the options of :func:`estimate`.

    Raises:
        MemestError: an unknown GPU, a size that is none, or a profile that is none.
    """
    if device_context is not None and profile not in (None, NO_PROFILE):
        raise ConfigError(
            f"--device-context {device_context} and --profile {profile} both say what context and "
            "kernels take: drop one."
        )
    torch_version = setup.software.torch or installed_version("torch") or (2, 13)
    context = None if device_context is None else read_size("device_context", device_context)
    names = [gpu] if isinstance(gpu, str) else list(gpu or ())
    memory = None if gpu_memory is None else read_size("gpu_memory", gpu_memory)
    named = [card_for(name, setup, torch_version, context, memory, profile) for name in names]
    if not named and memory is not None:
        named = [reference_card(setup, torch_version, context, memory, profile)]
    main = named[0] if named else reference_card(setup, torch_version, context, None, profile)
    return Cards(main=main, named=named, torch=torch_version, context=context)


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
    found = tracer.find(asked, main.traits, ("batch", *vary) if looks_for_batch else vary)
    found = generated(tracer, varied(tracer, asked, found, main.traits), main.traits)
    setup = found.setup
    conf = parse_alloc_conf(setup.alloc_conf)
    replays = tracer.replays(conf)
    stream = found.stream
    if snapshot is not None:
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
    for card in others:
        run = varied(tracer, asked, tracer.find(asked, card.traits), card.traits)
        run = generated(tracer, run, card.traits)
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
        ranks=_ranks(main, found, replays) if isinstance(found, Pipelined) else (),
        max_batch=batch,
        safe_batch=safe,
        common_gpus=tuple(fits),
        notes=tuple(_notes(found, main, rows, needs)),
        assumptions=tuple(_assumptions(tracer.assumptions(asked), setup, cards)),
    )


def _ranks(main: Card, found: Pipelined, replays: Replays) -> tuple[RankPeak, ...]:
    """All GPUs of a pipeline, the fullest first."""
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
    found = tracer.find(asked, cards.main.traits, vary)
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


def _assumptions(said: Sequence[str], setup: Setup, cards: Cards) -> list[str]:
    main = cards.main
    out = list(said)
    if other := unverified():
        out.append(other)
    if not cards.named or main.name != main.spec.name:
        out.append(f"kernels and workspaces as on {main.spec.name} (name a GPU with --gpu)")
    out.append(
        f"loop: {setup.loop}, optimizer {setup.optim}, {setup.num_steps} steps simulated, "
        f"torch {cards.torch[0]}.{cards.torch[1]}"
    )
    return out


def _evaluation(setup: Setup, needs: Needs) -> Iterator[str]:
    """What there is to know of the evaluation."""
    if setup.eval_samples is None:
        yield (
            "evaluation: the loss alone is kept. Where compute_metrics is given, the Trainer keeps "
            "predictions on the GPU: --eval-samples says of how many samples."
        )
    elif setup.eval_accumulation_steps is None and needs.reserved_bytes > 2 * needs.allocated_bytes:
        yield (
            "evaluation: predictions are concatenated batch by batch, each time into a larger "
            "block, and the allocator keeps the smaller ones until memory runs out: the reserved "
            "peak is what an endless card would show. --eval-accumulation-steps bounds it."
        )


def _paged(main: Card, needs: Needs) -> str:
    """What becomes of states in managed memory."""
    size, both = format_size(needs.managed_bytes), needs.device_bytes + needs.managed_bytes
    said = (
        f"{size} of optimizer states are in managed memory, which no counter of torch shows. On a "
        f"GPU with room the device holds them too, {format_size(both)} in all"
    )
    if both > main.usable_bytes:
        short = format_size(both - main.usable_bytes)
        return (
            f"{said}; {main.name} has {short} less than that, so pages move between host and GPU "
            "in every step, which costs time. The verdict is about the rest, which cannot move."
        )
    return f"{said}; the verdict is about the rest, which cannot move to the host."


def _notes(found: Found, main: Card, rows: tuple[Row, ...], needs: Needs) -> list[str]:
    setup = found.setup
    notes = [*found.notes, *length_notes(setup), *generation_notes(setup)]
    if main.spec.match_note:
        notes.append(main.spec.match_note)
    if needs.corrected is not None:
        notes += needs.corrected.notes
    if needs.managed_bytes:
        notes.append(_paged(main, needs))
    if setup.eval_batch is not None:
        notes += _evaluation(setup, needs)
    if setup.tf32:
        notes.append("tf32 changes the speed of matmuls, not the memory.")
    copies = sum(row.bytes for row in rows if row.category is Category.AUTOCAST_COPIES)
    if copies * 20 > sum(row.bytes for row in rows):
        notes.append(
            f"autocast keeps the fp32 weights and adds {format_size(copies)} of half-precision "
            "copies of them at the peak: at small batches that can outweigh what the smaller "
            "activations save."
        )
    version = setup.software.transformers
    if (
        version
        and version < (4, 54)
        and setup.loop is Loop.TRAINER
        and (setup.optim == "adamw_torch_fused")
    ):
        usual = "adamw_hf" if version < (4, 36) else "adamw_torch"
        notes.append(
            f"the Trainer of transformers {version[0]}.{version[1]} took --optim {usual} unless "
            "told otherwise; this is priced with adamw_torch_fused."
        )
    if setup.grad_accum > 1:
        notes.append(
            "gradient accumulation keeps the gradients alive during the next forward, so it is not "
            "free: the peak moves from the first micro-step to the second."
        )
    notes += found.spread_notes
    notes += host_notes(
        setup, found.short_stream, setup.num_steps * found.program.enough(setup.grad_accum)
    )
    notes.append(not_modelled(setup))
    return notes
