"""How much of a card PyTorch can have.

NVML's total is larger than PyTorch's because it counts what driver and firmware keep. Where no
public log gave PyTorch's figure, the gap of the nearest family of cards is taken off, and the
answer says so. Windows is another matter: under WDDM torch reports the whole board and the system
spills into host memory, so no figure here says what can be had there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memest.catalog.spec import GpuSpec, policy
from memest.errors import ConfigError
from memest.units import MIB, format_size

__all__ = ["DRIVER_SPREAD_RATIO", "DriverGap", "driver_gap", "usable_bytes"]

DRIVER_SPREAD_RATIO = 0.015
"""Totals of one card differ by up to this between drivers (T4: 15110 to 14913 MiB in torch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverGap:
    """What driver and firmware keep on a family of cards.

    Attributes:
        family: the cards it was read on.
        low_bytes: smallest gap seen.
        high_bytes: largest gap seen.
    """

    family: str
    low_bytes: int
    high_bytes: int

    @property
    def text(self) -> str:
        """The family and its range, for people."""
        low, high = self.low_bytes // MIB, self.high_bytes // MIB
        return f"{self.family}: {low}-{high} MiB" if low < high else f"{self.family}: {low} MiB"

    @property
    def middle_bytes(self) -> int:
        """Middle of the range, what estimates take off."""
        return (self.low_bytes + self.high_bytes) // 2


def _memory_gb(spec: GpuSpec) -> float:
    if spec.memory_marketing_gb:
        return spec.memory_marketing_gb
    return max(1.0, (spec.nvml_total_bytes or 0) / (1 << 30))


def driver_gap(spec: GpuSpec) -> DriverGap:
    """The gap of the family nearest to a card.

    Nearest means: same architecture first, then closest memory size, then same kind of card.
    A card of an architecture without a row takes the closest size of any architecture.
    """
    memory = _memory_gb(spec)

    def distance(row: dict[str, object]) -> tuple[bool, float, bool]:
        architectures, span = row["architectures"], row["memory_gb"]
        assert isinstance(architectures, list)
        assert isinstance(span, list)
        low, high = float(span[0]), float(span[1])
        nearest = min(max(memory, low), high)
        return (
            spec.architecture not in architectures,
            abs(math.log2(memory / nearest)),
            row["kind"] not in ("any", spec.kind),
        )

    row = min(policy()["driver_gaps"]["rows"], key=distance)
    return DriverGap(
        family=row["family"], low_bytes=row["low_mib"] * MIB, high_bytes=row["high_mib"] * MIB
    )


def usable_bytes(spec: GpuSpec) -> tuple[int, str]:
    """Memory PyTorch can have on an otherwise empty card.

    The CUDA context still comes out of it, see :mod:`memest.catalog.cuda_context`.

    Args:
        spec: a card of the catalogue or a live reading.

    Returns:
        The size in bytes and a sentence on where it comes from.

    Raises:
        ConfigError: if the spec names no size at all.
    """
    nbytes, basis = _known_size(spec)
    if spec.kind == "unified":
        basis += "; the CPU shares this memory, so a run can have less"
    return nbytes, basis


def _known_size(spec: GpuSpec) -> tuple[int, str]:
    """The size in bytes by the best figure that is known of a card, and which one that is."""
    if spec.is_memory_alone:
        return spec.torch_total_bytes or 0, "memory as given"
    if spec.torch_total_bytes is not None:
        precision = f" ({spec.torch_total_precision})" if spec.torch_total_precision else ""
        basis = (
            f"torch's own total of the {spec.name}, as printed on Linux{precision}; drivers move "
            "it by up to 1.5 %"
        )
        if spec.confidence == "live":
            basis = f"the memory of the {spec.name} in this machine{precision}"
        return spec.torch_total_bytes, basis
    if spec.nvml_total_bytes is not None:
        gap = driver_gap(spec)
        total = spec.nvml_total_bytes
        basis = (
            f"nvidia-smi total of {format_size(total)} minus {format_size(gap.middle_bytes)} that "
            f"driver and firmware keep on the nearest cards with both figures ({gap.text}); "
            f"torch's own total of the {spec.name} is not known"
        )
        return total - gap.middle_bytes, basis
    if spec.memory_marketing_gb is None:
        raise ConfigError(
            f"nothing is known about the memory of {spec.name}: give it, for example "
            "--gpu-memory 24GiB"
        )
    if spec.backend == "rocm":
        rocm_gap = policy()["rocm_gap"]["high_mib"] * MIB
        total = spec.memory_marketing_gb * (1 << 30) - rocm_gap
        basis = (
            f"{spec.memory_marketing_gb} GiB on the box minus {rocm_gap // MIB} MiB, as on the "
            "four AMD cards with a known total; no total of this card is known"
        )
        return total, basis
    # decimal gigabytes: within half a per cent of the two unified-memory boards with a reading,
    # and on the safe side elsewhere
    total = spec.memory_marketing_gb * 10**9
    basis = (
        f"the {spec.memory_marketing_gb} GB on the box read as decimal; neither torch's nor "
        f"nvidia-smi's total of the {spec.name} is known"
    )
    return total, basis
