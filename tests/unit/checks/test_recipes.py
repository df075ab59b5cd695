"""What ``docs/architecture.md`` says under "To add ...": the recipes, followed in a copy.

An option has its own test (``tests/unit/config/test_options.py``), a rule that a trace was kept
without too (``tests/unit/profiles/test_code_digest.py``).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memest
from memest.files.folders import data_folder


@pytest.fixture
def copy(tmp_path):
    """A copy of the package, with its data, to add something to."""
    left_out = shutil.ignore_patterns("__pycache__", "calibration", "app", "data")
    package = tmp_path / "memest"
    shutil.copytree(Path(memest.__file__).parent, package, ignore=left_out)
    # step profiles are large, and no recipe changes one
    shutil.copytree(
        data_folder(),
        package / "data",
        ignore=shutil.ignore_patterns("__pycache__", "step_profiles"),
    )
    return package


def run(package: Path, code: str) -> str:
    """Run code that imports the copy, and give what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(package.parent)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MEMEST_CACHE": str(package.parent / "cache")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def edit(path: Path, old: str, new: str) -> None:
    """Replace the only place at which a file has some text."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_gpu_is_a_line(copy):
    path = copy / "data" / "gpus.json"
    gpus = json.loads(path.read_text(encoding="utf-8"))
    known = next(gpu for gpu in gpus if gpu["name"] == "Tesla T4")
    gpus.append({**known, "name": "Tesla T5", "aliases": ["t5"], "nvml_total_bytes": 20 << 30})
    path.write_text(json.dumps(gpus), encoding="utf-8")

    printed = run(
        copy,
        "from memest.catalog.gpus import find_gpu; gpu = find_gpu('t5');"
        "print(gpu.name, gpu.sm_count, gpu.nvml_total_bytes)",
    )

    assert printed.split() == ["Tesla", "T5", str(known["sm_count"]), str(20 << 30)]


READER = """
from memest.readers.mapping import DocumentKeys, Key, KeyTable, read_table

_TABLE = KeyTable(
    defaults={"optim": ("sgd", "what it takes unasked")},
    options={"examples": Key("batch", "whole", 8), "tokens": Key("seq_len", "whole")},
    ignored_keys={"colour": "it colours its log"},
    unmodelled_keys={"mirror": "a second copy of the weights"},
)


def read_dummy(keys: DocumentKeys) -> None:
    read_table(keys, _TABLE)
"""


def test_a_reader_is_a_file_with_a_table_and_its_marks(copy, tmp_path):
    (copy / "readers" / "dummy.py").write_text(READER, encoding="utf-8")
    formats = copy / "readers" / "formats.py"
    edit(
        formats,
        "FORMATS: tuple[FileFormat, ...] = (\n",
        "from memest.readers.dummy import read_dummy\n"
        "FORMATS: tuple[FileFormat, ...] = (\n"
        '    _format("dummy", "Dummy", "examples tokens", read_dummy),\n',
    )
    configuration = tmp_path / "run.yaml"
    configuration.write_text("examples: 3\ntokens: 77\ncolour: red\nmirror: true\n")

    printed = run(
        copy,
        "from memest.readers.reading import read_config\n"
        f"read = read_config({str(configuration)!r}, model='gpt2')\n"
        "print(read.setup.batch, read.setup.seq_len, read.setup.optim)\n"
        "print(*read.notes)",
    )

    first, _, notes = printed.partition("\n")
    assert first == "3 77 sgd"
    assert "mirror" in notes
    assert "a second copy of the weights" in notes


@pytest.mark.slow
def test_an_optimizer_of_torch_is_its_facts(copy):
    pytest.importorskip("transformers")
    facts = copy / "config" / "optimizers.py"
    momentum = (
        'OptimizerFacts(about="a dummy", package="torch", module="torch.optim", kind="SGD",'
        'options=(("momentum", 0.9),))'
    )
    edit(facts, "_TORCH = {\n", f'_TORCH = {{"sgd_momentum": {momentum},\n')

    printed = run(
        copy,
        "import memest\n"
        "ask = dict(batch=2, seq_len=32, gpu='t4', max_batch=False)\n"
        "for optim in ('sgd', 'sgd_momentum'):\n"
        "    estimate = memest.estimate('prajjwal1/bert-tiny', optim=optim, **ask)\n"
        "    print(estimate.peak.allocated_bytes)",
    )

    plain, with_momentum = map(int, printed.split())
    assert with_momentum > plain


RULE = """
from memest.workspaces.operator_call import Workspace
from memest.workspaces.registry import rule


@rule("aten.tanh")
def tanh(call, gpu):
    return (Workspace(1 << 30, "scratch of tanh"),)
"""


@pytest.mark.slow
def test_a_workspace_rule_is_a_function_in_a_file_that_the_registry_names(copy):
    pytest.importorskip("transformers")
    ask = (
        "import memest; e = memest.estimate('prajjwal1/bert-tiny', batch=2, seq_len=32, gpu='t4',"
        "max_batch=False); print(e.peak.allocated_bytes)"
    )
    before = int(run(copy, ask))
    (copy / "workspaces" / "dummy.py").write_text(RULE, encoding="utf-8")
    edit(copy / "workspaces" / "registry.py", "_MODULES = (\n", '_MODULES = (\n    "dummy",\n')

    assert int(run(copy, ask)) >= 1 << 30 > before
