"""Sizes tried on one GPU, for :func:`memest.max_batch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from memest.config.setup import Setup
from memest.estimation.gpu_target import TargetGpu
from memest.estimation.kernel_notes import bf16_notes
from memest.estimation.notes import paged_notes, run_notes
from memest.estimation.peaks import peaks_of
from memest.estimation.profiler import Profiler
from memest.estimation.run import Run
from memest.estimation.verdict import LargestSizeSearch, SizeTrial, verdict_for
from memest.estimation.whole_run import resolve_run
from memest.profiles.known_profiles import each_size_alone
from memest.replay.conf import parse_alloc_conf
from memest.report.max_batch_result import CurvePoint, SizeAxis

__all__ = ["SizeTrials", "with_size"]

_NEAR = 32
"""Sizes next to the largest that are looked at, at most."""


def with_size(setup: Setup, of: SizeAxis, size: int) -> Setup:
    """A setup with another size."""
    change: dict[str, Any] = {of.field: size}
    return replace(setup, **change)


class SizeTrials:
    """One GPU on which sizes are tried, and what became of them.

    Args:
        profiler: of the model.
        request: the setup whose size is tried.
        of: the size.
        step: lengths that are multiples of it share their traces; of batches and images multiples
            alone are looked at.
        target: the GPU.
        smallest: size that can be asked for.
    """

    def __init__(
        self,
        profiler: Profiler,
        request: Setup,
        of: SizeAxis,
        step: int,
        target: TargetGpu,
        smallest: int = 1,
    ) -> None:
        self._profiler = profiler
        self._request = request
        self._of = of
        self._step = step
        self._apart = 1 if of is SizeAxis.SEQ_LEN else step
        self._target = target
        self._smallest = smallest
        self._replays = profiler.replays(parse_alloc_conf(request.alloc_conf))
        self._sizes: set[int] = set()
        self._fine_search = LargestSizeSearch(target, self._replays, self._run_at, 1)

    def _run_at(self, size: int) -> Run:
        self._sizes.add(size)
        request = with_size(self._request, self._of, size)
        in_steps = self._of is SizeAxis.SEQ_LEN and size % self._step == 0
        vary = (self._of.field,) if self._of is SizeAxis.BATCH or in_steps else None
        with self._target.naming_itself():
            return resolve_run(self._profiler, request, self._target.traits, vary)

    def coarse_search(self, highest: int) -> LargestSizeSearch:
        """A search over multiples of the step."""
        step = self._step
        lowest = -(-self._smallest // step)
        if step == 1:
            self._fine_search = LargestSizeSearch(
                self._target, self._replays, self._run_at, highest, lowest
            )
            return self._fine_search
        return LargestSizeSearch(
            self._target, self._replays, lambda k: self._run_at(k * step), highest, lowest
        )

    @property
    def tried_sizes(self) -> frozenset[int]:
        """The sizes that were looked at so far."""
        return frozenset(self._sizes)

    def at(self, size: int) -> SizeTrial:
        """What becomes of a size."""
        return self._fine_search.at(size)

    def climb(self, size: int, holds: Callable[[SizeTrial], bool], highest: int) -> int:
        """The largest size near by for which something holds."""
        while size:
            count = min(self._num_neighbours(size), (highest - size) // self._apart)
            larger = next((n for n in self._above(size, count) if holds(self.at(n))), size)
            if larger == size:
                break
            size = larger
        return size

    def look_below(self, largest: int, safe: int) -> None:
        """Look whether the sizes just below the largest run too."""
        count = min(self._num_neighbours(largest), (largest - safe) // self._apart) - 1
        for size in self._above(largest - (count + 1) * self._apart, count):
            self.at(size)

    def _num_neighbours(self, size: int) -> int:
        """How many sizes next to one are looked at: memory wavers by a share of itself."""
        return min(max(size // self._apart // _NEAR, 1), _NEAR)

    def _above(self, size: int, count: int) -> range:
        """So many sizes above one, the largest first."""
        return range(size + count * self._apart, size, -self._apart)

    def failed_below(self, largest: int) -> tuple[int, ...]:
        """The sizes looked at that do not run although a larger one does."""
        return tuple(sorted(n for n in self._sizes if n < largest and not self.at(n).runs))

    def multiple(self, number: int, highest: int, holds: Callable[[SizeTrial], bool]) -> int:
        """The largest multiple of a number for which something holds, 0 if none."""
        number = math.lcm(number, self._apart)
        sizes = range(highest // number * number, 0, -number)
        return next((size for size in sizes if holds(self.at(size))), 0)

    def point(self, size: int) -> CurvePoint:
        """The memory that a size takes, and the verdict that an estimate gives."""
        run = self._run_at(size)
        stream = run.stream
        result = self._replays.of(stream)
        peaks = peaks_of(self._target, run, stream, result)
        fit = verdict_for(self._target, run.setup, peaks, stream, result, self._replays.conf)
        return CurvePoint(
            size=size,
            allocated_bytes=peaks.allocated_bytes,
            reserved_bytes=peaks.reserved_bytes,
            device_bytes=fit.device_bytes,
            headroom_bytes=fit.headroom_bytes,
            verdict=fit.verdict,
        )

    def notes(self, size: int) -> list[str]:
        """What there is to know of the run of a size."""
        run = self._run_at(size)
        stream = run.stream
        peaks = peaks_of(self._target, run, stream, self._replays.of(stream))
        unpriced = "; ".join(run.setup.unpriced)
        words = [f"not priced, so nothing is safe: {unpriced}"] if unpriced else []
        if run.setup.overpriced:
            overpriced = "; ".join(run.setup.overpriced)
            words.append(f"the run may take less than is priced, so more may fit: {overpriced}")
        words += [*run_notes(run), *bf16_notes(run, self._target), *peaks.notes]
        return [*words, *paged_notes(self._target, peaks)]

    def curve(
        self, tried_sizes: Iterable[int], largest: int, safe: int, highest: int
    ) -> tuple[CurvePoint, ...]:
        """Memory over sizes: those that were tried, both answers, and some evenly spread.

        Where every size takes a trace of its own, the ones that were tried are enough of a curve.
        """
        top = min(largest + max(largest // 8, self._step), highest)
        sizes = {n for n in tried_sizes if n <= top}
        sizes |= {n for n in (safe, largest) if n > 0}
        if self._of is SizeAxis.BATCH and largest < highest:
            sizes.add(max(largest + self._apart, self._smallest))
        if self._of is not SizeAxis.IMAGE_SIZE and not each_size_alone(self._request):
            sizes |= set(_even_sizes(top, self._step))
        return tuple(self.point(size) for size in sorted(sizes) if size >= self._smallest)


def _even_sizes(top: int, step: int) -> range:
    """Five to ten round sizes up to ``top``."""
    stride = step
    while stride * 10 < top:
        stride *= 2
    return range(stride, top + 1, stride)
