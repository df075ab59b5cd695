"""What training tools print of memory, a line a reading, as rows of a table.

Sources: ``get_max_reserved_memory`` and ``add_train_message`` of ms-swift 3 and 4 (bytes / 1024**3,
summed over the cards of a process; the most so far) and ``training_log`` of its Megatron part;
``BaseTrainer._get_memory`` of Ultralytics 8.4 (``memory_reserved`` / 2**30); ``LogProcessor`` of
mmengine 0.10 and ``TextLoggerHook`` of mmcv 1 (``max_memory_allocated`` // 2**20, the most of all
processes); ``MetricsProcessor.log`` of torchtitan; ``CommonMetricPrinter`` of detectron2;
``MetricLogger.log_every`` of torchvision's references, which DETR and MAE have too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["printed_rows", "with_known_names"]

_ALLOCATED, _RESERVED, _NOW = "max_allocated", "max_reserved", "reserved"


@dataclass(frozen=True, slots=True)
class _Line:
    """A line that has a reading.

    Attributes:
        pattern: with groups ``size``, ``at`` and, where steps are counted anew in each epoch,
            ``epoch`` (from 1) and ``of``.
        column: what is read, in the words that name a column, with its unit.
        header: what the log has besides; None: nothing.
        redrawn: a line is printed again and again while its step goes on.
        note: what is to be known of the reading.
    """

    pattern: re.Pattern[str]
    column: str
    header: re.Pattern[str] | None = None
    redrawn: bool = False
    note: str = ""


_MM = r"\[\s*(?P<at>\d+)/(?P<of>\d+)\].*?\bmemory: (?P<size>\d+)\b"
_LINES = (
    _Line(
        re.compile(rf"\bEpoch(?:\(train\))?\s*\[\s*(?P<epoch>\d+)\]{_MM}"),
        f"{_ALLOCATED} memory(MiB)",
    ),
    _Line(re.compile(rf"\bIter(?:\(train\))?\s*{_MM}"), f"{_ALLOCATED} memory(MiB)"),
    _Line(
        re.compile(r"^\s*(?P<at>\d+)/\d+\s+(?P<size>\d+(?:\.\d+)?)G\s"),
        f"{_NOW} GPU_mem(GiB)",
        header=re.compile(r"\bgpu_mem\b", re.IGNORECASE),
        redrawn=True,
        note="GPU_mem was taken as GiB of the allocator's segments, as Ultralytics prints it; its "
        "older releases and YOLOv5 print 10^9 bytes, so it is 7 % less there.",
    ),
    _Line(
        re.compile(r"\biteration\s+(?P<at>\d+)/.*\bmemory\(GiB\): (?P<size>[\d.]+)"),
        f"{_RESERVED} memory(GiB)",
    ),
    _Line(
        re.compile(r"\bstep:\s*(?P<at>\d+)\s.*\bmemory:\s*(?P<size>[\d.]+)GiB\("),
        f"{_RESERVED} memory(GiB)",
    ),
    _Line(
        re.compile(r"\biter: (?P<at>\d+)\s.*\bmax_mem: (?P<size>\d+)M\b"),
        f"{_ALLOCATED} max_mem(MiB)",
    ),
    _Line(
        re.compile(
            r"\[(?P<epoch0>\d+)\]\s+\[\s*(?P<at>\d+)/(?P<of>\d+)\].*\bmax mem: (?P<size>\d+)\b"
        ),
        f"{_ALLOCATED} max mem(MiB)",
    ),
)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_DICT = re.compile(r"\{'.*\}")
_PAIR = re.compile(r"'([^']+)': '?([^,'}]+)")
_SWIFT = "memory(GiB)"
_SWIFT_STEP = re.compile(r"global_step/max_steps")
_SO_FAR = (
    "memory(GiB) of ms-swift is the most that segments took so far, of all cards of the process "
    "together: it never falls."
)


def printed_rows(text: str) -> tuple[list[dict[str, Any]], str]:
    """Rows of the lines of a log that tell of memory, and what is to be known of them.

    Args:
        text: what a run wrote to its terminal, with all else it says.

    Returns:
        No rows where no line is known.
    """
    lines = _COLOUR.sub("", text).splitlines()  # at carriage returns as well
    for line in _LINES:
        if line.header is None or line.header.search(text):
            rows = _rows(line, lines)
            if rows:
                return rows, line.note
    dicts = [
        {name: value.strip() for name, value in _PAIR.findall(match[0])}
        for line in lines
        if (match := _DICT.search(line))
    ]
    return with_known_names(dicts)


def with_known_names(rows: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Rows whose names are a tool's under names that say what they are, and what is to be known.

    Args:
        rows: of JSON lines, or of what the Trainer prints.
    """
    result, note = [], ""
    for row in map(dict, rows):
        if _SWIFT in row:
            row[f"{_RESERVED} {_SWIFT}"] = row.pop(_SWIFT)
            note = _SO_FAR
            step = next((row[name] for name in row if _SWIFT_STEP.search(name)), None)
            if isinstance(step, str):
                row["step"] = step.partition("/")[0]
        elif "data_time" in row and "memory" in row:
            row[f"{_ALLOCATED} memory(MiB)"] = row.pop("memory")
        result.append(row)
    return result, note


def _rows(line: _Line, lines: Iterable[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for text in lines:
        match = line.pattern.search(text)
        if match is None:
            continue
        found = match.groupdict()
        step = int(found["at"])
        if "of" in found:
            epochs = int(found.get("epoch0") or int(found.get("epoch") or 1) - 1)
            step += epochs * int(found["of"])
        if line.redrawn and rows and rows[-1]["step"] == step:
            rows.pop()
        rows.append({"step": step, line.column: found["size"]})
    return rows
