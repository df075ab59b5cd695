"""Write docs/cli.md from the commands' own help.

python tools/cli_page.py          # rewrite docs/cli.md
python tools/cli_page.py --check  # fail if it has drifted
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
COMMANDS = (
    "estimate", "fits", "max-batch", "compare", "advise", "sweep", "stages", "explain-oom",
    "replay", "validate", "models", "gpus", "app", "mcp", "cache", "env", "completion", "help",
    *(f"calibrate {name}" for name in (
        "run", "verify", "fit", "report", "show", "export", "import", "merge",
    )),
)  # fmt: skip
HEAD = """# The command line

Written by `tools/cli_page.py` from the commands themselves. Options carry the names of Hugging
Face's `TrainingArguments`; underscores work as well as dashes. Data goes to stdout, everything else
to stderr. Exit codes: 0 done (for `fits`: it fits), 1 failure, 2 wrong usage, 3 tight, 4 does not
fit, 5 unknown model or GPU, 6 missing extra.
"""
_END = "\f"
# a process for all: starting one takes longer than a help
_HELPS = f"""
import sys
from memest.cli.main import run
for command in sys.argv[1:]:
    if code := run([*command.split(), "--help"]):
        sys.exit(code)
    print({_END!r}, end="")
"""


def page() -> str:
    """The page as it should be."""
    environment = os.environ | {
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERMINAL_WIDTH": "100",
        "_TYPER_FORCE_DISABLE_TERMINAL": "1",
    }
    parts = [HEAD]
    process = subprocess.run(
        [sys.executable, "-c", _HELPS, *COMMANDS], capture_output=True, text=True, check=True,
        env=environment,
    )  # fmt: skip
    for command, help_text in zip(COMMANDS, process.stdout.split(_END)[:-1], strict=True):
        text = "\n".join(line.rstrip() for line in help_text.strip("\n").splitlines())
        parts.append(f"## memest {command}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def main() -> int:
    """Rewrite or check the page."""
    text = page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
