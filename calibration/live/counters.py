"""The counters of this process's GPU: the one place of a live run that asks torch.cuda.

Peaks are kept by the allocator on the host, so reading them waits for nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from memest.calibration.measurement import Environment
from memest.calibration.running.environment import gpu_environment
from memest.calibration.running.meters import GpuMeter

__all__ = ["CudaCounters", "open_counters"]


class CudaCounters(GpuMeter):
    """The counters of torch.cuda's current device, and NVML's reading of the process.

    Args:
        nvml: the module to ask, ``pynvml`` if None.

    Attributes:
        gpu: name of the device.
        total_bytes: of it, as torch sees it.
        first: the device before the context, None where that was over before anybody looked.
    """

    def __init__(self, nvml: Any = None) -> None:
        import torch

        began = torch.cuda.is_initialized()
        super().__init__(nvml)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.gpu = str(properties.name)
        self.total_bytes = int(properties.total_memory)
        self.note_context(str(getattr(properties, "uuid", "")))
        self.first = None if began else self.start()

    def environment(self) -> Environment:
        """Where this is."""
        return gpu_environment(self, " ".join(sys.argv)[:500])

    def reset(self) -> None:
        """Peaks begin anew."""
        import torch

        torch.cuda.reset_peak_memory_stats()

    def reserved_peak(self) -> int:
        """The peak of segments so far, bytes; cheap."""
        import torch

        return int(torch.cuda.max_memory_reserved())

    def now(self) -> tuple[int, int, int]:
        """Allocated, its peak so far, and reserved, bytes; cheap."""
        import torch

        stats = torch.cuda.memory_stats()
        return (
            int(torch.cuda.memory_allocated()),
            int(stats.get("allocated_bytes.all.peak", 0)),
            int(torch.cuda.memory_reserved()),
        )

    def ooms(self) -> int:
        """How often the allocator was out of memory so far."""
        import torch

        return int(torch.cuda.memory_stats().get("num_ooms", 0))


def open_counters() -> CudaCounters | None:
    """The counters of this process, None on a machine without a CUDA device."""
    import torch

    return CudaCounters() if torch.cuda.is_available() else None
