"""Sizes tried on one GPU, for :func:`memest.max_batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from memest.cards import Card
from memest.estimate_notes import paged_notes, run_notes
from memest.fit import Search, Tried, verdict_for
from memest.limits import CurvePoint, Of
from memest.needs import needs_of
from memest.replay.conf import parse_alloc_conf
from memest.setup import Setup
from memest.shelf import asks_for_gpu
from memest.tracing import Found, Tracer
from memest.whole_run import whole_run

__all__ = ["Ground", "with_size"]

_NEAR = 32
"""Sizes next to the largest that are looked at, at most."""


def with_size(setup: Setup, of: Of, size: int) -> Setup:
    """A setup with another size."""
    changed: dict[str, Any] = {of.field: size}
    return replace(setup, **changed)


class Ground:
    """One GPU on which sizes are tried, and what became of them.

    Args:
        tracer: of the model.
        asked: the setup whose size is tried.
        of: the size.
        step: lengths that are multiples of it share their traces.
        card: the GPU.
    """

    def __init__(self, tracer: Tracer, asked: Setup, of: Of, step: int, card: Card) -> None:
        self._tracer = tracer
        self._asked = asked
        self._of = of
        self._step = step
        self._card = card
        self._replays = tracer.replays(parse_alloc_conf(asked.alloc_conf))
        self._sizes: set[int] = set()
        self._fine = Search(card, self._replays, self._found_at, 1)

    def _found_at(self, size: int) -> Found:
        self._sizes.add(size)
        asked = with_size(self._asked, self._of, size)
        if self._of is Of.BATCH or (self._of is Of.SEQ_LEN and size % self._step == 0):
            return whole_run(self._tracer, asked, self._card.traits, (self._of.field,))
        return whole_run(self._tracer, asked, self._card.traits, once=True)

    def coarse(self, highest: int) -> Search:
        """A search over multiples of the step."""
        step = self._step
        if step == 1:
            self._fine = Search(self._card, self._replays, self._found_at, highest)
            return self._fine
        return Search(self._card, self._replays, lambda k: self._found_at(k * step), highest)

    @property
    def tried(self) -> frozenset[int]:
        """The sizes that were looked at so far."""
        return frozenset(self._sizes)

    def at(self, size: int) -> Tried:
        """What becomes of a size."""
        return self._fine.at(size)

    def climb(self, size: int, holds: Callable[[Tried], bool], highest: int) -> int:
        """The largest size near by for which something holds."""
        while size:
            top = min(size + _near(size), highest)
            found = next((n for n in range(top, size, -1) if holds(self.at(n))), size)
            if found == size:
                break
            size = found
        return size

    def look_below(self, largest: int, safe: int) -> None:
        """Look whether the sizes just below the largest run too."""
        for size in range(max(safe, largest - _near(largest)) + 1, largest):
            self.at(size)

    def failed_below(self, largest: int) -> tuple[int, ...]:
        """The sizes looked at that do not run although a larger one does."""
        return tuple(sorted(n for n in self._sizes if n < largest and not self.at(n).runs))

    def multiple(self, number: int, highest: int, holds: Callable[[Tried], bool]) -> int:
        """The largest multiple of a number for which something holds, 0 if none."""
        sizes = range(highest // number * number, 0, -number)
        return next((size for size in sizes if holds(self.at(size))), 0)

    def point(self, size: int) -> CurvePoint:
        """The memory that a size takes, and the verdict that an estimate gives."""
        found = self._found_at(size)
        stream = found.stream
        result = self._replays.of(stream)
        needs = needs_of(self._card, found, stream, result)
        fit = verdict_for(self._card, needs, stream, result, self._replays.conf)
        return CurvePoint(
            size=size,
            allocated_bytes=needs.allocated_bytes,
            reserved_bytes=needs.reserved_bytes,
            device_bytes=fit.device_bytes,
            headroom_bytes=fit.headroom_bytes,
            verdict=fit.verdict,
        )

    def notes(self, size: int) -> list[str]:
        """What there is to know of the run of a size."""
        found = self._found_at(size)
        stream = found.stream
        needs = needs_of(self._card, found, stream, self._replays.of(stream))
        return [*run_notes(found), *paged_notes(self._card, needs)]

    def curve(
        self, tried: Iterable[int], largest: int, safe: int, highest: int
    ) -> tuple[CurvePoint, ...]:
        """Memory over sizes: those that were tried, both answers, and some evenly spread.

        Where every size takes a trace of its own, the ones that were tried are enough of a curve.
        """
        top = min(largest + max(largest // 8, self._step), highest)
        sizes = {n for n in tried if n <= top}
        sizes |= {n for n in (safe, largest) if n > 0}
        if self._of is Of.BATCH and largest < highest:
            sizes.add(largest + 1)
        if self._of is not Of.IMAGE_SIZE and not asks_for_gpu(self._asked):
            sizes |= set(_spread(top, self._step))
        return tuple(self.point(size) for size in sorted(sizes))


def _near(size: int) -> int:
    """How many sizes next to one are looked at: memory wavers by a share of itself."""
    return min(max(size // _NEAR, 1), _NEAR)


def _spread(top: int, step: int) -> range:
    """Five to ten round sizes up to ``top``."""
    stride = step
    while stride * 10 < top:
        stride *= 2
    return range(stride, top + 1, stride)
