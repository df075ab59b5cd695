"""The commands and the code that stand in the README and on the pages."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELLS = ("", "sh", "bash")
# a command line begins with one of these; other unmarked blocks are drawings, links and formulas
PROGRAMS = re.compile(r"(?:memest|pip|bash|python3?|\.venv/bin/\w+)(?=\s)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    return blocks_of(page.read_text(encoding="utf-8"), *languages)


def blocks_of(text: str, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(text) if language in languages]


@dataclass(frozen=True)
class CommandLine:
    page: str
    line: str

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"

    @property
    def words(self) -> list[str]:
        """As a shell takes it apart, up to where its own signs begin."""
        words = shlex.split(self.line, comments=True)
        cut = [words.index(sign) for sign in ("&&", ">", "<", "|") if sign in words]
        return words[: min(cut, default=len(words))]


def command_lines() -> list[CommandLine]:
    """Every command line of every page; two that share a line are two."""
    lines = (
        CommandLine(name_of(page), line)
        for page in PAGES
        for line in lines_of(page.read_text(encoding="utf-8"))
    )
    return list(dict.fromkeys(lines))


def lines_of(text: str) -> list[str]:
    """The command lines of a page."""
    return [
        part.strip()
        for body in blocks_of(text, *SHELLS)
        for line in body.replace("\\\n", " ").splitlines()
        if PROGRAMS.match(line)
        for part in re.split(r"\s{2,}(?=memest )", line)
    ]
