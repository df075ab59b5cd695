"""What a change touches: in a small checkout made for it, and in this one."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys

import pytest

import memest
from support.affected.checkout import Checkout
from support.affected.full_run import RECORD, FullRun, counts, line, of_log
from support.affected.graph import (
    CODE_OF_PAGES,
    COMMANDS_OF_PAGES,
    NAME_FOR_OTHERS,
    PAGES,
    Graph,
    is_test,
)
from support.affected.rules import (
    RUNS_ALL,
    TRACES_NOTHING,
    TouchedTests,
    as_pytest_writes,
    installed_packages,
    touched_tests,
    traces_nothing,
)
from support.blocks import PAGES as PAGES_THAT_ARE_RUN
from support.blocks import command_lines, name_of
from support.paths import IN_TESTS, ROOT, TESTS

LAZY = """
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memest.estimator import estimate
    from memest.search import sweep

_HOMES = {"estimate": "memest.estimator", "sweep": "memest.search"}


def __getattr__(name):
    return getattr(importlib.import_module(_HOMES[name]), name)
"""
PAGE = """# Runs

```sh
memest estimate gpt2
memest estimate gpt2 --ways × 2
```

```python
import memest.units
```

```json
{"a": 1}
```
"""
HOUSE = {
    "pyproject.toml": "[tool.setuptools]\n"
    'package-dir = {"memest.app" = "app", "memest.data" = "data"}\n',
    "memest/__init__.py": LAZY,
    "memest/__main__.py": "from memest.cli import run",
    "memest/cli.py": "def run():\n    from memest.estimator import estimate\n    import memest.app",
    "memest/units.py": "",
    "memest/cards.py": 'TABLE = "gpus.json"',
    "memest/estimator.py": "import memest.cards\nfrom memest.sharding import zero",
    "memest/search.py": "from memest import estimator",
    "memest/sharding/__init__.py": "",
    "memest/sharding/zero.py": "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from memest.search import sweep\n",
    "memest/workspaces/__init__.py": "",
    "memest/workspaces/registry.py": "import importlib\n\n\ndef load(name):\n"
    '    importlib.import_module(f"memest.workspaces.{name}")\n',
    "memest/workspaces/blas.py": "",
    "memest/trace/recorder.py": "",
    "app/__init__.py": "",
    "data/__init__.py": "",
    "data/gpus.json": "{}",
    "tools/page.py": "from memest import search",
    "tools/unread.py": "",
    "docs/runs.md": PAGE,
    "docs/images/one.png": "",
    "tests/conftest.py": "",
    "tests/support/__init__.py": "",
    "tests/support/paths.py": 'ROOT = 1\nKEPT = ROOT / "tests" / "unit" / "kept"\n',
    "tests/support/tools.py": "",
    "tests/support/ranks.py": "from support.paths import KEPT\n",
    "tests/unit/kept/a.json": "{}",
    "tests/unit/cli/conftest.py": 'COMMAND = ["python", "-m", "memest"]',
    "tests/unit/cli/test_cli.py": "",
    "tests/unit/test_blas.py": "from memest.workspaces.registry import load",
    "tests/unit/test_code.py": 'CODE = "import memest.search; print(1)"',
    "tests/unit/test_estimate.py": "import memest\nmemest.estimate('gpt2')",
    "tests/unit/test_handed_on.py": "import memest\nvars(memest)",
    "tests/unit/test_kept.py": "from support import ranks",
    "tests/unit/test_patched.py": 'def test(monkeypatch): monkeypatch.setattr("memest.units.x", 1)',
    "tests/unit/test_tool.py": 'from support.tools import load_tool\nload_tool("page")',
    "tests/unit/test_two.py": """
import pytest
import memest

def swept():
    return memest.sweep()

@pytest.fixture
def grid():
    return swept()

@pytest.fixture(autouse=True)
def always():
    import memest.workspaces.blas

def test_grid(grid): pass

