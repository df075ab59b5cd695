"""Which traces make a family: the fewest that settle every number and bound where it holds.

A family is grown around the point that is asked for. Traces are made at the low and the high corner
of the range, so that a threshold between them shows: it would change the events, or leave some
number without a formula. Batch sizes are primes, lengths keep the asked length's remainder by 128:
then padding to 8, 32, 64 or 128 adds the same everywhere, and any other period shows. Traces are
added until every number has one shortest formula with a trace to spare: three for the batch alone,
four or five for batch and length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from memest.errors import MemestError
from memest.events import Trace
from memest.steps.family import Family, NotAlikeError, Point, alike, unite
from memest.steps.formula import NoFormulaError

__all__ = ["MAX_TRACES", "Range", "grow", "range_of"]

MAX_TRACES = 8
"""New traces for one family, at most."""
_MODULI = {"seq_len": 128, "target_len": 128, "image_size": 32, "audio_ms": 320}
_LONGEST = 8192  # where a model sets no limit; beyond it a further trace extends the family
_MAX_TOKENS = 1 << 20
_PRIMES = (509, 251, 127, 61, 31, 17, 7)


@dataclass(frozen=True, slots=True)
class Range:
    """Where a size may go.

    Attributes:
        low: least.
        high: greatest.
        modulus: steps between.
    """

    low: int
    high: int
    modulus: int

    def inner(self, asked: int) -> list[int]:
        """Sizes between the ends, spread, the asked one left out."""
        count = (self.high - self.low) // self.modulus
        found = []
        for share in (1 / 3, 2 / 3, 1 / 2, 1 / 5, 4 / 5):
            size = self.low + max(round(count * share), 1) * self.modulus
            if self.low < size < self.high and size != asked and size not in found:
                found.append(size)
        return found


def range_of(axis: str, asked: int, limit: int | None, tokens: int) -> Range | None:
    """The range of one size around the one asked for; None where there is only one.

    Args:
        axis: name of the size.
        asked: the size itself.
        limit: the greatest the model takes, None if it names none.
        tokens: of a sample: a large batch of long samples helps nobody.
    """
    if axis == "batch":
        high = next((p for p in _PRIMES if p * tokens <= _MAX_TOKENS), 5)
        return Range(2, max(high, asked), 1) if asked >= 2 else None
    modulus = _MODULI[axis]
    low = asked % modulus or modulus
    if axis in ("image_size", "audio_ms"):
        low, high = max(low, asked - 2 * modulus), asked + 3 * modulus
    else:
        if low < 16 and low < asked:
            low += modulus
        high = limit if limit is not None else max(asked, _LONGEST)
    high = min(high, limit) if limit is not None else high
    high -= (high - asked) % modulus
    return Range(low, high, modulus) if high - low >= 2 * modulus else None


def grow(
    asked: Mapping[str, int],
    ranges: Mapping[str, Range],
    known: Mapping[Point, Trace],
    trace_at: Callable[[Mapping[str, int]], Trace],
    *,
    tied: bool,
) -> Family | None:
    """The family around a point, None where there is none.

    Args:
        asked: its sizes.
        ranges: of the sizes that shall vary.
        known: traces that are there already, by point on those axes (the asked one among them).
        trace_at: makes a trace; its errors mean that the model does not go there.
        tied: the target is as long as the source.
    """
    axes = tuple(ranges)
    centre = tuple(asked[axis] for axis in axes)
    traces = {p: t for p, t in known.items() if _inside(p, ranges) and alike(t, known[centre])}
    fixed = {n: v for n, v in asked.items() if n not in axes and not (tied and n == "target_len")}
    moduli = tuple(r.modulus for r in ranges.values())
    made = 0
    for number, corner in enumerate((*_points(centre, ranges), None)):
        if corner in traces:
            continue
        # both ends of the range first: a family of neighbours would be asked for more soon
        if number >= 2 and _spans(traces, axes):
            try:
                return unite(traces, axes, moduli, fixed, tied=tied)
            except NoFormulaError as error:
                if not error.open:
                    return None
            except NotAlikeError:
                return None
        if corner is None or made >= MAX_TRACES:
            return None
        made += 1
        sizes = {**asked, **dict(zip(axes, corner, strict=True))}
        if tied:
            sizes["target_len"] = sizes["seq_len"]
        try:
            trace = trace_at(sizes)
        except (MemestError, MemoryError, OverflowError):
            continue
        if alike(trace, known[centre]):
            traces[corner] = trace
    return None


def _inside(point: Point, ranges: Mapping[str, Range]) -> bool:
    return all(
        size >= r.low and (size - r.low) % r.modulus == 0
        for size, r in zip(point, ranges.values(), strict=True)
    )


def _spans(traces: Mapping[Point, Trace], axes: tuple[str, ...]) -> bool:
    """Three sizes of each axis at least: a number that grows can then not pass for a constant."""
    return len(traces) >= 3 and all(
        len({point[i] for point in traces}) >= 3 for i in range(len(axes))
    )


def _points(centre: Point, ranges: Mapping[str, Range]) -> Iterator[Point]:
    """Where to trace, in this order: the corners that matter, then what is between.

    Where a corner is on the other side of a threshold, nearer ones follow.
    """
    every = list(ranges.values())
    lows, highs = tuple(r.low for r in every), tuple(r.high for r in every)
    yield lows
    yield highs
    inner = [r.inner(c) or [c] for r, c in zip(every, centre, strict=True)]
    yield tuple(sizes[0] for sizes in inner)
    yield from product(*zip(lows, highs, strict=True))
    for number in range(1, 3):
        yield tuple(sizes[min(number, len(sizes) - 1)] for sizes in inner)
    for share in (2, 4):
        yield tuple(
            _nearer(c, r.high, r.modulus, share) for c, r in zip(centre, every, strict=True)
        )
        yield tuple(_nearer(c, r.low, r.modulus, share) for c, r in zip(centre, every, strict=True))


def _nearer(centre: int, end: int, modulus: int, share: int) -> int:
    """A point on the way from the end to the centre."""
    steps = (end - centre) // modulus
    return centre + int(steps / share) * modulus
