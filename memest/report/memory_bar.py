"""One bar of memory against a card: what a picture of an answer shows at a glance."""

from __future__ import annotations

from dataclasses import dataclass

from memest.report.parts import parts_of
from memest.report.result import Estimate, Verdict
from memest.units import format_size

__all__ = ["VERDICT_WORDS", "BarSegment", "MemoryBar", "memory_bar"]

_SMALL = 0.03
"""Parts below this share of the bar are shown together."""
OTHER = "other"
_OTHER_COLOUR = "#9aa4af"
VERDICT_WORDS = {
    Verdict.FITS: "Fits",
    Verdict.RELEASES_CACHE: "Fits by releasing cache",
    Verdict.TIGHT: "Tight",
    Verdict.CANNOT_SAY: "Cannot say",
    Verdict.DOES_NOT_FIT: "Does not fit",
    Verdict.UNKNOWN: "No GPU named",
}
"""Verdicts as a headline."""
_DARK, _LIGHT = "#111111", "#ffffff"


@dataclass(frozen=True, slots=True)
class BarSegment:
    """A part of the bar.

    Attributes:
        name: of the part of the device peak, or ``other``.
        bytes: that it takes.
        colour: of the segment, as ``#rrggbb``.
        parts: what it is made of: names with sizes, more than one of ``other``.
    """

    name: str
    bytes: int
    colour: str
    parts: tuple[tuple[str, int], ...]

    @property
    def ink(self) -> str:
        """The colour in which text on it is read best: black or white."""
        return max((_DARK, _LIGHT), key=lambda ink: _contrast(ink, self.colour))

    @property
    def words(self) -> str:
        """Name and size; of ``other`` all of its parts."""
        return ", ".join(f"{name} {format_size(size)}" for name, size in self.parts)


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """An answer as one bar.

    Attributes:
        segments: that add up to the device peak, from left to right.
        low_bytes: lower end of the range of the device peak.
        high_bytes: upper end of it.
        usable_bytes: what PyTorch can have on the card; None where none was named.
        whole_bytes: what the whole width stands for: the card, or the run where that is larger.
    """

    segments: tuple[BarSegment, ...]
    low_bytes: int
    high_bytes: int
    usable_bytes: int | None
    whole_bytes: int

    @property
    def taken_bytes(self) -> int:
        """The device peak."""
        return sum(segment.bytes for segment in self.segments)

    @property
    def free_bytes(self) -> int | None:
        """What is left of the card, negative where it is too small; None without one."""
        return None if self.usable_bytes is None else self.usable_bytes - self.taken_bytes

    def share(self, size: int) -> float:
        """Bytes as a share of the whole width."""
        return size / self.whole_bytes


def memory_bar(estimate: Estimate, least_bytes: int = 0) -> MemoryBar:
    """The bar of an estimate, against the first card that was named.

    Args:
        estimate: the answer.
        least_bytes: what the whole width stands for at least, to compare bars.
    """
    gpu, interval = estimate.gpu, estimate.interval
    usable = None if gpu is None else gpu.usable_bytes
    whole = max(usable or 0, interval.high_bytes, least_bytes, 1)
    parts = [part for part in parts_of(estimate) if part.bytes > 0]
    large = [part for part in parts if part.bytes >= _SMALL * whole]
    segments = [
        BarSegment(part.name, part.bytes, part.colour, ((part.name, part.bytes),)) for part in large
    ]
    small = sorted((part for part in parts if part not in large), key=lambda part: -part.bytes)
    if small:
        together = tuple((part.name, part.bytes) for part in small)
        size = sum(part.bytes for part in small)
        segments.append(BarSegment(OTHER, size, _OTHER_COLOUR, together))
    return MemoryBar(tuple(segments), interval.low_bytes, interval.high_bytes, usable, whole)


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    """The contrast of two colours as WCAG 2 defines it: 1 to 21."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)
