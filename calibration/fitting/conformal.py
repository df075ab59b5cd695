"""How far off corrected peaks are for models that were left out of the fit.

Split conformal quantiles with equal tails: the r-th smallest of n residuals with
r = ceil(0.95 (n + 1)) bounds 95 % of new runs from above, whatever the distribution, and its
mirror image bounds them from below: 90 % lie between. Fewer than 19 residuals have no such r; the
smallest and the largest then bound (n - 1) / (n + 1) of new runs. (Vovk, Gammerman, Shafer:
Algorithmic Learning in a Random World, 2005; Lei et al., JASA 113, 2018.)

Runs of one model are alike, and a new question is mostly of another model: 60 runs of 6 models are
no 60 independent draws. So n is not the number of runs but what they count for: n / (1 + (m - 1) c)
with m runs of a model and c the correlation of residuals within models (Kish's design effect),
taken one standard error above its estimate. Where residuals do not depend on the model that is
almost n, where they depend on nothing else it is the number of models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from memest.estimation.calibration import LEVEL, SCALES, Band

__all__ = ["band_of", "bounds", "covers", "effective_count"]


def bounds(
    residuals: Sequence[float], level: float = LEVEL, *, count: float | None = None
) -> tuple[float, float, float]:
    """(low, high, level reached) of residuals, equal tails.

    Args:
        residuals: measured minus corrected, one at least.
        level: of the two-sided range.
        count: how many independent draws they count for; None = all of them.
    """
    ordered_residuals = sorted(residuals)
    real = len(ordered_residuals)
    draws = real if count is None else min(count, real)
    rank = math.ceil((1 + level) / 2 * (draws + 1) * real / draws - 1e-9)
    if rank <= real:
        return ordered_residuals[real - rank], ordered_residuals[rank - 1], level
    return ordered_residuals[0], ordered_residuals[-1], (draws - 1) / (draws + 1)


def effective_count(residuals: Sequence[float], groups: Sequence[str]) -> float:
    """How many independent draws residuals of grouped runs count for.

    By analysis of variance of their ranks, so that outliers do not decide.

    Args:
        residuals: one for each run.
        groups: the model of each.
    """
    from scipy.stats import rankdata  # type: ignore[import-untyped]

    total, sizes = len(residuals), Counter(groups)
    if len(sizes) < 2 or len(sizes) == total:
        return float(len(sizes))
    ranks = [float(rank) - 1 for rank in rankdata(residuals)]  # equal values share a mean
    mean = sum(ranks) / total
    sums: dict[str, float] = dict.fromkeys(sizes, 0.0)
    for group, rank in zip(groups, ranks, strict=True):
        sums[group] += rank
    means = {group: sums[group] / size for group, size in sizes.items()}
    between = sum(size * (means[g] - mean) ** 2 for g, size in sizes.items()) / (len(sizes) - 1)
    within = sum((rank - means[group]) ** 2 for group, rank in zip(groups, ranks, strict=True)) / (
        total - len(sizes)
    )
    squares = sum(size * size for size in sizes.values()) / total
    each = (total - squares) / (len(sizes) - 1)
    variance = between + (each - 1) * within
    alike = min(max((between - within) / variance, 0.0), 1.0) if variance > 0 else 0.0
    error = (1 - alike) * (1 + (each - 1) * alike)
    error *= math.sqrt(2 / (each * max(each - 1, 0.5) * (len(sizes) - 1)))
    counts = total / (1 + (squares - 1) * min(alike + error, 1.0))
    return max(counts, float(len(sizes))) if variance > 0 else float(total)


def band_of(
    metric: str,
    residuals: Sequence[float],
    peaks: Sequence[float],
    groups: Sequence[str] | None = None,
) -> Band:
    """The narrower of two bands: so many bytes, or a part of the corrected peak.

    Args:
        metric: which peak.
        residuals: measured minus corrected, in bytes.
        peaks: corrected.
        groups: the model of each, which the fit had not seen; None where it had, and nothing is
            promised.
    """
    if not residuals:
        return Band(metric=metric, scale=SCALES[0], low=0.0, high=0.0, level=None, cases=0)
    shares = [rest / max(peak, 1.0) for rest, peak in zip(residuals, peaks, strict=True)]
    mean = sum(peaks) / len(peaks)
    bands = []
    for scale, values, unit in ((SCALES[0], residuals, 1.0), (SCALES[1], shares, mean)):
        count = None if groups is None else effective_count(values, groups)
        low, high, level = bounds(values, count=count)
        bands.append(((high - low) * unit, scale, low, high, level, count))
    _, scale, low, high, level, count = min(bands, key=lambda item: item[0])
    return Band(
        metric=metric,
        scale=scale,
        low=round(low, 9),
        high=round(high, 9),
        level=None if groups is None else round(level, 6),
        cases=len(residuals),
        draws=0.0 if count is None else round(count, 3),
    )


def covers(band: Band, residual: float, peak: float) -> int:
    """-1 below the band, 0 inside, 1 above."""
    scale = peak if band.scale == SCALES[1] else 1.0
    if residual < min(band.low, 0) * scale:
        return -1
    return 1 if residual > max(band.high, 0) * scale else 0
