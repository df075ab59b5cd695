"""Which code made a trace or a prediction: digests of contents, in a millisecond or two.

Contents, not times of files: the same release installed again believes what it kept, and an edit
that was taken back finds what was there before it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from memest.places import data_folder

__all__ = [
    "NOT_IN_TRACES", "PREDICTS_NOTHING", "TRACES_WITH", "made_with", "predicting", "tracing",
]  # fmt: skip

_DIGITS = 16
TRACES_WITH = (
    "adapter.py", "attention.py", "compilation.py", "data_loading.py", "distributed.py",
    "events.py", "feed.py", "generation.py", "hidden/call.py", "hidden/flops.py",
    "hidden/layout.py", "hidden/registry.py", "installed.py", "kinds.py", "lengths.py",
    "models/catalogue.py", "models/changes.py", "models/config_file.py", "models/resolve.py",
    "optimizer_names.py", "packed_formats.py", "parallel.py", "quantization.py", "setup.py",
    "software.py", "steps/card.py", "steps/compose.py", "steps/formula.py", "steps/sizing.py",
    "steps/stages.py",
)  # fmt: skip
"""Files that the rooms of ``memest/trace`` work with, of which a trace is a product too."""
NOT_IN_TRACES = (
    "context_rules.py", "errors.py", "files.py", "given.py", "head_rules.py", "models/hub.py",
    "parallel_checks.py", "places.py", "sequence_rules.py", "setup_rules.py", "ulysses_rules.py",
    "units.py",
)  # fmt: skip
"""Files that they load besides: what these do is refuse, read and write, and say."""
PREDICTS_NOTHING = ("app", "calibration", "cli", "integrations", "measuring", "report", "search")
"""Rooms that ask for predictions, or show them."""
_TABLES = ("cuda_context.json", "gpu_policy.json", "gpus.json")


@cache
def tracing() -> str:
    """Of the code that traces: what other code traced is not believed.

    Returns:
        16 hexadecimal digits.
    """
    here = Path(__file__).parent
    return _digest(here, [*_sources(here, "trace"), *TRACES_WITH])


@cache
def predicting() -> str:
    """Of all code and tables that a prediction without calibration is a product of.

    Returns:
        16 hexadecimal digits.
    """
    here = Path(__file__).parent
    rooms = [
        entry.name for entry in sorted(os.scandir(here), key=lambda entry: entry.name)
        if entry.is_dir() and entry.name not in {*PREDICTS_NOTHING, "data", "__pycache__"}
    ]  # fmt: skip
    names = [*_sources(here, ""), *(name for room in rooms for name in _sources(here, room))]
    code = _digest(here, names)
    return _digest(data_folder(), _TABLES, code)


@cache
def made_with() -> str:
    """What predicts here: memest's version, and a digest of its code and its tables."""
    # loads a parser of e-mail: only where somebody asks
    from importlib.metadata import version

    return f"{version('memest')} {predicting()}"


def _sources(folder: Path, room: str) -> list[str]:
    """The Python files of a room, as paths in the folder."""
    prefix = f"{room}/" if room else ""
    with os.scandir(folder / room) as found:
        return sorted(f"{prefix}{e.name}" for e in found if e.name.endswith(".py"))


def _digest(folder: Path, names: Iterable[str], before: str = "") -> str:
    """Of files, with their names and lengths: nothing may move from one into the next."""
    found = hashlib.sha256(before.encode())
    for name in names:
        # without a buffer: read_bytes takes half as long again, and every command waits for this
        with open(f"{folder}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
            content = file.read()
        found.update(f"\n{name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()[:_DIGITS]
