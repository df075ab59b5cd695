"""What an estimate answers: frozen results, and the JSON document made from them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from memest.config.setup import Setup
from memest.events import Category, Phase
from memest.files.texts import write_as
from memest.report.answer import SCHEMA_VERSION, Answer, Document, document
from memest.report.life_result import RunLife

__all__ = [
    "NOT_MODELLED",
    "SUFFIXES",
    "CalibrationFacts",
    "Estimate",
    "GpuFit",
    "Interval",
    "Layer",
    "ModelFacts",
    "OpenChoice",
    "Origin",
    "Peak",
    "PeakMoment",
    "PeakRanges",
    "RankPeak",
    "Row",
    "Spot",
    "TimePoint",
    "Verdict",
]

SUFFIXES = (".json", ".csv", ".html", ".png")
"""Files that an estimate can be written to."""


class Verdict(enum.StrEnum):
    """Whether the run fits, from best to worst: more memory never makes it worse."""

    FITS = "fits"
    RELEASES_CACHE = "fits by releasing cache"
    """Tensors surely fit; what the allocator caches besides may not, and is given back then."""
    TIGHT = "tight"
    CANNOT_SAY = "cannot say"
    """What is priced is not all that the run does, or more than it does, and that decides."""
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "no GPU named"

    @property
    def rank(self) -> int:
        """Its place on the scale, 0 the best."""
        return list(Verdict).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What was built and counted (numbers of elements; tied weights once).

    ``family`` is the ``model_type`` of the configuration, else the class.
    """

    id: str
    class_name: str
    parameters: int
    trainable_parameters: int
    buffers: int
    parameter_bytes: int
    source: str
    task: str
    family: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The three peaks, in bytes: three different meters read three different numbers."""

    allocated_bytes: int
    """``torch.cuda.max_memory_allocated()``"""
    reserved_bytes: int
    """``torch.cuda.max_memory_reserved()``"""
    device_bytes: int
    """What NVML shows for the process: reserved, CUDA context and loaded kernels."""
    managed_bytes: int = 0
    """Beside the allocator, in managed memory (states of paged optimizers): its pages are on the
    GPU while there is room and move to the host where there is none."""

    engine_bytes: int = 0
    """Of the device's, what an engine takes that generates on the same GPU."""

    @property
    def device_with_managed_bytes(self) -> int:
        """The device peak with all of the managed memory on the GPU."""
        return self.device_bytes + self.managed_bytes

    def to_dict(self) -> dict[str, int]:
        """The three of them; an engine's part where there is one."""
        values = {
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "device_bytes": self.device_bytes,
        }
        return values | ({"engine_bytes": self.engine_bytes} if self.engine_bytes else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval(Document):
    """A range for a peak; ``basis`` says what it covers. ``level`` None = no claim."""

    level: float | None
    low_bytes: int
    high_bytes: int
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRanges(Document):
    """Ranges of the allocator's two peaks, by measured runs of the kind."""

    allocated: Interval
    reserved: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Document):
    """One row of the breakdown at the moment of the allocated peak."""

    category: Category
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMoment(Document):
    """When the allocated peak is reached."""

    phase: Phase
    step: int
    micro_step: int
    module: str
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Document):
    """What one module holds: activations at the peak, and its parameters."""

    module: str
    activation_bytes: int
    parameter_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePoint(Document):
    """The highest allocated and reserved memory within one phase.

    ``breakdown`` is what was alive at the former, as replayed; ``module`` and ``op`` made the last
    allocation before it, empty where the phase began with it. They are no part of the JSON
    document.
    """

    step: int
    micro_step: int
    phase: Phase
    allocated_bytes: int
    reserved_bytes: int
    breakdown: tuple[Row, ...] = ()
    module: str = ""
    op: str = ""
    left_out: ClassVar[tuple[str, ...]] = ("breakdown", "module", "op")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFit(Document):
    """One GPU and what the estimate means for it.

    Attributes:
        name: of the GPU.
        usable_bytes: what PyTorch can have of its memory.
        verdict: of the run on it.
        headroom_bytes: what is left at the expected device peak; below 0 what is missing.
        device_bytes: the expected device peak.
        basis: where the usable memory is known from.
        reason: why, where the verdict is neither that it fits nor that it does not.
        low_bytes: the least that the device peak may be on it.
        high_bytes: the most.
        largest_engine_share: of its memory, the most that an engine on it may take with the run
            sure to fit, in hundredths; None without an engine, or where no share will do.
    """

    left_out: ClassVar[tuple[str, ...]] = ("largest_engine_share",)
    name: str
    usable_bytes: int
    verdict: Verdict
    headroom_bytes: int
    device_bytes: int
    basis: str = ""
    reason: str = ""
    low_bytes: int = 0
    high_bytes: int = 0
    largest_engine_share: float | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one value of the setup comes from.

    Attributes:
        option: keyword of the option, or a field of the setup.
        value: as JSON has it.
        source: a flag, ``command: --bf16``, ``run.yaml:bf16``, ``model config``, ``default``.
    """

    option: str
    value: Any
    source: str


NOT_MODELLED = "what is not modelled"
"""The source of ``unpriced`` and ``overpriced`` where a reader filled them in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPeak(Document):
    """One GPU of several that differ.

    Attributes:
        rank: its number.
        parts: what of the model it has.
        allocated_bytes: its allocated peak.
        reserved_bytes: its reserved peak.
        device_bytes: reserved, context and kernels, and NCCL.
    """

    rank: int
    parts: str
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFacts(Document):
    """The calibration that corrected an answer: what it was before, and how good it is.

    Attributes:
        path: file of the profile.
        gpus: measured for it.
        process_gpu: whose context and kernels were taken; empty where the table's were.
        factors: by part of the breakdown.
        raw_parts: the breakdown before correction, bytes.
        raw_allocated_bytes: before correction.
        raw_reserved_bytes: before correction.
        raw_device_bytes: before correction.
        raw_low_bytes: range of the device peak before correction.
        raw_high_bytes: range of the device peak before correction.
        process_bytes: context and kernels.
        raw_process_bytes: as the table has them.
        extrapolates: the question lies beyond what was measured.
        cases: runs that were measured.
        models: of so many models.
        coverage: share of runs of models left out of the fit that lay in their range.
    """

    path: str
    gpus: tuple[str, ...]
    process_gpu: str
    factors: dict[str, float]
    raw_parts: dict[str, int]
    raw_allocated_bytes: int
    raw_reserved_bytes: int
    raw_device_bytes: int
    raw_low_bytes: int
    raw_high_bytes: int
    process_bytes: int
    raw_process_bytes: int
    extrapolates: bool
    cases: int
    models: int
    coverage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """The short answer: peaks and verdict alone, for those who ask many times."""

    setup: Setup
    gpu: GpuFit | None
    peak: Peak
    interval: Interval

    @property
    def verdict(self) -> Verdict:
        """Whether the run fits."""
        return Verdict.UNKNOWN if self.gpu is None else self.gpu.verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenChoice:
    """Something that a question leaves open, and what another choice changes.

    Attributes:
        text: what was assumed, and how to set it.
        instead: another choice, in words: "with 256".
        change_bytes: of the expected device peak with that.
    """

    text: str
    instead: str
    change_bytes: int


