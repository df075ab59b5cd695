"""One family for lengths of any remainder, where nothing in a model is padded.

A family is grown over lengths of one remainder by 128, because padding to a multiple adds the same
to all of them. Batches of drawn lengths have any remainder, and a family for each would be dozens
of traces that all say the same. So what was traced at several remainders is put together: what is
padded to an even multiple is padded by different amounts at an odd length and at an even one, so no
short formula has both, and each remainder keeps a family of its own. Where every number has one
formula for all of them, it holds between them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memest.events import Trace
from memest.shelf import traces_in
from memest.sizes import Sizes
from memest.steps.family import Family, NotAlikeError, Point, alike, unite
from memest.steps.formula import NoFormulaError
from memest.store import digest_of

__all__ = ["across", "place_across", "traces_around"]

_MODULUS = 128
_LENGTHS = ("seq_len", "target_len")
_FEWEST = 3
"""Remainders, odd and even ones among them."""


def traces_around(
    near: Sequence[Family], sizes: Sizes, axes: Sequence[str], *, tied: bool
) -> dict[Point, Trace]:
    """The traces at sizes that differ from the given ones in some axes alone, by point.

    Args:
        near: families with the same attention kernels.
        sizes: of a batch.
        axes: the sizes that may differ.
        tied: the target is as long as the source.
    """
    found = {}
    for family in near:
        for sized, trace in traces_in(family):
            if sized.keys() == sizes.keys() and all(
                sized.get(n) == v for n, v in sizes.items()
                if n not in axes and not (tied and n == "target_len")
            ) and (not tied or sized.get("target_len") == sized.get("seq_len")):  # fmt: skip
                found[tuple(sized[axis] for axis in axes)] = trace
    return found


def across(
    traces: Mapping[Point, Trace], centre: Point, axes: tuple[str, ...],
    fixed: Mapping[str, int], thresholds: Iterable[int] = (), *, tied: bool = False,
) -> Family | None:  # fmt: skip
    """The family of traces whose lengths have different remainders.

    Args:
        traces: by point, the one at the centre among them.
        centre: the sizes that are asked for.
        axes: the sizes in which they differ.
        fixed: the others.
        thresholds: lengths at which the model is known to do something else: traces on the other
            side of one are left out.
        tied: the target is as long as the source.

    Returns:
        None where too few remainders were traced so far to tell.

    Raises:
        NoFormulaError: something depends on the remainder.
    """
    lengths = [axis for axis in axes if axis in _LENGTHS]
    if not lengths or not {*axes} <= {"batch", *lengths}:
        return None
    thresholds = tuple(thresholds)
    side = _side(centre, axes, thresholds)
    kept = {
        point: trace
        for point, trace in traces.items()
        if _side(point, axes, thresholds) == side
        and alike(trace, traces[centre])
        # the first batch goes other ways
        and ("batch" not in axes or point[axes.index("batch")] > 1)
    }
    for axis in axes:
        sizes = {point[axes.index(axis)] for point in kept}
        rests = {size % _MODULUS for size in sizes}
        if len(sizes) < _FEWEST:
            return None
        if axis in lengths and (len(rests) < _FEWEST or len({rest % 2 for rest in rests}) < 2):
            return None
    try:
        return unite(kept, axes, (1,) * len(axes), fixed, tied=tied)
    except NotAlikeError:
        return None
    except NoFormulaError as error:
        if error.open:
            return None
        raise


def place_across(
    axes: tuple[str, ...], sizes: Sizes, family: Family, thresholds: Iterable[int]
) -> str:
    """Where remainders were put together: other lengths on this side would fail likewise."""
    rest = {n: v for n, v in sizes.items() if n not in axes}
    kinds = [kind for _, kind in family.skeleton.attention_choices]
    side = _side(tuple(sizes[axis] for axis in axes), axes, tuple(thresholds))
    return digest_of(["across", axes, rest, sizes["batch"] == 1, kinds, side])


def _side(
    point: Point, axes: tuple[str, ...], thresholds: tuple[int, ...]
) -> list[tuple[bool, ...]]:
    """On which side of the thresholds a point lies; a threshold itself lies beyond."""
    return [
        tuple(size >= threshold for threshold in thresholds)
        for axis, size in zip(axes, point, strict=True)
        if axis in _LENGTHS
    ]
