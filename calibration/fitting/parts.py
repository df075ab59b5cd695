"""The small models that are fitted: factors of tensors, the gap, and the process part.

Each comes in a few variants from simple to rich, and a variant has to earn its place on models it
has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memest.calibration.fitting.residuals import ResidualRow
from memest.calibration.fitting.robust import (
    MIN_GROUPS,
    choose,
    group_folds,
    nonnegative,
    robust_centre,
)
from memest.events import Category
from memest.units import MIB

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "PROCESS",
    "TENSORS",
    "Process",
    "Tensors",
    "fit_gap",
    "fit_process",
    "fit_tensors",
]

TENSORS = ("identity", "one factor", "activations and the rest", "every part")
"""Variants of the tensor part, simplest first."""
PROCESS = ("constant", "constant and operators", "constant, operators and precision")
"""Variants of the process part, simplest first; constants are per GPU, the rest is shared."""
_MOVING = frozenset(
    (Category.ACTIVATIONS.value, Category.TEMPORARIES.value, Category.WORKSPACES.value)
)
"""Parts that kernels decide; the others are copies of the weights."""
_PULL = 1e-2
"""Pull of factors towards 1: errors of 1 % against factors that are within 10 % of 1."""
_SHRINK = 1e-3
"""Pull of the process part's slopes towards 0."""
_AS_GOOD = 1e-4
"""Parts of the peak that are no difference."""
_AS_GOOD_BYTES = 2 * MIB


@dataclass(frozen=True, slots=True)
class Tensors:
    """Factors of the breakdown's rows."""

    name: str = TENSORS[0]
    factors: Mapping[str, float] = field(default_factory=dict)
    other: float = 1.0


@dataclass(frozen=True, slots=True)
class Process:
    """What the process holds beside its segments."""

    name: str = ""
    constants: Mapping[str, int] = field(default_factory=dict)
    per_kernel: float = 0.0
    precision: Mapping[str, int] = field(default_factory=dict)

    def of(self, row: ResidualRow) -> float:
        """The figure for a run on a GPU that has a constant."""
        return (
            self.constants[row.gpu]
            + self.per_kernel * row.prediction.kernels
            + self.precision.get(row.facts.precision, 0)
        )


# -- tensors --------------------------------------------------------------------------------------


def fit_tensors(rows: Sequence[ResidualRow]) -> Tensors:
    """Choose a variant on models (and GPUs) left out, and fit it to all rows."""
    models = {row.model for row in rows}
    if len(models) < MIN_GROUPS:
        return Tensors()
    folds = group_folds([row.model for row in rows])
    if len({row.gpu for row in rows}) > 1:
        folds += group_folds([row.gpu for row in rows])
    names = [name for name in TENSORS if len(_groups(name, rows)) * 2 <= len(rows)]

    def loss(name: str, fit: list[int], out: list[int]) -> float:
        tensors = tensors_of(name, [rows[i] for i in fit])
        errors = [abs(_relative(rows[i], tensors)) for i in out]
        return sum(errors) / len(errors)

    name = choose(names, folds, loss, tolerance=_AS_GOOD, cautious=True)
    return tensors_of(name, rows)


def tensors_of(name: str, rows: Sequence[ResidualRow]) -> Tensors:
    """Fit one variant."""
    import numpy as np

    groups = _groups(name, rows)
    if not groups:
        return Tensors()
    columns = np.array(
        [[sum(row.parts.get(p, 0) for p in g) / row.allocated for g in groups] for row in rows]
    )
    ones = np.ones(len(groups))
    coefficients = nonnegative(columns, np.ones(len(rows)), prior=ones, ridge=_PULL * ones)
    factors = {
        part: round(float(factor), 6)
        for group, factor in zip(groups, coefficients, strict=True)
        for part in group
    }
    rest = [factors[p] for p in sorted(factors) if p not in _MOVING]
    # what is alike for all parts not moved by kernels holds for those not measured, too
    other = rest[0] if rest and name != TENSORS[-1] else 1.0
    return Tensors(name, dict(sorted(factors.items())), other)


def _parts(rows: Sequence[ResidualRow]) -> list[str]:
    return sorted({part for row in rows for part, size in row.parts.items() if size})


def _groups(name: str, rows: Sequence[ResidualRow]) -> list[list[str]]:
    """Which parts share a factor."""
    parts = _parts(rows)
    if name == TENSORS[1]:
        return [parts]
    if name == TENSORS[2]:
        moving = [part for part in parts if part in _MOVING]
        rest = [part for part in parts if part not in _MOVING]
        return [group for group in (moving, rest) if group]
    return [[part] for part in parts] if name == TENSORS[3] else []


