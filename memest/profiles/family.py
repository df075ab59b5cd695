"""A family of traces: one structure, sizes as formulas of batch, length and their like.

Traces of the same steps at different sizes differ in nothing but numbers: the bytes of allocations
and the extents in operator calls. A family keeps the structure once and a table of formulas for the
numbers. It answers for points inside the box its traces span and in their residue class: a
threshold inside the box would have changed the structure or a number at one of its corners, and
padding to a multiple repeats with the class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from memest.events import Trace, Weight
from memest.profiles.fold import Fold, unfold
from memest.profiles.formula import Formula, NoFormulaError, constant, find, monomials
from memest.workspaces.attention_choice import SdpaCall
from memest.workspaces.operator_call import OpCall, TensorSpec, Value

__all__ = [
    "DEGREES",
    "Family",
    "FamilyDomain",
    "FormulaTable",
    "Merger",
    "NotAlikeError",
    "Point",
    "Ref",
    "alike",
    "single_trace_family",
    "unite",
]

Point = tuple[int, ...]

DEGREES = {"batch": 2, "seq_len": 2, "target_len": 2, "image_size": 4, "audio_ms": 2, "lora_r": 1}
"""The highest power of a size that occurs: attention is quadratic in tokens, tokens are quadratic
in the side of an image, and a contrastive loss compares all pairs of a batch."""


class NotAlikeError(Exception):
    """The traces differ in more than numbers."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in an operator call for the number of this place in the table."""

    number: int


@dataclass(slots=True)
class FormulaTable:
    """Formulas, each one once.

    Attributes:
        axes: names of the sizes, keys of ``DEGREES``.
        formulas: of the numbers.
    """

    axes: tuple[str, ...]
    formulas: list[Formula]

    def at(self, point: Point) -> list[int]:
        """All numbers at a point.

        Raises:
            NoFormulaError: one of them is not whole there.
        """
        return [formula.at(point) for formula in self.formulas]


@dataclass(frozen=True, slots=True)
class FamilyDomain:
    """The sizes for which a family's formulas hold.

    Attributes:
        axes: names of the sizes that vary.
        points: where traces were made.
        moduli: for each axis, the class its sizes keep to: all points are the same modulo this; 1
            for any size.
        fixed_sizes: sizes that are the same in all traces.
        tied: the target is as long as the source, in all traces.
    """

    axes: tuple[str, ...]
    points: tuple[Point, ...]
    moduli: tuple[int, ...]
    fixed_sizes: Mapping[str, int]
    tied: bool

    def point_of(self, sizes: Mapping[str, int]) -> Point | None:
        """The point of some sizes, None where the formulas do not hold for them."""
        if self.names != set(sizes):
            return None
        if any(sizes[name] != size for name, size in self.fixed_sizes.items()):
            return None
        if self.tied and sizes["target_len"] != sizes["seq_len"]:
            return None
        point = tuple(sizes[name] for name in self.axes)
        return point if self._covers(point) else None

    @property
    def names(self) -> set[str]:
        """All sizes that a batch has."""
        return {*self.axes, *self.fixed_sizes, *(("target_len",) if self.tied else ())}

    def sizes_at(self, point: Point) -> dict[str, int]:
        """The sizes of a batch at a point."""
        sizes = {**self.fixed_sizes, **dict(zip(self.axes, point, strict=True))}
        if self.tied:
            sizes["target_len"] = sizes["seq_len"]
        return sizes

    def _covers(self, point: Point) -> bool:
        if point in self.points:
            return True
        for axis, size in enumerate(point):
            sizes = [p[axis] for p in self.points]
            if not min(sizes) <= size <= max(sizes):
                return False
            if (size - sizes[0]) % self.moduli[axis]:
                return False
        return True


