"""The family that answers for sizes and for those around them: put together, or grown.

People ask about lengths of any remainder by 128, and a family for each would be dozens of traces
that all say the same. So what was traced at several remainders is put together first, and where
that is not enough a family is grown over all of them: what is padded is padded by different amounts
at an odd length and at a multiple of 128, so no short formula has both. Then each remainder keeps a
family of its own, to all of whose lengths padding adds the same. Where every number has one formula
for all of them, it holds between them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memest.config.kinds import SdpaBackend
from memest.events import Trace
from memest.profiles.axes import Sizes
from memest.profiles.cache import digest_of
from memest.profiles.family import Family, NotAlikeError, Point, alike, unite
from memest.profiles.formula import NoFormulaError
from memest.profiles.growth import (
    ANY_REMAINDER,
    LENGTHS,
    REMAINDERS,
    grow,
    range_of,
    spans,
    tells_remainders,
)
from memest.profiles.known_profiles import same_kernels, traces_in

__all__ = [
    "LONG_TRACE",
    "SMALL_BATCHES",
    "FamilySearch",
    "across",
    "answers_for",
    "goes_by_sample",
    "place_by_sample",
    "traces_around",
]

_AXES = ("batch", "seq_len", "target_len", "image_size", "audio_ms", "lora_r")
_SHORT = 256
"""Tokens where a model names no length."""
LONG_TRACE = 30_000
"""Events of a trace beyond which it takes seconds: at a large batch it may be minutes."""
SMALL_BATCHES = (2, 3)
"""Where it is seen whether a model goes by sample; a batch of 1 has operators of its own."""
_BY_SAMPLE = 0.05
"""The share of a trace that is done so; less may be a few operators that are chosen by size."""


@dataclass(frozen=True, kw_only=True)
class FamilySearch:
    """Looks for a family around some sizes.

    Attributes:
        families: that are known of the model.
        sizes: that are asked for.
        vary: the sizes that further questions will change.
        barren_places: where a family was looked for and there is none; more are added.
        thresholds: lengths at which the model is known to do something else.
        length_multiple: of which lengths must be multiples.
        limit_of: the greatest length that the model takes, by its name; None where it names none.
        trace_at: makes a trace; its errors mean that the model does not go there.
        goes_by_sample: whether the model does part of its work sample by sample.
    """

    families: Sequence[Family]
    sizes: Sizes
    vary: Sequence[str]
    barren_places: set[str]
    thresholds: Sequence[int]
    length_multiple: int
    limit_of: Callable[[str], int | None]
    trace_at: Callable[[Mapping[str, int]], Trace]
    goes_by_sample: Callable[[], bool]

    def around(self, family: Family, point: Point) -> Iterator[Family | None]:
        """Families around the sizes, the widest first; None where one more place is barren.

        Args:
            family: that answers for the sizes.
            point: of that family.
        """
        near_families = [
            other
            for other in self.families
            if other.fold == family.fold and same_kernels(other, family)
        ]
        centre_trace = family.at(point)
        axes = self._axes(near_families, family)
        if "batch" in axes and len(centre_trace.events) > LONG_TRACE:
            if not self.barren_places & {
                place_by_sample(self.sizes, goes) for goes in (True, False)
            }:
                goes = self.goes_by_sample()
                self.barren_places.add(place_by_sample(self.sizes, goes))
                yield None
            if place_by_sample(self.sizes) in self.barren_places:
                axes = tuple(axis for axis in axes if axis != "batch")
                if {*axes} <= {*family.axes}:
                    return  # that family is the one that is to be had
        while axes:
            num_barren = len(self.barren_places)
            wider = self._across(near_families, centre_trace, axes, family)
            by_tokens = self._goes_by_tokens(axes, centre_trace)
            for any_remainder in (True, False) if by_tokens else (False,):
                place = self._place(axes, family, any_remainder=any_remainder)
                if wider is None and place not in self.barren_places:
                    wider = self._grow(
                        near_families, centre_trace, axes, any_remainder=any_remainder
                    )
                    if wider is None:
                        self.barren_places.add(place)
            if len(self.barren_places) > num_barren:
                yield None
            if wider is not None:
                yield replace(wider, fold=family.fold, whole_because=family.whole_because)
            axes = _narrower(axes)

    def _axes(self, near_families: Sequence[Family], own: Family) -> tuple[str, ...]:
        """The sizes to vary: those asked for, and those in which questions differed before."""
        sizes = self.sizes
        # images and sounds are cut into patches and frames: their families are small and rare
        costly = {"image_size", "audio_ms"} - set(self.vary)
        axes = {axis for axis in self.vary if axis in sizes}
        for family in near_families:
            if family.domain.names != set(sizes):
                continue
            axes.update(family.axes)
            axes.update(
                n for n, v in family.fixed_sizes.items() if sizes[n] != v and n not in costly
            )
        axes.update(own.axes)
        if sizes["batch"] == 1:
            axes.discard("batch")
        if "target_len" in axes and sizes.get("target_len") == sizes.get("seq_len"):
            axes.discard("target_len")
            axes.add("seq_len")
        return tuple(axis for axis in _AXES if axis in axes)

    def _place(self, axes: tuple[str, ...], family: Family, *, any_remainder: bool) -> str:
        """Where a family is looked for: other sizes of these axes would not find it either."""
        rest = {n: v for n, v in self.sizes.items() if n not in axes}
        remainder = {
            axis: any_remainder or self.sizes[axis] % REMAINDERS
            for axis in axes
            if axis not in ANY_REMAINDER
        }
        kernels = [kernel for _, kernel in family.skeleton.attention_choices]
        return digest_of([axes, rest, remainder, self.sizes["batch"] == 1, kernels])

    def _across(
        self,
        near_families: Sequence[Family],
        centre_trace: Trace,
        axes: tuple[str, ...],
        family: Family,
    ) -> Family | None:
        """The family of what was traced at lengths of several remainders, where there is one."""
        rest = {n: v for n, v in self.sizes.items() if n not in axes}
        kernels = [kernel for _, kernel in family.skeleton.attention_choices]
        centre = tuple(self.sizes[axis] for axis in axes)
        side = _side(centre, axes, tuple(self.thresholds))
        place = digest_of(["across", axes, rest, self.sizes["batch"] == 1, kernels, side])
        if place in self.barren_places:
            return None
        tied = _tied(self.sizes, axes)
        traces = traces_around(near_families, self.sizes, axes, tied=tied)
        traces[centre] = centre_trace
        fixed_sizes = {n: v for n, v in rest.items() if not (tied and n == "target_len")}
        try:
            return across(traces, centre, axes, fixed_sizes, self.thresholds, tied=tied)
        except NoFormulaError:
            self.barren_places.add(place)
            return None

    def _grow(
        self,
        near_families: Sequence[Family],
        centre_trace: Trace,
        axes: tuple[str, ...],
        *,
        any_remainder: bool,
    ) -> Family | None:
        """A family of new traces, over lengths of any remainder or of the asked one's alone."""
        sizes, tied = self.sizes, _tied(self.sizes, axes)
        tokens = max(sizes.get("seq_len", _SHORT), sizes.get("target_len", 0))
        calls = [call for call, _ in centre_trace.attention_choices]
        masks_nothing = bool(calls) and not any(call.has_mask for call in calls)
        ranges = {}
        for axis in reversed(axes):  # the batch comes last: how far it goes depends on the others
            multiple = self.length_multiple if axis == "seq_len" else 1
            limit = self.limit_of(axis)
            size_range = range_of(
                axis, sizes[axis], limit, 0 if masks_nothing else tokens, self.thresholds,
                multiple, any_remainder=any_remainder,
            )  # fmt: skip
            if size_range is not None:
                ranges[axis] = size_range
                if axis in LENGTHS:
                    tokens = max(tokens, size_range.high)
        if not ranges:
            return None
        ranges = {axis: ranges[axis] for axis in axes if axis in ranges}
        traces = traces_around(near_families, sizes, tuple(ranges), tied=tied)
        traces[tuple(sizes[axis] for axis in ranges)] = centre_trace
        return grow(sizes, ranges, traces, self.trace_at, tied=tied)

    def _goes_by_tokens(self, axes: tuple[str, ...], centre_trace: Trace) -> bool:
        """Whether lengths may have any remainder: what is known to be padded is not tried."""
        is_padded = any(
            kernel == SdpaBackend.EFFICIENT and call.needs_grad
            for call, kernel in centre_trace.attention_choices
        )
        has_lengths = {*axes} & {*LENGTHS} and {*axes} <= {*ANY_REMAINDER, *LENGTHS}
        return bool(has_lengths) and not is_padded and self.length_multiple == 1


