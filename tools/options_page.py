"""Write docs/options.md from the table of options.

python tools/options_page.py          # rewrite docs/options.md
python tools/options_page.py --check  # fail if it has drifted
"""

from __future__ import annotations

import sys
from pathlib import Path

from page_sections import write_or_check

from memest.config.option import Kind, Option, Panel
from memest.config.option_table import OPTIONS

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """# Options

Written by `tools/options_page.py` from the table that the command line, Python, the explorer and
this page share. Every option of an estimate, with the names it has elsewhere: on the command line
underscores work as well as dashes; in Python each of the names is a keyword of `memest.estimate`,
`memest.profile`, `memest.compare`, ...; in a scenario (`--vs 'batch=4 fp16'`) the first flag
without its dashes.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _row(option: Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    names = ", ".join(f"`{name}`" for name in option.keywords)
    takes = option.kind.value if not option.metavar else f"{option.kind.value}, {option.metavar}"
    if option.kind is Kind.SWITCH:
        takes = "switch"
    return f"| {flags} | {names} | {_cell(takes)} | {_cell(option.help)} |"


def page() -> str:
    """The page as it should be."""
    parts = [HEAD]
    for panel in Panel:
        options = [option for option in OPTIONS if option.panel is panel]
        if options:
            rows = "\n".join(map(_row, options))
            parts.append(
                f"## {panel.value}\n\n| command line | Python | takes | what it is |\n"
                f"|---|---|---|---|\n{rows}\n"
            )
    return "\n".join(parts)


def main() -> int:
    """Rewrite or check the page."""
    return write_or_check(PAGE, page(), sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
