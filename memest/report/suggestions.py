"""What would make a run fit: a few changes, each with what it saves and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from memest.report.answer import Answer, Document
from memest.report.result import SCHEMA_VERSION, Verdict
from memest.report.terminal import VERDICT_STYLES, Page, grid
from memest.units import format_delta, format_size

__all__ = ["Suggestion", "Suggestions", "suggestion_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion(Document):
    """One change of a run, of one option or of a few together.

    Attributes:
        words: what is done, as a phrase.
        options: what is given in addition or in place, by the options' keywords.
        arguments: the same as the command line spells it.
        verdict: of the run with it.
        device_bytes: its expected device peak.
        gain_bytes: what it saves of the device peak.
        relative_time: estimated time of a sample over that without it; None where it is not
            comparable, because other GPUs share the work.
        changes_training: what makes the training another one; empty where it is only a matter of
            memory and time.
    """

    words: str
    options: tuple[tuple[str, Any], ...]
    arguments: str
    verdict: Verdict
    device_bytes: int
    gain_bytes: int
    relative_time: float | None
    changes_training: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        time = self.relative_time
        rounded = {"relative_time": None if time is None else round(time, 3)}
        return Document.to_dict(self) | {"options": dict(self.options)} | rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions(Answer):
    """What to change of a run, best first.

    Attributes:
        model: its reference.
        gpu: name of the GPU.
        usable_bytes: what PyTorch can have of its memory.
        verdict: of the run as it is.
        device_bytes: its expected device peak.
        changes: that were found: of a run that does not surely fit those that make it fit, else
            what makes use of the room that is left.
        closest: where no change makes it fit, the one that misses by the least; else None.
        time_basis: what the relative times are made of.
    """

    model: str
    gpu: str
    usable_bytes: int
    verdict: Verdict
    device_bytes: int
    changes: tuple[Suggestion, ...]
    closest: Suggestion | None
    time_basis: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"schema_version": SCHEMA_VERSION, **Document.to_dict(self)}


def suggestion_parts(suggestions: Suggestions, page: Page) -> Iterator[RenderableType]:
    """A table of the changes, or a sentence where there are none."""
    card = f"{suggestions.gpu} ({format_size(suggestions.usable_bytes)} usable)"
    if suggestions.changes:
        fits = suggestions.verdict is Verdict.FITS
        head = "What makes use of the room" if fits else "What makes it fit"
        yield Text(f"{head} on {card}", style="bold")
        yield _table(suggestions.changes, page)
        return
    closest = suggestions.closest
    if closest is None:
        yield Text(f"Nothing that is tried would change it on {card}.")
        return
    miss = closest.device_bytes - suggestions.usable_bytes
    yield Text(f"Nothing that is tried makes it fit {card}; by {format_size(miss)} misses", "bold")
    yield _table((closest,), page)


def _table(changes: tuple[Suggestion, ...], page: Page) -> Table:
    table = grid("left", "left", "right", "right", "left")
    for number, change in enumerate(changes, start=1):
        time = "" if change.relative_time is None else f"{change.relative_time:.2f}"
        says = Text(change.words)
        if change.changes_training:
            says.append(f" ({change.changes_training})", "yellow")
        says.append(f"\n{change.arguments}", "cyan")
        table.add_row(
            f"  {number}",
            Text(change.verdict.value, style=VERDICT_STYLES[change.verdict]),
            format_delta(-change.gain_bytes),
            f"{time} {page.glyphs.times} time" if time else "",
            says,
        )
    return table
