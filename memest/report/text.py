"""The report on a terminal.

:func:`print_report` writes to a rich console, :func:`render` returns plain text.
"""

from __future__ import annotations

import enum
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memest.report.glyphs import ASCII, UNICODE, Glyphs
from memest.report.layers import biggest, tree, visible
from memest.report.phases import phase_rows
from memest.report.words import (
    batch_sentence,
    format_count,
    interval_text,
    moment_text,
    process_words,
    setup_items,
    verdict_sentence,
)
from memest.result import Estimate, GpuFit, RankPeak, Verdict
from memest.units import format_delta, format_size

__all__ = ["VERDICT_STYLES", "By", "print_report", "render", "wide_enough"]

MAX_WIDTH = 104
NARROW = 78
"""Below this the columns that explain are left out."""
WIDE = 94
"""From here on there is room for remarks beside the peaks."""
BIGGEST = 6
VERDICT_STYLES = {
    Verdict.FITS: "bold green",
    Verdict.TIGHT: "bold yellow",
    Verdict.DOES_NOT_FIT: "bold red",
    Verdict.UNKNOWN: "bold",
}


class By(enum.StrEnum):
    """The one table to show in place of the whole report."""

    CATEGORY = "category"
    LAYER = "layer"
    TIME = "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a section needs to know about where it is written."""

    width: int
    glyphs: Glyphs

    @property
    def narrow(self) -> bool:
        """Whether only the necessary columns have room."""
        return self.width < NARROW


def wide_enough(width: int) -> int:
    """The width a report takes on a terminal of ``width`` columns."""
    return max(40, min(width, MAX_WIDTH))


def render(
    estimate: Estimate,
    *,
    by: By | None = None,
    depth: int | None = None,
    width: int = 80,
    ascii_only: bool = False,
) -> str:
    """The report as plain text.

    Args:
        estimate: what to show.
        by: one table in place of the whole report.
        depth: levels of the tree of modules, for ``by="layer"``.
        width: columns.
        ascii_only: no characters beyond ASCII of our own.

    Returns:
        Lines without blanks at their ends, the last one ended too.
    """
    # no environment: COLUMNS or FORCE_COLOR must not change what str() gives
    out = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, _environ={}
    )
    print_report(estimate, out, by=by, depth=depth, ascii_only=ascii_only)
    assert isinstance(out.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in out.file.getvalue().splitlines())


def print_report(
    estimate: Estimate,
    console: Console,
    *,
    by: By | None = None,
    depth: int | None = None,
    ascii_only: bool = False,
) -> None:
    """Write the report to a console, as :func:`render` does."""
    page = Page(width=wide_enough(console.width), glyphs=ASCII if ascii_only else UNICODE)
    for part in _parts(estimate, page, by, depth):
        console.print(part, width=page.width, highlight=False, markup=False)


def _parts(
    estimate: Estimate, page: Page, by: By | None, depth: int | None
) -> Iterator[RenderableType]:
    yield Text(verdict_sentence(estimate), style=VERDICT_STYLES[estimate.verdict])
    yield _subtitle(estimate, page)
    yield _section("Peaks", _peaks(estimate, page))
    if estimate.ranks and by is None:
        yield _section("GPUs of the pipeline, the fullest first", _ranks(estimate.ranks, page))
    if by is By.LAYER:
        yield _section("Memory by module at the allocated peak", _tree(estimate, page, depth))
        return
    if by is By.TIME:
        yield _section("Highest memory within each phase", _timeline(estimate, page))
        return
    yield _section("Alive at the allocated peak", _breakdown(estimate, page))
    yield Padding(Text(f"Reached {moment_text(estimate)}."), (1, 0, 0, 0))
    if by is By.CATEGORY:
        return
    yield _section("Biggest layers", _biggest(estimate, page))
    if estimate.gpu is not None:
        yield _section("GPU", _gpu(estimate, estimate.gpu, page))
    if estimate.common_gpus:
        title = "On common GPUs" if estimate.gpu is None else "On the other GPUs"
        yield _section(title, _gpus(estimate.common_gpus, page))
    assumed = list(estimate.assumptions)
    if estimate.interval.basis:
        assumed.append(f"range of the device peak: {estimate.interval.basis}")
    if assumed:
        yield _section("Assumed", _list(assumed, page))
    if estimate.notes:
        yield _section("Notes", _list(estimate.notes, page))


def _section(title: str, body: RenderableType) -> RenderableType:
    return Padding(Group(Text(title, style="bold"), Padding(body, (0, 0, 0, 2))), (1, 0, 0, 0))


