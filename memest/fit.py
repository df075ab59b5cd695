"""Does it fit: the cards, the verdict, and the largest batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memest.hardware.capacity import usable_bytes
from memest.hardware.catalogue import common_gpus, find_gpu, traits
from memest.hardware.context import ContextEstimate, context_estimate, loaded_kernels_later
from memest.hardware.nvml import resolve_gpu
from memest.hardware.spec import GpuSpec
from memest.hidden.call import GpuTraits
from memest.replay.conf import AllocatorConf
from memest.replay.replay import Replay, replay
from memest.replays import Replays
from memest.result import GpuFit, Verdict
from memest.setup import MAX_BATCH, Setup
from memest.steps.stream import Stream
from memest.tracing import Tracer
from memest.units import format_size

__all__ = [
    "Card",
    "Search",
    "Tried",
    "card_for",
    "common_cards",
    "largest_batch",
    "reference_card",
    "verdict_for",
]

REFERENCE_GPU = "a100-80gb"
_TRIES = 64
_SECANTS = 8


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


def verdict_for(card: Card, stream: Stream, result: Replay, conf: AllocatorConf) -> GpuFit:
    """The verdict for one card.

    ``fits``: the device peak at the upper end of the context's range is below what the card has.
    ``does not fit``: the run is out of memory even at the lower end, with all the retries that
    the allocator makes. Anything between is ``tight``.

    Args:
        card: the card.
        stream: of the run, with this card's workspaces.
        result: of its replay.
        conf: of the allocator.
    """
    device = result.peak_reserved_bytes + card.context.expected_bytes
    if _surely_fits(card, stream, result):
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


def _surely_fits(card: Card, stream: Stream, result: Replay) -> bool:
    upper = result.peak_reserved_bytes + card.context.high_bytes + stream.workspace_slack_bytes
    return upper <= card.usable_bytes


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


@dataclass(slots=True)
class Tried:
    """One size that was looked at on the way to the largest.

    Attributes:
        size: of the batch, or whatever varies.
        peak_allocated_bytes: of the replay.
        peak_reserved_bytes: of the replay.
        device_bytes: reserved and the context expected.
        runs: whether it completes with the context expected.
        fits: whether it surely fits.
    """

    size: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    runs: bool
    fits: bool


class Search:
    """Looks for the largest size that runs on a card, and for the largest that surely fits.

    Args:
        card: the card.
        replays: under the configuration of its allocator.
        stream_at: the stream for a size.
        highest: the largest size that can be asked for.
    """

    def __init__(
        self, card: Card, replays: Replays, stream_at: Callable[[int], Stream], highest: int
    ) -> None:
        self._card = card
        self._replays = replays
        self._stream_at = stream_at
        self._highest = highest
        self.tried: dict[int, Tried] = {}

    def at(self, size: int) -> Tried:
        """What becomes of one size."""
        known = self.tried.get(size)
        if known is None:
            card, stream = self._card, self._stream_at(size)
            result = self._replays.of(stream)
            expected = card.context.expected_bytes
            known = self.tried[size] = Tried(
                size=size,
                peak_allocated_bytes=result.peak_allocated_bytes,
                peak_reserved_bytes=result.peak_reserved_bytes,
                device_bytes=result.peak_reserved_bytes + expected,
                runs=_survives(card, expected, stream, self._replays.conf, result),
                fits=_surely_fits(card, stream, result),
            )
        return known

    def largest(self, start: int) -> tuple[int, int]:
        """(the largest that runs, the largest that surely fits), 0 where not even 1 does.

        Args:
            start: where to begin.
        """
        usable = self._card.usable_bytes - self._card.context.expected_bytes
        largest = self._last(lambda tried: tried.runs, start, usable)
        slack = self._card.context.high_bytes - self._card.context.expected_bytes
        return largest, self._last(lambda tried: tried.fits, max(largest, 1), usable - slack)

    def _last(self, holds: Callable[[Tried], bool], start: int, room: int) -> int:
        """The largest size for which ``holds``, by secants, then by halves.

        Memory grows with the size along a line that is almost straight, so the first guesses come
        from two points; the answer only from sizes next to each other that differ in ``holds``.
        """
        low, high = 0, self._highest + 1
        size = min(max(start, 1), self._highest)
        for attempt in range(_TRIES):
            tried = self.at(size)
            if holds(tried):
                low = size
            else:
                high = size
            if high - low <= 1:
                return low
            guess = self._guess(room) if attempt < _SECANTS else None
            if guess is None or not low < guess < high:
                # a guess outside has done its work: the answer is next to the nearer end
                if guess is not None and guess <= low:
                    guess = low + 1 + attempt // 2
                elif guess is not None:
                    guess = high - 1 - attempt // 2
                if guess is None or not low < guess < high:
                    guess = (low + high) // 2 if high <= self._highest else low * 2
            size = max(min(guess, high - 1, self._highest), low + 1)
        return low

    def _guess(self, room: int) -> int | None:
        """Where the line through the two sizes nearest to the limit meets it."""
        near = sorted(self.tried.values(), key=lambda t: abs(t.peak_reserved_bytes - room))[:2]
        if len(near) < 2:
            return max(near[0].size * room // max(near[0].peak_reserved_bytes, 1), 1)
        one, other = near
        rise = other.peak_reserved_bytes - one.peak_reserved_bytes
        if rise == 0:
            return None
        steps = (room - one.peak_reserved_bytes) * (other.size - one.size) // rise
        return max(one.size + steps, 1)


def largest_batch(card: Card, tracer: Tracer, setup: Setup, conf: AllocatorConf) -> tuple[int, int]:
    """The largest batch that runs with the expected context, and the largest that surely fits.

    Returns:
        (largest, largest safe); 0 where not even batch 1 does.
    """

    def stream_at(batch: int) -> Stream:
        return tracer.find(replace(setup, batch=batch), card.traits, ("batch",)).stream

    return Search(card, tracer.replays(conf), stream_at, MAX_BATCH).largest(setup.batch)
