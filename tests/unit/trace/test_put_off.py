"""Libraries that are imported for a function that hardly a trace calls are loaded by the call."""

from __future__ import annotations

import sys

import pytest

from memest.trace.model.put_off import put_off


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library of one module, by its name."""
    (tmp_path / "matching").mkdir()
    (tmp_path / "matching/__init__.py").write_text("")
    (tmp_path / "matching/pairs.py").write_text(
        "def match(*values):\n    return sorted(values)\n\n\nOTHER = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "matching.pairs"
    for name in ("matching", "matching.pairs"):
        sys.modules.pop(name, None)


def test_loaded_by_a_call(library):
    with put_off({library: ("match",)}):
        from matching.pairs import match
    assert library not in sys.modules
    assert match.__name__ == "match"
    assert match(3, 1) == [1, 3]
    assert library in sys.modules


def test_loaded_for_anything_else(library):
    with put_off({library: ("match",)}):
        from matching.pairs import OTHER
    assert OTHER == 3
    assert sys.modules[library].OTHER == 3


def test_loaded_for_a_part_of_it(library):
    with put_off({"matching": ("match",)}):
        from matching import match  # noqa: F401
        from matching.pairs import OTHER
    assert OTHER == 3
    assert sys.modules["matching"].pairs.OTHER == 3


def test_loaded_already(library):
    from matching import pairs

    with put_off({library: ("match",)}):
        from matching.pairs import match
    assert match is pairs.match


def test_not_installed():
    with (
        put_off({"no_such_library.pairs": ("match",)}),
        pytest.raises(ModuleNotFoundError, match="no_such_library"),
    ):
        from no_such_library.pairs import match  # noqa: F401