def _grid(*justify: Any, pad: int = 2) -> Table:
    table = Table.grid(padding=(0, pad, 0, 0))
    for side in justify:
        table.add_column(justify=side, overflow="fold", no_wrap=side == "right")
    return table


def _subtitle(estimate: Estimate, page: Page) -> Text:
    model = estimate.model
    size = f"{format_count(model.parameters)} parameters"
    if model.trainable_parameters != model.parameters:
        size += f", {format_count(model.trainable_parameters)} of them trained"
    items = [model.task, size, *setup_items(estimate.setup, times=page.glyphs.times)]
    # a phrase is not torn apart at the end of a line
    phrases = [item.replace(" ", "\u00a0") for item in items if item]
    lines = [""]
    for phrase in phrases:
        joined = f"{lines[-1]} {page.glyphs.dot} {phrase}" if lines[-1] else phrase
        if len(joined) > page.width and lines[-1]:
            lines.append(phrase)
        else:
            lines[-1] = joined
    return Text("\n".join(lines).replace("\u00a0", " "), style="dim")


def _peaks(estimate: Estimate, page: Page) -> RenderableType:
    peak = estimate.peak
    cached = format_delta(peak.reserved_bytes - peak.allocated_bytes)
    context = format_delta(peak.device_bytes - peak.reserved_bytes)
    rows: tuple[tuple[str, int, str, str], ...] = (
        ("allocated", peak.allocated_bytes, "torch.cuda.max_memory_allocated()", ""),
        (
            "reserved",
            peak.reserved_bytes,
            "torch.cuda.max_memory_reserved()",
            f"{cached} cached or fragmented",
        ),
        (
            "device",
            peak.device_bytes,
            "nvidia-smi, this process",
            f"{context} {process_words(estimate.setup)}",
        ),
    )
    if peak.managed_bytes:
        paged = peak.managed_bytes
        whole = format_size(peak.device_with_managed_bytes)
        rows += (("paged", paged, "managed memory, no counter", f"device {whole} with all of it"),)
    beside = page.width >= WIDE
    table = _grid("left", "right", "left", *(["left"] if beside else []))
    for name, size, meter, why in rows:
        cells = [Text(name), Text(format_size(size), style="bold"), Text(meter, style="cyan")]
        table.add_row(*cells, *([Text(why, style="dim")] if beside else []))
    parts: list[RenderableType] = [table]
    if not beside:
        parts.append(Text("; ".join(f"{row[0]}: {row[3]}" for row in rows[1:]), style="dim"))
    between = Text(f"device range: {interval_text(estimate)}")
    return Group(*parts, between)


def _breakdown(estimate: Estimate, page: Page) -> Table:
    total = sum(row.bytes for row in estimate.breakdown)
    largest = max((row.bytes for row in estimate.breakdown), default=0)
    room = max(6, page.width - (43 if page.narrow else 63))
    table = _grid("left", "right", "right", "left", *([] if page.narrow else ["right"]))

    def add(cells: list[Text], exact: Text) -> None:
        # the exact bytes are there to be added up; a narrow page has no room for them
        table.add_row(*cells, *([] if page.narrow else [exact]))

    for row in estimate.breakdown:
        add(
            [
                Text(row.category.value),
                Text(format_size(row.bytes)),
                Text(_percent(row.bytes, total)),
                Text(page.glyphs.bar(row.bytes, largest, room).ljust(room), style="cyan"),
            ],
            Text(f"{row.bytes:,} B", style="dim"),
        )
    rule, exact = page.glyphs.rule, f"{total:,} B"
    add([Text(rule * 16), Text(rule * 10), Text(rule * 6), Text("")], Text(rule * len(exact)))
    add(
        [
            Text("allocated", style="bold"),
            Text(format_size(total), style="bold"),
            Text(_percent(total, total)),
            Text(""),
        ],
        Text(exact, style="dim"),
    )
    return table


def _percent(part: int, whole: int) -> str:
    if whole <= 0:
        return ""
    ratio = 100 * part / whole
    if part == whole:
        return "100 %"
    return f"{ratio:.1f} %" if ratio >= 0.1 else "<0.1 %"


def _biggest(estimate: Estimate, page: Page) -> RenderableType:
    rows, left_out = biggest(estimate.layers, BIGGEST)
    if not rows:
        return Text("no module holds activations at the peak", style="dim")
    table = _grid("left", "right", "right", "right")
    table.add_row(
        "",
        Text("count", style="dim"),
        Text("activations" if page.narrow else "activations each", style="dim"),
        Text("parameters" if page.narrow else "parameters each", style="dim"),
    )
    for block in rows:
        table.add_row(
            Text(block.name),
            f"{block.count} {page.glyphs.times}" if block.count > 1 else "",
            format_size(block.activation_bytes),
            format_size(block.parameter_bytes),
        )
    if not left_out:
        return table
    rest = f"{page.glyphs.more} and {left_out} more: --by layer shows the tree"
    return Group(table, Text(rest, style="dim"))


