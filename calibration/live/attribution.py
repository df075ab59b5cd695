"""Where predicted and measured memory differ: tensors, fragmentation, process.

The three peaks are nested: what tensors hold (allocated), what the allocator holds beside it
(reserved), what the process holds beside that (device). So differences of the parts add up to the
difference of the whole, exactly. Where the allocator's own history of the first steps is kept, the
difference of the tensors is told by category, too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from memest.calibration.recording.conformance import compare
from memest.calibration.recording.history import History
from memest.events import CATEGORY_ORDER
from memest.profiles.stream import Stream
from memest.units import format_size

__all__ = [
    "NOT_PREDICTED",
    "REST",
    "AttributedPart",
    "Attribution",
    "MeasuredPeak",
    "attribute",
    "difference_by_category",
]

NOT_PREDICTED = "not predicted"
"""Allocations that only the run has: nothing says what they are for but their line of code."""
REST = "rest"
"""What no single allocation explains: order, rounding, peaks of other steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeak:
    """The three peaks as they were read, bytes; None where nothing tells.

    Attributes:
        allocated_bytes: ``torch.cuda.max_memory_allocated()``.
        reserved_bytes: ``torch.cuda.max_memory_reserved()``.
        device_bytes: of this process on the device, by the driver.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributedPart:
    """One part of a peak, predicted and measured.

    Attributes:
        name: ``tensors`` (allocated), ``fragmentation`` (reserved less allocated) or ``process``
            (device less reserved: context, kernels, libraries).
        predicted_bytes: before the run.
        measured_bytes: in it; None where it was not read.
    """

    name: str
    predicted_bytes: int
    measured_bytes: int | None

    @property
    def difference_bytes(self) -> int | None:
        """Measured less predicted; above 0: more was needed."""
        return None if self.measured_bytes is None else self.measured_bytes - self.predicted_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The difference between two peaks and its parts, which add up to it."""

    parts: tuple[AttributedPart, ...]

    @property
    def difference_bytes(self) -> int | None:
        """Of the largest peak that was read: the sum of the parts that are known."""
        known_differences = [d for part in self.parts if (d := part.difference_bytes) is not None]
        return sum(known_differences) if known_differences else None

    @property
    def complete(self) -> bool:
        """Whether the device was read too."""
        return all(part.measured_bytes is not None for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: for each part predicted, measured and the difference, bytes."""
        return {
            part.name: {
                "predicted_bytes": part.predicted_bytes,
                "measured_bytes": part.measured_bytes,
                "difference_bytes": part.difference_bytes,
            }
            for part in self.parts
        }

    def __str__(self) -> str:
        differences = [f"{part.name} {_signed_text(part.difference_bytes)}" for part in self.parts]
        return (
            f"measured less predicted {_signed_text(self.difference_bytes)}: "
            f"{', '.join(differences)}"
        )


def attribute(predicted: Any, measured: MeasuredPeak) -> Attribution:
    """The parts of two peaks side by side.

    Args:
        predicted: a :class:`memest.report.result.Peak`.
        measured: the three readings.
    """
    a, r, d = measured.allocated_bytes, measured.reserved_bytes, measured.device_bytes
    return Attribution(
        parts=(
            AttributedPart(
                name="tensors", predicted_bytes=predicted.allocated_bytes, measured_bytes=a
            ),
            AttributedPart(
                name="fragmentation",
                predicted_bytes=predicted.reserved_bytes - predicted.allocated_bytes,
                measured_bytes=None if a is None or r is None else r - a,
            ),
            AttributedPart(
                name="process",
                predicted_bytes=predicted.device_bytes - predicted.reserved_bytes,
                measured_bytes=None if r is None or d is None else d - r,
            ),
        )
    )


def difference_by_category(
    history: History, stream: Stream, difference_bytes: int
) -> dict[str, int]:
    """Share the difference of the allocated peaks out over what allocations are for.

    Args:
        history: of the run from its start, as far as it was kept.
        stream: that was predicted for it.
        difference_bytes: measured less predicted, of the allocated peak.

    Returns:
        Measured less predicted by category, bytes; the values add up to ``difference_bytes``.
    """
    sizes: Counter[str] = Counter()
    for one in compare(history, stream).differences:
        name = NOT_PREDICTED
        if one.predicted_event >= 0:
            event = stream.events[one.predicted_event]
            number = event if event >= 0 else ~event
            name = CATEGORY_ORDER[stream.categories[number]].value
        sizes[name] -= one.peak_bytes
    sizes[REST] = difference_bytes - sizes.total()
    return {name: size for name, size in sizes.items() if size}


def _signed_text(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{'+' if size >= 0 else '-'}{format_size(abs(size))}"
