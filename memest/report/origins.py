"""Where every value of a question comes from, as a table of text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from memest.result import Origin

__all__ = ["render_origins"]

_WIDEST_VALUE = 60


def render_origins(
    origins: Sequence[Origin], ignored: Sequence[str], not_modelled: Sequence[str]
) -> str:
    """The table of ``--explain``, and what was left aside, ready for stdout.

    Args:
        origins: a row each.
        ignored: keys with why they do not matter.
        not_modelled: keys with what is missing.
    """
    rows = [("option", "value", "origin")]
    rows += [(each.option, _text(each.value), each.source) for each in origins]
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = ["Every value and where it comes from"]
    lines += [f"  {a:<{wide[0]}}  {b:<{wide[1]}}  {c}" for a, b, c in rows]
    for title, remarks in (("Not modelled", not_modelled), ("Ignored", ignored)):
        if remarks:
            lines += ["", title, *_indented(remarks)]
    return "\n" + "".join(f"{line.rstrip()}\n" for line in lines)


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= _WIDEST_VALUE else f"{text[: _WIDEST_VALUE - 3]}..."


def _indented(remarks: Sequence[str]) -> Iterator[str]:
    for remark in remarks:
        yield "  " + "".join(char if char.isprintable() else "?" for char in remark)
