"""The explanation of an out-of-memory message in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from memest.report.oom_account import Account
from memest.report.oom_result import MessageMatch, OomExplanation
from memest.report.terminal import Grid, Page, bullets
from memest.report.words import place_text
from memest.units import format_delta, format_size

__all__ = ["oom_parts"]

_BAR = 24
_MOST_CARDS, _FEW_CARDS = 8, 4
"""How many names are listed whole, and how many of more."""


def oom_parts(explanation: OomExplanation, page: Page) -> Iterator[RenderableType]:
    """Each message by itself, the first one beside the prediction."""
    several = len(explanation.accounts) > 1
    for number, account in enumerate(explanation.accounts):
        yield from _account(account, page, first=not number, several=several)
        if not number and explanation.relation is not None:
            yield from _relation(explanation.relation, account, page)


def _points(sentences: tuple[str, ...], page: Page) -> Iterator[RenderableType]:
    if sentences:  # which fold: settings to be pasted must not be cut
        points = bullets((each[0].upper() + each[1:] for each in sentences), page)
        yield Padding(points, (0, 0, 0, 2))


def _account(
    account: Account, page: Page, *, first: bool, several: bool
) -> Iterator[RenderableType]:
    message = account.message
    origin = [] if message.rank is None else [f"rank {message.rank}"]
    origin += [] if message.device is None else [f"GPU {message.device}"]
    head = f"{message.backend} out of memory: {message.tried.text} asked of the driver"
    if origin:
        head += f" ({', '.join(origin)})"
    if message.times > 1:
        head += f", said {message.times} times"
    if not first:
        yield ""
    elif several:
        head += " - the first of several"
    yield Text(head, style="bold")
    if message.total is not None:
        names = [spec.name for spec in account.cards]
        cards = ", ".join(names if len(names) <= _MOST_CARDS else names[:_FEW_CARDS])
        cards += f" and {len(names) - _FEW_CARDS} more" if len(names) > _MOST_CARDS else ""
        card = f"a card with {message.total.text}"
        yield Padding(f"{card}: {cards}" if cards else f"{card}, none of the catalogue", (0, 2))
    table = Grid("left", "right", "left")
    largest_bytes = max((share.size.bytes for share in account.shares), default=0)
    for share in account.shares:
        table.add_row(
            f"  {share.name}",
            share.size.text,
            page.glyphs.bar(share.size.bytes, largest_bytes, _BAR),
        )
    yield table
    yield from _points(account.sentences, page)


def _relation(match: MessageMatch, account: Account, page: Page) -> Iterator[RenderableType]:
    message = account.message
    yield ""
    yield Text(f"Beside the prediction of {match.model} on {match.gpu}", style="bold")
    table = Grid("left", "right", "right", head=("", "message", "predicted peak"))
    for name, figure, predicted in (
        ("allocated", message.allocated, match.peak.allocated_bytes),
        ("reserved", message.reserved, match.peak.reserved_bytes),
        ("this process", message.this_process, match.peak.device_bytes),
    ):
        table.add_row(
            f"  {name}", "not said" if figure is None else figure.text, format_size(predicted)
        )
    yield table
    points = match.sentences
    if match.reached_at is not None and message.allocated is not None:
        place = place_text(match.reached_at, 1)
        points = (*points, f"so much ({message.allocated.text}) is first allocated {place}.")
    yield from _points(points, page)
    if match.changes and match.limit_bytes is not None:
        yield ""
        yield Text(
            f"One change at a time, in the {format_size(match.limit_bytes)} that the "
            "allocator could have",
            style="bold",
        )
        yield _changes(match)
    yield from _points(match.notes, page)


def _changes(match: MessageMatch) -> Grid:
    head = ("", "", "allocated", "reserved", "change", "")
    table = Grid("left", "left", "right", "right", "right", "left", head=head)
    for change in match.changes:
        table.add_row(
            "  fits" if change.fits else "  no",
            change.words,
            format_size(change.allocated_bytes),
            format_size(change.reserved_bytes),
            format_delta(change.reserved_bytes - match.peak.reserved_bytes),
            change.changes_training,
        )
    return table
