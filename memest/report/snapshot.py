"""A recording in the terminal: the comparison, the course of memory, holes, other options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memest.replay.inspection import CachePicture, Inspection
from memest.report.terminal import Grid
from memest.units import format_delta, format_size

__all__ = ["course_line", "render_inspections", "render_segments"]

_STEPS = {False: " ▁▂▃▄▅▆▇█", True: " .:-=+*#@"}
_WIDEST = 72


def render_inspections(
    inspections: Sequence[Inspection], *, width: int, ascii_only: bool
) -> RenderableType:
    """Everything that is shown of a recording.

    Args:
        inspections: its devices.
        width: columns there are.
        ascii_only: no character beyond ASCII.
    """
    parts: list[RenderableType] = [_comparisons(inspections)]
    for device in inspections:
        parts += ["", *_device(device, width, ascii_only=ascii_only)]
    return Group(*parts)


def _comparisons(inspections: Sequence[Inspection]) -> Grid:
    head = ("device", "allocations", "differ", "allocated", "reserved", "verdict")
    table = Grid("left", "right", "right", "right", "right", "left", head=head)
    for device in (each.comparison for each in inspections):
        verdict = "identical" if device.has_choices else "nothing was compared"
        if not device.is_exact:
            verdict = device.first_mismatch or "layouts differ"
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


def _device(inspection: Inspection, width: int, *, ascii_only: bool) -> Iterator[RenderableType]:
    name = f"cuda:{inspection.comparison.device}"
    yield Text(f"{name} over its {inspection.comparison.num_events:,} events", style="bold")
    yield _curves(inspection, width, ascii_only=ascii_only)
    yield ""
    yield Text(f"{name}, reserved but not allocated", style="bold")
    yield _pictures([(picture.moment, picture) for picture in inspection.pictures], "at")
    yield ""
    yield Text(f"{name} under other options of the allocator", style="bold")
    yield _options(inspection)
    if inspection.limit_bytes is not None:
        yield Text(
            f"with {format_size(inspection.limit_bytes)} for the allocator, as when memory ran "
            "out; played up to there",
            style="dim",
        )
    if inspection.earlier_bytes:
        yield Text(
            f"{format_size(inspection.earlier_bytes)} were allocated before the recording began: "
            "under each of these options they are laid anew, so compare these rows with each other",
            style="dim",
        )


def _curves(inspection: Inspection, width: int, *, ascii_only: bool) -> Grid:
    peak_bytes = inspection.comparison.peak_reserved_bytes
    cells = max(min(width - 32, _WIDEST), 10)
    table = Grid("left", "left", "right")
    for name, values in (
        ("allocated", [point.allocated_bytes for point in inspection.timeline]),
        ("reserved", [point.reserved_bytes for point in inspection.timeline]),
    ):
        line = course_line(values, peak_bytes, cells, ascii_only=ascii_only)
        table.add_row(f"  {name}", line, f"up to {format_size(max(values))}")
    return table


def course_line(values: Sequence[int], peak_bytes: int, cells: int, *, ascii_only: bool) -> str:
    """A row of columns, each the highest of its stretch.

    Args:
        values: bytes, in order.
        peak_bytes: what the highest column stands for.
        cells: columns there are.
        ascii_only: no character beyond ASCII.
    """
    steps = _STEPS[ascii_only]
    count = min(cells, len(values))
    columns = []
    for cell in range(count):
        begin, end = cell * len(values) // count, (cell + 1) * len(values) // count
        height = max(values[begin:end])
        columns.append(
            steps[-(-height * (len(steps) - 1) // peak_bytes)] if peak_bytes else steps[0]
        )
    return "".join(columns)


def render_segments(pictures: Mapping[int, CachePicture]) -> RenderableType:
    """What is shown of a recording without history: its segments.

    Args:
        pictures: of the end, by device.
    """
    return Group(
        "The recording has no history, so nothing was compared. Its segments, at the end:",
        "",
        _pictures([(f"cuda:{device}", picture) for device, picture in pictures.items()], "device"),
        "",
        Text(
            "for a history: torch.cuda.memory._record_memory_history() before the run", style="dim"
        ),
    )


def _pictures(rows: Sequence[tuple[str, CachePicture]], of: str) -> Grid:
    sizes = ("allocated", "reserved", "releasable", "in holes", "largest free", "free blocks")
    table = Grid("left", *["right"] * 6, head=(f"  {of}", *sizes))
    for name, picture in rows:
        table.add_row(
            f"  {name}",
            format_size(picture.allocated_bytes),
            format_size(picture.reserved_bytes),
            format_size(picture.releasable_bytes),
            format_size(picture.stuck_bytes),
            format_size(picture.largest_free_bytes),
            f"{picture.free_blocks:,}",
        )
    return table


def _options(inspection: Inspection) -> Grid:
    head = ("  options", "allocated", "reserved", "change", "")
    table = Grid("left", "right", "right", "right", "left", head=head)
    base = inspection.options[0].peak_reserved_bytes
    for row in inspection.options:
        outcome = {None: "", True: "the request fits", False: "out of memory"}[row.survives]
        change = (
            "" if row is inspection.options[0] else format_delta(row.peak_reserved_bytes - base)
        )
        table.add_row(
            f"  {row.options}",
            format_size(row.peak_allocated_bytes),
            format_size(row.peak_reserved_bytes),
            change,
            outcome,
        )
    return table
