"""Predictions of published runs, as they were made for ``docs/accuracy.md``.

``tools/published.py`` writes them to ``data/accuracy``; a folder named by ``MEMEST_REFERENCE`` is
read too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from memest.files.code_digest import made_with
from memest.files.folders import data_folder

__all__ = ["FILE", "described", "outcomes", "stale"]

FILE = "outcomes.jsonl"
_DESCRIBED = "descriptions.jsonl"


def outcomes() -> list[dict[str, Any]]:
    """Every published run with a prediction beside it; empty where none were kept."""
    folders = [data_folder() / "accuracy"]
    extra = os.environ.get("MEMEST_REFERENCE")
    if extra:
        folders.append(Path(extra))
    sources: dict[str, dict[str, Any]] = {}
    for folder in folders:
        path = folder / FILE
        if not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                record = json.loads(line)
                sources.setdefault(record["id"], record)
    return list(sources.values())


def described() -> dict[str, float]:
    """Errors of the published runs that were asked again as their pages describe them, by id.

    ``tools/descriptions.py`` keeps them; signed, 0.01 for one percent too high.
    """
    path = data_folder() / "accuracy" / _DESCRIBED
    if not path.is_file():
        return {}
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {
        record["id"]: record["described_bytes"] / record["measured_bytes"] - 1
        for record in records
        if "described_bytes" in record
    }


def stale(runs: list[dict[str, Any]]) -> int:
    """How many predictions were made by other code than is installed, or by nobody knows which."""
    installed_code = made_with()
    return sum(run.get("outcome", {}).get("made_with") != installed_code for run in runs)
