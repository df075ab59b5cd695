"""How memory goes over a run under watch: a reading a step, few enough to keep."""

from __future__ import annotations

from memest.calibration.live.counters import CudaCounters
from memest.calibration.running.meters import resident_bytes
from memest.report.growth_result import MemoryPoint

__all__ = ["MemoryCurve"]

_MOST = 512
"""Readings that are kept: of twice as many, every second one goes."""


class MemoryCurve:
    """Readings of a run in their order, over all its length."""

    def __init__(self, counters: CudaCounters) -> None:
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
                host_bytes=resident_bytes(),
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
