"""How far peaks may lie from their predictions, as measured runs of the kind showed.

What a prediction leaves open (workspaces, kernels that a library chooses, the order of streams,
software of the time) is not known run by run; how often it matters is. For each kind of run,
``data/peak_ranges.json`` keeps a conformal band of ``measured / predicted - 1`` over published runs
and memest's own, made by ``tools/peak_ranges.py``. A band claims the level that so many independent
runs allow. A kind that nobody measured takes the widest of them and claims none.
"""

from __future__ import annotations

import enum
import functools
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from memest.config.kinds import Strategy
from memest.config.setup import Setup
from memest.files.folders import data_folder
from memest.report.result import Interval

__all__ = ["ErrorBand", "RunKind", "band_for", "error_bands", "kind_of"]

_ENOUGH_MODELS = 19
"""Models from which on a kind speaks for itself: fewer independent runs have no 90 %."""
_LEAST_LEVEL = 0.6
"""Levels below this say too little to be claimed."""
_OPEN_WORKSPACES = 0.03
"""Share of the reserved peak from which on workspaces of a library's choice make a run's kind."""


class RunKind(enum.StrEnum):
    """Kinds of runs whose errors are alike; the first that applies."""

    COMPILED = "compiled"
    PREFERENCES = "a preference method"
    MODEL_PARALLEL = "model parallel"
    SEVERAL_GPUS = "several GPUs"
    ADAPTERS = "adapters"
    CONVOLUTIONS = "convolutions"
    ONE_GPU = "one GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBand:
    """Where ``measured / predicted - 1`` lies.

    Attributes:
        low: of it, 0 or below.
        high: of it, 0 or above.
        level: share of runs in between; None = no claim.
        runs: that were measured.
        models: that they are of.
    """

    low: float
    high: float
    level: float | None
    runs: int
    models: int

    def joined(self, *others: ErrorBand) -> ErrorBand:
        """The band as it is told: one of few models is joined with others, and claims what is left.

        Args:
            others: bands of other kinds.
        """
        if self.models >= _ENOUGH_MODELS:
            return self
        return replace(
            self,
            low=min(band.low for band in (self, *others)),
            high=max(band.high for band in (self, *others)),
            level=self.level if self.level is not None and self.level >= _LEAST_LEVEL else None,
        )

    def around(self, size: int, kind: RunKind, slack: int = 0) -> Interval:
        """The range around a prediction.

        Args:
            size: predicted, bytes.
            kind: of the run.
            slack: bytes by which it may be larger for a reason of its own.
        """
        return Interval(
            low_bytes=size + math.floor(self.low * size),
            high_bytes=size + max(math.ceil(self.high * size), slack),
            level=self.level,
            basis=self._words(kind),
        )

    def _words(self, kind: RunKind) -> str:
        ends = f"{self.low:+.1%} to {self.high:+.1%} of the prediction"
        if not self.runs:
            return f"{ends}: no run that is {kind} was measured, so the widest of other kinds"
        read = f"{self.runs} measured runs of {self.models} models ({kind})"
        if self.level is None:
            return f"{ends}: as {read} lay"
        return f"{ends}: {self.level:.0%} of runs lie there, by {read}"


def kind_of(setup: Setup, reserved_bytes: int, slack_bytes: int) -> RunKind:
    """The kind of a run.

    Args:
        setup: of it.
        reserved_bytes: predicted peak.
        slack_bytes: how much larger workspaces may be that a library chooses.
    """
    distributed = setup.distributed
    if setup.torch_compile:
        return RunKind.COMPILED
    if not setup.method.is_supervised:
        return RunKind.PREFERENCES
    if max(distributed.tp, distributed.pp, distributed.cp, distributed.sp, distributed.ep) > 1:
        return RunKind.MODEL_PARALLEL
    if distributed.strategy is not Strategy.NONE or distributed.num_gpus > 1:
        return RunKind.SEVERAL_GPUS
    if setup.adapter is not None or setup.quantization is not None:
        return RunKind.ADAPTERS
    if slack_bytes > _OPEN_WORKSPACES * reserved_bytes:
        return RunKind.CONVOLUTIONS
    return RunKind.ONE_GPU


@functools.cache
def error_bands() -> dict[RunKind, dict[str, ErrorBand]]:
    """The bands of kinds that were measured, by peak: ``allocated`` and ``reserved``."""
    text = (data_folder() / "peak_ranges.json").read_text(encoding="utf-8")
    kinds: dict[str, dict[str, dict[str, Any]]] = json.loads(text)["kinds"]
    return {
        RunKind(kind): {peak: ErrorBand(**band) for peak, band in peaks.items()}
        for kind, peaks in kinds.items()
    }


def band_for(kind: RunKind, peak: str) -> ErrorBand:
    """The band of a kind.

    A kind with few models takes the band of plain runs on one GPU where that is wider, and one that
    was not measured the widest there is.

    Args:
        kind: of the run.
        peak: ``allocated`` or ``reserved``.
    """
    bands = error_bands()
    own = bands.get(kind, {}).get(peak)
    if own is not None:
        return own.joined(bands[RunKind.ONE_GPU][peak])
    known = [peaks[peak] for peaks in bands.values() if peak in peaks]
    return ErrorBand(low=0.0, high=0.0, level=None, runs=0, models=0).joined(*known)
