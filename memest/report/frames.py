"""Answers as rows: for frames of pandas and for CSV, sizes in whole bytes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from memest.errors import ConfigError, MissingDependencyError, closest
from memest.report.answer import Answer, Document, renderer
from memest.report.findings import Advice, Comparison
from memest.report.max_batch_result import MaxBatch
from memest.report.oom_result import OomExplanation
from memest.report.parts import parts_of
from memest.report.result import Estimate
from memest.report.stages_result import StageTable
from memest.report.suggestions import Suggestions

__all__ = ["Rows", "csv_of", "frame_of"]

Rows = tuple[list[dict[str, Any]], tuple[str, ...]]
"""The rows of a frame, and the names of its columns: there may be no row."""


def frame_of(answer: Answer, *options: Any) -> Any:
    """An answer as a ``pandas.DataFrame``.

    Args:
        answer: of which there are rows.
        options: which of its tables, where it has several.

    Raises:
        MissingDependencyError: without pandas.
    """
    rows, columns = renderer(answer, "rows")(answer, *options)
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise MissingDependencyError(
            "to_frame() needs pandas, which is not installed: pip install 'memest-gpu[notebook]'. "
            "to_dict() has the same figures and needs nothing."
        ) from error
    return DataFrame(rows, columns=list(columns))


def csv_of(answer: Answer, *options: Any) -> str:
    """An answer as CSV: a header and its rows, each ended by a line feed.

    Args:
        answer: of which there are rows.
        options: which of its tables, where it has several.
    """
    rows, columns = renderer(answer, "rows")(answer, *options)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def estimate_rows(estimate: Estimate, by: str) -> Rows:
    """One table of an estimate.

    Args:
        estimate: the estimate.
        by: ``part``, ``layer`` or ``time``.

    Raises:
        ConfigError: for any other table.
    """
    columns: tuple[str, ...]
    if by == "part":
        parts = [{"part": part.name, "bytes": part.bytes} for part in parts_of(estimate)]
        return parts, ("part", "bytes")
    if by == "layer":
        columns = ("module", "activation_bytes", "parameter_bytes")
        return [{name: getattr(row, name) for name in columns} for row in estimate.layers], columns
    if by == "time":
        columns = ("step", "micro_step", "phase", "allocated_bytes", "reserved_bytes")
        points = [{name: getattr(row, name) for name in columns} for row in estimate.timeline]
        return [point | {"phase": point["phase"].value} for point in points], columns
    suggestions = closest(by, ("part", "layer", "time"), limit=1)
    hint = f" Did you mean {suggestions[0]!r}?" if suggestions else ""
    raise ConfigError(f"there is no table by {by!r}.{hint} Legal: part, layer, time.")


def comparison_rows(comparison: Comparison) -> Rows:
    """One row a scenario."""
    rows = [
        {
            "scenario": scenario.name,
            "model": scenario.model,
            "allocated_bytes": scenario.estimate.peak.allocated_bytes,
            "reserved_bytes": scenario.estimate.peak.reserved_bytes,
            "device_bytes": scenario.estimate.peak.device_bytes,
            "low_bytes": scenario.estimate.interval.low_bytes,
            "high_bytes": scenario.estimate.interval.high_bytes,
            "effective_batch": scenario.effective_batch,
            "relative_time_per_sample": scenario.relative_time,
            "verdict": scenario.estimate.verdict.value,
        }
        for scenario in comparison.scenarios
    ]
    return rows, tuple(rows[0])


def advice_rows(advice: Advice) -> Rows:
    """One row a plan, the best first."""
    columns = (
        "verdict",
        "batch",
        "grad_accum",
        "effective_batch",
        "checkpointing",
        "precision",
        "optim",
        "attn_implementation",
        "relative_time_per_sample",
        "allocated_bytes",
        "reserved_bytes",
        "device_bytes",
        "headroom_bytes",
    )
    return _columns_of(advice.plans, columns), columns


def suggestion_rows(suggestions: Suggestions) -> Rows:
    """One row a change, the best first."""
    columns = (
        "words",
        "arguments",
        "verdict",
        "device_bytes",
        "gain_bytes",
        "relative_time",
        "changes_training",
    )
    return _columns_of(suggestions.changes, columns), columns


def _columns_of(parts: Iterable[Document], columns: Iterable[str]) -> list[dict[str, Any]]:
    """What parts of a document have in some columns."""
    documents = [part.to_dict() for part in parts]
    return [{name: document[name] for name in columns} for document in documents]


def max_batch_rows(max_batch: MaxBatch) -> Rows:
    """One row a size that was looked at, for each GPU."""
    columns = (
        "gpu",
        "size",
        "allocated_bytes",
        "reserved_bytes",
        "device_bytes",
        "headroom_bytes",
        "verdict",
    )
    rows = [
        {"gpu": answer.gpu} | point.to_dict()
        for answer in max_batch.answers
        for point in answer.curve
    ]
    return rows, columns


def oom_rows(explanation: OomExplanation) -> Rows:
    """One row a share of the memory in each message."""
    rows = [
        {"message": number, "share": share.name, **share.size.to_dict()}
        for number, account in enumerate(explanation.accounts, 1)
        for share in account.shares
    ]
    return rows, ("message", "share", "low_bytes", "high_bytes")


def stage_rows(table: StageTable) -> Rows:
    """One row a stage that has an estimate."""
    rows = [
        {"stage": row.name, **{f"{name}_bytes": size for name, size in row.columns.items()}}
        | {"device_bytes": row.estimate.peak.device_bytes, "host_bytes": row.host_bytes}
        | {"host_bytes_per_node": 0 if row.host is None else row.host.node_bytes}
        for row in table.rows
        if row.estimate is not None
    ]
    return rows, tuple(rows[0]) if rows else ("stage", "device_bytes", "host_bytes")
