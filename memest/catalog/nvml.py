"""Read the GPUs of this machine, without torch and without touching them.

NVML comes with the driver and makes no CUDA context, so reading costs no device memory. A live
reading always wins over the catalogue; the catalogue adds what NVML does not say (SM count,
torch's own total).
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any

from memest.catalog.gpus import find_gpu
from memest.catalog.spec import GpuSpec
from memest.errors import ConfigError, DeviceError, MissingDependencyError, UnknownGpuError
from memest.units import MIB, format_size

__all__ = ["GpuProcess", "LocalGpu", "local_gpus", "local_spec", "resolve_gpu"]

_SAME_TOTAL_BYTES = 2 * MIB
"""NVML totals this close are the same board in the same state (the driver's page is 2 MiB)."""
_RESERVED_LEFT_OUT_BEFORE = 510
"""Older drivers leave the reserved part out of the total, so theirs is torch's figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process on a GPU; ``used_bytes`` is None where the driver does not say."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGpu:
    """One GPU of this machine, as read now.

    Attributes:
        index: NVML's index; CUDA may number differently (``CUDA_DEVICE_ORDER``).
        name: what the driver prints.
        uuid: the driver's identifier.
        total_bytes: memory of the board, with what the driver keeps.
        used_bytes: in use by all processes.
        free_bytes: not in use.
        reserved_bytes: kept by driver and firmware, None where the driver does not say.
        driver: version of the driver.
        compute_capability: (major, minor), None where the driver does not say.
        mig: whether the board is split (MIG); then the total is not what one process gets.
        processes: compute processes on it.
    """

    index: int
    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None
    driver: str
    compute_capability: tuple[int, int] | None
    mig: bool
    processes: tuple[GpuProcess, ...]


def _load() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise MissingDependencyError(
            "reading the GPUs of this machine needs the package nvidia-ml-py: "
            "pip install 'memest-gpu[gpu]', or name a card, for example --gpu rtx-4090"
        ) from error


def _text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _memory(nvml: Any, handle: Any) -> tuple[int, int, int, int | None]:
    """(total, used, free, reserved); version 1 of the call counts reserved as used."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
    except nvml.NVMLError:
        # drivers before 510 know version 1 only
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return memory.total, memory.used, memory.free, getattr(memory, "reserved", None)


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return ()
    return tuple(GpuProcess(pid=item.pid, used_bytes=item.usedGpuMemory) for item in processes)


def _capability(nvml: Any, handle: Any) -> tuple[int, int] | None:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except nvml.NVMLError:
        return None
    return int(major), int(minor)


def _mig(nvml: Any, handle: Any) -> bool:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except (nvml.NVMLError, AttributeError):
        return False
    return bool(current)


def _gpu(nvml: Any, index: int, driver: str) -> LocalGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        total, used, free, reserved = _memory(nvml, handle)
    except nvml.NVMLError as error:
        name = _text(nvml.nvmlDeviceGetName(handle))
        raise DeviceError(
            f"the driver names no memory total for GPU {index} ({name}): {error}. Boards that "
            "share memory with the CPU do not report one; give it, for example --gpu-memory 64GiB"
        ) from error
    return LocalGpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        total_bytes=int(total),
        used_bytes=int(used),
        free_bytes=int(free),
        reserved_bytes=None if reserved is None else int(reserved),
        driver=driver,
        compute_capability=_capability(nvml, handle),
        mig=_mig(nvml, handle),
        processes=_processes(nvml, handle),
    )


def local_gpus(*, nvml: Any = None) -> tuple[LocalGpu, ...]:
    """Read every GPU of this machine.

    Args:
        nvml: the module to ask, ``pynvml`` if None.

    Returns:
        One entry per board, possibly none.

    Raises:
        MissingDependencyError: without the package nvidia-ml-py.
        DeviceError: without a working driver, or when it refuses.
    """
    nvml = _load() if nvml is None else nvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise DeviceError(
            f"no NVIDIA driver answers on this machine ({error}): name the card instead, for "
            "example --gpu rtx-4090, or give its memory, --gpu-memory 24GiB"
        ) from error
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        return tuple(_gpu(nvml, index, driver) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as error:
        raise DeviceError(
            f"the NVIDIA driver does not answer ({error}): try nvidia-smi, or name the card with "
            "--gpu"
        ) from error
    finally:
        nvml.nvmlShutdown()


def _driver_major(driver: str) -> int:
    head = driver.split(".", maxsplit=1)[0]
    return int(head) if head.isdigit() else _RESERVED_LEFT_OUT_BEFORE


def local_spec(gpu: LocalGpu) -> GpuSpec:
    """Describe a live GPU: what was read wins, the catalogue fills in the rest.

    torch's own total is kept from the catalogue only if the board's total is the catalogue's too
    (same ECC state, no slice of a shared board).
    """
    try:
        entry = find_gpu(gpu.name, total_bytes=gpu.total_bytes)
    except UnknownGpuError:
        entry = GpuSpec(name=gpu.name)
    notes = [*entry.notes, f"read from GPU {gpu.index} of this machine, driver {gpu.driver}"]
    torch_total, precision = entry.torch_total_bytes, entry.torch_total_precision
    if _driver_major(gpu.driver) < _RESERVED_LEFT_OUT_BEFORE:
        torch_total, precision = gpu.total_bytes, None
    elif abs((entry.nvml_total_bytes or 0) - gpu.total_bytes) > _SAME_TOTAL_BYTES:
        torch_total, precision = None, None
        if entry.nvml_total_bytes is not None:
            notes.append(
                f"the catalogue has {format_size(entry.nvml_total_bytes)} for this name, the "
                f"driver reports {format_size(gpu.total_bytes)}; the driver is believed"
            )
    if gpu.mig:
        notes.append("the board is split (MIG): give the memory of your slice with --gpu-memory")
    return dataclasses.replace(
        entry,
        compute_capability=gpu.compute_capability or entry.compute_capability,
        nvml_total_bytes=gpu.total_bytes,
        torch_total_bytes=torch_total,
        torch_total_precision=precision,
        sources=(*entry.sources, f"nvml: live reading, driver {gpu.driver}"),
        confidence="live",
        notes=tuple(notes),
        match_note="",
    )


def resolve_gpu(name: str, *, total_bytes: int | None = None, nvml: Any = None) -> GpuSpec:
    """Answer ``--gpu``: ``local`` or ``local:1`` reads this machine, the rest is looked up.

    Args:
        name: ``local``, ``local:INDEX`` or a name for :func:`find_gpu`.
        total_bytes: memory in bytes that picks between cards of one name.
        nvml: the module to ask, ``pynvml`` if None.

    Raises:
        UnknownGpuError: for a name that is not in the catalogue.
        ConfigError: for an index that is no number.
        DeviceError: if this machine has no such GPU or no driver.
        MissingDependencyError: without the package nvidia-ml-py.
    """
    head, _, index = name.strip().lower().partition(":")
    if head != "local":
        return find_gpu(name, total_bytes=total_bytes)
    if index and not index.isdigit():
        raise ConfigError(f"--gpu {name}: after local: comes a number, for example local:0")
    gpus = local_gpus(nvml=nvml)
    number = int(index or 0)
    if number >= len(gpus):
        listing = ", ".join(f"local:{gpu.index} ({gpu.name})" for gpu in gpus) or "none"
        raise DeviceError(f"--gpu {name}: this machine has no such NVIDIA GPU; it has {listing}")
    return local_spec(gpus[number])
