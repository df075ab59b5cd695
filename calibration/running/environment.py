"""Where and with what a measurement is made."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from memest.calibration.measurement import CPU, Environment
from memest.config.installed import DISTRIBUTION, release

__all__ = ["commit_of", "cpu_environment", "gpu_environment", "remarks"]

_CHECKOUT = Path(__file__).resolve().parents[2]
_ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def alloc_conf() -> str:
    """The allocator's options of this process, by the name that wins."""
    return next((os.environ[name] for name in _ALLOC_CONF if os.environ.get(name)), "")


def commit_of(folder: Path = _CHECKOUT) -> str:
    """The commit of memest's checkout, ``+`` at its end with changes.

    A copy without its history may be told by ``MEMEST_COMMIT``; empty where nothing tells.
    """
    if not (folder / "pyproject.toml").is_file():
        return ""
    try:
        if Path(_git(folder, "rev-parse", "--show-toplevel")) != folder:
            raise OSError("a checkout within another one")  # noqa: TRY301
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("MEMEST_COMMIT", "")
    return f"{commit[:12]}{'+' if changes else ''}"


def _git(folder: Path, *words: str) -> str:
    process = subprocess.run(  # noqa: S603 - fixed words
        ["git", "-C", str(folder), *words],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return process.stdout.strip()


def remarks(*, mig: bool = False) -> list[str]:
    """What is special about this machine and matters for readings of the driver."""
    out = []
    if mig:
        out.append("the board is split (MIG)")
    if "microsoft" in platform.release().lower():
        out.append("Windows subsystem for Linux: the driver names no memory of single processes")
    if Path("/.dockerenv").exists() or os.environ.get("container"):  # noqa: SIM112
        out.append("a container: the driver may number processes as the host does")
    return out


def _software(command: str) -> dict[str, Any]:
    return {
        "torch": release("torch") or "",
        "transformers": release("transformers") or "",
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "memest": release(DISTRIBUTION) or "",
        "commit": commit_of(),
        "command": command,
    }


def cpu_environment(command: str = "") -> Environment:
    """The environment of runs on the CPU."""
    return Environment(gpu=CPU, **_software(command))


def gpu_environment(meter: Any, command: str = "") -> Environment:
    """The environment of runs on this process's CUDA device, which has its context already.

    Args:
        meter: a :class:`memest.calibration.running.meters.GpuMeter`.
        command: the command line of the campaign.
    """
    import torch

    properties = torch.cuda.get_device_properties(0)
    reading, gpu = meter.read("context"), meter.local()
    notes = remarks(mig=bool(gpu is not None and gpu.mig))
    if reading.process_bytes is not None:
        how = "process"
    elif gpu is not None and meter.start().device_used_bytes is not None:
        how = "device delta"
        notes.append("the driver does not name this process: device memory less what was there")
    else:
        how = "none"
        notes.append(f"NVML does not answer: {meter.problem or 'it does not list this device'}")
    return Environment(
        gpu=properties.name,
        total_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        max_threads_per_sm=getattr(properties, "max_threads_per_multi_processor", None),
        driver=gpu.driver if gpu is not None else "",
        cuda=torch.version.cuda or "",
        alloc_conf=alloc_conf(),
        meter=how,
        notes=tuple(notes),
        **_software(command),
    )
