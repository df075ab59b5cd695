"""Lengths of samples, and how a collator makes batches of them. Torch-free.

What batches come out of a histogram is computed, not simulated: batches of an epoch are drawn
without replacement, so the longest sample of a batch follows a hypergeometric law.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from functools import cached_property
from itertools import accumulate
from typing import Any

from memest.config.option import option
from memest.errors import ConfigError, not_legal

__all__ = ["Batching", "Lengths", "Padding"]

_BINS = 256
"""Lengths are rounded up to so many values where sums of them are counted: an upper bound."""

_CERTAINTY = 10**18
"""The chance of what is certain, where chances are counted in whole numbers."""

_GROUP = 40
"""Decimal digits that hold the product of two chances, summed over all of a distribution."""

_LONG_CONTEXT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


class Padding(enum.StrEnum):
    """What a collator fills up: transformers' names."""

    LONGEST = "longest"
    MAX_LENGTH = "max_length"


@dataclass(frozen=True)
class Lengths:
    """How many samples have which length.

    Attributes:
        counts: (length in tokens, number of samples), ascending.

    Raises:
        ConfigError: no samples, or a length or number below 1.
    """

    counts: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.counts:
            raise ConfigError("--lengths has no samples: write one length a line.")
        for length, count in self.counts:
            if length < 1 or count < 1:
                raise ConfigError(
                    f"--lengths has {count} samples of {length} tokens: both must be 1 or more."
                )

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Lengths:
        """From the lengths of all samples."""
        return cls(tuple(sorted(Counter(lengths).items())))

    @cached_property
    def samples(self) -> int:
        """How many there are."""
        return sum(count for _, count in self.counts)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest."""
        return self.counts[-1][0]

    @cached_property
    def mean(self) -> float:
        """Tokens of a sample on average."""
        return sum(length * count for length, count in self.counts) / self.samples

    @cached_property
    def _up_to(self) -> tuple[list[int], list[int]]:
        return [n for n, _ in self.counts], list(accumulate(c for _, c in self.counts))

    def at_most(self, length: int) -> int:
        """How many samples are no longer."""
        values, totals = self._up_to
        place = bisect_right(values, length)
        return totals[place - 1] if place else 0

    def cut(self, length: int | None) -> Lengths:
        """The same truncated to a greatest length."""
        if length is None or self.longest <= length:
            return self
        counts: Counter[int] = Counter()
        for value, count in self.counts:
            counts[min(value, length)] += count
        return Lengths(tuple(sorted(counts.items())))

    def sum_of_longest(self, number: int) -> int:
        """Tokens of so many samples, the longest there are; beyond all of them, of all."""
        total = 0
        for length, count in reversed(self.counts):
            samples = min(count, number)
            total += samples * length
            number -= samples
            if not number:
                break
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How samples become batches.

    Attributes:
        lengths: of the samples, before truncation.
        max_length: to which they are cut, None = not at all.
        flat: samples are laid end to end without padding (padding-free): a batch is one row.

    Raises:
        ConfigError: values that no collator takes.
    """

    lengths: Lengths
    max_length: int | None = None
    padding: Padding = option(
        Padding.LONGEST, "To what rows are filled up: longest (of the batch) or max_length.", "KIND"
    )
    multiple_of: int | None = option(
        None, "The padded length is rounded up to a multiple of it.", name="pad_to_multiple_of"
    )
    flat: bool = False
    group_by_length: bool = option(
        False, "The Trainer's sampler that puts samples of like length together, the longest first."
    )
    seed: int = option(42, "Seed of the order in which lengths are drawn.", name="data_seed")
    steps: int = option(
        12,
        "Optimizer steps that are played with lengths drawn from the file, the largest batch among "
        "them; 0 plays the largest batch alone.",
        name="length_steps",
    )

    def __post_init__(self) -> None:
        text = str(self.padding).strip().lower().replace("-", "_")
        text = {"true": "longest"}.get(text, text)
        if text not in list(Padding):
            raise not_legal(f"--padding {self.padding!r}", text, list(Padding))
        object.__setattr__(self, "padding", Padding(text))
        if self.padding is Padding.MAX_LENGTH and self.max_length is None:
            raise ConfigError("--padding max_length needs a length: add --max-length 512.")
        for name, flag in (("multiple_of", "--pad-to-multiple-of"), ("max_length", "--max-length")):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value} is out of range: it must be 1 or more.")
        if not 0 <= self.steps <= 200:
            raise ConfigError(f"--length-steps {self.steps} is out of range: 0 to 200.")

    @property
    def cut(self) -> Lengths:
        """The lengths after truncation."""
        return self.lengths.cut(self.max_length)

    def padded_length(self, longest: int) -> int:
        """Tokens of every row of a batch whose longest sample has so many."""
        if self.padding is Padding.MAX_LENGTH and self.max_length is not None:
            longest = self.max_length
        return -(-longest // self.multiple_of) * self.multiple_of if self.multiple_of else longest

    def worst(self, batch: int) -> int:
        """Tokens of a row of the largest batch there can be; laid flat, the mean of its samples.

        The mean is rounded up: the batch then has up to ``batch`` - 1 tokens more than it can have.
        """
        if not self.flat:
            return self.padded_length(self.cut.longest)
        batch = min(batch, self.cut.samples)
        return -(-self.cut.sum_of_longest(batch) // batch)

    def has_padding(self, batch: int) -> bool:
        """Whether the largest batch has rows that are filled up, so that its mask matters."""
        if self.flat:
            return False
        longest = self.cut.longest
        if self.padded_length(longest) > longest:
            return True
        return batch > 1 and self.cut.counts[-1][1] < batch

    def batches(self, batch: int) -> int:
        """Batches of an epoch on one GPU, the last one perhaps smaller."""
        return -(-self.lengths.samples // batch)

    # -- chances

    def chance_above(self, batch: int, tokens: int, steps: int) -> float:
        """The chance that one of the first ``steps`` batches of an epoch is padded to more.

        Exact: so many batches are ``steps * batch`` samples drawn without replacement. In a whole
        epoch it is 0 or 1, because every sample is seen.
        """
        cut = self.cut
        reach = max((n for n, _ in cut.counts if self.padded_length(n) <= tokens), default=0)
        samples = min(steps * batch, cut.samples)
        return 1 - _chance_of_all(cut.at_most(reach), cut.samples, samples)

    def mean_padded_length(self, batch: int) -> float:
        """Tokens that batches are padded to, on average. Exact."""
        cut, batch = self.cut, min(batch, self.cut.samples)
        before, total = 0.0, 0.0
        for length, _ in cut.counts:
            until = _chance_of_all(cut.at_most(length), cut.samples, batch)
            total += (until - before) * self.padded_length(length)
            before = until
        return total

    def flat_at_most(self, batch: int, share: float) -> int:
        """Tokens that no batch laid flat exceeds in an epoch but with a chance of ``share``.

        An upper bound twice over: lengths are rounded up to a grid, and chances of batches are
        added up (Boole's inequality); drawing with replacement stands for drawing without, which
        spreads sums less (Hoeffding 1963, theorem 4).
        """
        cut = self.cut
        step = max(1, -(-cut.longest // _BINS))
        sample_distribution = [0] * (-(-cut.longest // step) + 1)
        for length, count in cut.counts:
            sample_distribution[-(-length // step)] += -(-count * _CERTAINTY // cut.samples)
        distribution = [_CERTAINTY]
        for bit in f"{batch:b}":
            distribution = _convolve(distribution, distribution)
            if bit == "1":
                distribution = _convolve(distribution, sample_distribution)
        limit, above = share / self.batches(batch) * _CERTAINTY, 0
        for place in range(len(distribution) - 1, -1, -1):
            above += distribution[place]
            if above > limit:
                return min(place * step, cut.sum_of_longest(batch))
        return 0

    # -- one order

    def draw(self, batch: int, steps: int) -> list[int]:
        """Tokens of a row of the batches of some steps, in an order drawn with the seed.

        Laid flat, the mean of the batch's samples, rounded up. The largest batch comes last,
        where it finds what the others left, or first where batches are grouped by length.
        """
        source = random.Random(self.seed)  # noqa: S311 - an order, no secret
        cut = self.cut
        values = [n for n, _ in cut.counts]
        weights = [c for _, c in cut.counts]
        batch = min(batch, cut.samples)
        out = []
        for _ in range(max(steps - 1, 0)):
            rows = source.choices(values, weights, k=batch)
            out.append(-(-sum(rows) // batch) if self.flat else self.padded_length(max(rows)))
        worst = self.worst(batch)
        return [worst, *out] if self.group_by_length else [*out, worst]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the histogram by what matters of it."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        cut = self.cut
        out["padding"] = self.padding.value
        out["lengths"] = {
            "samples": cut.samples,
            "longest": cut.longest,
            "mean": round(cut.mean, 1),
        }
        return out


def _chance_of_all(good: int, of: int, number: int) -> float:
    """``C(good, number) / C(of, number)``: the chance that all of a draw are good."""
    if number > good:
        return 0.0
    if good == of:
        return 1.0
    log = math.lgamma
    return math.exp(log(good + 1) - log(good - number + 1) - log(of + 1) + log(of - number + 1))


def _convolve(a: list[int], b: list[int]) -> list[int]:
    """The distribution of a sum, from those of its two terms.

    Chances are parts of ``_CERTAINTY``, rounded up.
    Both are written as one decimal number each, a chance in every group of digits, and multiplied:
    a group of the product is an entry of the convolution, and ``decimal`` multiplies long numbers
    in next to linear time.
    """
    product = _LONG_CONTEXT.multiply(_as_number(a), _as_number(b))
    size = len(a) + len(b) - 1
    digits = f"{product:f}".zfill(size * _GROUP)
    groups = (digits[at : at + _GROUP] for at in range(0, len(digits), _GROUP))
    return [-(-int(group) // _CERTAINTY) for group in groups]


def _as_number(distribution: list[int]) -> Decimal:
    return Decimal("".join(f"{chance:0{_GROUP}d}" for chance in distribution))