_MANY_LOGITS = 0.25
"""Share of the allocated peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Answer):
    """The answer. Frozen, printable, and the same bytes for the same question."""

    model: ModelFacts
    setup: Setup
    gpu: GpuFit | None
    peak: Peak
    interval: Interval
    """Of the device peak."""
    ranges: PeakRanges
    """Of the two others."""
    breakdown: tuple[Row, ...]
    peak_at: PeakMoment
    layers: tuple[Layer, ...]
    timeline: tuple[TimePoint, ...]
    verdict: Verdict
    context_bytes: int
    max_batch: int | None
    safe_batch: int | None
    common_gpus: tuple[GpuFit, ...]
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    calibration: CalibrationFacts | None = None
    origins: tuple[Origin, ...] = ()
    ranks: tuple[RankPeak, ...] = ()
    """All GPUs where they differ, the fullest first: the rest of the estimate is about that one."""
    traced: str = ""
    """How many layers were traced, in words; empty where that is not known."""
    left_open: tuple[OpenChoice, ...] = ()
    """What changes most first; those alone whose steps are known without a trace."""
    usual: tuple[str, ...] = ()
    """Assumptions that are the same for most runs: the report tells them on request."""
    logits_bytes: int = 0
    """Logits, their copies and their gradients, of what is alive at the allocated peak; 0 where no
    vocabulary is known."""
    life: RunLife | None = None
    """Host memory, and the GPU while saving and resuming; None where nobody asked."""

    @property
    def has_many_logits(self) -> bool:
        """Whether logits are so much of the allocated peak that a loss without them may help."""
        return self.logits_bytes >= _MANY_LOGITS * self.peak.allocated_bytes > 0

    @property
    def named_gpus(self) -> tuple[GpuFit, ...]:
        """The GPUs that were asked about; those that people have are none of them."""
        return () if self.gpu is None else (self.gpu, *self.common_gpus)

    def bytes_of(self, category: Category) -> int:
        """What a category has in the breakdown."""
        return sum(row.bytes for row in self.breakdown if row.category is category)

    def to_dict(self) -> dict[str, Any]:
        """The document that ``memest estimate --json`` prints."""
        whole: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "model": {
                "id": self.model.id,
                "class": self.model.class_name,
                "parameters": self.model.parameters,
                "trainable_parameters": self.model.trainable_parameters,
                "buffers": self.model.buffers,
                "parameter_bytes": self.model.parameter_bytes,
                "task": self.model.task,
                "source": self.model.source,
            },
            "setup": self.setup.to_dict(),
            "gpu": document(self.gpu),
            "peak": {
                **self.peak.to_dict(),
                "managed_bytes": self.peak.managed_bytes,
                "device_with_managed_bytes": self.peak.device_with_managed_bytes,
            },
            "interval": document(self.interval),
            "ranges": document(self.ranges),
            "breakdown": document(self.breakdown),
            "peak_at": document(self.peak_at),
            "layers": document(self.layers),
            "timeline": document(self.timeline),
            "verdict": self.verdict.value,
            "verdict_reason": self.gpu.reason if self.gpu else "",
            "context_bytes": self.context_bytes,
            "calibration": document(self.calibration),
            "common_gpus": document(self.common_gpus),
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
            "origins": [
                {"option": o.option, "value": o.value, "origin": o.source} for o in self.origins
            ],
        }
        if self.ranks:
            whole["ranks"] = document(self.ranks)
        if self.life is not None:
            whole["life"] = self.life.to_dict()
        if self.gpu is not None:
            whole |= {"max_batch": self.max_batch, "safe_batch": self.safe_batch}
        return whole

    def to_csv(self) -> str:
        """The parts of the device peak, ``part,bytes``: they add up to it."""
        text: str = self._render("csv", "part")
        return text

    def to_frame(self, by: str = "part") -> Any:
        """A ``pandas.DataFrame``, sizes in bytes.

        Args:
            by: ``part`` of the device peak, ``layer`` or ``time``.

        Raises:
            ConfigError: for any other table.
            MissingDependencyError: without pandas.
        """
        return self._render("frame", by)

    def to_html(self) -> str:
        """The report as a page."""
        page: str = self._render("page")
        return page

    def to_png(self) -> bytes:
        """A picture: what fills the card, and memory phase by phase.

        Raises:
            MissingDependencyError: without matplotlib.
        """
        picture: bytes = self._render("png")
        return picture

    def to_share_png(self) -> bytes:
        """A picture to post, 1200 x 630 pixels: model, card, one bar of memory, verdict.

        Raises:
            MissingDependencyError: without matplotlib.
        """
        picture: bytes = self._render("share")
        return picture

    def save(self, path: str | Path) -> None:
        """Write a file; its suffix decides: .json, .csv, .html or .png.

        Args:
            path: where to; an existing file is overwritten.

        Raises:
            ConfigError: for any other suffix.
            MissingDependencyError: for .png without matplotlib.
        """
        makers: dict[str, Callable[[], str | bytes]] = {
            ".json": lambda: f"{self.to_json()}\n",
            ".csv": self.to_csv,
            ".html": self.to_html,
            ".png": self.to_png,
        }
        write_as(path, makers)
