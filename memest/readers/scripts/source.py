"""Python files and notebooks as syntax trees; nothing of them is run.

Source of notebooks: nbformat 4 (``cells``, ``cell_type``, ``source``) and 3 (``worksheets``,
``input``); of magics: IPython's ``%name``, ``%%name``, ``!command``, ``name?``.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memest.errors import ConfigError
from memest.readers.documents import MAX_NODES, check_size, read_source

__all__ = ["SUFFIXES", "Source", "parse_python", "parse_script"]

SUFFIXES = (".py", ".ipynb")
MAX_NOTEBOOK_BYTES = 20 << 20
"""A notebook holds its outputs, pictures among them."""
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%python3")
"""Magics of a cell that is Python all the same."""
_MAX_MAGICS = 100
_TIMED = re.compile(r"(\s*)%(?:time|timeit|prun)\s+(?:-\w+\s+(?:\d+\s+)?)*(.+)")
_MAGIC = re.compile(r"\s*(%|!|\?|[\w.]+\?+\s*$|[\w, ]+=\s*(!|%\w))")


@dataclass(frozen=True, slots=True)
class Source:
    """What a script or a notebook holds.

    Attributes:
        name: of the file, without folders.
        body: its statements, those of a notebook's cells behind each other.
        cells: first line and number of each cell of a notebook; nothing for a file.
        unread: first lines of cells that are no Python, and why.
        folder: that the file is in.
        texts: number and text of each cell of a notebook.
    """

    name: str
    body: tuple[ast.stmt, ...]
    cells: tuple[tuple[int, int], ...] = ()
    unread: tuple[tuple[int, str], ...] = ()
    folder: Path | None = None
    texts: tuple[tuple[int, str], ...] = ()

    def place(self, line: int) -> str:
        """Where a line is: ``train.py:41``, ``colab.ipynb:cell 3, line 2``."""
        if not line:
            return self.name  # no line of it, but what none of them says
        before = [cell for cell in self.cells if cell[0] <= line]
        if not before:
            return f"{self.name}:{line}"
        first, number = before[-1]
        return f"{self.name}:cell {number}, line {line - first + 1}"


def parse_python(text: str, label: str, *, first_line: int = 1) -> list[ast.stmt]:
    """The statements of Python code.

    Args:
        text: of the code.
        label: how to call it.
        first_line: number of its first line.

    Raises:
        ConfigError: it is no Python of today, or no code that a person writes.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError as error:
        line = f" in line {error.lineno}" if error.lineno else ""
        version = f"as Python {sys.version_info[0]}.{sys.version_info[1]} reads it"
        older = ": it is Python 2" if "print" in str(error.msg) else f", {version}: {error.msg}"
        raise ConfigError(f"{label} is not Python{line}{older}.") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{label} is not Python: {error or 'nested too deep'}.") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ConfigError(f"{label} has more than {MAX_NODES:,} expressions: no script has.")
    if first_line > 1:
        ast.increment_lineno(tree, first_line - 1)
    return tree.body


def parse_script(path: Path, label: str) -> Source:
    """The statements of a script or of a notebook.

    Args:
        path: of the file; its suffix tells which.
        label: how messages call it.

    Raises:
        ConfigError: it cannot be read, or holds no Python.
    """
    if path.suffix.lower() != ".ipynb":
        body = parse_python(read_source(path, label), label)
        return Source(path.name, tuple(body), folder=path.parent)
    body = []
    cells: list[tuple[int, int]] = []
    unread: list[tuple[int, str]] = []
    line = 1
    texts = tuple(_code_cells(read_source(path, label, limit=MAX_NOTEBOOK_BYTES), label))
    for number, text in texts:
        cells.append((line, number))
        try:
            body += _parse_cell(text, f"{label}, cell {number},", line)
        except ConfigError as error:
            unread.append((line, str(error)))
        line += text.count("\n") + 1
    if unread and not body:
        raise ConfigError(unread[0][1])
    return Source(path.name, tuple(body), tuple(cells), tuple(unread), path.parent, texts)


def _parse_cell(text: str, label: str, first_line: int) -> list[ast.stmt]:
    """The Python of a cell: lines that Python cannot read and IPython can are taken out one by one.

    A line that starts with ``%`` may as well go on with an expression, so Python is asked first.
    """
    start = text.lstrip()
    if start.startswith("%%") and not start.startswith(_PYTHON_CELLS):
        return []
    lines = text.split("\n")
    for _ in range(_MAX_MAGICS):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse("\n".join(lines))
            break
        except SyntaxError as error:
            place = min((error.lineno or 0) - 1, len(lines) - 1)
            while place > 0 and lines[place - 1].endswith("\\"):
                place -= 1
            if place < 0 or not _MAGIC.match(lines[place]):
                break
            _take_out(lines, place)
        except (ValueError, RecursionError, MemoryError):
            break
    return parse_python("\n".join(lines), label, first_line=first_line)


def _take_out(lines: list[str], place: int) -> None:
    """An empty statement in the place of a line of IPython's, nothing in that of what goes on.

    What a line times or profiles is run, and stays.
    """
    line = lines[place]
    timed = _TIMED.match(line)
    if timed:
        lines[place] = f"{timed[1]}{timed[2]}"
        return
    lines[place] = line[: len(line) - len(line.lstrip())] + "pass"
    while line.endswith("\\") and place + 1 < len(lines):
        place += 1
        line, lines[place] = lines[place], ""


def _code_cells(text: str, label: str) -> Iterator[tuple[int, str]]:
    """Cells that hold code, with their numbers among all cells."""
    try:
        notebook = json.loads(text)
        check_size(notebook, label)
    except RecursionError:
        raise ConfigError(f"{label} is nested too deep: no notebook is.") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{label} is no notebook: it is not JSON: {error}.") from None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if cells is None and isinstance(notebook, dict):
        sheets = notebook.get("worksheets")
        first = sheets[0] if isinstance(sheets, list) and sheets else None
        cells = first.get("cells") if isinstance(first, dict) else None
    if not isinstance(cells, list):
        raise ConfigError(f"{label} is no notebook: it has no cells.")
    for number, cell in enumerate(cells, 1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            yield number, _text_of(cell.get("source", cell.get("input", "")))


def _text_of(source: Any) -> str:
    lines = source if isinstance(source, list) else [source]
    return "".join(line for line in lines if isinstance(line, str))
