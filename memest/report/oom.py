"""The explanation of an out-of-memory message in the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memest.oom_account import Account
from memest.report.glyphs import ASCII, UNICODE, Glyphs
from memest.report.words import place_text
from memest.units import format_delta, format_size

if TYPE_CHECKING:
    from memest.oom_findings import OomExplanation, Relation

__all__ = ["print_oom", "render_oom"]

_BAR = 24


def render_oom(found: OomExplanation, *, width: int = 80, ascii_only: bool = False) -> str:
    """The explanation as text without colours."""
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, highlight=False)
    print_oom(found, console, ascii_only=ascii_only)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def print_oom(found: OomExplanation, console: Console, *, ascii_only: bool = False) -> None:
    """The explanation on a console."""
    glyphs = ASCII if ascii_only else UNICODE
    first = True
    for account in found.accounts:
        for part in _account(account, glyphs, first=first, several=len(found.accounts) > 1):
            console.print(part, markup=False)
        if first and found.relation is not None:
            for part in _relation(found.relation, account, glyphs):
                console.print(part, markup=False)
        first = False


def _grid(*sides: str) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for side in sides:
        table.add_column(justify="right" if side == "right" else "left")
    return table


def _points(sentences: tuple[str, ...], glyphs: Glyphs) -> Iterator[RenderableType]:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")  # settings to be pasted must not be cut
    for sentence in sentences:
        table.add_row(f"  {glyphs.bullet}", sentence[0].upper() + sentence[1:])
    if sentences:
        yield table


def _account(
    account: Account, glyphs: Glyphs, *, first: bool, several: bool
) -> Iterator[RenderableType]:
    message = account.message
    who = [] if message.rank is None else [f"rank {message.rank}"]
    who += [] if message.device is None else [f"GPU {message.device}"]
    head = f"{message.backend} out of memory: {message.tried.text} asked of the driver"
    if who:
        head += f" ({', '.join(who)})"
    if message.times > 1:
        head += f", said {message.times} times"
    if not first:
        yield ""
    elif several:
        head += " - the first of several"
    yield Text(head, style="bold")
    if message.total is not None:
        cards = ", ".join(spec.name for spec in account.cards)
        card = f"a card with {message.total.text}"
        yield Padding(f"{card}: {cards}" if cards else f"{card}, none of the catalogue", (0, 2))
    table = _grid("left", "right", "left")
    most = max((share.size.bytes for share in account.shares), default=0)
    for share in account.shares:
        table.add_row(f"  {share.name}", share.size.text, glyphs.bar(share.size.bytes, most, _BAR))
    yield table
    yield from _points(account.sentences, glyphs)


def _relation(found: Relation, account: Account, glyphs: Glyphs) -> Iterator[RenderableType]:
    message = account.message
    yield ""
    yield Text(f"Beside the prediction of {found.model} on {found.gpu}", style="bold")
    table = _grid("left", "right", "right")
    table.add_row("", "message", "predicted peak", style="dim")
    for name, said, predicted in (
        ("allocated", message.allocated, found.peak.allocated_bytes),
        ("reserved", message.reserved, found.peak.reserved_bytes),
        ("this process", message.this_process, found.peak.device_bytes),
    ):
        table.add_row(
            f"  {name}", "not said" if said is None else said.text, format_size(predicted)
        )
    yield table
    points = found.sentences
    if found.reached_at is not None and message.allocated is not None:
        where = place_text(found.reached_at, 1)
        points = (*points, f"so much ({message.allocated.text}) is first allocated {where}.")
    yield from _points(points, glyphs)
    if found.changes and found.limit_bytes is not None:
        yield ""
        yield Text(f"One change at a time, in the {format_size(found.limit_bytes)} that the "
                   "allocator could have", style="bold")  # fmt: skip
        yield _changes(found)
    yield from _points(found.notes, glyphs)


def _changes(found: Relation) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for side in ("left", "left", "right", "right", "right", "left"):
        # nothing of an option may be lost; figures stay on one line
        table.add_column(justify=side, overflow="fold", no_wrap=side == "right")
    table.add_row("", "", "allocated", "reserved", "change", "", style="dim")
    for change in found.changes:
        table.add_row(
            "  fits" if change.fits else "  no",
            change.words,
            format_size(change.allocated_bytes),
            format_size(change.reserved_bytes),
            format_delta(change.reserved_bytes - found.peak.reserved_bytes),
            change.changes_training,
        )
    return table