@dataclass(slots=True)
class Family:
    """Traces of one structure.

    Attributes:
        table: the numbers.
        skeleton: a trace whose ``sizes`` and ``counts`` are places in the table and whose calls,
            attention choices and weights hold :class:`Ref` where a number varies.
        points: where traces were made.
        moduli: for each axis, the class its sizes keep to: all points are the same modulo this; 1
            for any size.
        fixed_sizes: sizes that are the same in all traces.
        tied: the target is as long as the source, in all traces.
        fold: how these traces of few layers become those of the model; None where they are.
        whole_because: why the model was traced layer by layer.
        is_unfolded: what the fold says is done.
        weights_vary: a size of the batch changes a weight's shape (position tables of images do).
    """

    table: FormulaTable
    skeleton: Trace
    points: tuple[Point, ...]
    moduli: tuple[int, ...]
    fixed_sizes: Mapping[str, int]
    tied: bool = False
    fold: Fold | None = None
    whole_because: str = ""
    is_unfolded: bool = False
    weights_vary: bool = field(init=False)

    def __post_init__(self) -> None:
        self.weights_vary = any(
            isinstance(extent, Ref)
            for weight in self.skeleton.weights
            for extent in (*weight.shape, *weight.stride)
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the sizes that a point has."""
        return self.table.axes

    def point_of(self, sizes: Mapping[str, int]) -> Point | None:
        """The point of some sizes, None where the formulas do not hold for them."""
        return self.domain.point_of(sizes)

    @property
    def domain(self) -> FamilyDomain:
        """Where the formulas hold."""
        return FamilyDomain(self.axes, self.points, self.moduli, self.fixed_sizes, self.tied)

    def numbers_at(self, point: Point) -> list[int]:
        """The table's numbers at a point.

        Raises:
            NoFormulaError: one of them is not whole there.
        """
        return self.table.at(point)

    def calls_at(self, numbers: Sequence[int]) -> list[OpCall]:
        """The operator calls with their numbers filled in."""
        return [_fill_in(call, numbers) for call in self.skeleton.calls]

    def choices_at(self, numbers: Sequence[int]) -> list[tuple[SdpaCall, str]]:
        """The attention choices with their numbers filled in, each one once."""
        unique = dict.fromkeys(self.skeleton.attention_choices)
        return [(_fill_in(call, numbers), kind) for call, kind in unique]

    def weights_at(self, numbers: Sequence[int]) -> tuple[Weight, ...]:
        """The weights with their numbers filled in."""
        if not self.weights_vary:
            return tuple(self.skeleton.weights)
        return tuple(_fill_in(weight, numbers) for weight in self.skeleton.weights)

    def unfolded(self) -> Family:
        """The family of the model in its depth."""
        if self.fold is None or self.is_unfolded:
            return self
        formulas = list(self.table.formulas)

        def grow(place: int, more: int) -> int:
            formulas.append(formulas[place].plus(more))
            return len(formulas) - 1

        skeleton = unfold(self.skeleton, self.fold, grow=grow)
        table = FormulaTable(self.axes, formulas)
        return replace(self, table=table, skeleton=skeleton, is_unfolded=True)

    @property
    def depth_words(self) -> str:
        """How many layers were traced, and why; empty where that is not known."""
        if self.fold is not None:
            return f"{self.fold.depth_words}, and the others follow from them"
        return f"all layers, because {self.whole_because}" if self.whole_because else ""

    def at(self, point: Point) -> Trace:
        """The trace at a point."""
        numbers = self.numbers_at(point)
        trace = replace(self.skeleton)
        trace.sizes = [numbers[size] for size in self.skeleton.sizes]
        trace.counts = tuple(numbers[place] for place in self.skeleton.counts)
        trace.calls = self.calls_at(numbers)
        trace.weights = self.weights_at(numbers)
        trace.attention_choices = [
            (_fill_in(call, numbers), kind) for call, kind in self.skeleton.attention_choices
        ]
        return trace


def single_trace_family(
    trace: Trace, sizes: Mapping[str, int], fold: Fold | None = None, whole_because: str = ""
) -> Family:
    """The family of one trace."""
    places: dict[int, int] = {}
    skeleton = replace(trace)
    skeleton.sizes = [places.setdefault(size, len(places)) for size in trace.sizes]
    skeleton.counts = tuple(places.setdefault(count, len(places)) for count in trace.counts)
    formulas = [constant(size, 0) for size in places]
    table = FormulaTable((), formulas)
    return Family(table, skeleton, ((),), (), dict(sizes), fold=fold, whole_because=whole_because)


def unite(
    traces: Mapping[Point, Trace],
    axes: tuple[str, ...],
    moduli: tuple[int, ...],
    fixed_sizes: Mapping[str, int],
    *,
    tied: bool = False,
) -> Family:
    """The family of several traces.

    Args:
        traces: of the same steps, by point.
        axes: the sizes in which they differ, keys of ``DEGREES``.
        moduli: see :class:`Family`.
        fixed_sizes: likewise.
        tied: likewise.

    Raises:
        NotAlikeError: the traces have different events, operators or modules.
        NoFormulaError: a number has no formula, or more traces are needed to find it.
    """
    points, all_traces = tuple(traces), list(traces.values())
    first = all_traces[0]
    if not all(alike(first, trace) for trace in all_traces[1:]):
        raise NotAlikeError
    maker = _Maker(axes, points, moduli)
    skeleton = replace(first)
    skeleton.sizes = [maker.place(v) for v in zip(*(t.sizes for t in all_traces), strict=True)]
    skeleton.counts = tuple(
        maker.place(v) for v in zip(*(t.counts for t in all_traces), strict=True)
    )
    places: dict[tuple[OpCall, ...], int] = {}
    sites = zip(*([t.calls[c] for c in t.call_of_site] for t in all_traces), strict=True)
    order = [places.setdefault(calls, len(places)) for calls in sites]
    skeleton.call_of_site = type(first.call_of_site)("l", order)
    skeleton.calls = [maker.merge(calls) for calls in places]
    skeleton.weights = tuple(
        maker.merge(weights) for weights in zip(*(t.weights for t in all_traces), strict=True)
    )
    skeleton.attention_choices = [
        (maker.merge([call for call, _ in pairs]), pairs[0][1])
        for pairs in zip(*(t.attention_choices for t in all_traces), strict=True)
    ]
    skeleton.unnoted_ops = list(
        dict.fromkeys(op for trace in all_traces for op in trace.unnoted_ops)
    )
    return Family(
        FormulaTable(axes, maker.formulas), skeleton, points, moduli, dict(fixed_sizes), tied
    )


def alike(one: Trace, other: Trace) -> bool:
    """Whether two traces differ in numbers only."""
    return _structure(one) == _structure(other)


def _structure(trace: Trace) -> tuple[Any, ...]:
    """Everything of a trace but numbers (and the order in which equal calls were first seen)."""
    calls = [trace.calls[number].op for number in trace.call_of_site]
    return (
        trace.events,
        trace.categories,
        trace.modules,
        trace.ops,
        calls,
        trace.site_modules,
        trace.marks,
        trace.launches,
        trace.module_names,
        trace.op_names,
        trace.notes,
        trace.unpriced,
        trace.seams,
        trace.cues,
        trace.landmarks,
        trace.micro_steps,
        len(trace.weights),
        [kind for _, kind in trace.attention_choices],
    )


class Merger:
    """Puts values that differ in numbers together: :class:`Ref` stands where they differ."""

    def place(self, values: tuple[int, ...]) -> int:
        """The place in the table of a number with these values."""
        raise NotImplementedError

    def merge(self, calls: Sequence[Any]) -> Any:
        """One call for all points."""
        first = calls[0]
        if all(call == first for call in calls[1:]):
            return first
        values = {
            field.name: self._value([getattr(call, field.name) for call in calls])
            for field in fields(first)
        }
        return type(first)(**values)

    def _value(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if all(value == first for value in values[1:]):
            return first
        kinds = {type(value) for value in values}
        if len(kinds) > 1:
            raise NotAlikeError
        if isinstance(first, TensorSpec):
            if len({(v.dtype, v.on_host) for v in values}) > 1:
                raise NotAlikeError
            shape = self._value([v.shape for v in values])
            stride = self._value([v.stride for v in values])
            return TensorSpec(shape, stride, first.dtype, first.on_host)
        if isinstance(first, tuple):
            if len({len(value) for value in values}) > 1:
                raise NotAlikeError
            return tuple(self._value(parts) for parts in zip(*values, strict=True))
        if isinstance(first, float):
            return first  # scales and learning rates do not size anything
        if isinstance(first, int) and not isinstance(first, bool):
            return Ref(self.place(tuple(values)))
        raise NotAlikeError


class _Maker(Merger):
    """Finds the formula of every combination of numbers once."""

    def __init__(
        self, axes: tuple[str, ...], points: tuple[Point, ...], moduli: tuple[int, ...]
    ) -> None:
        self._points = points
        self._moduli = moduli
        self._basis = monomials([DEGREES[axis] for axis in axes])
        self._places: dict[tuple[int, ...], int] = {}
        self._by_formula: dict[Formula, int] = {}
        self.formulas: list[Formula] = []

    def place(self, values: tuple[int, ...]) -> int:
        """The place in the table of a number with these values."""
        place = self._places.get(values)
        if place is None:
            formula = find(values, self._points, self._basis)
            if formula.divisor != 1 and not self._is_whole(formula):
                raise NoFormulaError(open=True)
            place = self._by_formula.get(formula)
            if place is None:
                place = self._by_formula[formula] = len(self.formulas)
                self.formulas.append(formula)
            self._places[values] = place
        return place

    def _is_whole(self, formula: Formula) -> bool:
        """Whether the value is a whole number wherever the family answers.

        A polynomial is, if it is at one point more than its degree next to each other.
        """
        steps = product(*(range(degree + 1) for degree in map(max, zip(*self._basis, strict=True))))
        try:
            for step in steps:
                formula.at(
                    tuple(
                        size + count * modulus
                        for size, count, modulus in zip(
                            self._points[0], step, self._moduli, strict=True
                        )
                    )
                )
        except NoFormulaError:
            return False
        return True


def _fill_in(value: Any, numbers: Sequence[int]) -> Any:
    """A call, or a part of it, with numbers in place of references."""
    if isinstance(value, Ref):
        return numbers[value.number]
    if isinstance(value, tuple):
        return tuple(_fill_in(part, numbers) for part in value)
    if isinstance(value, TensorSpec):
        shape: Value = _fill_in(value.shape, numbers)
        stride: Value = _fill_in(value.stride, numbers)
        return TensorSpec(shape, stride, value.dtype, value.on_host)  # type: ignore[arg-type]
    if isinstance(value, OpCall):
        return OpCall(
            value.op,
            _fill_in(value.args, numbers),
            _fill_in(value.kwargs, numbers),
            _fill_in(value.outputs, numbers),
            value.thread,
        )
    if isinstance(value, (SdpaCall, Weight)):
        kind = type(value)
        return kind(**{f.name: _fill_in(getattr(value, f.name), numbers) for f in fields(value)})
    return value
