"""``memest env``: what to paste into a bug report. Imports none of the packages it lists."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from memest.cli.console import Output, write_document
from memest.cli.flags import shows
from memest.config.installed import DISTRIBUTION, VERIFIED, build_of, unverified_note
from memest.files.folders import data_folder

__all__ = ["env", "environment"]

PACKAGES = (
    DISTRIBUTION,
    "torch",
    "transformers",
    "torchvision",
    "torchaudio",
    "timm",
    "accelerate",
    "peft",
    "bitsandbytes",
    "trl",
    "huggingface_hub",
    "safetensors",
    "numpy",
    "nvidia-ml-py",
    "typer",
    "rich",
)
VARIABLES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MODULE_LOADING",
)
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Shown as set or not, never with their value."""


def _version(package: str) -> str | None:
    """The release that is installed, with what it was built for where the package says that."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version(package)
    except PackageNotFoundError:
        return None
    build = "" if "+" in number else build_of(package)
    return f"{number}+{build}" if build else number


def _gpus() -> tuple[list[dict[str, Any]], str]:
    """The GPUs of this machine, and why there are none."""
    from memest.catalog.nvml import local_gpus
    from memest.errors import MemestError

    try:
        gpus = local_gpus()
    except MemestError as error:
        return [], str(error)
    return [
        {
            "index": gpu.index,
            "name": gpu.name,
            "total_bytes": gpu.total_bytes,
            "used_bytes": gpu.used_bytes,
            "driver": gpu.driver,
            "mig": gpu.mig,
        }
        for gpu in gpus
    ], "" if gpus else "the driver sees no GPU"


def _cache() -> dict[str, Any]:
    """The folder of step profiles, and what it holds."""
    from memest.profiles.cache import Store, cache_folder

    folder = cache_folder()
    if folder is None:
        return {"path": None, "entries": 0, "bytes": 0}
    entries = Store(folder, writable=False).entries()
    return {
        "path": str(folder),
        "entries": len(entries),
        "bytes": sum(entry.bytes for entry in entries),
    }


def environment() -> dict[str, Any]:
    """The facts as plain data."""
    import memest

    gpus, no_gpu_reason = _gpus()
    own_variables = sorted(name for name in os.environ if name.startswith("MEMEST_"))
    return {
        "schema_version": 1,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "releases": {"verified": VERIFIED, "note": unverified_note()},
        "gpus": gpus,
        "gpus_note": no_gpu_reason,
        "paths": {
            "python": sys.executable,
            "memest": str(Path(memest.__file__).parent),
            "data": str(data_folder()),
        },
        "cache": _cache(),
        "variables": {
            name: os.environ[name] for name in (*VARIABLES, *own_variables) if name in os.environ
        }
        | {name: "(set)" for name in SECRETS if os.environ.get(name)},
    }


@shows()
def env(*, output: Output) -> int:
    """Versions, GPUs and paths, for a bug report. What works here: memest selftest."""
    facts = environment()
    if output.as_json:
        write_document(facts)
        return 0
    from memest.units import format_size

    rows: list[tuple[str, str]] = [("python", facts["python"]), ("platform", facts["platform"])]
    rows += [(name, version or "not installed") for name, version in facts["packages"].items()]
    for gpu in facts["gpus"]:
        sizes = f"{format_size(gpu['total_bytes'])}, {format_size(gpu['used_bytes'])} in use"
        driver_text = f"driver {gpu['driver']}{', MIG' if gpu['mig'] else ''}"
        rows.append((f"GPU {gpu['index']}", f"{gpu['name']}, {sizes}, {driver_text}"))
    if facts["gpus_note"]:
        rows.append(("GPU", facts["gpus_note"]))
    rows += [(f"path of {name}", path) for name, path in facts["paths"].items()]
    cache_facts = facts["cache"]
    if cache_facts["path"] is None:
        rows.append(("path of cache", "none: this user has no home folder that is known"))
    else:
        rows.append(
            ("path of cache", f"{cache_facts['path']} ({format_size(cache_facts['bytes'])})")
        )
    rows += sorted(facts["variables"].items())
    if facts["releases"]["note"]:
        rows.append(("releases", facts["releases"]["note"]))
    output.table(rows)
    return 0
