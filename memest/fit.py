"""Does it fit: the cards, the verdict, and the largest batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memest.events import Trace
from memest.hardware.capacity import usable_bytes
from memest.hardware.catalogue import common_gpus, find_gpu, traits
from memest.hardware.context import ContextEstimate, context_estimate, loaded_kernels_later
from memest.hardware.nvml import resolve_gpu
from memest.hardware.spec import GpuSpec
from memest.hidden.call import GpuTraits
from memest.steps.stream import Stream, make_stream
from memest.replay.conf import AllocatorConf
from memest.replay.replay import Replay, replay
from memest.result import GpuFit, Verdict
from memest.setup import MAX_BATCH, Setup
from memest.tracing import Tracer
from memest.units import format_size

__all__ = ["Card", "card_for", "common_cards", "largest_batch", "reference_card", "verdict_for"]

REFERENCE_GPU = "a100-80gb"
_TRIES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU with the software that runs on it, under the name it goes by in the answer."""

    name: str
    spec: GpuSpec
    traits: GpuTraits
    context: ContextEstimate
    usable_bytes: int
    basis: str


def card_for(
    name: str, setup: Setup, torch: tuple[int, int], context: int | None, memory: int | None
) -> Card:
    """The card of a name (or ``local``), its context, and what PyTorch can have of it."""
    return _card(resolve_gpu(name), setup, torch, context, memory)


def reference_card(
    setup: Setup, torch: tuple[int, int], context: int | None, memory: int | None
) -> Card:
    """The card whose kernels are taken where none is named."""
    card = _card(find_gpu(REFERENCE_GPU), setup, torch, context, memory)
    return card if memory is None else replace(card, name="your GPU")


def common_cards(setup: Setup, torch: tuple[int, int], context: int | None) -> list[Card]:
    """The cards that people have."""
    return [_card(spec, setup, torch, context, None) for spec in common_gpus()]


def _card(
    spec: GpuSpec, setup: Setup, torch: tuple[int, int], context: int | None, memory: int | None
) -> Card:
    usable, basis = usable_bytes(spec)
    name = spec.name
    if memory is not None:
        usable, basis = memory, "memory as given"
        name = f"{spec.name} with {format_size(memory)}"
    return Card(
        name=name,
        spec=spec,
        traits=traits(spec, torch),
        context=_context(spec, setup, torch, context),
        usable_bytes=usable,
        basis=basis,
    )


def _context(
    spec: GpuSpec, setup: Setup, torch: tuple[int, int], given: int | None
) -> ContextEstimate:
    if given is None:
        return context_estimate(spec, torch, setup.software.cuda)
    later = loaded_kernels_later(torch, setup.software.cuda)
    return ContextEstimate(
        expected_bytes=given + later.expected_bytes,
        low_bytes=given + later.low_bytes,
        high_bytes=given + later.high_bytes,
        basis=f"context as given, {later.basis}",
    )


def verdict_for(
    card: Card, tracer: Tracer, conf: AllocatorConf, batch: int | None = None
) -> GpuFit:
    """The verdict for one card.

    ``fits``: the device peak at the upper end of the context's range is below what the card has.
    ``does not fit``: the run is out of memory even at the lower end, with all the retries that
    the allocator makes. Anything between is ``tight``.
    """
    setup = tracer.setup
    trace = tracer.trace(card.traits) if batch is None else tracer.at_batch(card.traits, batch)
    stream = make_stream(trace, card.traits, num_steps=setup.num_steps, grad_accum=setup.grad_accum)
    result = replay(stream.events, stream.sizes, conf)
    device = result.peak_reserved_bytes + card.context.expected_bytes
    upper = result.peak_reserved_bytes + card.context.high_bytes + stream.workspace_slack_bytes
    if upper <= card.usable_bytes:
        verdict = Verdict.FITS
    elif _survives(card, card.context.low_bytes, stream, conf, result):
        verdict = Verdict.TIGHT
    else:
        verdict = Verdict.DOES_NOT_FIT
    return GpuFit(
        name=card.name,
        usable_bytes=card.usable_bytes,
        verdict=verdict,
        headroom_bytes=card.usable_bytes - device,
        device_bytes=device,
        basis=card.basis,
    )


def _survives(
    card: Card, context: int, stream: Stream, conf: AllocatorConf, unlimited: Replay
) -> bool:
    """Whether the run completes in what the context leaves, retries of the allocator included."""
    limit = card.usable_bytes - context
    if limit <= 0 or unlimited.peak_allocated_bytes > limit:
        return False
    if unlimited.peak_reserved_bytes <= limit:
        return True
    limited = replay(stream.events, stream.sizes, conf, limit_bytes=limit)
    return limited.num_ooms == 0


def largest_batch(card: Card, tracer: Tracer, conf: AllocatorConf) -> tuple[int, int]:
    """The largest batch that runs with the expected context, and the largest that surely fits.

    Both by bisection over replays of traces on the line through two batch sizes. Traces made at
    the largest and the one above must say the same; if not, every batch looked at is traced.

    Returns:
        (largest, largest safe); 0 where not even batch 1 does.
    """
    gpu = card.traits

    def runs(batch: int) -> bool:
        return _runs(card, tracer, conf, tracer.at_batch(gpu, batch))

    def really_runs(batch: int) -> bool:
        return _runs(card, tracer, conf, tracer.trace(gpu, batch))

    largest = _bisect(runs, tracer.setup.batch)
    if (largest and not really_runs(largest)) or (largest < MAX_BATCH and really_runs(largest + 1)):
        tracer.give_up_line(gpu)
        largest = _bisect(runs, largest)
    safe = _bisect(
        lambda b: verdict_for(card, tracer, conf, b).verdict is Verdict.FITS,
        max(largest, 1),
    )
    return largest, safe


def _runs(card: Card, tracer: Tracer, conf: AllocatorConf, trace: Trace) -> bool:
    setup = tracer.setup
    stream = make_stream(trace, card.traits, num_steps=setup.num_steps, grad_accum=setup.grad_accum)
    result = replay(stream.events, stream.sizes, conf)
    expected = card.context.expected_bytes
    return _survives(card, expected, stream, conf, result)


def _bisect(holds: Callable[[int], bool], start: int) -> int:
    """The largest batch for which ``holds`` is true, looked for from ``start`` outwards."""
    low, high = 0, None
    batch = max(start, 1)
    for _ in range(_TRIES):
        if holds(batch):
            low = batch
            if high is None:
                if batch >= MAX_BATCH:
                    return batch
                batch = min(batch * 2, MAX_BATCH)
        else:
            high = batch
        if high is not None:
            if high - low <= 1:
                return low
            batch = (low + high) // 2
    return low
