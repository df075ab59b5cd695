"""``memest replay``: a recorded CUDA memory snapshot through the model of the allocator."""

from __future__ import annotations

import dataclasses
import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memest.cli.console import Output, write_out
from memest.cli.parameters import AsciiFlag, DebugFlag, JsonFlag, NoColorFlag
from memest.errors import ReplayError

if TYPE_CHECKING:
    from rich.table import Table

    from memest.replay.retrace import SnapshotReplay

__all__ = ["replay"]


def _table(devices: tuple[SnapshotReplay, ...]) -> Table:
    from rich.table import Table as RichTable

    from memest.units import format_size

    table = RichTable.grid(padding=(0, 2, 0, 0))
    for side in ("left", "right", "right", "right", "right", "left"):
        table.add_column(justify=side)
    table.add_row(
        "device", "allocations", "differ", "allocated", "reserved", "verdict", style="dim"
    )
    for device in devices:
        verdict = "identical" if device.is_exact else (device.first_mismatch or "layouts differ")
        if device.num_ooms_recorded:
            verdict += f", out of memory {device.num_ooms_recorded} x as recorded"
        table.add_row(
            f"cuda:{device.device}",
            f"{device.num_allocations:,}",
            f"{device.address_mismatches + device.driver_mismatches:,}",
            format_size(device.peak_allocated_bytes),
            format_size(device.peak_reserved_bytes),
            verdict,
        )
    return table


def replay(
    snapshot: Annotated[
        Path,
        typer.Argument(
            metavar="SNAPSHOT",
            help="A file of torch.cuda.memory._dump_snapshot. Read as data, never executed.",
        ),
    ],
    *,
    json: JsonFlag = False,
    no_color: NoColorFlag = False,
    ascii: AsciiFlag = False,  # noqa: A002 - the same options everywhere
    debug: DebugFlag = False,  # noqa: ARG001 - read before parsing
) -> int:
    """Replay a recorded snapshot and compare every address with the recorded one."""
    from memest.replay import replay_snapshot

    devices = replay_snapshot(snapshot)
    if not devices:
        raise ReplayError(
            f"{snapshot} holds no allocator history: record one with "
            "torch.cuda.memory._record_memory_history() before the run."
        )
    if json:
        rows = [dataclasses.asdict(d) | {"is_exact": d.is_exact} for d in devices]
        document = {"schema_version": 1, "snapshot": str(snapshot), "devices": rows}
        write_out(json_module.dumps(document, indent=2) + "\n")
    else:
        Output(color=not no_color, ascii_only=ascii).show(_table(devices))
    return 0 if all(d.is_exact for d in devices) else 1
