"""Non-negative least squares that outliers do not move, and the choice between small models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from memest.errors import MissingDependencyError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MIN_GROUPS", "choose", "group_folds", "need_sklearn", "nonnegative", "robust_centre"]

HUBER = 1.345
"""Residuals up to so many scales count in full: 95 % efficient where errors are normal."""
TUKEY = 4.685
"""Residuals beyond so many scales count for nothing in the last rounds."""
_ROUNDS = 20
_NORMAL = 1.4826
"""Median of absolute deviations to standard deviation, of normal errors."""
_EXACT = 1e-5
"""Least scale: where most rows fit exactly, the rest are outliers."""
_STILL = 5e-5
"""Coefficients that move no further are found."""
MIN_GROUPS = 3
"""Models below which nothing is chosen by leaving models out: two agree by chance too often."""
MAX_FOLDS = 10


def need_sklearn() -> None:
    """Refuse early and in a sentence.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    try:
        import sklearn.linear_model  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "Fitting a calibration needs scikit-learn: pip install 'memest-gpu[calibration]'. "
            "Applying one needs nothing."
        ) from error


def nonnegative(
    columns: np.ndarray, target: np.ndarray, *, prior: np.ndarray, ridge: np.ndarray
) -> np.ndarray:
    """Coefficients of at least 0 of a robust linear model without intercept.

    Huber's weights by iteration to a start that no outlier pulls far, then Tukey's, which leave
    outliers out. Columns are in units in which residuals are comparable (parts of the measured
    peak); the prior enters as one more row for each coefficient.

    Args:
        columns: rows by coefficients.
        target: one for each row.
        prior: where each coefficient is pulled to.
        ridge: how strongly, as so many rows of full size.
    """
    import numpy as np
    from sklearn import config_context
    from sklearn.linear_model import LinearRegression

    count = columns.shape[1]
    pull = np.sqrt(ridge)
    matrix = np.vstack([columns, np.diag(pull)])
    extended_target = np.concatenate([target, pull * prior])

    def solve(weights: np.ndarray) -> np.ndarray:
        model = LinearRegression(positive=True, fit_intercept=False)
        model.fit(matrix, extended_target, sample_weight=np.concatenate([weights, np.ones(count)]))
        return np.asarray(model.coef_)

    def huber(rest: np.ndarray) -> np.ndarray:
        return np.minimum(1.0, HUBER / np.maximum(rest, 1e-9))

    def tukey(rest: np.ndarray) -> np.ndarray:
        return np.asarray(np.clip(1 - (rest / TUKEY) ** 2, 0, 1) ** 2)

    with config_context(assume_finite=True, skip_parameter_validation=True):
        solution = solve(np.ones(len(target)))
        for weigh in (huber, tukey):
            for _ in range(_ROUNDS):
                rest = np.abs(target - columns @ solution)
                scale = max(_NORMAL * float(np.median(rest)), _EXACT)
                before, solution = solution, solve(weigh(rest / scale))
                if np.abs(solution - before).max() <= _STILL:
                    break
    return np.maximum(solution, 0.0)


def robust_centre(values: Sequence[float]) -> float:
    """The median, which half of the values may not move."""
    return float(median(values))


def group_folds(groups: Sequence[str], most: int = MAX_FOLDS) -> list[tuple[list[int], list[int]]]:
    """Folds that keep groups together: (rows to fit, rows left out) by index.

    Args:
        groups: of each row.
        most: folds; fewer groups make as many folds as there are groups.
    """
    import numpy as np
    from sklearn.model_selection import GroupKFold

    count = min(len(set(groups)), most)
    if count < 2:
        return []
    blank = np.zeros((len(groups), 1))
    folds = GroupKFold(n_splits=count).split(blank, groups=list(groups))
    return [(list(map(int, fit)), list(map(int, out))) for fit, out in folds]


def choose(
    candidates: Sequence[str],
    folds: Sequence[tuple[list[int], list[int]]],
    loss: Callable[[str, list[int], list[int]], float],
    *,
    tolerance: float,
    cautious: bool = False,
) -> str:
    """The simplest candidate that is not clearly worse than the best.

    The one-standard-error rule, on differences from fold to fold: candidates are compared on the
    same models, so what makes a model hard for all of them cancels.

    Args:
        candidates: from the simplest to the richest.
        folds: as :func:`group_folds` makes them.
        loss: of a candidate fitted to some rows, on others.
        tolerance: what is no worse than this is as good.
        cautious: the first candidate changes nothing, and only two standard errors speak against
            it.
    """
    import numpy as np

    losses = {
        name: np.array([loss(name, fit, out) for fit, out in folds], dtype=float)
        for name in candidates
    }
    means = {name: float(values.mean()) for name, values in losses.items()}
    best = min(candidates, key=lambda name: means[name])
    for place, name in enumerate(candidates):
        worse: Any = losses[name] - losses[best]
        error = float(worse.std(ddof=1)) / len(worse) ** 0.5 if len(worse) > 1 else 0.0
        errors = 2 if cautious and place == 0 else 1
        if float(worse.mean()) <= max(errors * error, tolerance):
            return name
    return best
