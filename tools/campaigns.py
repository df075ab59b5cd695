"""What takes too long for the tests: a command each, its last result, and whether that still holds.

    python tools/campaigns.py        the table: what each proves, when it ran, what changed since

A campaign that ran whole writes its date, its result in a line and a digest of the files that the
result speaks of to ``tests/campaigns.json``. Where one of these files, or a release that took part,
has changed since, the result is stale, and ``tests/unit/checks/test_campaigns.py`` fails until the
command has run again.
"""

from __future__ import annotations

import ast
import datetime as dt
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "tests" / "campaigns.json"
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Campaign:
    """A proof that is run by hand.

    Attributes:
        name: as its record has it.
        command: that runs it and writes its page.
        proves: in a line.
        page: where its result stands.
        speaks_of: patterns of the files whose content the result is about.
        releases: packages whose pinned releases it is about.
        minutes: on two cores, about.
    """

    name: str
    command: str
    proves: str
    page: str
    speaks_of: tuple[str, ...]
    releases: tuple[str, ...] = ()
    minutes: int = 0

    def digest(self, root: Path = ROOT) -> str:
        """Of the contents that a result speaks of: 16 hexadecimal digits.

        Names of files do not count, nor does prose: see :func:`code_of`.
        """
        files = {path for pattern in self.speaks_of for path in root.glob(pattern)}
        # what Python left behind is no content
        paths = [path for path in files if path.is_file() and path.parent.name != "__pycache__"]
        contents = sorted(map(code_of, paths))
        pins = [f"{name}=={pinned_releases(root)[name]}".encode() for name in self.releases]
        hasher = hashlib.sha256()
        for content in (*contents, *pins):
            hasher.update(hashlib.sha256(content).digest())
        return hasher.hexdigest()[:16]


CAMPAIGNS = (
    Campaign(
        name="catalogue",
        command="python tools/coverage.py",
        proves="every model of the catalogue, in its real size, is built and trains on meta",
        page="docs/coverage.md",
        # small models of every family are traced by the tests: here sizes and configurations count
        speaks_of=("data/models/index.csv", "data/models/configs/*"),
        releases=("torch", "transformers"),
        minutes=40,
    ),
    Campaign(
        name="published",
        command="python tools/published.py",
        proves="every published measurement, predicted; what the errors are",
        page="docs/accuracy.md",
        speaks_of=("data/reference/**/*", "tools/published.py", "calibration/validation/*.py"),
        minutes=20,
    ),
    Campaign(
        name="folds",
        command="python tools/folds.py",
        proves="one model of every family, traced from few layers and whole: the same events",
        page="docs/folding.md",
        speaks_of=(
            "memest/profiles/fold.py", "memest/profiles/fold_search.py",
            "memest/profiles/transcript.py", "memest/trace/model/stacks.py",
        ),
        releases=("torch", "transformers"),
        minutes=25,
    ),
    Campaign(
        name="hostile input",
        command="python tools/fuzz --write",
        proves="100,000 changed inputs: no reader crashes, hangs, floods or does what none may do",
        page="docs/hostile-input.md",
        speaks_of=("tools/fuzz/*.py", "memest/readers/**/*.py"),
        minutes=10,
    ),
    Campaign(
        name="releases",
        command='python tools/compatibility.py --install "torch==2.13.0 transformers==5.23.0"',
        proves="new environments: traces under other releases against real CPU steps there",
        page="docs/compatibility.md",
        speaks_of=("tools/compatibility.py", "calibration/drift.py"),
        releases=("torch", "transformers"),
        minutes=15,
    ),
    Campaign(
        name="pictures",
        command="python tools/app_screenshots.py --docs",
        proves="the explorer as a browser shows it, on a laptop and on a phone",
        page="docs/explorer.md",
        speaks_of=("tools/app_screenshots.py", "app/**/*.py"),
        minutes=3,
    ),
)  # fmt: skip


def code_of(path: Path) -> bytes:
    """What a file does: its bytes, or the syntax tree of Python.

    Where names are imported from does not count, so a move of files makes no result stale; nor do
    comments, docstrings and layout.
    """
    if path.suffix != ".py":
        return path.read_bytes()
    tree = _WithoutProse()
    left = ast.dump(tree.visit(ast.parse(path.read_bytes())))
    return f"{sorted(tree.imports)} {left}".encode()


class _WithoutProse(ast.NodeTransformer):
    """Takes out of a tree what only tells: docstrings, and where names are imported from."""

    def __init__(self) -> None:
        self.imports: set[tuple[str, str]] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imports |= {(name.name, name.asname or "") for name in node.names}

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
        return super().generic_visit(node)


def pinned_releases(root: Path = ROOT) -> dict[str, str]:
    """The releases of ``constraints.txt``, by package."""
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(match.groups() for line in lines if (match := re.match(r"([\w.-]+)==(\S+)", line)))


def records() -> dict[str, dict[str, Any]]:
    """The last result of each campaign that has one."""
    return json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else {}


def stale(campaign: Campaign, record: dict[str, Any] | None) -> str:
    """Why a campaign has to run again; empty where its result still holds."""
    if record is None:
        return f"no result is recorded: {campaign.command}"
    if record["digest"] != campaign.digest():
        about = ", ".join((*campaign.speaks_of, *campaign.releases))
        return f"the result of {record['date']} is older than {about}: {campaign.command}"
    return ""


def record(name: str, result: str) -> None:
    """Keep the result of a campaign that ran whole, with the date and what it speaks of."""
    campaign = next(campaign for campaign in CAMPAIGNS if campaign.name == name)
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    all_records = {**records(), name: {"date": date, "digest": campaign.digest(), "result": result}}
    text = json.dumps(dict(sorted(all_records.items())), indent=2, ensure_ascii=False)
    RECORDS.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Print the table."""
    last_results = records()
    for campaign in CAMPAIGNS:
        result = last_results.get(campaign.name)
        print(f"{campaign.name}: {campaign.proves}")
        print(f"  {campaign.command}   (about {campaign.minutes} minutes; {campaign.page})")
        if result is not None:
            print(f"  {result['date']}: {result['result']}")
        if why := stale(campaign, result):
            print(f"  stale: {why}")


if __name__ == "__main__":
    main()
