"""``memest gpus``: the catalogue of GPUs, one of them, or those of this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from memest.cli.console import Output, write_document, write_out
from memest.cli.flags import argument, shows, switch
from memest.errors import ConfigError, UnknownGpuError

if TYPE_CHECKING:
    from memest.catalog.spec import GpuSpec

__all__ = ["gpus"]


def _usable(spec: GpuSpec) -> tuple[int | None, str]:
    from memest.catalog.capacity import usable_bytes

    try:
        return usable_bytes(spec)
    except ConfigError as error:
        return None, str(error)


def _document(specs: Sequence[GpuSpec]) -> dict[str, Any]:
    rows = []
    for spec in specs:
        usable, basis = _usable(spec)
        row = {"slug": spec.slug} | dataclasses.asdict(spec)
        rows.append(row | {"kind": spec.kind, "usable_bytes": usable, "usable_basis": basis})
    return {"schema_version": 1, "gpus": rows}


def _search(query: str) -> list[GpuSpec]:
    """One card by its name, or all whose names hold the words asked for."""
    from memest.catalog.gpus import find_gpu, list_gpus, normalise

    try:
        spec = find_gpu(query)
    except UnknownGpuError:
        search_text = normalise(query)
        gpu_specs = [
            spec
            for spec in list_gpus()
            if search_text
            and any(search_text in normalise(text) for text in (spec.name, *spec.aliases))
        ]
        gpu_specs = gpu_specs or [
            spec for spec in list_gpus() if query.strip().lower() == spec.architecture.lower()
        ]
        if not gpu_specs:
            raise
        return gpu_specs
    size = spec.memory_marketing_gb
    same_size = [other for other in list_gpus() if other.memory_marketing_gb == size]
    return same_size if spec.is_memory_alone and same_size else [spec]


def _capability(spec: GpuSpec) -> str:
    capability = spec.compute_capability
    if isinstance(capability, tuple):
        return ".".join(map(str, capability))
    return capability or "unknown"


def _size(num_bytes: int | None) -> str:
    from memest.units import format_size

    return "unknown" if num_bytes is None else format_size(num_bytes)


def _row(spec: GpuSpec) -> Sequence[str]:
    """A card among others."""
    usable, _ = _usable(spec)
    return spec.slug, _size(usable), spec.architecture, _capability(spec), spec.name


def _facts(spec: GpuSpec) -> list[tuple[str, str]]:
    """A card by itself, fact by fact."""
    usable, basis = _usable(spec)
    threads = spec.max_threads_per_sm
    rows = [
        ("name", spec.name),
        ("names for --gpu", ", ".join(spec.aliases) or spec.name),
        ("usable by PyTorch", f"{_size(usable)}: {basis}"),
        ("total in nvidia-smi", _size(spec.nvml_total_bytes)),
        ("total in torch", _size(spec.torch_total_bytes)),
        ("on the box", f"{spec.memory_marketing_gb} GB" if spec.memory_marketing_gb else "unknown"),
        ("architecture", f"{spec.architecture}, {spec.backend} {_capability(spec)}"),
        ("multiprocessors", f"{spec.sm_count or 'unknown'}"),
        ("threads of each", f"{threads or 'unknown'}"),
        ("announced", f"{spec.launch_year or 'unknown'}"),
        ("confidence", spec.confidence),
    ]
    rows += [("source", source) for source in spec.sources]
    rows += [("note", note) for note in (*spec.notes, spec.match_note) if note]
    return rows


@shows()
def gpus(
    name: Annotated[
        str | None,
        argument("NAME", "A card, or a part of its name."),
    ] = None,
    *,
    output: Output,
    local: Annotated[
        bool,
        switch("--local", "The GPUs of this machine, read from the driver."),
    ] = False,
) -> int:
    """List the GPUs that are known, or describe one."""
    from memest.catalog.gpus import list_gpus
    from memest.catalog.nvml import local_gpus, local_spec

    if local and name is not None:
        raise ConfigError("memest gpus takes a NAME or --local, not both: drop one of them.")
    if local:
        gpu_specs = [local_spec(gpu) for gpu in local_gpus()]
    else:
        gpu_specs = list(list_gpus()) if name is None else _search(name)
    if output.as_json:
        write_document(_document(gpu_specs))
        return 0
    if len(gpu_specs) > 1 and not local:
        head = ("name for --gpu", "usable", "architecture", "capability", "card")
        sides = ("left", "right", "left", "right", "left")
        output.table(map(_row, gpu_specs), head, sides)
        return 0
    for index, spec in enumerate(gpu_specs):
        if index:
            write_out("\n")
        output.table(_facts(spec))
    return 0