class TestGrid:
    @pytest.mark.usefixtures("grid")
    def test(self): pass

def test_units():
    from memest import units
""",
    "tests/unit/test_zero.py": "def test():\n    from memest.sharding.zero import x",
    COMMANDS_OF_PAGES: "from memest.cli import run",
    CODE_OF_PAGES: "",
}
COMMANDS, CODE = COMMANDS_OF_PAGES, CODE_OF_PAGES
UNIT = "tests/unit/"


def commit(root, files=None):
    """Write files (None: delete one) and commit everything; the commit."""
    for name, text in (files or {}).items():
        path = root / name
        if text is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--allow-empty", "--message", "one")
    return git(root, "rev-parse", "HEAD")


def git(root, *words):
    own = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *own, *words], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A small checkout, with its first commit recorded as one that all tests passed on."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    first = commit(tmp_path, HOUSE)
    record(tmp_path, first)
    commit(tmp_path)
    return tmp_path


def record(root, commit):
    (root / ".ci").mkdir(exist_ok=True)
    FullRun(commit, "2026-01-01T00:00:00+00:00", 30.5, 4000, 12, 2).write(root)


def files_touched(house):
    """The files of which a test is touched, and the cases."""
    found = touched_tests(Checkout(house))
    assert not found.everything
    return {name.partition("::")[0] for name in found.tests} | found.cases.keys()


def test_a_record_that_is_committed_changes_nothing(house):
    assert files_touched(house) == set()
    assert (
        touched_tests(Checkout(house)).since
        == json.loads((house / RECORD).read_text())["commit"][:10]
    )


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        # imports: at the top, in functions, by way of others, not for a type checker alone
        ("memest/sharding/zero.py", {
            "cli/test_cli.py", "test_code.py", "test_estimate.py", "test_handed_on.py",
            "test_tool.py", "test_two.py", "test_zero.py",
        }),
        # names that a package finds when it is asked, or when it is handed on
        ("memest/search.py", {"test_code.py", "test_handed_on.py", "test_tool.py", "test_two.py"}),
        ("memest/workspaces/blas.py", {"test_blas.py", "test_two.py"}),
        ("memest/units.py", {"test_patched.py", "test_two.py", CODE}),
        ("app/__init__.py", {"cli/test_cli.py"}),
        ("tools/page.py", {"test_tool.py"}),
        ("tools/unread.py", set()),
        ("tests/support/ranks.py", {"test_kept.py"}),
        ("tests/unit/cli/conftest.py", {"cli/test_cli.py"}),
        ("tests/unit/kept/a.json", {"test_kept.py"}),
        ("data/gpus.json", {
            "cli/test_cli.py", "test_code.py", "test_estimate.py", "test_handed_on.py",
            "test_tool.py", "test_two.py",
        }),
        ("docs/images/one.png", set()),
        ("LICENSE", set()),
    ],
)  # fmt: skip
def test_a_change_touches_what_depends_on_it(house, changed, tests):
    (house / changed).write_text("# other\n" + HOUSE.get(changed, ""))
    # the command line imports all but search, and the commands of pages are run by it
    behind_cli = UNIT + "cli/test_cli.py" in {UNIT + name for name in tests}
    also = {COMMANDS} if behind_cli and not changed.startswith("tests/") else set()
    assert files_touched(house) == {n if n == CODE else UNIT + n for n in tests} | also


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("memest/search.py", {"test_grid", "TestGrid"}),  # through fixtures and functions
        ("memest/units.py", {"test_units"}),
        ("memest/workspaces/blas.py", {"test_grid", "TestGrid", "test_units"}),
        (UNIT + "test_two.py", {"test_grid", "TestGrid", "test_units"}),
    ],
)
def test_tests_of_one_file_are_told_apart(house, changed, tests):
    (house / changed).write_text(HOUSE[changed] + "\nx = 1\n")
    found = touched_tests(Checkout(house))
    names = {f"{UNIT}test_two.py::{name}" for name in ("test_grid", "TestGrid::test", "test_units")}
    ran = {name for name in names if found.reason(f"{name}[some: case]") == changed}
    assert {name.split("::")[1] for name in ran} == tests
    assert {name for name in names if found.reason(name) is None} == names - ran


def test_a_test_that_is_not_written_down_as_one_runs(house):
    found = touched_tests(Checkout(house))
    assert found.reason(UNIT + "test_two.py::test_units") is None
    assert "not known" in found.reason(UNIT + "test_two.py::test_made[up]")


@pytest.mark.parametrize("place", RUNS_ALL)
def test_some_changes_run_everything(house, place):
    name = f"{place}new.py" if place.endswith("/") else place
    (house / name).parent.mkdir(parents=True, exist_ok=True)
    with (house / name).open("a") as file:
        file.write("\n")
    found = touched_tests(Checkout(house))
    assert found.everything.startswith(f"{name} differs from {found.since}: ")
    assert found.reason("tests/unit/test_zero.py::test") == found.everything


@pytest.mark.parametrize("name", ["data/new.json", "other/new.txt", "memest/nobody.py"])
def test_what_nobody_is_known_to_read_runs_everything(house, name):
    (house / name).parent.mkdir(exist_ok=True)
    (house / name).write_text("")
    assert "nothing says who reads it" in touched_tests(Checkout(house)).everything


def test_a_file_that_is_gone_touches_what_still_asks_for_it(house):
    (house / "memest/units.py").unlink()
    (house / "tests/unit/kept/a.json").unlink()
    tests = {UNIT + name for name in ("test_patched.py", "test_two.py", "test_kept.py")}
    assert files_touched(house) == {CODE, *tests}


def test_new_tests_and_renamed_ones_are_touched(house):
    git(house, "mv", "tests/unit/test_zero.py", "tests/unit/test_stages.py")
    (house / "tests/unit/test_new.py").write_text("")
    gone = UNIT + "test_zero.py"
    assert files_touched(house) - {gone} == {UNIT + "test_stages.py", UNIT + "test_new.py"}


@pytest.mark.parametrize(
    ("before", "after", "cases"),
    [
        ("# Runs", "# All runs\n\nWords, and a `command --in=them`.", set()),
        ("gpt2 --ways × 2", "gpt2 --ways × 3",
         {f"{COMMANDS}[memest estimate gpt2 --ways \\xd7 3]"}),
        ("memest estimate gpt2\n", "", set()),
        ("import memest.units", "import memest.units as u", {f"{CODE}[docs/runs.md]"}),
        ('{"a": 1}', '{"a": 2}', {COMMANDS, CODE}),
    ],
)  # fmt: skip
def test_a_page_touches_its_changed_commands_and_code(house, before, after, cases):
    assert before in PAGE
    (house / "docs/runs.md").write_text(PAGE.replace(before, after, 1))
    assert files_touched(house) == cases


def test_a_command_that_moves_to_another_page_was_run(house):
    (house / "docs/runs.md").write_text(PAGE.replace("memest estimate gpt2\n", ""))
    (house / "docs/more.md").write_text("```sh\nmemest estimate gpt2\nmemest fits gpt2\n```\n")
    assert files_touched(house) == {f"{COMMANDS}[memest fits gpt2]"}


def test_all_commits_since_the_record_count_and_merged_ones_too(house):
    git(house, "checkout", "--quiet", "-b", "side")
    commit(house, {"memest/units.py": "x = 1"})
    git(house, "checkout", "--quiet", "main")
    commit(house, {"tools/page.py": ""})
    git(house, "merge", "--quiet", "--no-edit", "side")
    tests = {UNIT + name for name in ("test_patched.py", "test_two.py", "test_tool.py")}
    assert files_touched(house) == {CODE, *tests}


def test_without_a_record_of_this_history_everything_runs(house, tmp_path_factory):
    (house / RECORD).write_text("{}")
    assert "cannot be read" in touched_tests(Checkout(house)).everything
    git(house, "checkout", "--quiet", "-b", "side")
    elsewhere = commit(house)
    git(house, "checkout", "--quiet", "main", "--force")
    for unknown in (elsewhere, "0" * 40):
        record(house, unknown)
        assert "not in this clone's history" in touched_tests(Checkout(house)).everything
    (house / RECORD).unlink()
    assert "no full run is recorded" in touched_tests(Checkout(house)).everything

    record(house, git(house, "rev-parse", "main~1"))
    commit(house, {"memest/units.py": "x = 1"})
    shallow = tmp_path_factory.mktemp("clone")
    git(shallow, "clone", "--quiet", "--depth", "1", house.as_uri(), ".")
    assert touched_tests(Checkout(house)).tests
    assert "not in this clone's history" in touched_tests(Checkout(shallow)).everything


SUITE = r"""
import pytest

