"""Every public module, class and function says what it does; what users call says all of it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import pytest

import memest
from support.paths import ROOT

FILES = [path for room in ("memest", "calibration", "app") for path in (ROOT / room).rglob("*.py")]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def public(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS) and not child.name.startswith("_"):
            yield f"{outer}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{outer}{child.name}.")
        elif isinstance(child, ast.If | ast.Try):
            yield from public(child, outer)


def without_words(text: str) -> list[str]:
    tree = ast.parse(text)
    found = [] if not tree.body or ast.get_docstring(tree) else ["the module"]
    return [*found, *(name for name, node in public(tree) if not ast.get_docstring(node))]


@pytest.mark.slow
def test_everything_public_has_a_docstring():
    lacking = {
        str(path.relative_to(ROOT)): names
        for path in FILES
        if (names := without_words(path.read_text(encoding="utf-8")))
    }

    assert lacking == {}


def test_what_lacks_one_is_found():
    text = '"""A."""\nclass B:\n    """B."""\n    def c(self): ...\ndef _d(): ...\n'

    assert without_words(text) == ["B.c"]
    assert without_words("def e():\n    'E.'\n") == ["the module"]


CALLED = [name for name in memest.__all__ if inspect.isfunction(getattr(memest, name))]


@pytest.mark.parametrize("name", CALLED)
def test_what_users_call_names_its_arguments_and_errors(name):
    function = getattr(memest, name)
    text = inspect.getdoc(function) or ""

    for parameter in inspect.signature(function).parameters:
        assert f"{parameter}:" in text or f"``{parameter}``" in text, parameter
    assert "Raises:" in text