def place_by_sample(sizes: Sizes, goes: bool = True) -> str:
    """What stands among barren places of a model that goes by sample, or does not."""
    return digest_of(["by sample" if goes else "not by sample", _without_batch(sizes)])


def _without_batch(sizes: Sizes) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name != "batch"}


def goes_by_sample(num_events: Sequence[int]) -> bool:
    """Whether a model does part of its work sample by sample, as some towers do with their images.

    No two batches are alike then, and traces of large ones take minutes.

    Args:
        num_events: of the first forward at each of the ``SMALL_BATCHES``.
    """
    (few, more), (one, other) = SMALL_BATCHES, num_events
    return (other - one) / (more - few) * more > _BY_SAMPLE * other


def _narrower(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes to try next: without the rank, then perhaps only the batch is well-behaved."""
    if len(axes) > 1 and "lora_r" in axes:
        return tuple(axis for axis in axes if axis != "lora_r")
    return ("batch",) if len(axes) > 1 and "batch" in axes else ()


def answers_for(family: Family, vary: Sequence[str], sizes: Sizes) -> bool:
    """Whether a family answers for all sizes that will vary."""
    return all(
        axis in family.axes
        or (axis == "target_len" and family.tied)
        or (axis == "batch" and sizes["batch"] == 1)
        for axis in vary
        if axis in sizes
    )


def _tied(sizes: Sizes, axes: Sequence[str]) -> bool:
    """Whether the target is as long as the source, at all sizes of these axes."""
    same = "target_len" in sizes and sizes["target_len"] == sizes.get("seq_len")
    return same and "target_len" not in axes and "seq_len" in axes


def traces_around(
    near_families: Sequence[Family], sizes: Sizes, axes: Sequence[str], *, tied: bool
) -> dict[Point, Trace]:
    """The traces at sizes that differ from the given ones in some axes alone, by point.

    Args:
        near_families: families with the same attention kernels.
        sizes: of a batch.
        axes: the sizes that may differ.
        tied: the target is as long as the source.
    """
    traces = {}
    for family in near_families:
        for trace_sizes, trace in traces_in(family):
            if (
                trace_sizes.keys() == sizes.keys()
                and all(
                    trace_sizes.get(n) == v
                    for n, v in sizes.items()
                    if n not in axes and not (tied and n == "target_len")
                )
                and (not tied or trace_sizes.get("target_len") == trace_sizes.get("seq_len"))
            ):
                traces[tuple(trace_sizes[axis] for axis in axes)] = trace
    return traces


def across(
    traces: Mapping[Point, Trace],
    centre: Point,
    axes: tuple[str, ...],
    fixed_sizes: Mapping[str, int],
    thresholds: Iterable[int] = (),
    *,
    tied: bool = False,
) -> Family | None:
    """The family of traces whose lengths have different remainders.

    Args:
        traces: by point, the one at the centre among them.
        centre: the sizes that are asked for.
        axes: the sizes in which they differ.
        fixed_sizes: the others.
        thresholds: lengths at which the model is known to do something else: traces on the other
            side of one are left out.
        tied: the target is as long as the source.

    Returns:
        None where too few remainders were traced so far to tell.

    Raises:
        NoFormulaError: something depends on the remainder.
    """
    lengths = [axis for axis in axes if axis in LENGTHS]
    if not lengths or not {*axes} <= {*ANY_REMAINDER, *lengths}:
        return None
    thresholds = tuple(thresholds)
    side = _side(centre, axes, thresholds)
    usable_traces = {
        point: trace
        for point, trace in traces.items()
        if _side(point, axes, thresholds) == side
        and alike(trace, traces[centre])
        # the first batch goes other ways
        and ("batch" not in axes or point[axes.index("batch")] > 1)
    }
    if not spans(usable_traces, axes) or not tells_remainders(usable_traces, axes):
        return None
    try:
        return unite(usable_traces, axes, (1,) * len(axes), fixed_sizes, tied=tied)
    except NotAlikeError:
        return None
    except NoFormulaError as error:
        if error.open:
            return None
        raise


def _side(
    point: Point, axes: tuple[str, ...], thresholds: tuple[int, ...]
) -> list[tuple[bool, ...]]:
    """On which side of the thresholds a point lies; a threshold itself lies beyond."""
    return [
        tuple(size >= threshold for threshold in thresholds)
        for axis, size in zip(axes, point, strict=True)
        if axis in LENGTHS
    ]
