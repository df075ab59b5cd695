"""Models of the catalogue measured one after the other: what goes wrong is a result, too."""

from __future__ import annotations

import gc
import json
import multiprocessing
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["rows_of"]

_ENTRIES_OF_A_PROCESS = 40


class _TimeLimitError(Exception):
    """An entry that took longer than it may."""


def rows_of(
    entries: Iterable[Any],
    measure: Callable[[Any], dict[str, Any]],
    *,
    limit: int,
    jobs: int,
    results: Path | None = None,
) -> list[dict[str, Any]]:
    """A row for each entry of the catalogue, in order.

    Args:
        entries: of the catalogue.
        measure: makes the rest of a row, its ``status`` with it; processes are told by its name.
        limit: seconds for one entry.
        jobs: entries at a time, each in a process of its own.
        results: where rows are kept, one JSON line each, so that a run can be taken up again.
    """
    rows: list[dict[str, Any]] = []
    if results and results.exists():
        rows = [json.loads(line) for line in results.read_text().splitlines()]
    finished_ids = {row["id"] for row in rows}
    left = [entry for entry in entries if entry.id not in finished_ids]
    context = multiprocessing.get_context("spawn")
    # processes do not live long: they keep what they traced
    with context.Pool(jobs, _prepare, maxtasksperchild=_ENTRIES_OF_A_PROCESS) as pool:
        for row in pool.imap(partial(_row, measure=measure, limit=limit), left):
            rows.append(row)
            print(row["status"], row["seconds"], row["id"], row.get("reason", ""), file=sys.stderr)
            if results:
                with results.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
    return rows


def _prepare() -> None:
    """Of a process: its models share the machine with others, and their warnings are not asked."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _raise_time_limit)
    import torch

    torch.set_num_threads(1)


def _row(entry: Any, measure: Callable[[Any], dict[str, Any]], limit: int) -> dict[str, Any]:
    row: dict[str, Any] = {"id": entry.id, "model_type": entry.model_type}
    began = time.monotonic()
    signal.alarm(limit)
    try:
        row |= measure(entry)
    except _TimeLimitError:
        row |= {"status": "slow", "reason": f"not done after {limit} s"}
    except Exception as error:  # noqa: BLE001 - every failure is a row of the report
        row |= {"status": "fails", "reason": f"{type(error).__name__}: {error}"}
    finally:
        signal.alarm(0)
        gc.collect()
    row["seconds"] = round(time.monotonic() - began, 2)
    return row


def _raise_time_limit(*_: Any) -> None:
    raise _TimeLimitError
