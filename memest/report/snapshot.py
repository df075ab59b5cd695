"""A recording in the terminal: the comparison, the course of memory, holes, other options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memest.replay.inspection import Inspection
from memest.units import format_delta, format_size

__all__ = ["render_inspections"]

_STEPS = {False: " ▁▂▃▄▅▆▇█", True: " .:-=+*#@"}
_WIDEST = 72


def render_inspections(
    found: Sequence[Inspection], *, width: int, ascii_only: bool
) -> RenderableType:
    """Everything that is shown of a recording.

    Args:
        found: its devices.
        width: columns there are.
        ascii_only: no character beyond ASCII.
    """
    parts: list[RenderableType] = [_comparisons(found)]
    for device in found:
        parts += ["", *_device(device, width, ascii_only=ascii_only)]
    return Group(*parts)


def _grid(*sides: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for side in sides:
        table.add_column(justify="right" if side == "right" else "left")
    return table


def _comparisons(found: Sequence[Inspection]) -> Table:
    table = _grid("left", "right", "right", "right", "right", "left")
    table.add_row(
        "device", "allocations", "differ", "allocated", "reserved", "verdict", style="dim"
    )
    for device in (each.comparison for each in found):
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


def _device(found: Inspection, width: int, *, ascii_only: bool) -> Iterator[RenderableType]:
    name = f"cuda:{found.comparison.device}"
    yield Text(f"{name} over its {found.comparison.num_events:,} events", style="bold")
    yield _curves(found, width, ascii_only=ascii_only)
    yield ""
    yield Text(f"{name}, reserved but not allocated", style="bold")
    yield _pictures(found)
    yield ""
    yield Text(f"{name} under other options of the allocator", style="bold")
    yield _options(found)
    if found.limit_bytes is not None:
        yield Text(
            f"with {format_size(found.limit_bytes)} for the allocator, as when memory ran out; "
            "played up to there",
            style="dim",
        )
    if found.earlier_bytes:
        yield Text(
            f"{format_size(found.earlier_bytes)} were allocated before the recording began: under "
            "each of these options they are laid anew, so compare these rows with each other",
            style="dim",
        )


def _curves(found: Inspection, width: int, *, ascii_only: bool) -> Table:
    most = found.comparison.peak_reserved_bytes
    cells = max(min(width - 32, _WIDEST), 10)
    table = _grid("left", "left", "right")
    for name, values in (
        ("allocated", [point.allocated_bytes for point in found.timeline]),
        ("reserved", [point.reserved_bytes for point in found.timeline]),
    ):
        line = _line(values, most, cells, _STEPS[ascii_only])
        table.add_row(f"  {name}", line, f"up to {format_size(max(values))}")
    return table


def _line(values: Sequence[int], most: int, cells: int, steps: str) -> str:
    """A row of columns, each the highest of its stretch."""
    count = min(cells, len(values))
    columns = []
    for cell in range(count):
        begin, end = cell * len(values) // count, (cell + 1) * len(values) // count
        height = max(values[begin:end])
        columns.append(steps[-(-height * (len(steps) - 1) // most)] if most else steps[0])
    return "".join(columns)


def _pictures(found: Inspection) -> Table:
    table = _grid("left", *["right"] * 6)
    table.add_row(
        "  at", "allocated", "reserved", "releasable", "in holes", "largest free", "free blocks",
        style="dim",
    )  # fmt: skip
    for picture in found.pictures:
        table.add_row(
            f"  {picture.moment}",
            format_size(picture.allocated_bytes),
            format_size(picture.reserved_bytes),
            format_size(picture.releasable_bytes),
            format_size(picture.stuck_bytes),
            format_size(picture.largest_free_bytes),
            f"{picture.free_blocks:,}",
        )
    return table


def _options(found: Inspection) -> Table:
    table = _grid("left", "right", "right", "right", "left")
    table.add_row("  options", "allocated", "reserved", "change", "", style="dim")
    base = found.options[0].peak_reserved_bytes
    for row in found.options:
        fate = {None: "", True: "the request fits", False: "out of memory"}[row.survives]
        change = "" if row is found.options[0] else format_delta(row.peak_reserved_bytes - base)
        table.add_row(
            f"  {row.options}",
            format_size(row.peak_allocated_bytes),
            format_size(row.peak_reserved_bytes),
            change,
            fate,
        )
    return table
