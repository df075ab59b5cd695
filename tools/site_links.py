"""A hook of mkdocs: what a page links to outside of the pages' folder stands as its path."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.?/[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The text of a page, with such links as the words and the path in the repository."""
    pages = Path(config.docs_dir).name
    folder = posixpath.dirname(f"{pages}/{page.file.src_uri}")

    def stands(match: re.Match[str]) -> str:
        words, target = match.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith(f"{pages}/"):
            return match[0]
        return f"`{path}`" if words.strip("`") in path else f"{words} (`{path}`)"

    return _LINK.sub(stands, markdown)
