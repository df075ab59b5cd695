"""A hook of mkdocs: what a page links to outside of docs/ is no page, and stands as its path."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.?/[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page, with such links as the words and the path in the repository."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def stands(match: re.Match[str]) -> str:
        words, target = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return match[0]
        return f"`{path}`" if words.strip("`") in path else f"{words} (`{path}`)"

    return _LINK.sub(stands, markdown)
