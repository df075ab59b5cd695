"""Write docs/workspaces.md from the registry of workspace rules.

python tools/workspaces_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from page_sections import write_or_check

from memest.workspaces.registry import all_rules

PAGE = Path(__file__).parents[1] / "docs" / "workspaces.md"
HEAD = """# What kernels allocate behind the operators

Written by `tools/workspaces_page.py` from the rules in `memest/workspaces`. The last column tells
how far each rule can be trusted: confirmed by recorded CUDA traces, read in PyTorch's source, or
remembered.

| rule | operators | what is allocated | source | evidence |
|---|---|---|---|---|
"""


def page() -> str:
    """The page as it should be."""
    rows = []
    for rule in all_rules():
        operators = ", ".join(f"`{op.removeprefix('aten.')}`" for op in rule.ops)
        cells = (f"`{rule.name}`", operators, rule.summary, rule.source, rule.evidence)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return HEAD + "".join(rows)


def main() -> int:
    """Rewrite or check the page."""
    return write_or_check(PAGE, page(), sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
