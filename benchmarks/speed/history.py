"""The history file: one run of the suite a line, never changed, only added to."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from speed.timing import Figure

ROOT = Path(__file__).parents[2]
HISTORY = ROOT / "data" / "speed" / "history.jsonl"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Run:
    """One run: when, of which commit, on what, what the references took, and the figures."""

    date: str
    commit: str
    changed: bool
    machine: dict[str, str | int]
    load: float
    references: dict[str, float]
    cases: dict[str, Figure]

    def like(self, other: Run) -> bool:
        """Whether ratios may be compared: same processor, same Python."""
        return all(self.machine.get(k) == other.machine.get(k) for k in ("cpu", "python"))

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, sort_keys=True)


class NotARunError(ValueError):
    """A line of the history that says no run."""


def run_of(line: str) -> Run:
    """The run that a line says.

    Raises:
        NotARunError: it is no JSON, of another schema, or lacks something; the message says what.
    """
    try:
        document = json.loads(line)
    except ValueError as error:
        raise NotARunError(f"no JSON ({error})") from None
    if not isinstance(document, dict):
        raise NotARunError(f"not an object but {type(document).__name__}")
    if document.pop("schema_version", None) != SCHEMA_VERSION:
        raise NotARunError(f"schema_version is not {SCHEMA_VERSION}")
    try:
        cases = {name: _figure(value) for name, value in document.pop("cases").items()}
        run = Run(cases=cases, **document)
    except (KeyError, TypeError, AttributeError) as error:
        raise NotARunError(f"not a run: {error}") from None
    if not isinstance(run.machine, dict) or not isinstance(run.references, dict):
        raise NotARunError("machine and references must be objects")
    return run


def _figure(value: dict[str, Any]) -> Figure:
    figure = Figure(**value)
    numbers = (figure.ratio, figure.low, figure.high, figure.seconds)
    if not all(isinstance(n, int | float) and 0 < n < float("inf") for n in numbers):
        raise TypeError(f"ratio, low, high and seconds must be positive numbers, not {numbers}")
    return figure


def read(path: Path) -> tuple[list[Run], list[str]]:
    """Runs in the order of the file, and what was wrong with lines that say none."""
    runs, problems = [], []
    lines: Iterable[str] = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            runs.append(run_of(line))
        except NotARunError as error:
            problems.append(f"line {number}: {error}")
    return runs, problems


def append(run: Run, path: Path) -> None:
    """Add a line; a last line that was cut off is not continued."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{chr(10) if torn else ''}{run.to_json()}\n")


def machine() -> dict[str, str | int]:
    """What figures depend on. Nothing in it says whose machine it is."""
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "system": platform.system(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: _release(name) for name in ("memest", "torch", "transformers", "streamlit")},
    }  # fmt: skip


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _release(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit() -> tuple[str, bool]:
    """The commit that is checked out, and whether files that git knows differ from it."""

    def git(*words: str) -> str | None:
        try:
            process = subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
            )
        except OSError:
            return None
        return process.stdout.strip() if process.returncode == 0 else None

    changes = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short=12", "HEAD") or "unknown", changes is None or bool(changes)


def now() -> str:
    """The date of a run."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
