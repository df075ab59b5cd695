"""Write what commands really print into the README and the page about the report.

    python tools/readme_output.py          # rewrite them
    python tools/readme_output.py --check  # fail if one has drifted

A block stands between ``<!-- output: memest ... -->`` and ``<!-- output:end -->``; with
``<!-- output, first 20 lines: memest ... -->`` it has the first lines alone.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "report.md")
_BLOCK = re.compile(
    r"(<!-- output(?:, first (\d+) lines)?: (memest .*?) -->\n).*?(<!-- output:end -->)", re.DOTALL
)


def real_output(command: str) -> str:
    """What a command prints on a terminal of 80 columns, without colours, whatever the verdict."""
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if process.returncode not in (0, 3, 4):
        raise SystemExit(f"{command}: {process.stderr}")
    return process.stdout.rstrip()


def with_output(text: str) -> str:
    """A page's text with the blocks between its markers replaced."""

    def block(match: re.Match[str]) -> str:
        begin, count, command, end = match.groups()
        lines = real_output(command).splitlines()
        shown = lines if count is None else [*lines[: int(count)], "..."]
        body = "\n".join([f"$ {command}", *shown])
        return f"{begin}```text\n{body}\n```\n{end}"

    return _BLOCK.sub(block, text)


def main() -> int:
    """Rewrite or check the pages."""
    drifted = False
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new_text = with_output(text)
        drifted |= new_text != text
        if "--check" not in sys.argv[1:]:
            page.write_text(new_text, encoding="utf-8")
    return int(drifted and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
