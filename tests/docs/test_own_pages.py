"""The code of the pages on modules of one's own and on measuring runs, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["any-module.md", "in-training.md"])
def test_the_code_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMEST_STORE", str(tmp_path / "store.db"))
    names: dict[str, object] = {"__name__": "page"}
    found = blocks(page)
    assert found
    for number, code in enumerate(found, start=1):
        exec(compile(code, f"{page}, block {number}", "exec"), names)
