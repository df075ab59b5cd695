"""Scenarios of a comparison as rows of a table, and as the text that stands in the URL.

The text is what follows ``--vs`` of ``memest compare``, one scenario after the other, parted by
semicolons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memest.config.spelling import read_scenario, write_scenario
from memest.errors import MemestError

__all__ = ["COLUMNS", "dtype_of", "edited", "read", "to_rows", "to_text"]

COLUMNS = (
    "batch",
    "seq_len",
    "grad_accum",
    "precision",
    "checkpointing",
    "optim",
    "attn_implementation",
    "gpu",
)
"""Options with a column of their own; all others share the last one."""
OTHERS = "others"
_WHOLE = ("batch", "seq_len", "grad_accum")


def dtype_of(column: str) -> str:
    """The type of a column, as pandas calls it."""
    return "Int64" if column in _WHOLE else "string"


def read(text: str) -> list[str]:
    """The scenarios of a text."""
    return [part.strip() for part in text.split(";") if part.strip()]


def to_rows(scenarios: Iterable[str]) -> list[dict[str, Any]]:
    """The rows of the table; what cannot be read stays as it is written."""
    return [_row(scenario) for scenario in scenarios]


def _row(scenario: str) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys((*COLUMNS, OTHERS))
    try:
        options = read_scenario(scenario)
    except MemestError:
        return row | {OTHERS: scenario}
    others: dict[str, Any] = {}
    for name, value in options.items():
        if name in ("bf16", "fp16") and value is True:
            row["precision"] = name
        elif name in _WHOLE and str(value).isdigit():
            row[name] = int(value)
        elif name in COLUMNS and name not in _WHOLE and not isinstance(value, tuple):
            row[name] = str(value)
        else:
            others[name] = value
    return row | {OTHERS: write_scenario(others) or None}


def to_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of a table; empty rows are left out."""
    options = []
    for row in rows:
        own = {name: row[name] for name in COLUMNS if row.get(name) not in (None, "")}
        words = [write_scenario(own), str(row.get(OTHERS) or "")]
        if any(words):
            options.append(" ".join(filter(None, words)))
    return "; ".join(options)


def edited(rows: list[dict[str, Any]], changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows after what ``st.data_editor`` says was changed in them."""
    matches = [
        row | dict(changes.get("edited_rows", {}).get(number, {}))
        for number, row in enumerate(rows)
        if number not in changes.get("deleted_rows", [])
    ]
    return matches + [dict(row) for row in changes.get("added_rows", [])]
