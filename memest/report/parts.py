"""What the device peak is made of, and the colour of each part, in every picture the same."""

from __future__ import annotations

from dataclasses import dataclass

from memest.events import Category
from memest.report.result import Estimate

__all__ = [
    "CACHED",
    "COLOURS",
    "CONTEXT",
    "CONTEXT_NCCL",
    "ENGINE",
    "PART_COLOURS",
    "MemoryPart",
    "parts_of",
]

CACHED, CONTEXT, ENGINE = "cached or fragmented", "context and kernels", "vLLM"
CONTEXT_NCCL = "context and kernels with NCCL"
"""On several GPUs the process holds buffers of communicators too."""
COLOURS = {
    Category.PARAMETERS: "#0072b2",
    Category.MASTER_WEIGHTS: "#56b4e9",
    Category.BUFFERS: "#4d5566",
    Category.GRADIENTS: "#009e73",
    Category.OPTIMIZER_STATES: "#e69f00",
    Category.ACTIVATIONS: "#d55e00",
    Category.AUTOCAST_COPIES: "#cc79a7",
    Category.TEMPORARIES: "#f0e442",
    Category.WORKSPACES: "#8c564b",
    Category.INPUTS: "#17becf",
    Category.COMMUNICATION: "#882255",
    Category.ROUNDING: "#d9cfa8",
    Category.REFERENCE: "#332288",
    Category.RESTING: "#117733",
}
"""One colour a category, told apart by colour-blind readers too."""
PART_COLOURS = {
    **{category.value: colour for category, colour in COLOURS.items()},
    CACHED: "#a9bad1",
    CONTEXT: "#7d8794",
    ENGINE: "#999933",
    CONTEXT_NCCL: "#7d8794",
}
"""One colour a part, by its name."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One part of the device peak: a category, or what lies between two of the three peaks."""

    name: str
    bytes: int

    @property
    def colour(self) -> str:
        """Its colour, as ``#rrggbb``."""
        return PART_COLOURS[self.name]


def parts_of(estimate: Estimate) -> tuple[MemoryPart, ...]:
    """Categories alive at the allocated peak, then the way up: together the device peak."""
    peak = estimate.peak
    several = estimate.setup.distributed.num_gpus > 1
    context = peak.device_bytes - peak.reserved_bytes - peak.engine_bytes
    engine = [MemoryPart(ENGINE, peak.engine_bytes)] if peak.engine_bytes else []
    return (
        *(MemoryPart(row.category.value, row.bytes) for row in estimate.breakdown),
        MemoryPart(CACHED, peak.reserved_bytes - peak.allocated_bytes),
        MemoryPart(CONTEXT_NCCL if several else CONTEXT, context),
        *engine,
    )
