"""What each stage buys, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from memest.result import Verdict
from memest.stage_table import StageRow, StageTable
from memest.units import GIB, MIB

__all__ = ["render_stages"]

_NAME = 18
_CELL = 7
_HEADS = {
    "parameters": "param", "gradients": "grads", "optimizer": "optim", "activations": "activ",
    "communication": "comm", "other": "other", "cached": "cached", "process": "proc",
}  # fmt: skip
_WIDE = 99_999 * MIB
_TEXT = 80


def render_stages(table: StageTable) -> str:
    """The table, DeepSpeed's own figures, and what is not in them.

    Args:
        table: to print.
    """
    return "\n".join(_lines(table)) + "\n"


def _lines(table: StageTable) -> Iterator[str]:
    known = [row for row in table.rows if row.estimate is not None]
    most = max(row.estimate.peak.device_bytes for row in known if row.estimate is not None)
    unit = MIB if most <= _WIDE else GIB
    said = "MiB" if unit == MIB else "GiB"
    yield (
        f"{table.model}, {table.num_gpus} GPUs: {said} of each GPU, and of host memory for each "
        "process"
    )
    yield ""
    heads = [*_HEADS.values(), "GPU", "host"]
    yield " " * _NAME + "".join(f"{head:>{_CELL}}" for head in heads)
    for row in table.rows:
        if row.estimate is None:
            yield f"{row.name:<{_NAME}}  refused (below)"
            continue
        values = [*(row.columns[name] for name in _HEADS), row.estimate.peak.device_bytes]
        cells = [_cell(value, unit) for value in values] + [_cell(row.host_bytes, unit)]
        yield f"{row.name:<{_NAME}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)
    yield ""
    yield from _wrapped(
        "param to other: alive at the allocated peak of each, which is not at the same moment in "
        "all of them; optim: states and master weights; comm: buckets and gathered parameters; "
        "cached: what the allocator holds beyond it; proc: CUDA context, kernels, NCCL."
    )
    yield from _verdicts(known)
    if table.official:
        yield ""
        yield "DeepSpeed's own estimator (model states alone)"
        for official in table.official:
            gpu, host = official.states.gpu_bytes, official.states.host_bytes
            yield (
                f"  {official.name:<{_NAME}}{_cell(gpu, unit):>{_CELL}} GPU"
                f"{_cell(host, unit):>{_CELL + 2}} host of a node"
            )
            if official.said:
                yield from _wrapped(f"{official.said}.", "    ")
    refused = [row for row in table.rows if row.estimate is None]
    if refused:
        yield ""
        same: dict[str, list[str]] = {}
        for row in refused:
            same.setdefault(row.refused, []).append(row.name)
        for why, names in same.items():
            yield from _wrapped(f"{'; '.join(names)}: {why}")
    if table.notes:
        yield ""
        for note in table.notes:
            yield from _wrapped(f"- {note}")


def _cell(nbytes: int, unit: int) -> str:
    if not nbytes:
        return "-"
    return f"{nbytes / MIB:,.0f}" if unit == MIB else f"{nbytes / GIB:,.1f}"


def _verdicts(rows: list[StageRow]) -> Iterator[str]:
    """Which of them fit, where a GPU was named."""
    by_verdict: dict[Verdict, list[str]] = {}
    gpu = ""
    for row in rows:
        if row.estimate is not None and row.estimate.gpu is not None:
            gpu = row.estimate.gpu.name
            by_verdict.setdefault(row.estimate.verdict, []).append(row.name)
    for verdict, names in by_verdict.items():
        yield from _wrapped(f"{verdict.value} on {gpu}: {'; '.join(names)}.")


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _TEXT, initial_indent=indent, subsequent_indent=indent)
