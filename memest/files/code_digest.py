"""Which code made a trace or a prediction: digests of contents, in a few milliseconds.

Contents, not times of files: the same release installed again believes what it kept, and an edit
that was taken back finds what was there before it.

Both digests are of every Python file of the package, whatever it is called and wherever it lies,
but those of the rooms that only ask and show. What a stored document depends on is therefore never
written down: a file that nobody thought of is covered, and so is one that is imported by its name
at run time, as workspace rules are. A file too many costs one more trace after an upgrade; a file
too few would keep answers of the code before it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from memest.files.folders import data_folder

__all__ = ["PREDICTS_NOTHING", "made_with", "predicting", "sources", "tracing"]

_DIGITS = 16
PREDICTS_NOTHING = ("app", "calibration", "cli", "report", "search")
"""Rooms that ask for predictions, or show them: what predicts imports nothing of theirs but the
results of ``report``, data that it puts what it found into."""
_NO_CODE_FOLDERS = ("__pycache__", "data")


@cache
def tracing() -> str:
    """Of the code that traces, and makes families of traces: what other code made is not believed.

    Returns:
        16 hexadecimal digits.
    """
    package = Path(__file__).parents[1]
    return _digest(package, sources())


@cache
def predicting() -> str:
    """Of all code and tables that a prediction without calibration is a product of.

    Returns:
        16 hexadecimal digits.
    """
    data = data_folder()
    return _digest(data, sorted(path.name for path in data.glob("*.json")), tracing())


@cache
def made_with() -> str:
    """What predicts here: memest's version, and a digest of its code and its tables."""
    # loads a parser of e-mail: only where somebody asks
    from importlib.metadata import version

    return f"{version('memest-gpu')} {predicting()}"


def sources() -> list[str]:
    """The Python files that a prediction is a product of, as sorted paths in the package."""
    return sorted(
        _python_files(str(Path(__file__).parents[1]), "", {*_NO_CODE_FOLDERS, *PREDICTS_NOTHING})
    )


def _python_files(folder: str, prefix: str, skipped_folders: Iterable[str]) -> Iterator[str]:
    """Those below a folder but not in ``skipped_folders``, each behind the prefix."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue  # locks and copies of editors: no name of a module
            if entry.name.endswith(".py"):
                yield f"{prefix}{entry.name}"
            elif entry.name not in skipped_folders and entry.is_dir():
                yield from _python_files(entry.path, f"{prefix}{entry.name}/", _NO_CODE_FOLDERS)


def _digest(folder: Path, names: Iterable[str], before: str = "") -> str:
    """Of files, with their names and lengths: nothing may move from one into the next."""
    digest = hashlib.sha256(before.encode())
    for name in names:
        # without a buffer: read_bytes takes half as long again, and every command waits for this
        with open(f"{folder}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
            content = file.read()
        digest.update(f"\n{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:_DIGITS]
