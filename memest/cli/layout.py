"""Plain text for a screen of any width: paragraphs, rows of two columns, command lines.

Nothing is cut: what does not fit stands on the next line, and on a narrow screen what a row says
stands below what it is about.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["examples", "heading", "paragraph", "rows", "screen_width"]

_NARROWEST, _WIDEST = 20, 100
_NARROW = 60
_TERM_SHARE = 0.38
"""Of the width, what the first column takes at most."""
_INDENT = "  "


def screen_width() -> int:
    """Columns of the terminal: 80 where there is none, and never too few or too many to read."""
    return max(_NARROWEST, min(shutil.get_terminal_size().columns, _WIDEST))


def _colourful() -> bool:
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _marked(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if _colourful() else text


def heading(text: str) -> str:
    """A line above a block; bold on a terminal."""
    return _marked(f"{text}:", 1) + "\n"


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False) or [""]


def paragraph(text: str, width: int, *, indent: str = "") -> str:
    """Sentences, filled; an empty line parts paragraphs."""
    filled = [
        "".join(f"{indent}{line}\n" for line in _wrap(" ".join(part.split()), width - len(indent)))
        for part in re.split(r"\n\s*\n", text.strip())
    ]
    return "\n".join(filled)


def rows(pairs: Iterable[tuple[str, str]], width: int) -> str:
    """A block of rows: what it is about, and what is said of it."""
    pairs = list(pairs)
    if not pairs:
        return ""
    if width < _NARROW:
        return "".join(_row_below(term, text, width) for term, text in pairs)
    most = int(width * _TERM_SHARE)
    column = max((len(term) for term, _ in pairs if len(term) <= most), default=0)
    return "".join(
        _row_beside(term, text, width, column)
        if len(term) <= column
        else _row_below(term, text, width, " " * (len(_INDENT) * 2 + column))
        for term, text in pairs
    )


def _row_beside(term: str, text: str, width: int, column: int) -> str:
    margin = " " * (len(_INDENT) * 2 + column)
    first, *others = _wrap(text, width - len(margin))
    gap = " " * (column - len(term))
    lines = [f"{_INDENT}{_marked(term, 36)}{gap}{_INDENT}{first}", *(margin + x for x in others)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _row_below(term: str, text: str, width: int, margin: str = _INDENT * 3) -> str:
    terms = _wrap(term, width - len(_INDENT))
    said = [margin + line for line in _wrap(text, width - len(margin))] if text else []
    return "".join(f"{line}\n" for line in [*(_INDENT + _marked(x, 36) for x in terms), *said])


def _command_line(line: str, width: int) -> str:
    """A command line, which can be pasted wherever it is broken."""
    words = re.findall(r"(?:'[^']*'|[^\s'])+", line)
    lines = [_INDENT + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 <= width:  # a blank, and what says that it goes on
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(_INDENT * 3 + word)
    return "".join(f"{each}\n" for each in lines)


def examples(lines: Sequence[tuple[str, str]], width: int) -> str:
    """Command lines with what each is for."""
    return "".join(_example(line, purpose, width) for line, purpose in lines)


def _example(line: str, purpose: str, width: int) -> str:
    in_one = f"{_INDENT}{line}{_INDENT}# {purpose}"
    if len(in_one) <= width:
        return f"{in_one}\n"
    return _command_line(line, width) + paragraph(purpose, width, indent=_INDENT * 3)
