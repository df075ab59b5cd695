"""Reading a GPU's memory: the allocator's own counters, and what the driver says of the process.

NVML names the bytes of each process, where it may: not on Windows (WDDM) and WSL, not across the
border of a container that hides processes, not always on a slice of a split board. Then the whole
device is read, and what was there before the context is taken off; a measurement says which.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from memest.calibration.measurement import MemoryReading, StepReading
from memest.catalog.nvml import GpuProcess, LocalGpu, local_gpus
from memest.errors import MemestError

__all__ = ["GpuMeter", "peaks_of", "resident_bytes", "visible_device"]


def visible_device(device: str, environment: dict[str, str]) -> str:
    """The value of ``CUDA_VISIBLE_DEVICES`` that leaves one device to a process.

    Args:
        device: ``cuda`` or ``cuda:1``, counted among those that are visible now.
        environment: of the process.

    Raises:
        ValueError: there is no such device among those named.
    """
    index = int(device.partition(":")[2] or 0)
    listing = environment.get("CUDA_VISIBLE_DEVICES")
    if listing is None:
        return str(index)
    names = [name.strip() for name in listing.split(",") if name.strip()]
    if index >= len(names):
        raise ValueError(f"CUDA_VISIBLE_DEVICES={listing!r} leaves no device {index}")
    return names[index]


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def own_process(processes: tuple[GpuProcess, ...], before: frozenset[int]) -> GpuProcess | None:
    """This process among those on the device.

    In a container the driver may number processes as the host does: then it is the one that came
    since the context was made, if there is only one.
    """
    mine = [p for p in processes if p.pid == os.getpid()]
    if not mine:
        mine = [p for p in processes if p.pid not in before]
    return mine[0] if len(mine) == 1 else None


class GpuMeter:
    """Reads one CUDA device of this process.

    Args:
        nvml: the module to ask, ``pynvml`` if None.

    Attributes:
        problem: why the driver says nothing, empty if it does.
    """

    def __init__(self, nvml: Any = None) -> None:
        self.problem = ""
        self._nvml = nvml
        self._uuid = ""  # before the context it is not known which device it is
        self._before: frozenset[int] = frozenset()
        self._first = self._gpus()

    def note_context(self, uuid: str) -> None:
        """The context is there: from now on it is known which device is meant.

        Args:
            uuid: as torch gives it.
        """
        self._uuid = _bare(uuid)
        first = self._find(self._first)
        if first is not None:
            self._before = frozenset(p.pid for p in first.processes)

    def _gpus(self) -> tuple[LocalGpu, ...]:
        """All devices, none where NVML does not answer."""
        try:
            return local_gpus(nvml=self._nvml)
        except MemestError as error:
            self.problem = str(error)
            return ()

    def _find(self, gpus: tuple[LocalGpu, ...]) -> LocalGpu | None:
        """This device among all; a slice of a split board is found by its board alone."""
        for gpu in gpus:
            if self._uuid and _bare(gpu.uuid) == self._uuid:
                return gpu
        return gpus[0] if len(gpus) == 1 else None

    def local(self) -> LocalGpu | None:
        """The device as the driver sees it now."""
        return self._find(self._gpus())

    def start(self) -> MemoryReading:
        """The device before the context; call after :meth:`note_context`."""
        first = self._find(self._first)
        if first is None:
            return MemoryReading(name="start")
        return MemoryReading(
            name="start",
            device_used_bytes=first.used_bytes,
            process_bytes=0,
            other_processes=len(first.processes),
            other_bytes=_sum(first.processes),
        )

    def read(self, name: str) -> MemoryReading:
        """The device now, and the allocator's counters."""
        import torch

        gpu = self.local()
        now: dict[str, Any] = {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
        }
        if gpu is None:
            free, total = torch.cuda.mem_get_info()
            return MemoryReading(name=name, device_used_bytes=total - free, **now)
        mine = own_process(gpu.processes, self._before)
        others = tuple(p for p in gpu.processes if p is not mine)
        return MemoryReading(
            name=name,
            device_used_bytes=gpu.used_bytes,
            process_bytes=None if mine is None else mine.used_bytes,
            other_processes=len(others) if mine is not None else None,
            other_bytes=_sum(others) if mine is not None else None,
            **now,
        )

    def step(self, seconds: float) -> StepReading:
        """The end of a step."""
        import torch

        reading = self.read("step")
        return StepReading(
            seconds=round(seconds, 6),
            process_bytes=reading.process_bytes,
            device_used_bytes=reading.device_used_bytes,
            reserved_now_bytes=reading.reserved_bytes,
            **peaks_of(torch.cuda.memory_stats()),
        )


def resident_bytes() -> int | None:
    """Memory of this process on the host; None where the system does not tell by ``/proc``."""
    with suppress(OSError, IndexError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None


def peaks_of(stats: dict[str, Any]) -> dict[str, int | None]:
    """Peaks and counts out of ``torch.cuda.memory_stats``."""
    out = {
        f"{name}_bytes": stats.get(f"{name}_bytes.all.peak")
        for name in ("requested", "allocated", "active", "reserved")
    }
    return out | {"retries": stats.get("num_alloc_retries"), "ooms": stats.get("num_ooms")}


def _sum(processes: tuple[GpuProcess, ...]) -> int | None:
    sizes = [p.used_bytes for p in processes]
    known_sizes = [size for size in sizes if size is not None]
    return None if len(known_sizes) < len(sizes) else sum(known_sizes)
