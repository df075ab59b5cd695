"""The allocated peak without its curve, for streams that differ in nothing but sizes.

A stream comes in waves: some frees, then some allocations. What is allocated is most at the end of
one of them, and layers that repeat make waves that repeat: of 20,000 waves of a step of 32 layers
there are 80 patterns, whose sums are found once. Rests that were not split off are added where
their blocks come and go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import neg

__all__ = ["Waves", "waves_of"]


@dataclass(frozen=True, slots=True)
class Waves:
    """The structure of a stream.

    Attributes:
        kinds: of each allocation number, those of a kind being of one size.
        patterns: what waves that are alike do: k >= 0 allocates one of kind k, ``~k`` frees one.
        pattern_of: each wave.
        starts: the first event of each wave, and the event behind the last.
        wave_of: each event, by what it is: -1-v is read from the end. -1 for what never happens.
    """

    kinds: Sequence[int]
    patterns: list[tuple[int, ...]]
    pattern_of: list[int]
    starts: list[int]
    wave_of: list[int]

    def peak(self, rounded: Sequence[int], odd: Mapping[int, int]) -> tuple[int, int, int]:
        """The largest sum, the first event with it, and the sum at the end, in bytes.

        Args:
            rounded: block size of each kind, above 0.
            odd: of the numbers whose block is of another size, that size.
        """
        signed = [*rounded, *map(neg, reversed(rounded))]
        sums = [sum(map(signed.__getitem__, pattern)) for pattern in self.patterns]
        changes = [*map(sums.__getitem__, self.pattern_of), 0]  # the last for what never happens
        for number, size in odd.items():
            rest = size - rounded[self.kinds[number]]
            changes[self.wave_of[number]] += rest
            changes[self.wave_of[~number]] -= rest
        curve = list(accumulate(changes[:-1]))
        peak = max(curve)
        return peak, self.starts[curve.index(peak) + 1] - 1, curve[-1]


def waves_of(events: Sequence[int], kinds: Sequence[int]) -> Waves:
    """The waves of a stream; ``events`` and ``kinds`` are not empty."""
    signed = [*kinds, *(~kind for kind in reversed(kinds))]
    turns = (index for index, (a, b) in enumerate(pairwise(events), 1) if a >= 0 > b)
    starts = [0, *turns, len(events)]
    patterns: dict[tuple[int, ...], int] = {}
    pattern_of = []
    wave_of = [-1] * len(signed)
    for wave, (first, behind) in enumerate(pairwise(starts)):
        own = events[first:behind]
        pattern = tuple(map(signed.__getitem__, own))
        pattern_of.append(patterns.setdefault(pattern, len(patterns)))
        for event in own:
            wave_of[event] = wave
    return Waves(kinds, list(patterns), pattern_of, starts, wave_of)
