"""``memest.estimate``: the one place where model, setup, trace, replay and GPU meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memest.assemble import alive_at_peak, breakdown, layers, moment, timeline
from memest.events import Category
from memest.fit import (
    Card,
    card_for,
    common_cards,
    largest_batch,
    reference_card,
    verdict_for,
)
from memest.installed import installed_version
from memest.options import given_setup, read_size
from memest.replay.conf import parse_alloc_conf
from memest.replay.replay import Replay
from memest.result import Estimate, Interval, Peak, Row, Spot, Verdict
from memest.setup import Loop, Setup
from memest.steps.stream import Stream
from memest.tracing import Found, Tracer
from memest.units import MIB, format_size

if TYPE_CHECKING:
    import torch

__all__ = ["NOT_MODELLED", "Cards", "answer", "cards_of", "estimate", "spot"]

NOT_MODELLED = (
    "not modelled: memory of other processes, of NCCL, and of libraries that allocate on their own."
)

Progress = Callable[[str], None]


def estimate(
    model: str | torch.nn.Module,
    setup: Setup | None = None,
    *,
    gpu: str | Sequence[str] | None = None,
    gpu_memory: int | str | None = None,
    device_context: int | str | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    trust_remote_code: bool = False,
    max_batch: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Estimate:
    """Predict the GPU memory of a training run.

    Args:
        model: a catalogue name, hub id, folder, config.json, ``package.module:factory``, or a
            live ``torch.nn.Module`` (which is not modified).
        setup: the training configuration; ``options`` are an alternative way to give it.
        gpu: name of a GPU, ``local``, or several; the first one decides the verdict.
        gpu_memory: bytes the GPU has, in place of the catalogue's figure.
        device_context: CUDA context read after a first touch of the GPU, in place of the table.
            Kernels that load later are added where the software loads them lazily.
        inputs: example inputs by argument name, for models that are no transformers models.
        loss: ``loss(outputs, batch)`` where the outputs carry none.
        trust_remote_code: run code that the model's repository brings.
        max_batch: look for the largest batch when a GPU is named.
        progress: called with one line for each longer thing done.
        **options: fields of :class:`Setup` and the spellings of HF ``TrainingArguments``.

    Returns:
        The estimate.

    Raises:
        MemestError: with one paragraph that says what to do; see :mod:`memest.errors`.
    """
    setup = given_setup(setup, options)
    tracer = Tracer.of(
        model, inputs=inputs, loss=loss, trust_remote_code=trust_remote_code, progress=progress
    )
    return answer(
        tracer, setup, gpu=gpu, gpu_memory=gpu_memory, device_context=device_context,
        max_batch=max_batch,
    )  # fmt: skip


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
    device_context: int | str | None,
) -> Cards:  # fmt: skip
    """The GPUs that a question names, by the options of :func:`estimate`.

    Raises:
        MemestError: an unknown GPU, or a size that is none.
    """
    torch_version = setup.software.torch or installed_version("torch") or (2, 13)
    context = None if device_context is None else read_size("device_context", device_context)
    names = [gpu] if isinstance(gpu, str) else list(gpu or ())
    memory = None if gpu_memory is None else read_size("gpu_memory", gpu_memory)
    named = [card_for(name, setup, torch_version, context, memory) for name in names]
    if not named and memory is not None:
        named = [reference_card(setup, torch_version, context, memory)]
    main = named[0] if named else reference_card(setup, torch_version, context, None)
    return Cards(main=main, named=named, torch=torch_version, context=context)


def answer(
    tracer: Tracer, asked: Setup, *, gpu: str | Sequence[str] | None = None,
    gpu_memory: int | str | None = None, device_context: int | str | None = None,
    max_batch: bool = True, vary: Sequence[str] = (), common: bool = True,
) -> Estimate:  # fmt: skip
    """The estimate of a setup for a model whose traces a tracer keeps.

    Args:
        tracer: of the model.
        asked: the setup as it was asked for.
        gpu: as for :func:`estimate`.
        gpu_memory: likewise.
        device_context: likewise.
        max_batch: look for the largest batch when a GPU is named.
        vary: sizes that further questions will change.
        common: say what it means for the GPUs that people have, where none is named.
    """
    cards = cards_of(asked, gpu, gpu_memory, device_context)
    main, named = cards.main, cards.named
    looks_for_batch = bool(named) and max_batch
    found = tracer.find(asked, main.traits, ("batch", *vary) if looks_for_batch else vary)
    setup = found.setup
    conf = parse_alloc_conf(setup.alloc_conf)
    replays = tracer.replays(conf)
    stream = found.stream
    result = replays.of(stream, curve=True)
    alive = alive_at_peak(stream, result)
    rows = breakdown(stream, result, alive)
    fits = []
    others = named[1:]
    if not named and common:
        others = common_cards(setup, cards.torch, cards.context)
    for card in others:
        other = tracer.find(asked, card.traits).stream
        fits.append(verdict_for(card, other, replays.of(other), conf))
    chosen = verdict_for(main, stream, result, conf) if named else None
    batch = safe = None
    if looks_for_batch:
        batch, safe = largest_batch(main, tracer, replace(asked, batch=setup.batch), conf)
    return Estimate(
        model=tracer.facts(found),
        setup=setup,
        gpu=chosen,
        peak=_peak(main, result),
        interval=_interval(main, stream, result),
        breakdown=rows,
        peak_at=moment(stream, result),
        layers=layers(stream, alive),
        timeline=timeline(stream, result),
        verdict=chosen.verdict if chosen else Verdict.UNKNOWN,
        context_bytes=main.context.expected_bytes,
        max_batch=batch,
        safe_batch=safe,
        common_gpus=tuple(fits),
        notes=tuple(_notes(found, main, rows)),
        assumptions=tuple(_assumptions(tracer.assumptions(asked), setup, cards)),
    )


def spot(
    tracer: Tracer, asked: Setup, *, gpu: str | Sequence[str] | None = None,
    gpu_memory: int | str | None = None, device_context: int | str | None = None,
    vary: Sequence[str] = (),
) -> Spot:  # fmt: skip
    """The peaks and the verdict of :func:`answer` alone, in a third of the time.

    Args:
        tracer: of the model.
        asked: the setup as it was asked for.
        gpu: as for :func:`estimate`; the first one counts.
        gpu_memory: likewise.
        device_context: likewise.
        vary: sizes that further questions will change.
    """
    cards = cards_of(asked, gpu, gpu_memory, device_context)
    found = tracer.find(asked, cards.main.traits, vary)
    conf = parse_alloc_conf(found.setup.alloc_conf)
    stream = found.short_stream
    result = tracer.replays(conf).of(stream)
    return Spot(
        setup=found.setup,
        gpu=verdict_for(cards.main, stream, result, conf) if cards.named else None,
        peak=_peak(cards.main, result),
        interval=_interval(cards.main, stream, result),
    )


def _peak(card: Card, result: Replay) -> Peak:
    return Peak(
        allocated_bytes=result.peak_allocated_bytes,
        reserved_bytes=result.peak_reserved_bytes,
        device_bytes=result.peak_reserved_bytes + card.context.expected_bytes,
    )


def _interval(card: Card, stream: Stream, result: Replay) -> Interval:
    basis, slack = card.context.basis, stream.workspace_slack_bytes
    if slack >= MIB:
        basis += f"; up to {format_size(slack)} more where a library picks its own workspace"
    reserved = result.peak_reserved_bytes
    return Interval(
        level=None,
        low_bytes=reserved + card.context.low_bytes,
        high_bytes=reserved + card.context.high_bytes + slack,
        basis=basis,
    )


def _assumptions(said: Sequence[str], setup: Setup, cards: Cards) -> list[str]:
    main = cards.main
    out = list(said)
    if not cards.named or main.name != main.spec.name:
        out.append(f"kernels and workspaces as on {main.spec.name} (name a GPU with --gpu)")
    out.append(
        f"loop: {setup.loop}, optimizer {setup.optim}, {setup.num_steps} steps simulated, "
        f"torch {cards.torch[0]}.{cards.torch[1]}"
    )
    return out


def _notes(found: Found, main: Card, rows: tuple[Row, ...]) -> list[str]:
    setup = found.setup
    notes = found.notes
    if main.spec.match_note:
        notes.append(main.spec.match_note)
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
    notes.append(NOT_MODELLED)
    return notes
