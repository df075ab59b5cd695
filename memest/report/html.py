"""The report in a notebook: one HTML fragment, no scripts, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from memest.report.layers import biggest
from memest.report.life_result import HostVerdict, RunLife
from memest.report.memory_bar import MemoryBar, memory_bar
from memest.report.page import html_document
from memest.report.parts import COLOURS
from memest.report.result import Estimate, Verdict
from memest.report.words import (
    batch_sentence,
    interval_text,
    moment_text,
    setup_items,
    verdict_sentence,
)
from memest.units import format_delta, format_size

__all__ = ["VERDICT_COLOURS", "render_html", "render_page"]

VERDICT_COLOURS = {
    Verdict.FITS: "#1a7f37",
    Verdict.RELEASES_CACHE: "#9a6700",
    Verdict.TIGHT: "#9a6700",
    Verdict.CANNOT_SAY: "#6639ba",
    Verdict.DOES_NOT_FIT: "#cf222e",
    Verdict.UNKNOWN: "#57606a",
}
_WIDTH, _HEIGHT = 640, 22
_STYLE = "body{margin:2em auto;padding:0 1em;max-width:60em;background:#fff;color:#1f2328}"
BIGGEST = 8


def _bar(estimate: Estimate) -> str:
    """The answer as a bar of the card, with the names of its segments below it."""
    bar = memory_bar(estimate)
    shapes, start = [], 0
    for segment in bar.segments:
        shapes.append(_block(bar, start, segment.bytes, f'fill="{segment.colour}"', segment.words))
        start += segment.bytes
    span = f"range of the device peak: {interval_text(estimate)}"
    shapes.append(
        _block(
            bar, bar.low_bytes, bar.high_bytes - bar.low_bytes, 'fill="#333" opacity="0.45"', span
        )
    )
    names = [
        f"{_swatch(segment.colour)}{'other: ' * (len(segment.parts) > 1)}{escape(segment.words)}"
        for segment in bar.segments
    ]
    if bar.usable_bytes is not None and estimate.gpu is not None:
        has = f"{estimate.gpu.name} has {format_size(bar.usable_bytes)} for PyTorch"
        edge = bar.share(bar.usable_bytes) * _WIDTH
        shapes.append(
            f'<line x1="{edge:.2f}" x2="{edge:.2f}" y1="0" y2="{_HEIGHT}" stroke="#1f2328" '
            f'stroke-width="4"><title>{escape(has)}</title></line>'
        )
        names.append(escape(has))
    words = escape(", ".join(segment.words for segment in bar.segments))
    return (
        f'<svg role="img" aria-label="Memory: {words}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="100%" style="max-width:{_WIDTH}px;height:{_HEIGHT}px;background:#e8eaed" '
        f'preserveAspectRatio="none">{"".join(shapes)}</svg>'
        f'<p style="font-size:0.85em">{" &nbsp; ".join(names)}</p>'
    )


def _block(bar: MemoryBar, start: int, size: int, style: str, words: str) -> str:
    """A stretch of the bar."""
    return (
        f'<rect x="{bar.share(start) * _WIDTH:.2f}" y="0" width="{bar.share(size) * _WIDTH:.2f}" '
        f'height="{_HEIGHT}" {style}><title>{escape(words)}</title></rect>'
    )


def _table(
    rows: Iterable[Iterable[str]], head: Iterable[str] = (), *, ends_in_words: bool = False
) -> str:
    """A table of cells that are HTML already; all but the first column stand right.

    Args:
        rows: of cells.
        head: names of the columns.
        ends_in_words: the last column stands left as well.
    """

    def line(row: Iterable[str], tag: str) -> str:
        cells = list(row)
        sides = ["left", *["right"] * (len(cells) - 1)]
        if ends_in_words:
            sides[-1] = "left"
        inner = "".join(
            f'<{tag} style="text-align:{side};padding:1px 12px 1px 0">{cell}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{inner}</tr>"

    first = line(head, "th") if head else ""
    body = "".join(line(cells, "td") for cells in rows)
    return f'<table style="border-collapse:collapse">{first}{body}</table>'


def _swatch(colour: str) -> str:
    return (
        f'<span style="display:inline-block;width:0.8em;height:0.8em;background:{colour};'
        'margin-right:0.4em"></span>'
    )


def _details(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _breakdown(estimate: Estimate) -> str:
    total = sum(row.bytes for row in estimate.breakdown)
    rows = [
        [
            _swatch(COLOURS[row.category]) + escape(row.category.value),
            format_size(row.bytes),
            f"{row.bytes:,} B",
        ]
        for row in estimate.breakdown
    ]
    rows.append(["<b>allocated</b>", f"<b>{format_size(total)}</b>", f"{total:,} B"])
    return _table(rows)


def _peaks(estimate: Estimate) -> str:
    peak = estimate.peak
    meters = (
        ("allocated", peak.allocated_bytes, "torch.cuda.max_memory_allocated()"),
        ("reserved", peak.reserved_bytes, "torch.cuda.max_memory_reserved()"),
        ("device", peak.device_bytes, "nvidia-smi, this process"),
        *([("paged", peak.managed_bytes, "managed memory, no counter")] * bool(peak.managed_bytes)),
    )
    return _table(
        [escape(name), f"<b>{format_size(size)}</b>", f"<code>{escape(meter)}</code>"]
        for name, size, meter in meters
    )


def _chip(verdict: Verdict | HostVerdict, colour: str) -> str:
    return (
        f'<span style="background:{colour};color:#fff;border-radius:1em;'
        f'padding:0.1em 0.7em;margin-right:0.6em">{escape(verdict.value)}</span>'
    )


def _host_verdict(life: RunLife | None) -> Iterator[str]:
    """The verdict on the host, where its memory was named."""
    if life is not None and life.budget_bytes is not None:
        chip = _chip(life.verdict, VERDICT_COLOURS[Verdict(life.verdict.value)])
        yield f"<p>{chip}<b>{escape(life.sentence)}</b></p>"


def _host(life: RunLife) -> str:
    rows = (map(escape, row) for row in life.rows)
    return _table(rows, map(escape, life.head), ends_in_words=True) + _list(life.remarks)


def render_html(estimate: Estimate) -> str:
    """The whole fragment."""
    chip = _chip(estimate.verdict, VERDICT_COLOURS[estimate.verdict])
    parts = [
        f"<p>{chip}<b>{escape(verdict_sentence(estimate))}</b></p>",
        *_host_verdict(estimate.life),
        f"<p>{escape(' · '.join(setup_items(estimate.setup)))}</p>",
        _bar(estimate),
        _peaks(estimate),
        f"<p>Device range: {escape(interval_text(estimate))}.</p>",
        f"<p>Allocated peak reached {escape(moment_text(estimate))}.</p>",
    ]
    largest = batch_sentence(estimate)
    if largest:
        parts.append(f"<p>Largest batch: <b>{escape(largest)}</b></p>")
    parts.append(_details("Alive at the allocated peak", _breakdown(estimate)))
    rows, _ = biggest(estimate.layers, BIGGEST)
    layers = _table(
        (
            [
                escape(block.name),
                f"{block.count}",
                format_size(block.activation_bytes),
                format_size(block.parameter_bytes),
            ]
            for block in rows
        ),
        ("module", "count", "activations each", "parameters each"),
    )
    parts.append(_details("Biggest layers", layers))
    if estimate.life is not None:
        parts.append(_details("Host memory", _host(estimate.life)))
    if estimate.ranks:
        ranks = _table(
            (
                [
                    str(rank.rank),
                    escape(rank.parts),
                    format_size(rank.allocated_bytes),
                    format_size(rank.reserved_bytes),
                    format_size(rank.device_bytes),
                ]
                for rank in estimate.ranks
            ),
            ("rank", "has", "allocated", "reserved", "device"),
        )
        parts.append(_details("GPUs of the pipeline, the fullest first", ranks))
    if estimate.common_gpus:
        fits = _table(
            (
                [
                    escape(fit.name),
                    format_size(fit.usable_bytes),
                    escape(fit.verdict.value),
                    format_delta(fit.headroom_bytes),
                ]
                for fit in estimate.common_gpus
            ),
            ("GPU", "usable", "verdict", "headroom"),
        )
        parts.append(_details("GPUs", fits))
    basis = f"range of the device peak: {estimate.interval.basis}"
    remarks = [*estimate.assumptions, basis, *estimate.notes]
    parts.append(_details("Assumed and noted", _list(remarks)))
    return f'<div style="font-family:sans-serif">{"".join(parts)}</div>'


def render_page(estimate: Estimate) -> str:
    """The fragment as a page of its own."""
    return html_document(f"{estimate.model.id}: GPU memory", _STYLE, render_html(estimate))
