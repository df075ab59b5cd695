"""Write the real output of the README's first command into the README.

python tools/readme_output.py          # rewrite README.md
python tools/readme_output.py --check  # fail if it has drifted
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
COMMAND = ("estimate", "bert-large-uncased", "--batch", "8", "--fp16")
_BLOCK = re.compile(r"(<!-- output:begin -->\n).*?(<!-- output:end -->)", re.DOTALL)


def real_output() -> str:
    """What the command prints on a terminal of 80 columns, without colours."""
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "memest", *COMMAND],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    return process.stdout.rstrip()


def with_output(text: str, output: str) -> str:
    """The README's text with the block between the markers replaced."""
    return _BLOCK.sub(lambda m: f"{m[1]}```text\n{output}\n```\n{m[2]}", text)


def main() -> int:
    """Rewrite or check the README."""
    text = README.read_text(encoding="utf-8")
    new_text = with_output(text, real_output())
    if "--check" in sys.argv[1:]:
        return 0 if new_text == text else 1
    README.write_text(new_text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