@pytest.mark.slow
def test_slow(): pass

def test_fast(): pass

LINES = ["docs/runs.md: memest a", "memest help: memest \u2264", "memest help: memest b"]

@pytest.mark.slow(LINES[0], r"memest help: memest \u2264")
@pytest.mark.parametrize("line", LINES)
def test_line(line): pass
"""
ZERO, CHAINS = UNIT + "test_zero.py", UNIT + "replay/test_chains.py"


@pytest.fixture
def suite(house):
    """The checkout with tests that run: their names that passed, and what pytest said."""
    for name in filter(is_test, HOUSE):
        (house / name).unlink()
    record(house, commit(house, {
        "tests/conftest.py": (TESTS / "conftest.py").read_text(encoding="utf-8"),
        "pytest.ini": f"[pytest]\npythonpath = {TESTS}\nmarkers =\n    slow: left to --full\n"
        "addopts = --strict-markers --import-mode=importlib -p no:randomly -p no:cacheprovider\n",
        ZERO: f"import memest.sharding.zero\n{SUITE}", CHAINS: SUITE, COMMANDS: SUITE,
        "docs/runs.md": "```sh\nmemest a\n```\n",
    }))  # fmt: skip

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pytest", "-rp", *words, "tests/unit", "tests/faces"],
            cwd=house, capture_output=True, text=True,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        return done, {words[7:] for words in lines if words.startswith("PASSED ")}

    return run


CASES = ("test_line[docs/runs.md: memest a]", r"test_line[memest help: memest \u2264]")


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_slow_tests_that_nothing_touches_are_left_out_and_told(suite, house, workers):
    (house / "memest/sharding/zero.py").write_text("x = 1")
    (house / "docs/runs.md").write_text("```sh\nmemest a\nmemest ≤\n```\nOther words.\n")
    done, ran = suite("--full", "--touched", "-n", workers)
    fast = ("test_fast", "test_line[memest help: memest b]")
    touched = {f"{ZERO}::{test}" for test in ("test_slow", *CASES)} | {f"{COMMANDS}::{CASES[1]}"}
    assert ran == touched | {
        f"{name}::{test}" for name in (ZERO, CHAINS, COMMANDS) for test in fast
    }
    said = done.stdout.partition("= slow tests =")[2]
    assert "4 run, by what differs from" in said
    assert "  3 in tests/unit: memest/sharding/zero.py\n" in said
    assert "  1 in tests/faces/docs: docs/runs.md\n" in said
    assert "5 left out, which depend on nothing that differs:" in said
    assert "  3 in tests/unit/replay\n" in said
    assert "  2 in tests/faces/docs\n" in said


@pytest.mark.slow
def test_where_all_run_it_says_why(suite, house):
    (house / "constraints.txt").write_text("torch==3.0\n")
    done, ran = suite("--full", "--touched", "-m", "slow")
    assert {name.partition("::")[2] for name in ran} == {"test_slow", *CASES}
    assert len(ran) == 9
    assert "all 9 run: constraints.txt differs from" in done.stdout


@pytest.mark.slow
def test_nothing_to_run_is_an_exit_code_of_its_own(suite):
    done, ran = suite("--full", "--touched", "-m", "slow")
    assert (done.returncode, ran) == (pytest.ExitCode.NO_TESTS_COLLECTED, set())


LOG = """
== README's test command: python3 -m pytest
3 passed, 2 skipped, 7 deselected in 61.50s (0:01:01)
==================== 7 passed, 1 warning in 2.50s =====================
13 deselected in 1.00s
no tests ran in 0.01s
"""


def test_the_runs_of_a_log_are_counted_together():
    found, seconds = counts(LOG)
    assert found == {"passed": 10, "skipped": 2, "warning": 1}
    assert line(found, seconds) == "10 passed, 2 skipped, 1 warning in 65.00s (0:01:05)"
    assert line(*counts("")) == "no tests ran in 0.00s (0:00:00)"


def test_a_full_run_is_recorded_as_its_log_says(tmp_path):
    (tmp_path / ".ci").mkdir()
    made = of_log("abc", LOG, workers=2)
    made.write(tmp_path)
    assert FullRun.read(tmp_path) == made
    assert (made.commit, made.minutes, made.passed, made.skipped) == ("abc", 1.1, 10, 2)


def test_the_program_says_the_counts_of_a_log(tmp_path):
    (tmp_path / "log").write_text(LOG)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "support.affected", "--counts", tmp_path / "log"],
        capture_output=True, text=True, env=IN_TESTS, check=True,
    )  # fmt: skip
    assert done.stdout == "10 passed, 2 skipped, 1 warning in 65.00s (0:01:05)\n"


OWN = "tests/unit/checks/"
"""What tests the tests themselves."""
SELF = OWN + "test_affected.py"


@pytest.fixture(scope="module")
def graph():
    """What the files of this checkout depend on."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    checkout = Checkout(ROOT)
    return Graph(checkout, installed_packages(checkout))


