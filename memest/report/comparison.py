"""A comparison on a terminal: runs as columns, categories as rows, reasons below."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memest.events import CATEGORY_ORDER
from memest.findings import Comparison, Scenario
from memest.report.glyphs import ASCII, UNICODE, Glyphs
from memest.report.text import VERDICT_STYLES, wide_enough
from memest.report.words import batch_count, moment_text, setup_items
from memest.result import Estimate
from memest.units import format_delta, format_size

__all__ = ["change_sentence", "print_comparison", "render_comparison"]

LABEL, FIRST, COLUMN = 18, 12, 24
"""Widths of the row labels, of the first scenario and of every further one."""


def change_sentence(scenario: Scenario, first: Scenario) -> str:
    """What a scenario buys or costs against the first, in one sentence.

    The time is of one sample, so that scenarios with other batch sizes compare.
    """
    before, after = first.estimate, scenario.estimate
    delta = after.peak.device_bytes - before.peak.device_bytes
    share = delta / before.peak.device_bytes
    if delta:
        text = f"{scenario.name}: {format_delta(delta)} on the device ({share:+.1%})"
    else:
        text = f"{scenario.name}: the same on the device"
    if scenario.relative_time is not None:
        text += f", {scenario.relative_time:.2f} times the time of a sample (estimated)"
    if after.gpu is not None and before.gpu is not None:
        if after.verdict is before.verdict:
            text += f", {after.verdict.value} as before"
        else:
            text += f", {after.verdict.value} where {first.name} is {before.verdict.value}"
    if after.max_batch is not None and before.max_batch is not None:
        text += f", largest batch {batch_count(after.max_batch)} against "
        text += batch_count(before.max_batch)
    return f"{text}."


def render_comparison(comparison: Comparison, *, width: int = 80, ascii_only: bool = False) -> str:
    """The comparison as plain text, lines without blanks at their ends."""
    out = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, _environ={}
    )
    print_comparison(comparison, out, ascii_only=ascii_only)
    assert isinstance(out.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in out.file.getvalue().splitlines())


def print_comparison(comparison: Comparison, console: Console, *, ascii_only: bool = False) -> None:
    """Write the comparison to a console, as :func:`render_comparison` does."""
    glyphs = ASCII if ascii_only else UNICODE
    width = wide_enough(console.width)
    for part in _parts(comparison, width, glyphs):
        console.print(part, width=width, highlight=False, markup=False)


def _parts(comparison: Comparison, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    first, *others = comparison.scenarios
    for scenario in others:
        yield Text(change_sentence(scenario, first), style="bold")
    phrases = setup_items(first.estimate.setup, times=glyphs.times)
    gpu = first.estimate.gpu
    head = [first.model, *phrases, *([gpu.name] if gpu else [])]
    yield Text(f"{first.name}: " + f" {glyphs.dot} ".join(head), style="dim")
    room = max(1, (width - LABEL - FIRST) // COLUMN)
    for start in range(0, len(others), room):
        yield Padding(_table(first, others[start : start + room], glyphs), (1, 0, 0, 0))
    yield Padding(Text("Why", style="bold"), (1, 0, 0, 0))
    yield Padding(Text(f"{first.name}: peak reached {moment_text(first.estimate)}."), (0, 0, 0, 2))
    for scenario in others:
        yield Padding(_why(scenario, glyphs), (1, 0, 0, 2))
    yield Padding(Text(f"Time is {comparison.time_basis}.", style="dim"), (1, 0, 0, 0))
    for note in comparison.notes:
        yield Text(f"{glyphs.bullet} {note}", style="dim")


def _why(scenario: Scenario, glyphs: Glyphs) -> RenderableType:
    assert scenario.reasons is not None
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column()
    grid.add_column(overflow="fold")
    for sentence in scenario.reasons.sentences:
        grid.add_row(glyphs.bullet, Text(sentence))
    outer = Table.grid()
    outer.add_column(overflow="fold")
    outer.add_row(Text(scenario.name, style="bold"))
    outer.add_row(grid)
    return outer


def _table(first: Scenario, others: Sequence[Scenario], glyphs: Glyphs) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for _ in others:
        table.add_column(justify="right", overflow="fold", max_width=COLUMN - 2)
    names = [Text(scenario.name, style="bold") for scenario in others]
    table.add_row("", Text(first.name[: COLUMN - 2], style="bold"), *names)

    def sizes(label: str, of: Callable[[Estimate], int], *, style: str = "") -> None:
        own = of(first.estimate)
        cells = [Text(label, style=style), Text(format_size(own), style=style)]
        for scenario in others:
            size = of(scenario.estimate)
            delta = format_delta(size - own) if size != own else "="
            cells.append(Text(format_size(size), style=style).append(f"{delta:>11}", style="dim"))
        table.add_row(*cells)

    def words(label: str, of: Callable[[Scenario], Text]) -> None:
        table.add_row(Text(label), of(first), *map(of, others))

    for category in CATEGORY_ORDER:
        if any(_bytes(s.estimate, category) for s in (first, *others)):
            sizes(category.value, lambda e, c=category: _bytes(e, c))  # type: ignore[misc]
    rule = [Text(glyphs.rule * (COLUMN - 3))] * len(others)
    table.add_row(Text(glyphs.rule * 16), Text(glyphs.rule * 10), *rule)
    sizes("allocated", lambda e: e.peak.allocated_bytes, style="bold")
    sizes("reserved", lambda e: e.peak.reserved_bytes)
    sizes("device", lambda e: e.peak.device_bytes)
    if first.estimate.gpu is not None:
        words("verdict", _verdict)
    if first.estimate.max_batch is not None:
        words("largest batch", lambda s: Text(batch_count(s.estimate.max_batch or 0)))
    if first.relative_time is not None:
        words("time of a sample", lambda s: Text(f"{s.relative_time:.2f} {glyphs.times}"))
    return table


def _verdict(scenario: Scenario) -> Text:
    verdict = scenario.estimate.verdict
    return Text(verdict.value, style=VERDICT_STYLES[verdict])


def _bytes(estimate: Estimate, category: object) -> int:
    return sum(row.bytes for row in estimate.breakdown if row.category is category)
