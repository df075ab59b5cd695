"""Which traces make a family: the fewest that settle every number and bound where it holds.

A family is grown around the point that is asked for. Traces are made at the low and the high corner
of the range, so that a threshold between them shows: it would change the events, or leave some
number without a formula. Batch sizes are primes. Lengths have remainders of all kinds, and where
something depends on those (what is padded has no short formula then), they keep the asked length's
remainder by 128: padding to 8, 32, 64 or 128 adds the same everywhere, and any other period shows.
Traces are added until every number has one shortest formula with a trace to spare: three for the
batch alone, four or five for batch and length.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from memest.errors import MemestError, MissingDependencyError
from memest.events import Trace
from memest.profiles.family import Family, NotAlikeError, Point, alike, unite
from memest.profiles.formula import NoFormulaError

__all__ = [
    "ANY_REMAINDER",
    "LENGTHS",
    "MAX_TRACES",
    "REMAINDERS",
    "Range",
    "grow",
    "range_of",
    "spans",
    "tells_remainders",
]

MAX_TRACES = 8
"""New traces for one family, at most."""
LENGTHS = ("seq_len", "target_len")
ANY_REMAINDER = ("batch", "lora_r")
"""Sizes that nothing is padded by."""
REMAINDERS = 128
"""Lengths are padded to what divides this."""
_MODULI = {"seq_len": REMAINDERS, "target_len": REMAINDERS, "image_size": 32, "audio_ms": 320}
_LONGEST = 4096  # where a model sets no limit; beyond it a further trace extends the family
_SHORTEST = 32
"""Tokens from which on lengths of any remainder are one family."""
_FEWEST = 3
"""Remainders, odd and even ones among them."""
# masks that a model asks for are computed for real: batch x length x length
_MAX_MASK = 1 << 28
_HIGHEST_RANK = 256
_PRIMES = (509, 251, 127, 61, 31, 17, 13, 7)


@dataclass(frozen=True, slots=True)
class Range:
    """Where a size may go.

    Attributes:
        low: least.
        high: greatest.
        modulus: steps between.
        settles: one size at least is to be a multiple of this: what is done to multiples shows.
    """

    low: int
    high: int
    modulus: int
    settles: int = 1

    def inner(self, size: int) -> list[int]:
        """Sizes between the ends, spread, the given one left out.

        Among neighbours those are taken whose remainders are new: what is padded to a multiple of
        a few steps must not look alike everywhere.
        """
        count = (self.high - self.low) // self.modulus
        steps, sizes = [0, count, (size - self.low) // self.modulus], []
        if all(each % self.settles for each in (self.low, self.high, size)):
            middle = (self.low + self.high) // 2
            whole = middle // self.settles * self.settles
            if self.low < whole < self.high:
                sizes.append(whole)
                steps.append((whole - self.low) // self.modulus)
        for share in (1 / 3, 2 / 3, 1 / 2, 1 / 5, 4 / 5):
            aim = round(count * share)
            near = [k for k in range(max(aim - 6, 1), min(aim + 7, count)) if k not in steps]
            if near:
                step = max(near, key=lambda k: (_news(k, steps), -abs(k - aim)))
                steps.append(step)
                sizes.append(self.low + step * self.modulus)
        return sizes


def _news(number: int, steps: Sequence[int]) -> list[bool]:
    """For divisors that matter, most of all first: whether the remainder is one not yet seen."""
    return [number % d not in {k % d for k in steps} for d in (2, 3, 4, 8, 5, 7)]


def range_of(
    axis: str,
    size: int,
    limit: int | None,
    tokens: int,
    thresholds: Iterable[int] = (),
    multiple: int = 1,
    *,
    any_remainder: bool = False,
) -> Range | None:
    """The range of one size around the given one; None where there is only one.

    Args:
        axis: name of the size.
        size: the size asked for.
        limit: the greatest the model takes, None if it names none.
        tokens: of the longest sample that a mask is computed for: a large batch of long ones
            takes its time; 0 where there are no masks.
        thresholds: lengths above which the model is known to do something else (windows): the
            range keeps to one side of them.
        multiple: of which lengths must be (pieces that a sequence is dealt out in).
        any_remainder: lengths of all remainders by 128, not of the given one's alone.
    """
    if axis == "batch":
        high = next((p for p in _PRIMES if p * tokens**2 <= _MAX_MASK), 5)
        # whoever asks for more will ask for more still
        return Range(2, high if size <= high else 2 * size, 1) if size >= 2 else None
    if axis == "lora_r":
        return Range(2, max(size, _HIGHEST_RANK), 1) if size >= 2 else None
    modulus = 1 if any_remainder else math.lcm(_MODULI[axis], multiple)
    low = size % modulus or modulus
    if axis in ("image_size", "audio_ms"):
        low, high = max(low, size - 2 * modulus), size + 3 * modulus
    else:
        if any_remainder:
            low = min(_SHORTEST - 1 + size % 2, size)  # one of the two is even
        elif low < 16 and low < size:
            low += modulus
        high = max(size, _LONGEST)
        # the window's own length may count as either side
        high = min((t - 1 for t in thresholds if size < t <= high), default=high)
        threshold_below = max((t for t in thresholds if t <= size), default=0)
        low += max(0, -(-(threshold_below - low) // modulus)) * modulus
    high = min(high, limit) if limit is not None else high
    high -= (high - size) % modulus
    settles = REMAINDERS if any_remainder else 1
    return Range(low, high, modulus, settles) if high - low >= 2 * modulus else None


def grow(
    base_sizes: Mapping[str, int],
    ranges: Mapping[str, Range],
    known_traces: Mapping[Point, Trace],
    trace_at: Callable[[Mapping[str, int]], Trace],
    *,
    tied: bool,
) -> Family | None:
    """The family around a point, None where there is none.

    Args:
        base_sizes: its sizes.
        ranges: of the sizes that shall vary.
        known_traces: traces that are there already, by point on those axes (that of
            ``base_sizes`` among them).
        trace_at: makes a trace; its errors mean that the model does not go there.
        tied: the target is as long as the source.
    """
    axes = tuple(ranges)
    centre = tuple(base_sizes[axis] for axis in axes)
    centre_trace = known_traces[centre]
    traces = {
        p: t for p, t in known_traces.items() if _inside(p, ranges) and alike(t, centre_trace)
    }
    unlike_points: set[Point] = set()
    fixed_sizes = {
        n: v for n, v in base_sizes.items() if n not in axes and not (tied and n == "target_len")
    }
    moduli = tuple(r.modulus for r in ranges.values())
    any_remainder = any(r.settles > 1 for r in ranges.values())
    num_traced = 0

    def trace_point(point: Point) -> None:
        nonlocal num_traced
        num_traced += 1
        sizes = {**base_sizes, **dict(zip(axes, point, strict=True))}
        if tied:
            sizes["target_len"] = sizes["seq_len"]
        try:
            trace = trace_at(sizes)
        except MissingDependencyError:
            raise  # that says nothing about the model
        except (MemestError, MemoryError, OverflowError):
            unlike_points.add(point)
            return
        if alike(trace, centre_trace):
            traces[point] = trace
        else:
            unlike_points.add(point)

    queue = deque(dict.fromkeys(_points(centre, ranges)))
    # both ends of the range first: a family of neighbours would be asked for more soon
    for end in (queue.popleft(), queue.popleft()):
        for point in (end, *_retreat(centre, end, ranges)):
            if point not in {*traces, *unlike_points} and num_traced < MAX_TRACES:
                trace_point(point)
            if point in traces:
                break
            if any_remainder:
                return None  # on the way back the remainder may be one that goes well by chance
    while True:
        inside = _without(traces, unlike_points, centre)
        # what grows with the sizes passes no threshold between two ends that are alike
        missing = next((end for end in _ends(inside) if end not in inside), None)
        enough = spans(inside, axes) and (not any_remainder or tells_remainders(inside, axes))
        if missing is None and enough:
            try:
                return unite(inside, axes, moduli, fixed_sizes, tied=tied)
            except NoFormulaError as error:
                if not error.open:
                    return None
            except NotAlikeError:
                return None
        while missing is None and queue:
            point = queue.popleft()
            if point not in traces and point not in unlike_points:
                missing = point
        if missing is None or num_traced >= MAX_TRACES:
            return None
        trace_point(missing)


def _ends(points: Iterable[Point]) -> tuple[Point, Point]:
    """The least and the greatest corner of the box around some points."""
    sizes = list(zip(*points, strict=True))
    return tuple(map(min, sizes)), tuple(map(max, sizes))


def _without(
    traces: Mapping[Point, Trace], unlike_points: Iterable[Point], centre: Point
) -> dict[Point, Trace]:
    """The traces on the centre's side of all points at which the model does something else."""
    inside = dict(traces)
    for point in unlike_points:
        lows, highs = _ends(inside)
        if not all(low <= p <= high for low, p, high in zip(lows, point, highs, strict=True)):
            continue
        sides = [
            {
                p: t
                for p, t in inside.items()
                if p[axis] != size and (p[axis] < size) == (mine < size)
            }
            for axis, (size, mine) in enumerate(zip(point, centre, strict=True))
            if size != mine
        ]
        inside = max(sides, key=len)
    return inside