@pytest.mark.parametrize(
    ("changed", "touches", "does_not"),
    [
        ("memest/sharding/zero.py",
         ("proof/ranks/test_zero.py", "unit/sharding/test_quantized.py"),
         ("unit/replay/test_chains.py", "unit/workspaces/test_blas.py")),
        ("memest/report/text.py",
         ("faces/cli/test_report.py", "proof/ranks/test_fsdp.py"),
         ("proof/ranks/test_fsdp_ranks.py::test_a_rank_allocates_what_fully_shard_does",)),
        ("memest/workspaces/blas.py",
         ("unit/workspaces/test_blas.py",), ("unit/replay/test_conf.py",)),
        ("memest/search/advise.py",
         ("unit/search/test_advise.py", "faces/cli/test_advise.py", "faces/app/test_browser.py"),
         ("proof/ranks/test_zero.py", "published/test_xmem.py")),
        ("app/main.py", ("faces/app/test_browser.py",), ("unit/search/test_advise.py",)),
        ("calibration/fitting/robust.py",
         ("unit/calibration/test_fit.py",), ("proof/ranks/test_zero.py",)),
        ("tests/proof/ranks/recorded/zero_3.json",
         ("proof/ranks/test_zero.py",), ("unit/calibration/test_fit.py",)),
        ("tests/unit/search/deepspeed_estimator.json", ("unit/search/test_stages.py",), ()),
        ("tests/unit/readers/examples/sft.yaml",
         ("unit/readers/test_formats.py", "faces/docs/test_commands.py"),
         ("proof/ranks/test_zero.py",)),
        ("data/gpus.json", ("unit/catalog/test_gpus.py",), ("unit/replay/test_conf.py",)),
        ("data/reference/xmem.jsonl", ("published/test_xmem.py",), ("proof/ranks/test_zero.py",)),
        ("tools/cli_page.py", ("faces/docs/test_readme.py",), ("published/test_xmem.py",)),
        ("benchmarks/speed/suite.py", ("unit/benchmarks/test_suite.py",), ()),
        ("examples/memory.ipynb", ("faces/notebook/test_example.py",), ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "x",
)  # fmt: skip
def test_a_change_of_this_checkout_touches_what_it_should(graph, changed, touches, does_not):
    found = {*graph.touched_by({changed})}
    found |= {name.partition("::")[0] for name in found}
    assert [name for name in touches if f"tests/{name}" not in found] == []
    assert [name for name in does_not if f"tests/{name}" in found] == []


def behind(graph, file):
    """Everything that some test of a file depends on."""
    tests = [name for name in graph.uses if name.partition("::")[0] == file]
    return graph.behind(*tests)


def test_what_runs_code_that_is_no_import_is_seen(graph):
    for test, asked in {
        "faces/cli/test_help.py": "memest/cli/sweep.py",  # python -m memest
        "faces/notebook/test_example.py": "memest/estimation/estimate.py",  # a notebook's cells
        "faces/docs/test_own_pages.py": "calibration/live/trainer.py",  # a page's code
        "unit/calibration/live/test_lightning_example.py": "examples/lightning_callback.py",
        "unit/calibration/live/test_two_ranks.py": "tests/support/two_ranks.py",
        "faces/app/test_browser.py": "app/streamlit_app.py",
        "unit/sharding/test_block_states.py": "memest/trace/optimizers/torch.py",
    }.items():
        assert asked in behind(graph, f"tests/{test}"), test


def test_prose_of_pages_is_behind_no_test_but_those_that_name_the_page(graph):
    found = {
        page: {n.partition("::")[0] for n in graph.touched_by({page})} - {page, SELF}
        for page in graph.files
        if PAGES.fullmatch(page)
    }
    assert found["docs/pipelines.md"] == set()
    assert "tests/unit/benchmarks/test_suite.py" in found["docs/speed.md"]
    assert len([page for page in found if not found[page]]) > 20


def test_names_that_memest_finds_when_asked_are_all_known(graph):
    assert set(graph.lazy("memest/__init__.py")) == {*memest.__all__, "MemestCallback"} - {
        "__version__"
    }


def test_every_slow_test_is_behind_a_change_of_what_is_installed(graph):
    """Otherwise it would never run again, but for a change of its own file."""
    files = {name.partition("::")[0] for name in graph.tests()}
    slow = {n for n in files if "mark.slow" in (ROOT / n).read_text("utf-8")}
    lost = []
    for test in graph.tests():
        if test.partition("::")[0] in slow and not test.startswith(OWN):
            code = graph.behind(test) - {"memest/__init__.py", "memest/errors.py"}
            if not any(name.startswith("memest/") for name in code):
                lost.append(test)
    assert len(slow) > 20
    assert lost == []


def test_everything_installed_is_behind_some_test_and_so_is_what_tests_read(graph):
    """What is behind none would run everything whenever it changes."""
    lost = graph.files - graph.behind(*graph.tests())
    lost = {n for n in lost if not (PAGES.fullmatch(n) or traces_nothing(n))}
    assert lost <= RUNS_ALL.keys()


def test_the_rules_speak_of_what_is_there(graph):
    for place in (*RUNS_ALL, *NAME_FOR_OTHERS):
        assert (ROOT / place).exists(), place
    for pattern in TRACES_NOTHING:
        assert pattern == RECORD or fnmatch.filter(graph.files, pattern), pattern
    pages = {name_of(page) for page in PAGES_THAT_ARE_RUN}
    assert {name for name in graph.files if PAGES.fullmatch(name)} == pages


def test_every_command_of_the_pages_is_a_case(graph):
    for command in command_lines():
        case = as_pytest_writes(str(command))
        found = TouchedTests(cases={f"{COMMANDS}[{as_pytest_writes(command.line)}]": command.page})
        assert found.reason(f"{COMMANDS}::test_the_command_runs[{case}]") == command.page
