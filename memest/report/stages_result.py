"""What each way to share a run among GPUs takes: a frozen result with a JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memest.events import Category
from memest.report.answer import SCHEMA_VERSION, Answer, document
from memest.report.life_result import RunLife
from memest.report.result import Estimate
from memest.sharding.deepspeed_estimator import ModelStates

__all__ = ["OfficialRow", "StageRow", "StageTable"]

_COLUMNS: Mapping[str, tuple[Category, ...]] = {
    "parameters": (Category.PARAMETERS,),
    "gradients": (Category.GRADIENTS,),
    "optimizer": (Category.MASTER_WEIGHTS, Category.OPTIMIZER_STATES),
    "activations": (Category.ACTIVATIONS, Category.AUTOCAST_COPIES),
    "communication": (Category.COMMUNICATION,),
    "other": (
        Category.BUFFERS,
        Category.TEMPORARIES,
        Category.WORKSPACES,
        Category.INPUTS,
        Category.ROUNDING,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One way to share a run.

    Attributes:
        name: for people.
        options: that say so.
        estimate: of one GPU; None where the run cannot be, or is not modelled.
        host: memory of the host, phase by phase; None where there is no estimate.
        refused: why there is no estimate.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    estimate: Estimate | None
    host: RunLife | None = None
    refused: str = ""

    @property
    def host_bytes(self) -> int:
        """What the fullest process has in host memory at the fullest moment."""
        phases = () if self.host is None else self.host.phases
        return max((phase.process_bytes or 0 for phase in phases), default=0)

    @property
    def columns(self) -> dict[str, int]:
        """Bytes of one GPU by kind; they add up to the device peak.

        What is alive at the allocated peak, what the allocator holds beyond it (cached and
        fragmented), and what is not the allocator's.
        """
        assert self.estimate is not None
        rows = {row.category: row.bytes for row in self.estimate.breakdown}
        sizes = {
            name: sum(rows.get(c, 0) for c in categories) for name, categories in _COLUMNS.items()
        }
        peak = self.estimate.peak
        sizes["cached"] = peak.reserved_bytes - peak.allocated_bytes
        sizes["process"] = peak.device_bytes - peak.reserved_bytes
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficialRow:
    """What DeepSpeed's own estimator says of a stage, and of what it is silent.

    Attributes:
        name: of the row of the table that it is beside.
        states: its figures.
        difference: of the two, in words and numbers; empty where that row has no estimate.
    """

    name: str
    states: ModelStates
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable(Answer):
    """What each stage buys.

    Attributes:
        model: how it was called.
        num_gpus: of the run.
        parameters: of the model.
        rows: in the order of the sharing, least first.
        official: of DeepSpeed's estimators.
        notes: what to know of the runs, with the names of those that a note is about.
    """

    model: str
    num_gpus: int
    parameters: int
    rows: tuple[StageRow, ...]
    official: tuple[OfficialRow, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; sizes in bytes."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": {"id": self.model, "parameters": self.parameters},
            "num_gpus": self.num_gpus,
            "stages": [_row(row) for row in self.rows],
            "deepspeed_estimator": [
                {
                    "name": row.name,
                    "gpu_bytes": row.states.gpu_bytes,
                    "host_bytes_per_node": row.states.host_bytes,
                    "difference": row.difference,
                }
                for row in self.official
            ],
            "notes": list(self.notes),
        }


def _row(row: StageRow) -> dict[str, Any]:
    stage: dict[str, Any] = {"name": row.name, "options": dict(row.options)}
    if row.estimate is None:
        return {**stage, "refused": row.refused}
    fits = row.estimate.verdict.value if row.estimate.gpu else None
    return {
        **stage,
        "peak": row.estimate.peak.to_dict(),
        "bytes": row.columns,
        "host_bytes": row.host_bytes,
        "host": document(row.host),
        "verdict": fits,
    }
