"""How memory goes over a run under watch: a reading a step, few enough to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from memest.report.growth_result import MemoryPoint

__all__ = ["MemoryCurve", "host_bytes"]

_MOST = 512
"""Readings that are kept: of twice as many, every second one goes."""
_STATM = Path("/proc/self/statm")


class NowCounters(Protocol):
    """What is asked of a GPU's counters between two steps."""

    def now(self) -> tuple[int, int, int]:
        """Allocated, its peak so far, and reserved, bytes; cheap."""
        ...


class MemoryCurve:
    """Readings of a run in their order, over all its length."""

    def __init__(self, counters: NowCounters) -> None:
        self._counters = counters
        self._points: list[MemoryPoint] = []
        self._stride = 1
        self._seen = 0

    @property
    def points(self) -> tuple[MemoryPoint, ...]:
        """What was read, in order."""
        return tuple(self._points)

    def read(self, step: int, *, evaluation: bool = False) -> None:
        """Read once, where it is this reading's turn.

        Args:
            step: number of the optimizer step that is over, 0 before the first.
            evaluation: between two batches of an evaluation.
        """
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return
        allocated, peak, reserved = self._counters.now()
        self._points.append(
            MemoryPoint(
                step=step,
                allocated_bytes=allocated,
                peak_allocated_bytes=peak,
                reserved_bytes=reserved,
                host_bytes=host_bytes(),
                evaluation=evaluation,
            )
        )
        if len(self._points) >= 2 * _MOST:
            del self._points[1::2]
            self._stride *= 2

    def logs(self) -> dict[str, int]:
        """The last reading, bytes by name."""
        if not self._points:
            return {}
        last = self._points[-1]
        sizes = {
            "allocated": last.allocated_bytes,
            "reserved": last.reserved_bytes,
            "host": last.host_bytes,
        }
        return {f"memest/{name}_bytes": size for name, size in sizes.items() if size is not None}


def host_bytes() -> int | None:
    """Resident memory of this process, bytes; None where the system does not tell by /proc."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    import resource

    return pages * resource.getpagesize()
