"""The page of the examples: its commands run as they stand there."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil

import pytest

from support.blocks import blocks
from support.paths import ROOT

EXAMPLES = ROOT / "examples"
PAGE = EXAMPLES / "README.md"
SECTIONS = ("student", "llm", "vision", "oom", "platform")
STAND_INS = ("python", "axolotl", "kubectl")
CODE = re.compile(r"# exit code (\d+)$")
NEEDS = re.compile(r"# needs (\w+)$")

RECIPES = [
    [line for line in block.splitlines() if line and not line.startswith("#")]
    for block in blocks(PAGE, "sh", "bash")
]
COMMANDS = {
    f"{section}-{number}": line
    for section, lines in zip(SECTIONS, RECIPES, strict=True)
    for number, line in enumerate(lines, start=1)
}
FAST = (
    "llm-1", "llm-2", "vision-4", "oom-1", "oom-2", "oom-3", "oom-4", "oom-5",
    "platform-3", "platform-5",
)  # fmt: skip


def test_recipes_are_short():
    assert [len(lines) <= 5 for lines in RECIPES] == [True] * 5


@pytest.mark.slow(but=FAST)
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
@pytest.mark.parametrize("case", COMMANDS)
def test_a_command_runs_as_it_stands_there(case, bash):
    line = COMMANDS[case]
    for name in STAND_INS:
        bash.tool(name, f'echo "{name} $@"')
    if "peft" in line or "axolotl" in line or "llama_factory" in line:
        pytest.importorskip("peft")
    named, needed = CODE.search(line), NEEDS.search(line)
    code = int(named.group(1)) if named else 0
    missing = needed is not None and importlib.util.find_spec(needed.group(1)) is None

    done = bash("-c", line, cwd=ROOT, PYTHONDONTWRITEBYTECODE="1")

    # code of an example that fails, or a library that memest asks for itself
    missing_code = 6 if re.search(r"\b(timm|torchvision)/", line) else 1
    assert done.returncode == (missing_code if missing else code), done.stderr
    assert "Traceback" not in done.stderr
    if missing:
        package = needed.group(1)
        assert package in done.stderr
        assert "pip install" in done.stderr
    else:
        assert done.stdout


def test_the_readme_shows_commands_of_the_page():
    shown = [
        line
        for block in blocks(ROOT / "README.md", "sh", "bash")
        for line in block.splitlines()
        if re.search(r"\bexamples[/.]", line)
    ]
    assert len(shown) >= 5
    assert set(shown) <= set(COMMANDS.values())


def test_files_that_commands_name_are_there():
    words = re.findall(r"examples/[\w./-]+", PAGE.read_text(encoding="utf-8"))
    assert len(words) > 20
    assert [word for word in words if not (ROOT / word).is_file()] == []


def test_scripts_of_shells_are_sound():
    for path in (*EXAMPLES.rglob("*.sh"), *EXAMPLES.rglob("*.sbatch")):
        assert path.read_text(encoding="utf-8").startswith("#!/bin/bash\n")
        assert os.system(f"bash -n '{path}'") == 0
