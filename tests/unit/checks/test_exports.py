"""What a module shows is what others may use of it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import memest

ROOT = Path(memest.__file__).parent


def uses() -> Iterator[tuple[str, str, str]]:
    """(the file that imports, the module that it imports from, the name)."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            source = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and source.split(".")[0] == "memest":
                for alias in node.names:
                    yield str(path.relative_to(ROOT)), source, alias.name


def test_modules_take_from_each_other_what_is_shown() -> None:
    hidden = []
    for path, source, name in uses():
        module = importlib.import_module(source)
        shown = getattr(module, "__all__", None)
        is_module = hasattr(module, "__path__") and name not in vars(module)
        if shown is not None and name not in shown and not is_module:
            inner = vars(module).get(name)
            if getattr(inner, "__name__", "") != f"{source}.{name}":  # a module of a package
                hidden.append((path, f"{source}.{name}"))
    assert not hidden
