"""The report of an estimate on a terminal."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from memest.report.layers import biggest, phase_rows, tree, visible
from memest.report.life_result import RunLife
from memest.report.result import Estimate, GpuFit, RankPeak
from memest.report.suggestions import Suggestions
from memest.report.tables import suggestion_parts
from memest.report.terminal import HOST_STYLES, VERDICT_STYLES, Grid, Page, bullets, section
from memest.report.words import (
    batch_sentence,
    format_count,
    moment_text,
    peak_ranges_text,
    process_words,
    setup_items,
    verdict_sentence,
    why_sentence,
)
from memest.units import format_delta, format_size

__all__ = ["TableChoice", "estimate_parts"]

BIGGEST = 6


class TableChoice(enum.StrEnum):
    """The one table to show in place of the whole report."""

    CATEGORY = "category"
    LAYER = "layer"
    TIME = "time"


def estimate_parts(
    estimate: Estimate,
    page: Page,
    *,
    by: TableChoice | None = None,
    depth: int | None = None,
    tips: Callable[[], Suggestions | None] | None = None,
    explain: bool = False,
) -> Iterator[RenderableType]:
    """What the report is made of.

    Args:
        estimate: what to show.
        page: where it is written.
        by: one table in place of the whole report.
        depth: levels of the tree of modules, for ``by="layer"``.
        tips: looks for what to change, when the verdict is out already.
        explain: tell all assumptions, not only those that are this question's.
    """
    yield Text(verdict_sentence(estimate), style=VERDICT_STYLES[estimate.verdict])
    if (life := estimate.life) is not None and life.budget_bytes is not None:
        yield Text(life.sentence, style=HOST_STYLES[life.verdict])
    yield _subtitle(estimate, page)
    if by is None:
        yield Padding(Text(why_sentence(estimate)), (1, 0, 0, 0))
        if tips is not None and (found := tips()) is not None:
            yield Padding(Group(*suggestion_parts(found, page)), (1, 0, 0, 0))
    yield section("Peaks", _peaks(estimate, page))
    if estimate.ranks and by is None:
        yield section("GPUs of the pipeline, the fullest first", _ranks(estimate.ranks, page))
    if by is TableChoice.LAYER:
        yield section("Memory by module at the allocated peak", _tree(estimate, page, depth))
        return
    if by is TableChoice.TIME:
        yield section("Highest memory within each phase", _timeline(estimate, page))
        return
    yield section("Alive at the allocated peak", _breakdown(estimate, page))
    if by is TableChoice.CATEGORY:
        yield Padding(Text(f"Reached {moment_text(estimate)}."), (1, 0, 0, 0))
        return
    yield section("Biggest layers", _biggest(estimate, page))
    if estimate.gpu is not None:
        yield section("GPU", _gpu(estimate, estimate.gpu, page))
    if estimate.common_gpus:
        title = "On common GPUs" if estimate.gpu is None else "On the other GPUs"
        yield section(title, _gpus(estimate.common_gpus, page))
    if estimate.life is not None:
        yield section("Host memory", _host(estimate.life, page))
    yield from _assumptions(estimate, page, explain=explain)
    if estimate.notes:
        yield section("Notes", bullets(estimate.notes, page))


def _assumptions(estimate: Estimate, page: Page, *, explain: bool) -> Iterator[RenderableType]:
    """What this question leaves open, with what it could change; on request the rest besides."""
    told = {choice.text for choice in estimate.left_open}
    assumptions = [
        f"{choice.text}: {format_delta(choice.change_bytes)} {choice.instead}"
        for choice in estimate.left_open
    ]
    usual = set() if explain else set(estimate.usual)
    assumptions += [text for text in estimate.assumptions if text not in told | usual]
    if explain and estimate.interval.basis:
        assumptions.append(f"range of the device peak: {estimate.interval.basis}")
    if assumptions:
        yield section("Assumed", bullets(assumptions, page))


def _subtitle(estimate: Estimate, page: Page) -> Text:
    model = estimate.model
    size_text = f"{format_count(model.parameters)} parameters"
    if model.trainable_parameters != model.parameters:
        size_text += f", {format_count(model.trainable_parameters)} of them trained"
    items = [model.task, size_text, *setup_items(estimate.setup, times=page.glyphs.times)]
    # a phrase is not torn apart at the end of a line
    phrases = [item.replace(" ", "\u00a0") for item in items if item]
    lines = [""]
    for phrase in phrases:
        longer_line = f"{lines[-1]} {page.glyphs.dot} {phrase}" if lines[-1] else phrase
        if len(longer_line) > page.width and lines[-1]:
            lines.append(phrase)
        else:
            lines[-1] = longer_line
    return Text("\n".join(lines).replace("\u00a0", " "), style="dim")


def _peaks(estimate: Estimate, page: Page) -> RenderableType:
    peak = estimate.peak
    cache = format_delta(peak.reserved_bytes - peak.allocated_bytes)
    context = format_delta(peak.device_bytes - peak.reserved_bytes)
    engine = "vLLM, " if peak.engine_bytes else ""
    rows: tuple[tuple[str, int, str, str], ...] = (
        ("allocated", peak.allocated_bytes, "all tensors at once", "max_memory_allocated"),
        (
            "reserved",
            peak.reserved_bytes,
            f"{cache} that PyTorch keeps cached",
            "max_memory_reserved",
        ),
        (
            "device",
            peak.device_bytes,
            f"{context} of {engine}{process_words(estimate.setup)}",
            "nvidia-smi",
        ),
    )
    if peak.managed_bytes:
        managed = peak.managed_bytes
        total_text = format_size(peak.device_with_managed_bytes)
        rows += (("paged", managed, f"managed memory: {total_text} with all of it", "no counter"),)
    table = Grid("left", "right", "left", *([] if page.narrow else ["left"]))
    for name, size, what, meter in rows:
        cells = [Text(name), Text(format_size(size), style="bold"), Text(what)]
        table.add_row(*cells, *([] if page.narrow else [Text(meter, style="cyan")]))
    return Group(table, Text(peak_ranges_text(estimate), style="dim"))


def _breakdown(estimate: Estimate, page: Page) -> Grid:
    total = sum(row.bytes for row in estimate.breakdown)
    largest = max((row.bytes for row in estimate.breakdown), default=0)
    bar_width = max(6, page.width - (43 if page.narrow else 63))
    table = Grid("left", "right", "right", "left", *([] if page.narrow else ["right"]))

    def add(cells: list[Text], exact: Text) -> None:
        # the exact bytes are there to be added up; a narrow page has no room for them
        table.add_row(*cells, *([] if page.narrow else [exact]))

    for row in estimate.breakdown:
        add(
            [
                Text(row.category.value),
                Text(format_size(row.bytes)),
                Text(_percent(row.bytes, total)),
                Text(page.glyphs.bar(row.bytes, largest, bar_width).ljust(bar_width), style="cyan"),
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
    each = "" if page.narrow else " each"
    head = ("", "count", f"activations{each}", f"parameters{each}")
    table = Grid("left", "right", "right", "right", head=head)
    for block in rows:
        table.add_row(
            Text(block.name),
            f"{block.count} {page.glyphs.times}" if block.count > 1 else "",
            format_size(block.activation_bytes),
            format_size(block.parameter_bytes),
        )
    if not left_out:
        return table
    rest_text = f"{page.glyphs.more} and {left_out} more: --by layer shows the tree"
    return Group(table, Text(rest_text, style="dim"))


def _tree(estimate: Estimate, page: Page, depth: int | None) -> Grid:
    root = tree(estimate.layers)
    head = ("module", "count", "activations", "parameters")
    table = Grid("left", "right", "right", "right", "left", head=head)
    bar_width = max(6, page.width - 78)
    largest = max((child.total_bytes for child in root.children), default=0)
    for level, node in visible(root, depth):
        table.add_row(
            Text("  " * level + node.name),
            f"{node.count} {page.glyphs.times}" if node.count > 1 else "",
            format_size(node.activation_bytes),
            format_size(node.parameter_bytes),
            Text(
                "" if page.narrow else page.glyphs.bar(node.total_bytes, largest, bar_width),
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
    head = ("step", "micro", "phase", "allocated", "reserved")
    sides = ("right", "right", "left", "right", "right", *(["left"] * (2 - page.narrow)))
    table = Grid(*sides, head=head)
    largest = max((point.reserved_bytes for point in estimate.timeline), default=0)
    bar_width = max(4, page.width - 67)
    for row in phase_rows(estimate.timeline, estimate.peak_at):
        inner, outer = page.glyphs.two_part_bar(
            row.allocated_bytes, row.reserved_bytes, largest, bar_width
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


def _gpu(estimate: Estimate, gpu: GpuFit, page: Page) -> Grid:
    table = Grid("left", "left")
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


def _host(life: RunLife, page: Page) -> RenderableType:
    """A line a phase, the verdict, what it is for the GPU, and what comes on top."""
    numbers = ["right"] * (len(life.head) - 2)
    table = Grid("left", *numbers, "left", head=life.head)
    for phase, *sizes, words in life.rows:
        table.add_row(Text(phase), *sizes, Text(words))
    return Group(table, Padding(bullets(life.remarks, page), (1, 0, 0, 0)))


def _gpus(fits: Iterable[GpuFit], page: Page) -> Grid:
    head = ("", "usable", "verdict", "headroom")
    table = Grid("left", "right", "left", "right", head=head)
    for fit in fits:
        name = fit.name.removeprefix("NVIDIA ") if page.narrow else fit.name
        table.add_row(
            Text(name),
            format_size(fit.usable_bytes),
            Text(fit.verdict.value, style=VERDICT_STYLES[fit.verdict]),
            format_delta(fit.headroom_bytes),
        )
    return table


def _ranks(ranks: Iterable[RankPeak], page: Page) -> Grid:
    head = ("rank", "has", "allocated", "reserved", "device")
    table = Grid("right", "left", "right", "right", "right", head=head)
    for rank in ranks:
        parts = rank.parts.replace("layers ", "") if page.narrow else rank.parts
        sizes = (rank.allocated_bytes, rank.reserved_bytes, rank.device_bytes)
        table.add_row(str(rank.rank), Text(parts), *map(format_size, sizes))
    return table
