"""Text of others on a page: what a link says is shown, and never drawn."""

from __future__ import annotations

import re

__all__ = ["plain"]

_MARKS = re.compile(r"([\\`*_\[\]<>#|~$!:])")


def plain(text: object) -> str:
    """A text as Markdown that shows it letter by letter: no links, pictures, formulas, icons."""
    return _MARKS.sub(r"\\\1", str(text))
