"""A calibration: what measured runs say about memest's figures.

Stdlib only: it is fitted with scikit-learn and applied without it. The file is
:mod:`memest.estimation.calibration_files`'s matter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CPU",
    "FACTS",
    "KIND",
    "LEVEL",
    "METRICS",
    "SCALES",
    "SCHEMA_VERSION",
    "UNNAMED",
    "Band",
    "Calibration",
    "CrossValidation",
    "MeasuredOn",
    "ProcessPart",
    "Provenance",
    "same_gpu",
]

SCHEMA_VERSION = 1
KIND = "memest calibration profile"
CPU = "cpu"
"""The GPU of a calibration that was measured without one."""
LEVEL = 0.9
"""Of the two-sided range; its upper end alone holds with 0.95, for the tails are equal."""
METRICS = ("device", "reserved", "allocated")
SCALES = ("constant", "proportional")
FACTS = (
    "precision",
    "dtype",
    "attention",
    "optimizer",
    "loop",
    "checkpointing",
    "family",
    "parallelism",
    "compiler",
)
"""The facts of a run whose measured values a calibration lists."""
UNNAMED = {"parallelism": ("one GPU",), "compiler": ("eager",)}
"""What was measured where a file does not name a fact: it is older than the fact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPart:
    """What a process holds beside its segments on one GPU: context, kernels, libraries.

    Attributes:
        gpu: name as the driver prints it.
        constant_bytes: of every run.
        low_bytes: how far below the fitted figure readings lie, 0 or less.
        high_bytes: how far above, 0 or more.
        cases: readings it was fitted to.
        capability: (major, minor).
        sm_count: streaming multiprocessors.
        total_bytes: memory of the card.
    """

    gpu: str
    constant_bytes: int
    low_bytes: int
    high_bytes: int
    cases: int
    capability: tuple[int, int] | None = None
    sm_count: int | None = None
    total_bytes: int | None = None

    def distance(
        self,
        capability: tuple[int, int] | str | None,
        sm_count: int | None,
        total_bytes: int | None,
    ) -> tuple[bool, float, float, str]:
        """How unlike another GPU is: its compute capability first, then its SMs, then its memory.

        Args:
            capability: (major, minor) of the other one.
            sm_count: its streaming multiprocessors.
            total_bytes: its memory.
        """
        other = self.capability is None or self.capability != capability
        units = _apart(self.sm_count, sm_count)
        return other, units, _apart(self.total_bytes, total_bytes), self.gpu


def _apart(one: int | None, other: int | None) -> float:
    return abs(math.log2(one / other)) if one and other else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """How far measured peaks lie from corrected ones, in runs of models left out of the fit.

    Attributes:
        metric: which peak: ``device``, else the highest one that could be measured.
        scale: ``constant`` (low and high are bytes) or ``proportional`` (parts of the peak).
        low: lower end of measured minus corrected.
        high: upper end.
        level: share of new runs that such a range is to contain; None = no claim.
        cases: residuals behind it.
        draws: independent draws that they count for: runs of one model are alike.
    """

    metric: str
    scale: str
    low: float
    high: float
    level: float | None
    cases: int
    draws: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOn:
    """What was measured: beyond it, a calibration extrapolates.

    Attributes:
        allocated_bytes: the largest predicted allocated peak.
        kernels: the most distinct operators of a run.
        slack_bytes: the largest range of library-chosen workspaces.
        seen: measured values of each of :data:`FACTS`.
        torch: releases, (major, minor).
        cuda: releases, (major, minor).
    """

    allocated_bytes: int = 0
    kernels: int = 0
    slack_bytes: int = 0
    seen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    torch: tuple[tuple[int, int], ...] = ()
    cuda: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossValidation:
    """How right the corrected figures were for models that the fit had not seen.

    Attributes:
        cases: runs.
        models: models.
        folds: how often some were left out and predicted.
        raw_error: median absolute relative error of the band's metric, before correction.
        error: after it.
        allocated_raw_error: the same for the allocated peak.
        allocated_error: after correction.
        coverage: share of runs inside a range that was made without their model; None where there
            is no other model to make one from.
        above: share of runs above such a range.
    """

    cases: int = 0
    models: int = 0
    folds: int = 0
    raw_error: float | None = None
    error: float | None = None
    allocated_raw_error: float | None = None
    allocated_error: float | None = None
    coverage: float | None = None
    above: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where a profile is from.

    Attributes:
        gpus: names of the devices; ``cpu`` for none.
        drivers: versions.
        first: date of the first run, ISO 8601.
        last: date of the last one.
        statuses: number of runs by how they ended.
        dataset_sha256: digest of the measurements.
        versions: of memest, torch, scikit-learn and NumPy that made the fit.
        notes: what there is to say of the fit.
    """

    gpus: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    first: str = ""
    last: str = ""
    statuses: Mapping[str, int] = field(default_factory=dict)
    dataset_sha256: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What is to be changed in an estimate, and how sure that is.

    Attributes:
        tensors: name of the chosen model of the tensors, from ``identity`` to ``every part``.
        factors: by part of the breakdown; others are taken as they are times ``other_factor``.
        other_factor: for parts that were not measured.
        gap_bytes: beyond the replayed difference between reserved and allocated.
        process_model: name of the chosen model of the process part; empty without one.
        process: by GPU.
        per_kernel_bytes: for each distinct operator.
        precision_bytes: by kind of autocast.
        band: how far off it is.
        measured: what was measured.
        validation: how right it was.
        provenance: where it is from.
    """

    tensors: str
    factors: Mapping[str, float]
    other_factor: float = 1.0
    gap_bytes: int = 0
    process_model: str = ""
    process: tuple[ProcessPart, ...] = ()
    per_kernel_bytes: float = 0.0
    precision_bytes: Mapping[str, int] = field(default_factory=dict)
    band: Band
    measured: MeasuredOn
    validation: CrossValidation
    provenance: Provenance

    @property
    def on_cpu(self) -> bool:
        """Measured without a GPU: it knows tensors, nothing of an allocator or a context."""
        return self.provenance.gpus == (CPU,)

    def part_of(self, gpu: str) -> ProcessPart | None:
        """The process part that was measured on a GPU."""
        return next((part for part in self.process if same_gpu(part.gpu, gpu)), None)

    def to_dict(self) -> dict[str, Any]:
        """The document of the file."""
        return {"schema_version": SCHEMA_VERSION, "kind": KIND, **_plain(self)}


def same_gpu(one: str, other: str) -> bool:
    """Whether two names mean the same card; the maker's name and spaces do not count."""
    return _gpu_key(one) == _gpu_key(other)


def _gpu_key(name: str) -> str:
    return " ".join(name.lower().removeprefix("nvidia").replace("-", " ").split())


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
