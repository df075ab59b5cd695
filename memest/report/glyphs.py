"""The characters of a report: with blocks and dashes, or plain ASCII."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ASCII", "UNICODE", "Glyphs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What bars, separators and marks are made of.

    Attributes:
        steps: parts of a bar's last cell, from least to full.
        behind: fills the second part of a two-part bar.
        dot: between the phrases of a line.
        times: multiplication sign.
        bullet: opens an item of a list.
        rule: drawn above totals.
        mark: points at the row of the peak.
        more: stands for what was left out.
    """

    steps: str
    behind: str
    dot: str
    times: str
    bullet: str
    rule: str
    mark: str
    more: str

    def bar(self, part: int, whole: int, width: int) -> str:
        """A bar of ``part`` of ``whole``; anything above nothing shows at least a sliver.

        Example:
            >>> ASCII.bar(3, 4, 8)
            '######'
        """
        if part <= 0 or whole <= 0:
            return ""
        cells = len(self.steps)
        eighths = min(max(1, part * width * cells // whole), width * cells)
        full, rest = divmod(eighths, cells)
        return self.steps[-1] * full + (self.steps[rest - 1] if rest else "")

    def two_part_bar(self, inner: int, outer: int, whole: int, width: int) -> tuple[str, str]:
        """A bar of ``inner``, and what goes on behind it up to ``outer``."""
        first = self.bar(inner, whole, width)
        end = min(width, round(outer * width / whole)) if whole > 0 else 0
        return first, self.behind * max(0, end - len(first))


UNICODE = Glyphs(
    steps="▏▎▍▌▋▊▉█",
    behind="░",
    dot="·",
    times="×",
    bullet="•",
    rule="─",
    mark="◀ peak",
    more="…",
)
ASCII = Glyphs(
    steps="#", behind=".", dot="|", times="x", bullet="-", rule="-", mark="< peak", more="..."
)
