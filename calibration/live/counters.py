"""The counters of this process's GPU: the one place of a live run that asks torch.cuda.

Peaks are kept by the allocator on the host, so reading them waits for nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

from memest.calibration.measurement import Environment, MemoryReading, StepReading

__all__ = ["Counters", "open_counters"]


class Counters(Protocol):
    """What is read of a GPU."""

    gpu: str
    total_bytes: int

    def environment(self) -> Environment:
        """Where this is."""

    def reset(self) -> None:
        """Peaks begin anew."""

    def start(self) -> MemoryReading | None:
        """The device before the context, None where that was over before anybody looked."""

    def now(self, name: str) -> MemoryReading:
        """The device and the allocator now."""

    def step(self, seconds: float) -> StepReading:
        """The peaks up to the end of a step."""

    def reserved_peak(self) -> int:
        """The peak of segments so far, bytes; cheap."""

    def ooms(self) -> int:
        """How often the allocator was out of memory so far."""


class CudaCounters:
    """The counters of torch.cuda's current device, and NVML's reading of the process.

    Args:
        nvml: the module to ask, ``pynvml`` if None.
    """

    def __init__(self, nvml: Any = None) -> None:
        import torch

        from memest.calibration.running.meters import GpuMeter

        began = torch.cuda.is_initialized()
        self._meter = GpuMeter(nvml)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.gpu = str(properties.name)
        self.total_bytes = int(properties.total_memory)
        self._meter.made_context(str(getattr(properties, "uuid", "")))
        self._start = None if began else self._meter.start()

    def environment(self) -> Environment:
        """Where this is."""
        import sys

        from memest.calibration.running.environment import gpu_environment

        return gpu_environment(self._meter, " ".join(sys.argv)[:500])

    def reset(self) -> None:
        """Peaks begin anew."""
        import torch

        torch.cuda.reset_peak_memory_stats()

    def start(self) -> MemoryReading | None:
        """The device before the context."""
        return self._start

    def now(self, name: str) -> MemoryReading:
        """The device and the allocator now."""
        return self._meter.read(name)

    def step(self, seconds: float) -> StepReading:
        """The peaks up to the end of a step."""
        return self._meter.step(seconds)

    def reserved_peak(self) -> int:
        """The peak of segments so far."""
        import torch

        return int(torch.cuda.max_memory_reserved())

    def ooms(self) -> int:
        """How often the allocator was out of memory so far."""
        import torch

        return int(torch.cuda.memory_stats().get("num_ooms", 0))


def open_counters() -> Counters | None:
    """The counters of this process, None on a machine without a CUDA device."""
    import torch

    return CudaCounters() if torch.cuda.is_available() else None
