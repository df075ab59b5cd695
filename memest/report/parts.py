"""What the device peak is made of, and the colour of each part, in every picture the same."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

from memest.errors import ConfigError, closest
from memest.events import Category
from memest.result import Estimate

__all__ = [
    "CACHED",
    "COLOURS",
    "CONTEXT",
    "CONTEXT_NCCL",
    "PART_COLOURS",
    "Part",
    "estimate_rows",
    "parts_csv",
    "parts_of",
]

CACHED, CONTEXT = "cached or fragmented", "context and kernels"
CONTEXT_NCCL = "context and kernels with NCCL"
"""On several GPUs the process holds buffers of communicators too."""
COLOURS = {
    Category.PARAMETERS: "#0072b2",
    Category.MASTER_WEIGHTS: "#56b4e9",
    Category.BUFFERS: "#7f7f7f",
    Category.GRADIENTS: "#009e73",
    Category.OPTIMIZER_STATES: "#e69f00",
    Category.ACTIVATIONS: "#d55e00",
    Category.AUTOCAST_COPIES: "#cc79a7",
    Category.TEMPORARIES: "#f0e442",
    Category.WORKSPACES: "#8c564b",
    Category.INPUTS: "#17becf",
    Category.COMMUNICATION: "#882255",
    Category.ROUNDING: "#c7c7c7",
}
"""One colour a category, told apart by colour-blind readers too."""
PART_COLOURS = {
    **{category.value: colour for category, colour in COLOURS.items()},
    CACHED: "#e5e5e5",
    CONTEXT: "#bdbdbd",
    CONTEXT_NCCL: "#bdbdbd",
}
"""One colour a part, by its name."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the device peak: a category, or what lies between two of the three peaks."""

    name: str
    bytes: int

    @property
    def colour(self) -> str:
        """Its colour, as ``#rrggbb``."""
        return PART_COLOURS[self.name]


def parts_of(estimate: Estimate) -> tuple[Part, ...]:
    """Categories alive at the allocated peak, then the way up: together the device peak."""
    peak = estimate.peak
    several = estimate.setup.distributed.num_gpus > 1
    return (
        *(Part(row.category.value, row.bytes) for row in estimate.breakdown),
        Part(CACHED, peak.reserved_bytes - peak.allocated_bytes),
        Part(CONTEXT_NCCL if several else CONTEXT, peak.device_bytes - peak.reserved_bytes),
    )


def estimate_rows(estimate: Estimate, by: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The rows of one table of an estimate, and the names of its columns; sizes in bytes.

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
    near = closest(by, ("part", "layer", "time"), limit=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"there is no table by {by!r}.{hint} Legal: part, layer, time.")


def parts_csv(estimate: Estimate) -> str:
    """The parts as CSV, ``part,bytes``; they add up to the device peak."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("part", "bytes"))
    writer.writerows((part.name, part.bytes) for part in parts_of(estimate))
    return text.getvalue()
