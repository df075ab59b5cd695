"""Tables that tools write into pages of ``docs/``, between markers; the prose around them stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def write_sections(page: Path, sections: Mapping[str, str]) -> None:
    """Replace what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.

    Args:
        page: that has the markers.
        sections: new texts by their names.

    Raises:
        ValueError: the page has no such marker.
    """
    text = page.read_text(encoding="utf-8")
    for name, body in sections.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, rest = text.split(begin, 1)
        _, tail = rest.split(end, 1)
        text = f"{head}{begin}\n{body}\n{end}{tail}"
    page.write_text(text, encoding="utf-8")


def write_or_check(page: Path, text: str, arguments: Sequence[str]) -> int:
    """Write a page, or with ``--check`` say by the exit code whether it is as it should be."""
    if "--check" in arguments:
        return 0 if page.is_file() and page.read_text(encoding="utf-8") == text else 1
    page.write_text(text, encoding="utf-8")
    return 0
