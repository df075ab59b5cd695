"""Every file of the package is written by one module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import memest.app
import memest.calibration

FOLDERS = [Path(m.__file__).parent for m in (memest, memest.app, memest.calibration)]
WRITERS = {"write_text", "write_bytes", "mkstemp", "NamedTemporaryFile", "replace_file"}
ELSEWHERE = {
    "whole.py": "the writer",
    "texts.py": "the writer of texts",
    "sweep.py": "lines as they come: see Files.line_by_line",
    "uploads.py": "what was uploaded, in a temporary folder that nobody else reads",
}


def writes(path):
    """Where a module opens a file for writing, or calls what does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
        opens = name in ("open", "fdopen") and any(
            isinstance(m, str) and set(m) & set("wax+") and len(m) <= 3 for m in modes
        )
        if opens or (name in WRITERS and owner not in ("", "files")) or (owner, name) in (
            ("os", "replace"), ("os", "rename"),
        ):  # fmt: skip
            yield node.lineno


@pytest.mark.slow
def test_files_are_written_whole_by_one_module():
    found = {
        f"{path.name}:{line}"
        for folder in FOLDERS
        for path in folder.rglob("*.py")
        if path.name not in ELSEWHERE
        for line in writes(path)
    }
    assert found == set()


def test_the_search_sees_a_writer(tmp_path):
    path = tmp_path / "writer.py"
    path.write_text("path.write_text('x')\nopen('f', 'w')\nos.replace(a, b)\nopen('f')\n")
    assert list(writes(path)) == [1, 2, 3]
