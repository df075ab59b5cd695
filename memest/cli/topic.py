"""A page of ``memest help TOPIC``: what it holds, and how its text is taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Topic"]


@dataclass(frozen=True, slots=True)
class Topic:
    """A page.

    Attributes:
        title: what it is about, in a line.
        text: paragraphs, and rows of two columns: ``term | what is said of it``.
        also: further words that lead to it, parted by blanks.
    """

    title: str
    text: str
    also: str = ""

    @property
    def parts(self) -> list[str | list[tuple[str, str]]]:
        """Paragraphs, and rows."""
        parts: list[str | list[tuple[str, str]]] = []
        for part in re.split(r"\n\n+", self.text.strip()):
            if " | " not in part:
                parts.append(part)
                continue
            rows = [row.partition(" | ") for row in re.split(r"\n(?!\s)", part)]
            parts.append([(term, " ".join(text.split())) for term, _, text in rows])
        return parts