def _inside(point: Point, ranges: Mapping[str, Range]) -> bool:
    return all(
        size >= r.low and (size - r.low) % r.modulus == 0
        for size, r in zip(point, ranges.values(), strict=True)
    )


def spans(traces: Collection[Point], axes: Sequence[str]) -> bool:
    """Three sizes of each axis at least: a number that grows can then not pass for a constant."""
    return len(traces) >= 3 and all(
        len({point[i] for point in traces}) >= 3 for i in range(len(axes))
    )


def tells_remainders(points: Collection[Point], axes: Sequence[str]) -> bool:
    """Whether lengths at these points would show that something depends on their remainder.

    A multiple of all powers of two that sizes are padded to is among them, and an odd one.
    """
    for place, axis in enumerate(axes):
        if axis in LENGTHS:
            rests = {point[place] % REMAINDERS for point in points}
            if len(rests) < _FEWEST or 0 not in rests or not any(rest % 2 for rest in rests):
                return False
    return True


def _points(centre: Point, ranges: Mapping[str, Range]) -> Iterator[Point]:
    """Where to trace, in this order: the corners that matter, then what is between."""
    all_ranges = list(ranges.values())
    lows, highs = tuple(r.low for r in all_ranges), tuple(r.high for r in all_ranges)
    yield lows
    yield highs
    inner = [r.inner(c) or [c] for r, c in zip(all_ranges, centre, strict=True)]
    yield tuple(sizes[0] for sizes in inner)
    yield from product(*zip(lows, highs, strict=True))
    for number in range(1, 3):
        yield tuple(sizes[min(number, len(sizes) - 1)] for sizes in inner)


def _retreat(centre: Point, end: Point, ranges: Mapping[str, Range]) -> Iterator[Point]:
    """Points on the way back from an end that is on the other side of a threshold."""
    for share in (2, 4):
        yield tuple(
            _nearer(c, e, r.modulus, share)
            for c, e, r in zip(centre, end, ranges.values(), strict=True)
        )


def _nearer(centre: int, end: int, modulus: int, share: int) -> int:
    """A point on the way from the end to the centre."""
    steps = (end - centre) // modulus
    return centre + int(steps / share) * modulus
