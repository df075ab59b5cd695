"""What was kept is believed as long as the code that made it has the same contents."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memest
from memest.files import code_digest
from memest.files.folders import data_folder
from memest.workspaces.registry import all_rules

PACKAGE = Path(memest.__file__).parent
RESULTS = {"report/result.py", "report/life_result.py", "report/growth_result.py"}
"""What predictions are put into: data, which know the way to what shows them."""


def imported(path: Path) -> set[str]:
    """The files of memest that one of its files imports, as paths in the package."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    places = {name.removeprefix("memest.").replace(".", "/") for name in names
              if name.startswith("memest.")}  # fmt: skip
    files = {f"{place}{end}" for place in places for end in (".py", "/__init__.py")}
    return {file for file in files if (PACKAGE / file).is_file()}


def test_the_digest_of_traces_is_of_all_that_tracing_imports():
    todo = {path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "trace").rglob("*.py")}
    found: set[str] = set()
    while todo:
        found |= todo
        todo = {file for name in todo for file in imported(PACKAGE / name)} - found

    assert len(found) > 100
    assert found <= set(code_digest.sources())


def test_it_is_of_the_rules_that_are_imported_by_name():
    rules = {f"workspaces/{info.name.partition('.')[0]}.py" for info in all_rules()}

    assert len(rules) > 8
    assert rules <= set(code_digest.sources())


def test_it_is_of_all_files_but_those_of_the_rooms_that_show():
    """No list of files: what is left out is left out with its room."""
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    found = {name for name in found if not name.startswith("data/")}
    left = found - set(code_digest.sources())

    assert {name.partition("/")[0] for name in left} <= set(code_digest.PREDICTS_NOTHING)
    assert code_digest.sources() == sorted(found - left)


@pytest.mark.slow
def test_rooms_that_predict_nothing_are_imported_by_none_that_does():
    """Else a change there could change a prediction, and its digest would not tell."""
    faces = ("__init__.py", "__main__.py", "integrations.py")
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if name.partition("/")[0] in code_digest.PREDICTS_NOTHING or name in faces:
            continue
        rooms = {file.partition("/")[0] for file in imported(path) - RESULTS if "/" in file}
        assert name.startswith("data/") or not rooms & set(code_digest.PREDICTS_NOTHING), name


@pytest.fixture
def copy(tmp_path):
    """memest as another installation has it, in a folder of its own."""
    pruned = shutil.ignore_patterns("__pycache__", "step_profiles")
    shutil.copytree(PACKAGE, tmp_path / "site/memest", ignore=pruned, dirs_exist_ok=True)
    shutil.copytree(data_folder(), tmp_path / "site/memest/data", ignore=pruned, dirs_exist_ok=True)
    return tmp_path / "site"


def run(site, code, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MEMEST_", "HF_"))}
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}"],
        env={**env, "HF_HUB_OFFLINE": "1", **more}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout


DIGESTS = (
    "from memest.files import code_digest as c; print(c.tracing(), c.predicting(), c.__file__)"
)


def test_the_same_contents_elsewhere_and_at_another_time_are_the_same_code(copy):
    digests = f"{code_digest.tracing()} {code_digest.predicting()}"
    assert run(copy, DIGESTS).startswith(f"{digests} {copy}")
    for path in copy.rglob("*.py"):
        os.utime(path, (1, 1))
    assert run(copy, DIGESTS).startswith(digests)


@pytest.mark.parametrize(
    ("file", "traces", "predicts"),
    [
        ("trace/loops.py", True, True),
        ("config/quantization.py", True, True),
        ("workspaces/reduce.py", True, True),
        ("replay/replay.py", True, True),
        ("nobody_thought_of_it.py", True, True),
        ("new_room/inner/deep.py", True, True),
        ("data/cuda_context.json", False, True),
        ("report/text.py", False, False),
        ("cli/main.py", False, False),
    ],
)
def test_a_change_is_told_by_the_digests_of_what_it_may_change(file, traces, predicts, copy):
    path = copy / "memest" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as text:
        text.write("\n")

    tracing, predicting, _ = run(copy, DIGESTS).split()

    assert (tracing != code_digest.tracing()) is traces
    assert (predicting != code_digest.predicting()) is predicts


@pytest.mark.slow
def test_what_was_kept_outlives_a_reinstallation_and_no_edit(copy, tmp_path):
    pytest.importorskip("transformers")
    ask = (
        "from memest.cli.main import run; "
        "code = run(['estimate', 'prajjwal1/bert-tiny', '--seq-len', '64', '--json']); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    cache = tmp_path / "cache"

    def asked() -> tuple[str, int]:
        out = run(copy, ask, MEMEST_CACHE=str(cache))
        return out, len([*cache.glob("*/*.json.gz")])

    first, kept = asked()
    for path in copy.rglob("*.py"):  # the same release again: other times, the same contents
        path.write_bytes(path.read_bytes())
        os.utime(path, (1, 1))
    assert asked() == (first, kept)

    path = copy / "memest/config/quantization.py"
    path.write_text(path.read_text(encoding="utf-8") + "\n# edited\n", encoding="utf-8")
    again, more = asked()
    assert again == first
    assert more > kept


RULE = """
from memest.workspaces.operator_call import Workspace
from memest.workspaces.registry import rule
@rule("aten.tanh")
def tanh(call, gpu):
    return (Workspace({nbytes}, "scratch"),)
"""


@pytest.mark.slow
def test_a_new_rule_and_a_changed_one_say_the_same_of_what_is_kept_as_of_what_is_not(
    copy, tmp_path
):
    pytest.importorskip("transformers")
    rules = copy / "memest/workspaces/sort.py"
    before = rules.read_text(encoding="utf-8")
    ask = (
        "import os; from memest.cli.main import run\n"
        "for place in os.environ['PLACES'].split(os.pathsep):\n"
        "    os.environ['MEMEST_CACHE'] = place\n"
        "    run('estimate prajjwal1/bert-tiny --seq-len 64 --gpu a100 --json'.split())\n"
        "    print('-' * 9)"
    )

    def allocated(*caches: str) -> list[int]:
        places = os.pathsep.join(str(tmp_path / name) for name in caches)
        answers = run(copy, ask, PLACES=places).split("-" * 9)
        return [json.loads(text)["peak"]["allocated_bytes"] for text in answers if text.strip()]

    (none,) = allocated("kept")
    rules.write_text(before + RULE.format(nbytes=1 << 30), encoding="utf-8")
    warm, cold = allocated("kept", "cold with a rule")
    assert warm == cold > none + (1 << 29)

    rules.write_text(before + RULE.format(nbytes=1 << 31), encoding="utf-8")
    warm_again, cold_again = allocated("kept", "cold with another")
    assert warm_again == cold_again == cold + (1 << 30)
