"""Configurations in the style of each framework, and a place to read them from."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent / "examples"


@pytest.fixture
def examples(monkeypatch):
    """The working directory is the one that a training is launched from."""
    monkeypatch.chdir(EXAMPLES)
    return EXAMPLES


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file into the working directory of a test."""
    monkeypatch.chdir(tmp_path)

    def make(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text, encoding="utf-8")
        return name

    return make
