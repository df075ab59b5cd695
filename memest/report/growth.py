"""Why memory grew, in the terminal: its course, what is expected of it, causes, code that keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from memest.report.frames import Rows
from memest.report.growth_result import (
    Cause,
    GrowthExplanation,
    GrowthFinding,
    MemoryPoint,
    Quantity,
)
from memest.report.snapshot import course_line
from memest.report.terminal import Grid, Page, bullets, section
from memest.units import format_delta, format_size

__all__ = ["growth_headline", "growth_parts", "growth_rows"]

_MOST_SITES = 8
_WIDEST = 60
_FIGURES = 44
"""Columns beside a line of readings."""


def growth_headline(explanation: GrowthExplanation) -> str:
    """The answer in a sentence."""
    if not explanation.points:
        return "Nothing was read that growth could be told by."
    if not explanation.findings:
        return "Memory does not grow."
    first = explanation.findings[0]
    if first.cause is Cause.UNEXPLAINED:
        what = _what(first, explanation.unit).partition(", ")[2]
        return f"Memory grows, and what was read does not tell why: {what}."
    if first.is_leak:
        return f"Memory is kept: {_what(first, explanation.unit)}."
    return f"No leak was found. What grew: {_what(first, explanation.unit)}."


def _what(finding: GrowthFinding, unit: str) -> str:
    size = format_size(finding.bytes)
    each = f", {format_size(finding.step_bytes)} a {unit}" if finding.step_bytes else ""
    return f"{finding.cause.value}, {size} of {_words(finding.quantity)}{each}"


def _words(quantity: Quantity) -> str:
    return {
        Quantity.ALLOCATED: "allocated memory",
        Quantity.PEAK_ALLOCATED: "the allocated peak",
        Quantity.RESERVED: "reserved memory",
        Quantity.DEVICE: "device memory",
        Quantity.HOST: "host memory",
    }[quantity]


def growth_parts(explanation: GrowthExplanation, page: Page) -> Iterator[RenderableType]:
    """The answer, the course, and each finding with its evidence."""
    yield Text(growth_headline(explanation), style="bold")
    yield Text(explanation.source, style="dim")
    if explanation.full_at is not None:
        yield f"At this rate the card is full at {explanation.unit} {explanation.full_at:,}."
    if explanation.points:
        yield section("Course", _course(explanation, page))
    for finding in explanation.findings:
        title = f"{finding.cause.value[0].upper()}{finding.cause.value[1:]}"
        size = f"{format_delta(finding.bytes)} of {_words(finding.quantity)}"
        points = (*finding.evidence, *finding.remedy)
        yield section(f"{title}, {size}", bullets(map(_sentence, points), page))
    if explanation.sites:
        yield section("Code whose allocations stay", _sites(explanation))
    if explanation.notes:
        yield ""
        yield Padding(bullets(map(_sentence, explanation.notes), page), (0, 0, 0, 0))


def _sentence(text: str) -> str:
    # a name of code or of a function begins in its own case
    first = text.partition(" ")[0]
    return text if any(mark in first for mark in ".:_(") else text[0].upper() + text[1:]


def _course(explanation: GrowthExplanation, page: Page) -> Grid:
    """A line of readings for each quantity, from the first to the last, and what is expected."""
    expected = explanation.expected
    named = {} if expected is None else {
        Quantity.ALLOCATED: expected.held_bytes,
        Quantity.PEAK_ALLOCATED: expected.peak_allocated_bytes,
        Quantity.RESERVED: expected.reserved_bytes,
    }  # fmt: skip
    head = ("", "", "first", "last", *(("expected",) if named else ()))
    table = Grid("left", "left", *["right"] * (len(head) - 2), head=head)
    cells = 0 if page.narrow else max(min(page.width - _FIGURES - 12 * bool(named), _WIDEST), 10)
    for quantity in Quantity:
        values = [v for point in explanation.points if (v := point.value(quantity)) is not None]
        if not values:
            continue
        line = course_line(values, max(values), cells, ascii_only=len(page.glyphs.steps) == 1)
        size = format_size(named[quantity]) if quantity in named else ""
        row = (format_size(values[0]), format_size(values[-1]), *((size,) if named else ()))
        table.add_row(quantity.value.replace("_", " "), line if cells else "", *row)
    return table


def _sites(explanation: GrowthExplanation) -> Grid:
    unit = explanation.unit
    head = ("where", "part", "tensors", "by now", f"a {unit}", f"{unit}es")
    table = Grid("left", "left", *["right"] * 4, head=head)
    for site in explanation.sites[:_MOST_SITES]:
        where = site.site or "no Python frame"
        if site.line and site.line not in where:
            where = f"{site.line}, in {where}"
        table.add_row(
            where,
            site.role,
            f"{site.count:,}",
            format_size(site.bytes),
            format_size(site.pass_bytes),
            f"{site.passes:,}",
        )
    if len(explanation.sites) > _MOST_SITES:
        table.add_row(f"{len(explanation.sites) - _MOST_SITES} more: --json has them all")
    return table


def growth_rows(explanation: GrowthExplanation) -> Rows:
    """One row a reading."""
    columns = tuple(MemoryPoint.__dataclass_fields__)
    rows: Sequence[MemoryPoint] = explanation.points
    return [point.to_dict() for point in rows], columns
