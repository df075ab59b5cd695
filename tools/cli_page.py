"""Write docs/cli/, a page for each command and an index, from the commands' own help.

python tools/cli_page.py          # rewrite docs/cli/
python tools/cli_page.py --check  # fail if it has drifted
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "cli"
HEAD = """# The command line

Written by `tools/cli_page.py` from the commands themselves. `memest COMMAND --help` has the options
that most people use, `--help GROUP` those of a group, `--help all` all of them, and
`memest help TOPIC` says what words mean. `memest` alone, on a terminal, asks for model, card,
method and batch. Every option of a run stands on the page of [estimate](estimate.md); other
commands take them too.

Options carry the names of Hugging Face's `TrainingArguments`; underscores work as well as dashes.
Data goes to stdout, everything else to stderr. Exit codes: 0 done (for `fits`: it fits), 1 failure,
2 wrong usage, 3 tight, 4 does not fit, 5 unknown model or GPU, 6 missing extra, 7 cannot say.

| command | what it does |
|---|---|
"""
OWN = "The options of its own in full; [every option of a run](estimate.md) is taken too."
_EVERY = "estimate"
"""The command whose page has every option of a run."""
_END, _PART = "\f", "\v"
# a process for all: starting one takes longer than a help
_HELPS = f"""
from memest.cli.commands import build
from memest.cli.main import run
from memest.config.option_table import OPTIONS

def show(title, *words):
    print(title, end={_PART!r})
    assert run([*words]) == 0
    print(end={_PART!r})

shared = {{"config", "config_format", "launch", *(option.name for option in OPTIONS)}}
for name, command in build().commands.items():
    print(name, command.help.partition(chr(10) * 2)[0], sep={_PART!r}, end={_PART!r})
    own = [each for each in command.params if each.name not in shared
           and each.param_type_name == "option" and not each.hidden]
    if hasattr(command, "commands"):
        for each in command.commands:
            show("memest " + name + " " + each, name, each, "--help")
    elif name == {_EVERY!r}:
        show("", name, "--help", "all")
    else:
        show("", name, "--help")
        if any(each.name == "help_group" for each in command.params):
            for panel in dict.fromkeys(each.rich_help_panel for each in own):
                show("own", name, "--help", panel.split()[0].lower())
    print(end={_END!r})
"""


def pages() -> dict[str, str]:
    """The pages as they should be, by the names of their files."""
    process = subprocess.run(
        [sys.executable, "-c", _HELPS], capture_output=True, text=True, check=True,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1"},
    )  # fmt: skip
    rows: list[str] = []
    found: dict[str, str] = {}
    for text in process.stdout.split(_END)[:-1]:
        name, purpose, *parts = text.split(_PART)[:-1]
        purpose = " ".join(purpose.split())
        rows.append(f"| [{name}]({name}.md) | {purpose} |\n")
        found[f"{name}.md"] = _page(name, purpose, list(zip(parts[::2], parts[1::2], strict=True)))
    return {"README.md": HEAD + "".join(rows), **found}


def _page(name: str, purpose: str, shown: list[tuple[str, str]]) -> str:
    blocks = [f"# memest {name}\n"]
    if shown[0][0]:  # a group of commands
        blocks.append(f"{purpose}\n")
    for title, text in shown:
        if title not in ("", "own"):
            blocks.append(f"## {title}\n")
        if title != "own":
            blocks.append(_fenced(text))
    # of the help of a group, what stands between its usage and what says how to see more
    own = ["\n\n".join(text.strip().split("\n\n")[1:-1]) for title, text in shown if title == "own"]
    if own:
        blocks += [f"{OWN}\n", _fenced("\n\n".join(own))]
    return "\n".join(blocks)


def _fenced(text: str) -> str:
    return f"```text\n{text.strip()}\n```\n"


def main() -> int:
    """Rewrite or check the pages."""
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    if "--check" in sys.argv[1:]:
        return 0 if there == wanted else 1
    FOLDER.mkdir(exist_ok=True)
    for name in there.keys() - wanted.keys():
        (FOLDER / name).unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
