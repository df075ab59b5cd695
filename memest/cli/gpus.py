"""``memest gpus``: the catalogue of GPUs, one of them, or those of this machine."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from memest.cli.console import Output, write_out
from memest.cli.parameters import AsciiFlag, DebugFlag, JsonFlag, NoColorFlag
from memest.errors import ConfigError, UnknownGpuError

if TYPE_CHECKING:
    from rich.table import Table

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
        return [find_gpu(query)]
    except UnknownGpuError:
        wanted = normalise(query)
        gpu_specs = [
            spec
            for spec in list_gpus()
            if wanted and any(wanted in normalise(text) for text in (spec.name, *spec.aliases))
        ]
        gpu_specs = gpu_specs or [
            spec for spec in list_gpus() if query.strip().lower() == spec.architecture.lower()
        ]
        if not gpu_specs:
            raise
        return gpu_specs


def _capability(spec: GpuSpec) -> str:
    capability = spec.compute_capability
    if isinstance(capability, tuple):
        return ".".join(map(str, capability))
    return capability or "unknown"


def _size(num_bytes: int | None) -> str:
    from memest.units import format_size

    return "unknown" if num_bytes is None else format_size(num_bytes)


def _list(specs: Sequence[GpuSpec]) -> Table:
    from rich.table import Table as RichTable

    table = RichTable.grid(padding=(0, 2, 0, 0))
    for side in ("left", "right", "left", "right", "left"):
        table.add_column(justify=side, no_wrap=side == "right")
    table.add_row("name for --gpu", "usable", "architecture", "capability", "card", style="dim")
    for spec in specs:
        usable, _ = _usable(spec)
        table.add_row(spec.slug, _size(usable), spec.architecture, _capability(spec), spec.name)
    return table


def _describe(spec: GpuSpec) -> Table:
    from rich.table import Table as RichTable

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
    table = RichTable.grid(padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(name, value)
    return table


def gpus(
    name: Annotated[
        Optional[str],  # noqa: UP045 - read at run time by every Typer we allow
        typer.Argument(metavar="NAME", help="A card, or a part of its name.", show_default=False),
    ] = None,
    *,
    local: Annotated[
        bool,
        typer.Option("--local", metavar="", help="The GPUs of this machine, read from the driver."),
    ] = False,
    json: JsonFlag = False,
    no_color: NoColorFlag = False,
    ascii: AsciiFlag = False,  # noqa: A002, ARG001 - the same options everywhere
    debug: DebugFlag = False,  # noqa: ARG001 - read before parsing
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
    if json:
        write_out(f"{json_module.dumps(_document(gpu_specs), indent=2)}\n")
        return 0
    output = Output(color=not no_color)
    single = len(gpu_specs) == 1 or local
    for index, part in enumerate(map(_describe, gpu_specs) if single else [_list(gpu_specs)]):
        if index:
            write_out("\n")
        output.show(part)
    return 0
