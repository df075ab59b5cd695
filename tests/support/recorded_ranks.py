"""What ranks of DeepSpeed were measured to do, kept; see ``deepspeed_ranks``."""

from __future__ import annotations

import fnmatch
import functools
import json
from typing import Any

from support.paths import RECORDED_RANKS


def names_of(pattern: str, *but: str) -> list[str]:
    """Names of the recordings that match a pattern, and none of others."""
    names = sorted(path.stem for path in RECORDED_RANKS.glob(f"{pattern}.json"))
    return [name for name in names if not any(fnmatch.fnmatchcase(name, one) for one in but)]


def case_of(name: str) -> dict[str, Any]:
    """What was asked of a recorded rank."""
    return _document(name)["case"]


def recorded_run(name: str) -> Any:
    """What DeepSpeed was measured to do: a ``CpuRun``; its events from 8 KiB on."""
    from memest.calibration.running.cpu_memory import CpuRun, MemoryEvent, PhaseBytes

    document = _document(name)
    phases = [PhaseBytes(*row) for row in document["phases"]]
    names = document["names"]
    events = [MemoryEvent(nbytes, "", names[place], 0) for nbytes, place in document["events"]]
    return CpuRun(phases, events)


@functools.cache
def _document(name: str) -> dict[str, Any]:
    return json.loads((RECORDED_RANKS / f"{name}.json").read_text(encoding="utf-8"))
