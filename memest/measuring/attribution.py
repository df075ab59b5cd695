"""Where predicted and measured memory differ: tensors, fragmentation, process.

The three peaks are nested: what tensors hold (allocated), what the allocator holds beside it
(reserved), what the process holds beside that (device). So differences of the parts add up to the
difference of the whole, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memest.units import format_size

__all__ = ["Attribution", "MeasuredPeak", "Part", "attribute"]


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
class Part:
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

    parts: tuple[Part, ...]

    @property
    def difference_bytes(self) -> int | None:
        """Of the largest peak that was read: the sum of the parts that are known."""
        known = [d for part in self.parts if (d := part.difference_bytes) is not None]
        return sum(known) if known else None

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
        said = [f"{part.name} {_signed(part.difference_bytes)}" for part in self.parts]
        return f"measured less predicted {_signed(self.difference_bytes)}: {', '.join(said)}"


def attribute(predicted: Any, measured: MeasuredPeak) -> Attribution:
    """The parts of two peaks side by side.

    Args:
        predicted: a :class:`memest.result.Peak`.
        measured: the three readings.
    """
    a, r, d = measured.allocated_bytes, measured.reserved_bytes, measured.device_bytes
    return Attribution(
        parts=(
            Part(name="tensors", predicted_bytes=predicted.allocated_bytes, measured_bytes=a),
            Part(
                name="fragmentation",
                predicted_bytes=predicted.reserved_bytes - predicted.allocated_bytes,
                measured_bytes=None if a is None or r is None else r - a,
            ),
            Part(
                name="process",
                predicted_bytes=predicted.device_bytes - predicted.reserved_bytes,
                measured_bytes=None if r is None or d is None else d - r,
            ),
        )
    )


def _signed(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{'+' if size >= 0 else '-'}{format_size(abs(size))}"