def _relative(row: ResidualRow, tensors: Tensors) -> float:
    """Error of the corrected allocated peak as a part of the measured one."""
    corrected_peak = sum(
        size * tensors.factors.get(part, tensors.other) for part, size in row.parts.items()
    )
    return corrected_peak / row.allocated - 1


# -- the gap --------------------------------------------------------------------------------------


def fit_gap(rows: Sequence[ResidualRow]) -> int:
    """Reserved beyond allocated, beyond the replay, in bytes.

    Nothing, or the median, where it holds for models left out.
    """
    model_gaps = [(row.model, row.gap) for row in rows if row.gap is not None]
    if len({model for model, _ in model_gaps}) < MIN_GROUPS:
        return 0
    gaps = [float(gap) for _, gap in model_gaps if gap is not None]

    def loss(name: str, fit: list[int], out: list[int]) -> float:
        centre = robust_centre([gaps[i] for i in fit]) if name == "constant" else 0.0
        return sum(abs(gaps[i] - centre) for i in out) / len(out)

    name = choose(
        ("identity", "constant"),
        group_folds([model for model, _ in model_gaps]),
        loss,
        tolerance=_AS_GOOD_BYTES,
        cautious=True,
    )
    return round(robust_centre(gaps)) if name == "constant" else 0


# -- the process part -----------------------------------------------------------------------------


def fit_process(rows: Sequence[ResidualRow]) -> Process:
    """Choose a variant on models left out, and fit it to all rows that have a reading."""
    rows_to_fit = [row for row in rows if row.fits_process]
    if not rows_to_fit:
        return Process()
    name = PROCESS[0]
    if len({row.model for row in rows_to_fit}) >= MIN_GROUPS:
        # a GPU whose rows are all left out has no constant, so its rows are no test
        folds = [
            (fit, test_rows)
            for fit, out in group_folds([row.model for row in rows_to_fit])
            if (
                test_rows := [
                    i for i in out if rows_to_fit[i].gpu in {rows_to_fit[f].gpu for f in fit}
                ]
            )
        ]

        def loss(name: str, fit: list[int], out: list[int]) -> float:
            process = process_of(name, [rows_to_fit[i] for i in fit])
            errors = [abs(process.of(rows_to_fit[i]) - (rows_to_fit[i].process or 0)) for i in out]
            return sum(errors) / len(errors)

        names = [
            n for n in PROCESS if _columns(n, rows_to_fit).shape[1] * 2 <= len(rows_to_fit)
        ] or PROCESS[:1]
        if folds:
            name = choose(names, folds, loss, tolerance=_AS_GOOD_BYTES)
    return process_of(name, rows_to_fit)


def process_of(name: str, rows: Sequence[ResidualRow]) -> Process:
    """Fit one variant to rows that have a reading."""
    import numpy as np

    columns = _columns(name, rows)
    measured = np.array([row.process for row in rows], dtype=float)
    unit = max(float(np.median(measured)), 1.0)
    gpus, precisions = _gpus(rows), _precisions(rows)
    ridge = np.full(columns.shape[1], _SHRINK)
    ridge[: len(gpus)] = 0.0
    most = max(row.prediction.kernels for row in rows) or 1
    slopes = (
        nonnegative(columns, measured / unit, prior=np.zeros(columns.shape[1]), ridge=ridge) * unit
    )
    rest = slopes[len(gpus) :]
    return Process(
        name,
        {gpu: round(float(c)) for gpu, c in zip(gpus, slopes, strict=False)},
        round(float(rest[0]) / most, 3) if len(rest) else 0.0,
        {p: round(float(c)) for p, c in zip(precisions, rest[1:], strict=False)},
    )


def _gpus(rows: Sequence[ResidualRow]) -> list[str]:
    return sorted({row.gpu for row in rows})


def _precisions(rows: Sequence[ResidualRow]) -> list[str]:
    return sorted({row.facts.precision for row in rows})


def _columns(name: str, rows: Sequence[ResidualRow]) -> np.ndarray:
    """A column for each GPU; then operators as a part of the most; then one for each precision.

    Each precision has its own column, no one is the reference: coefficients cannot be negative, so
    which one is lowest is for the fit to find.
    """
    import numpy as np

    most = max(row.prediction.kernels for row in rows) or 1
    columns = [[float(row.gpu == gpu) for row in rows] for gpu in _gpus(rows)]
    if name != PROCESS[0]:
        columns.append([row.prediction.kernels / most for row in rows])
    if name == PROCESS[2]:
        columns += [
            [float(row.facts.precision == kind) for row in rows] for kind in _precisions(rows)
        ]
    return np.array(columns).T
