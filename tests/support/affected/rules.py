"""What a change touches: everything, some files of tests, or some cases of the pages' tests."""

from __future__ import annotations

import fnmatch
import json
import tomllib
from dataclasses import asdict, dataclass, field

from support.affected.checkout import Checkout
from support.affected.full_run import FullRun
from support.affected.graph import CODE_OF_PAGES, COMMANDS_OF_PAGES, PAGES, Graph, is_test
from support.blocks import blocks_of, lines_of

RUNS_ALL = {
    "memest/trace/": "the tracer: every prediction begins with what it recorded",
    "memest/estimation/profiler.py": "asks the tracer for all others",
    "memest/events.py": "what the tracer, the recorder and the replay tell each other",
    "memest/replay/": "every prediction ends in it",
    "pyproject.toml": "dependencies, what is installed, how pytest is set",
    "constraints.txt": "versions of everything that is not memest",
    "tests/conftest.py": "options of the whole suite",
    "tests/support/affected/": "what chooses would choose the tests of its own change",
    ".ci/run": "how everything is run",
}
"""What runs all tests when it changes, and why."""
TRACES_NOTHING = (
    "*.md", "docs/images/*", "LICENSE", "CITATION.cff", ".gitignore", ".ci/full-run.json",
    "tests/campaigns.json", "tools/*.py", "benchmarks/*.py",
)  # fmt: skip
"""What no slow test may depend on: prose, programs that are started by hand, and their results."""
DATA = ("json", "toml", "yaml")
"""Languages of blocks that the tests of pages read, each for what it likes."""


@dataclass(frozen=True)
class TouchedTests:
    """What of the slow tests has to run.

    Attributes:
        since: the commit whose full run is recorded; empty if there is none.
        everything: why all have to; empty if they have not.
        tests: what can be touched, ``FILE::NAME``, or ``FILE`` for all in it, and by which change.
        cases: cases of other tests, by file and what pytest has in brackets (a command line without
            its page), and by which change.
        untouched_tests: tests that nothing can touch, as ``FILE::NAME``.
    """

    since: str = ""
    everything: str = ""
    tests: dict[str, str] = field(default_factory=dict)
    cases: dict[str, str] = field(default_factory=dict)
    untouched_tests: list[str] = field(default_factory=list)

    def reason(self, test: str) -> str | None:
        """What touches a test, named as pytest does; None if nothing can."""
        file, _, rest = test.partition("::")
        name, _, case = rest.partition("[")
        name = f"{file}::{name.partition('::')[0]}"
        case = case.removesuffix("]")
        reasons = (
            self.everything,
            self.tests.get(name),
            self.tests.get(file),
            self.cases.get(f"{file}[{case}]"),
            self.cases.get(f"{file}[{case.partition(': ')[2]}]"),
        )
        unknown = None if name in self.untouched_tests else "what it depends on is not known"
        return next(filter(None, reasons), unknown)

    def dumps(self) -> str:
        """As text, for other processes."""
        return json.dumps(asdict(self))


def touched_tests(checkout: Checkout) -> TouchedTests:
    """What has to run in a checkout, by what differs from the last recorded full run."""
    try:
        record = FullRun.read(checkout.root)
    except ValueError as error:
        return TouchedTests(everything=str(error))
    if record is None:
        return TouchedTests(everything="no full run is recorded in .ci/full-run.json")
    since = record.commit[:10]
    if not checkout.descends_from(record.commit):
        return TouchedTests(
            everything=f"{since}, whose full run is recorded, is not in this clone's history"
        )
    return touched_since(checkout, record.commit)


def touched_since(checkout: Checkout, commit: str) -> TouchedTests:
    """What has to run by what differs from a commit."""
    since = commit[:10]
    changed_files = checkout.changed_since(commit)
    for name in sorted(changed_files):
        for place, why in RUNS_ALL.items():
            if name == place or (place.endswith("/") and name.startswith(place)):
                return TouchedTests(since, f"{name} differs from {since}: {why}")
    graph = Graph(checkout, installed_packages(checkout), changed_files)
    causes = graph.touched_by(changed_files)
    for name in sorted(changed_files & checkout.files()):
        if not (is_test(name) or graph.is_used(name) or traces_nothing(name)):
            return TouchedTests(since, f"{name} differs from {since}: nothing says who reads it")
    tests = {name: why for name, why in causes.items() if is_test(name.partition("::")[0])}
    cases: dict[str, str] = {}
    pages = sorted(name for name in changed_files if PAGES.fullmatch(name))
    before = {page: checkout.text_at(commit, page) for page in pages}
    after = {page: checkout.text(page) for page in pages}
    known_lines = {line for text in before.values() for line in lines_of(text)}
    for page in pages:
        if blocks_of(before[page], *DATA) != blocks_of(after[page], *DATA):
            tests |= {COMMANDS_OF_PAGES: page, CODE_OF_PAGES: page}
        if blocks_of(before[page], "python") != blocks_of(after[page], "python"):
            cases[f"{CODE_OF_PAGES}[{page}]"] = page
        for line in set(lines_of(after[page])) - known_lines:
            cases[f"{COMMANDS_OF_PAGES}[{as_pytest_writes(line)}]"] = page
    untouched_tests = graph.tests() - tests.keys()
    return TouchedTests(since, "", tests, cases, sorted(untouched_tests))


def installed_packages(checkout: Checkout) -> dict[str, str]:
    """Folders of the packages that are installed, by their names."""
    settings = tomllib.loads(checkout.text("pyproject.toml"))["tool"]["setuptools"]
    return {"memest": "memest", **settings.get("package-dir", {})}


def traces_nothing(name: str) -> bool:
    """Whether a file is none that a test has to depend on."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in TRACES_NOTHING)


def as_pytest_writes(case: str) -> str:
    """What stands in the brackets of a test's name."""
    return case.encode("unicode_escape").decode("ascii")