def _tree(estimate: Estimate, page: Page, depth: int | None) -> Table:
    root = tree(estimate.layers)
    table = _grid("left", "right", "right", "right", "left")
    room = max(6, page.width - 78)
    head = ("module", "count", "activations", "parameters")
    table.add_row(*(Text(title, style="dim") for title in head))
    largest = max((child.total_bytes for child in root.children), default=0)
    for level, node in visible(root, depth):
        table.add_row(
            Text("  " * level + node.name),
            f"{node.count} {page.glyphs.times}" if node.count > 1 else "",
            format_size(node.activation_bytes),
            format_size(node.parameter_bytes),
            Text(
                "" if page.narrow else page.glyphs.bar(node.total_bytes, largest, room),
                style="cyan",
            ),
        )
    rule = page.glyphs.rule
    table.add_row(rule * 6, "", rule * 10, rule * 10)
    table.add_row(
        Text("all", style="bold"),
        "",
        Text(format_size(root.activation_bytes), style="bold"),
        Text(format_size(root.parameter_bytes), style="bold"),
    )
    return table


def _timeline(estimate: Estimate, page: Page) -> RenderableType:
    table = _grid("right", "right", "left", "right", "right", *(["left"] * (2 - page.narrow)))
    head = ("step", "micro", "phase", "allocated", "reserved")
    table.add_row(*(Text(title, style="dim") for title in head))
    largest = max((point.reserved_bytes for point in estimate.timeline), default=0)
    room = max(4, page.width - 67)
    for row in phase_rows(estimate.timeline, estimate.peak_at):
        inner, outer = page.glyphs.two_part_bar(
            row.allocated_bytes, row.reserved_bytes, largest, room
        )
        bar = Text(inner, style="cyan").append(outer, style="dim cyan")
        style = "bold" if row.is_peak else ""
        table.add_row(
            str(row.step or ""),
            row.micro_text,
            Text(row.phase.value, style=style),
            Text(format_size(row.allocated_bytes), style=style),
            format_size(row.reserved_bytes),
            *([] if page.narrow else [bar]),
            Text(page.glyphs.mark if row.is_peak else "", style="bold"),
        )
    moment = Text(f"Allocated peak reached {moment_text(estimate)}.")
    return Group(table, Padding(moment, (1, 0, 0, 0)))


def _gpu(estimate: Estimate, gpu: GpuFit, page: Page) -> Table:
    table = _grid("left", "left")
    table.add_row("name", Text(gpu.name, style="bold"))
    usable = Text(format_size(gpu.usable_bytes))
    if gpu.basis and not page.narrow:
        usable.append(f" ({gpu.basis})", style="dim")
    table.add_row("usable", usable)
    table.add_row("needed", format_size(gpu.device_bytes))
    headroom = Text(format_delta(gpu.headroom_bytes), style=VERDICT_STYLES[gpu.verdict])
    table.add_row("headroom", headroom)
    largest = batch_sentence(estimate)
    if largest:
        table.add_row("largest batch", Text(largest, style="bold"))
    return table


def _gpus(fits: Iterable[GpuFit], page: Page) -> Table:
    table = _grid("left", "right", "left", "right")
    head = ("", "usable", "verdict", "headroom")
    table.add_row(*(Text(title, style="dim") for title in head))
    for fit in fits:
        name = fit.name.removeprefix("NVIDIA ") if page.narrow else fit.name
        table.add_row(
            Text(name),
            format_size(fit.usable_bytes),
            Text(fit.verdict.value, style=VERDICT_STYLES[fit.verdict]),
            format_delta(fit.headroom_bytes),
        )
    return table


def _ranks(ranks: Iterable[RankPeak], page: Page) -> Table:
    table = _grid("right", "left", "right", "right", "right")
    titles = ("rank", "has", "allocated", "reserved", "device")
    table.add_row(*(Text(title, style="dim") for title in titles))
    for rank in ranks:
        parts = rank.parts.replace("layers ", "") if page.narrow else rank.parts
        sizes = (rank.allocated_bytes, rank.reserved_bytes, rank.device_bytes)
        table.add_row(str(rank.rank), Text(parts), *map(format_size, sizes))
    return table


def _list(items: Iterable[str], page: Page) -> Table:
    table = _grid("left", "left", pad=1)
    for item in items:
        table.add_row(page.glyphs.bullet, Text(item))
    return table
