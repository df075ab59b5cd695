"""What was kept is believed as long as the code that made it has the same contents."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memest
from memest import code_digest
from memest.places import data_folder

PACKAGE = Path(memest.__file__).parent


def imported(path: Path) -> set[str]:
    """The files of memest that one of its files imports, as paths in the package."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    files = {f"{name.removeprefix('memest.').replace('.', '/')}.py" for name in names
             if name.startswith("memest.")}  # fmt: skip
    return {file for file in files if (PACKAGE / file).is_file()}


def test_the_digest_of_traces_is_of_all_that_tracing_works_with():
    todo = {f"trace/{path.name}" for path in (PACKAGE / "trace").glob("*.py")}
    found: set[str] = set()
    while todo:
        found |= todo
        # what only refuses, reads, writes or says leads on to no size
        todo = {
            file for name in todo if name not in code_digest.NOT_IN_TRACES
            for file in imported(PACKAGE / name)
        } - found  # fmt: skip
    beside = {name for name in found if not name.startswith("trace/")}

    assert beside == {*code_digest.TRACES_WITH, *code_digest.NOT_IN_TRACES}


def test_rooms_that_predict_nothing_are_imported_by_none_that_does():
    """Else a change there could change a prediction, and its digest would not tell."""
    words = {"memest/result.py", "memest/oom_findings.py", "memest/stage_table.py"}
    words |= {"memest/findings.py", "memest/limits.py"}  # these know the way to their own report
    faces = ("__init__.py", "__main__.py")
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if name.partition("/")[0] in code_digest.PREDICTS_NOTHING or name in faces:
            continue
        rooms = {file.partition("/")[0] for file in imported(path) if "/" in file}
        below = name.startswith(("validation/", "data/")) or f"memest/{name}" in words
        assert below or not rooms & set(code_digest.PREDICTS_NOTHING), name


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


DIGESTS = "from memest import code_digest as c; print(c.tracing(), c.predicting(), c.__file__)"


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
        ("packed_formats.py", True, True),
        ("replay/replay.py", False, True),
        ("data/cuda_context.json", False, True),
        ("report/text.py", False, False),
        ("cli/main.py", False, False),
    ],
)
def test_a_change_is_told_by_the_digests_of_what_it_may_change(file, traces, predicts, copy):
    path = copy / "memest" / file
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")

    tracing, predicting, _ = run(copy, DIGESTS).split()

    assert (tracing != code_digest.tracing()) is traces
    assert (predicting != code_digest.predicting()) is predicts


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

    path = copy / "memest/packed_formats.py"
    path.write_text(path.read_text(encoding="utf-8") + "\n# edited\n", encoding="utf-8")
    again, more = asked()
    assert again == first
    assert more > kept
