"""Families and sizings as JSON: the format of stored step profiles.

Numbers that follow from their neighbours are left out: an allocation is always the next one, so
only deaths carry a number (how many allocations ago). Reading checks everything that another part
relies on; what does not check is no document.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate, pairwise
from string import Formatter
from typing import Any

from memest.events import (
    ALLOC,
    CALL,
    CATEGORY_ORDER,
    FREE,
    MARK,
    OF_WEIGHTS,
    Cue,
    CueKind,
    Landmarks,
    Mark,
    Phase,
    Seam,
    SeamKind,
    Trace,
    Weight,
)
from memest.profiles.family import DEGREES, Family, FamilyDomain, FormulaTable, Ref
from memest.profiles.fold import Fold, FoldRun, PointerRule, check_fold
from memest.profiles.formula import Formula
from memest.profiles.sizing import SIZES, Rule, SizeAnswer, Sizing
from memest.profiles.transcript import Stack
from memest.profiles.updates import Number, UpdateRule
from memest.workspaces.attention_choice import SdpaCall
from memest.workspaces.operator_call import DTYPE_BYTES, OpCall, TensorSpec

__all__ = [
    "FORMAT",
    "BadDocumentError",
    "domain_from_json",
    "domain_to_json",
    "family_from_json",
    "family_to_json",
    "rule_from_json",
    "rule_to_json",
    "sizing_from_json",
    "sizing_to_json",
]

FORMAT = 1
"""Goes up with every change of the format or of what a trace records."""


class BadDocumentError(Exception):
    """Not a document of this format."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise BadDocumentError(what)


# -- families -------------------------------------------------------------------------------------


def family_to_json(family: Family) -> dict[str, Any]:
    """The document of a family: plain lists, dicts, numbers and text."""
    trace = family.skeleton
    choices = list(dict.fromkeys(trace.attention_choices))
    order = {choice: index for index, choice in enumerate(choices)}
    return {
        "reach": domain_to_json(family.domain),
        "formulas": [_formula(f) for f in family.table.formulas],
        "micro_steps": list(trace.micro_steps),
        "module_names": trace.module_names,
        "op_names": trace.op_names,
        "events": _events(trace),
        "sizes": trace.sizes,
        "counts": list(trace.counts),
        "categories": list(trace.categories),
        "modules": _steps(trace.modules),
        "ops": list(trace.ops),
        "call_of_site": list(trace.call_of_site),
        "site_modules": _steps(trace.site_modules),
        "calls": [_call(call) for call in trace.calls],
        "marks": [[m.phase.value, m.step, m.micro_step] for m in trace.marks],
        "launches": trace.launches,
        "seams": [[s.position, s.kind.value, s.step, s.index] for s in trace.seams],
        "weights": [_weight(weight) for weight in trace.weights],
        "cues": _cues(trace.cues),
        "landmarks": _landmarks(trace.landmarks),
        "notes": trace.notes,
        "unnoted": trace.unnoted_ops,
        **({"unpriced": trace.unpriced} if trace.unpriced else {}),
        **({"managed_bytes": trace.managed_bytes} if trace.managed_bytes else {}),
        "attention": [[_fields(call), kind] for call, kind in choices],
        "attention_order": [order[choice] for choice in trace.attention_choices],
        **({"fold": _fold(family.fold)} if family.fold is not None else {}),
        **({"whole_because": family.whole_because} if family.whole_because else {}),
    }


def domain_to_json(domain: FamilyDomain) -> dict[str, Any]:
    """What a family's formulas hold for, to be read before the family is."""
    return {
        "axes": list(domain.axes),
        "points": [list(point) for point in domain.points],
        "moduli": list(domain.moduli),
        "fixed": dict(domain.fixed_sizes),
        "tied": domain.tied,
    }


def domain_from_json(document: Any) -> FamilyDomain:
    """Read a reach.

    Raises:
        BadDocumentError: it is none.
    """
    try:
        return _read_domain(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadDocumentError(f"{type(error).__name__}: {error}") from error


def _read_domain(document: Any) -> FamilyDomain:
    axes = tuple(document["axes"])
    _require(all(axis in DEGREES for axis in axes), "axes")
    points = tuple(tuple(_whole(v) for v in point) for point in document["points"])
    moduli = tuple(_whole(v) for v in document["moduli"])
    _require(bool(points) and all(len(p) == len(axes) for p in points), "points")
    _require(len(moduli) == len(axes) and all(m > 0 for m in moduli), "moduli")
    fixed_sizes = {_text(k): _whole(v) for k, v in document["fixed"].items()}
    return FamilyDomain(axes, points, moduli, fixed_sizes, bool(document["tied"]))


def family_from_json(document: Any) -> Family:
    """Read a family.

    Raises:
        BadDocumentError: it is none, or a damaged one.
    """
    try:
        return _family(document)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise BadDocumentError(f"{type(error).__name__}: {error}") from error


def _family(document: Any) -> Family:
    domain = _read_domain(document["reach"])
    axes = domain.axes
    formulas = [_read_formula(f, len(axes)) for f in document["formulas"]]
    trace = Trace()
    trace.sizes = _wholes(document["sizes"])
    trace.counts = tuple(_whole(v) for v in document["counts"])
    places = len(formulas)
    _require(_within(trace.sizes, places) and _within(trace.counts, places), "sizes")
    trace.categories = bytearray(document["categories"])
    trace.module_names = [_text(v) for v in document["module_names"]]
    trace.op_names = [_text(v) for v in document["op_names"]]
    trace.modules = array("l", accumulate(document["modules"]))
    trace.site_modules = array("l", accumulate(document["site_modules"]))
    trace.ops = array("l", document["ops"])
    trace.call_of_site = array("l", document["call_of_site"])
    trace.calls = [_read_call(call, places) for call in document["calls"]]
    trace.marks = [Mark(Phase(p), _whole(s), _whole(m)) for p, s, m in document["marks"]]
    trace.launches = _wholes(document["launches"])
    trace.events = _read_events(_wholes(document["events"]))
    trace.seams = [
        Seam(_whole(p), SeamKind(k), _whole(s), _whole(i)) for p, k, s, i in document["seams"]
    ]
    trace.micro_steps = tuple(_whole(v) for v in document["micro_steps"])
    trace.weights = tuple(_read_weight(weight, places) for weight in document["weights"])
    trace.cues = _read_cues(document.get("cues", [[], [], [], []]))
    trace.landmarks = _read_landmarks(document.get("landmarks", [[], [], None, None, None]))
    trace.notes = [_text(v) for v in document["notes"]]
    trace.unpriced = [_text(v) for v in document.get("unpriced", [])]
    # what was written before operators without a rule were told names none
    trace.unnoted_ops = [_text(v) for v in document.get("unnoted", [])]
    trace.managed_bytes = _whole(document.get("managed_bytes", 0))
    choices = [
        (SdpaCall(**{k: _read_value(v, places) for k, v in call.items()}), _text(kind))
        for call, kind in document["attention"]
    ]
    trace.attention_choices = [choices[_whole(i)] for i in document["attention_order"]]
    _check(trace)
    table = FormulaTable(axes, formulas)
    fold = _read_fold(document["fold"]) if "fold" in document else None
    family = Family(
        table,
        trace,
        domain.points,
        domain.moduli,
        domain.fixed_sizes,
        domain.tied,
        fold=fold,
        whole_because=_text(document.get("whole_because", "")),
    )
    if fold is not None:
        check_fold(trace, fold)
    return family


def _fold(fold: Fold) -> list[Any]:
    return [
        [[list(s.paths), s.period, s.before, s.behind, s.count] for s in fold.stacks],
        list(fold.kept),
        [[[run.stack, run.start, run.length] for run in runs] for runs in fold.runs],
        [[rule.run, int(rule.from_end), rule.slope] for rule in fold.rules],
        [list(pair) for pair in fold.rule_of],
        [list(launches) for launches in fold.launches],
        [[allocation, list(more)] for allocation, more in fold.growing],
    ]


def _read_fold(document: Any) -> Fold:
    stacks, kept, runs, rules, rule_of, launches, growing = document
    return Fold(
        tuple(Stack(tuple(map(_text, paths)), *map(_whole, rest)) for paths, *rest in stacks),
        tuple(map(_whole, kept)),
        tuple(tuple(FoldRun(*map(_whole, run)) for run in each) for each in runs),
        tuple(PointerRule(_whole(run), bool(end), _whole(slope)) for run, end, slope in rules),
        tuple((_whole(many), _whole(which)) for many, which in rule_of),
        tuple(tuple(map(_whole, each)) for each in launches),
        tuple((_whole(allocation), tuple(map(_whole, more))) for allocation, more in growing),
    )


def _check(trace: Trace) -> None:
    """Every number points at something."""
    count, sites = len(trace.sizes), len(trace.call_of_site)
    modules, ops = len(trace.module_names), len(trace.op_names)
    _require(len(trace.categories) == len(trace.modules) == len(trace.ops) == count, "allocations")
    _require(len(trace.site_modules) == sites, "sites")
    _require(len(trace.launches) == len(trace.marks), "launches")
    _require(_within(trace.categories, len(CATEGORY_ORDER)), "categories")
    _require(_within(trace.modules, modules) and _within(trace.site_modules, modules), "modules")
    _require(_within(trace.ops, ops) and _within(trace.call_of_site, len(trace.calls)), "ops")
    kinds = Counter(value & 3 for value in trace.events)
    counts = kinds[ALLOC], kinds[CALL], kinds[MARK]
    _require(counts == (count, sites, len(trace.marks)), "events")
    positions = [seam.position for seam in trace.seams]
    _require(positions == sorted(positions), "seams")
    _require(_within(positions, len(trace.events) + 1), "seams")
    places = [cue.position for cue in trace.cues]
    _require(places == sorted(places) and _within(places, len(trace.events) + 1), "cues")
    _require(all(-1 <= cue.allocation < count for cue in trace.cues), "cues")
    _require(
        all(
            0 <= cue.index < (len(trace.weights) if cue.kind in OF_WEIGHTS else modules)
            for cue in trace.cues
            if cue.kind is not CueKind.UPDATE
        ),
        "cues",
    )


def _within(values: Sequence[int], bound: int) -> bool:
    return not values or (min(values) >= 0 and max(values) < bound)


def _wholes(values: Any) -> list[int]:
    _require(isinstance(values, list) and set(map(type, values)) <= {int}, "whole numbers")
    return list(values)


def _events(trace: Trace) -> list[int]:
    """0 birth, 1 call, 2 mark (each the next one), 3 + n death of what was born n births ago."""
    out, num_allocs = [], 0
    for value in trace.events:
        kind = value & 3
        if kind == FREE:
            out.append(3 + num_allocs - (value >> 2))
            continue
        out.append({ALLOC: 0, CALL: 1, MARK: 2}[kind])
        num_allocs += kind == ALLOC
    return out


def _read_events(codes: Sequence[int]) -> array[int]:
    events = array("q")
    add = events.append
    num_allocs = num_calls = num_marks = 0
    alive = bytearray()
    for code in codes:
        if code == 0:
            add(num_allocs << 2 | ALLOC)
            num_allocs += 1
            alive.append(1)
        elif code == 1:
            add(num_calls << 2 | CALL)
            num_calls += 1
        elif code == 2:
            add(num_marks << 2 | MARK)
            num_marks += 1
        else:
            index = num_allocs + 3 - code
            if not 0 <= index < num_allocs or not alive[index]:
                raise BadDocumentError("events")
            alive[index] = 0
            add(index << 2 | FREE)
    return events


def _cues(cues: Sequence[Cue]) -> list[list[int]]:
    """Columns: positions as differences, kinds, indices, allocations."""
    return [
        _steps([cue.position for cue in cues]),
        [int(cue.kind) for cue in cues],
        [cue.index for cue in cues],
        [cue.allocation for cue in cues],
    ]


def _read_cues(columns: Any) -> list[Cue]:
    steps, kinds, indices, allocations = (_wholes(column) for column in columns)
    positions = accumulate(steps)
    return [
        Cue(position, CueKind(kind), index, allocation)
        for position, kind, index, allocation in zip(
            positions, kinds, indices, allocations, strict=True
        )
    ]


def _landmarks(landmarks: Landmarks) -> list[Any]:
    kinds = [[name, kind] for name, kind in landmarks.kinds.items()]
    units = [[list(names), *what] for names, *what in landmarks.units]
    more = landmarks.shared_paths or landmarks.units or landmarks.ties
    return [
        kinds,
        list(landmarks.blocks),
        landmarks.embeddings,
        landmarks.head,
        landmarks.norm,
        *([[list(pair) for pair in landmarks.shared_paths.items()]] if more else ()),
        *([units] if units or landmarks.ties else ()),
        *((True,) if landmarks.ties else ()),
    ]


def _read_landmarks(document: Any) -> Landmarks:
    kinds, blocks, *paths = document
    ties = bool(paths.pop()) if len(paths) == 6 else False
    # what was written before units and shared parameters were told has none
    units = paths.pop() if len(paths) == 5 else []
    shared_paths = paths.pop() if len(paths) == 4 else []
    embeddings, head, norm = (None if path is None else _text(path) for path in paths)
    return Landmarks(
        kinds={_text(name): _text(kind) for name, kind in kinds},
        blocks=tuple(_text(block) for block in blocks),
        embeddings=embeddings,
        head=head,
        norm=norm,
        shared_paths={_text(alias): _text(name) for alias, name in shared_paths},
        units=tuple(
            (tuple(_text(name) for name in names), bool(frees), bool(experts))
            for names, frees, experts in units
        ),
        ties=ties,
    )


def _steps(values: Sequence[int]) -> list[int]:
    """Differences between neighbours: short where neighbours are alike."""
    return [b - a for a, b in pairwise([0, *values])]


def _formula(formula: Formula) -> list[Any]:
    return [formula.divisor, *([n, *exponents] for n, exponents in formula.terms)]


def _read_formula(document: Any, num_axes: int) -> Formula:
    divisor, *terms = document
    _require(_whole(divisor) > 0, "formula")
    read = tuple((_whole(n), tuple(_whole(e) for e in exponents)) for n, *exponents in terms)
    _require(all(len(e) == num_axes and all(0 <= x <= 8 for x in e) for _, e in read), "formula")
    return Formula(read, divisor)


def _call(call: OpCall) -> list[Any]:
    kwargs = [[name, _value(value)] for name, value in call.kwargs]
    return [call.op, _value(call.args), kwargs, _value(call.outputs), call.thread]


def _read_call(document: Any, places: int) -> OpCall:
    op, args, kwargs, outputs, thread = document
    return OpCall(
        op=_text(op),
        args=_read_value(args, places),
        kwargs=tuple((_text(name), _read_value(value, places)) for name, value in kwargs),
        outputs=_read_value(outputs, places),
        thread=_text(thread),
    )


def _value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_value(part) for part in value]
    if isinstance(value, Ref):
        return {"n": value.number}
    if isinstance(value, TensorSpec):
        out = {"shape": _value(value.shape), "stride": _value(value.stride), "dtype": value.dtype}
        return {**out, "host": True} if value.on_host else out
    return value


def _read_value(document: Any, places: int) -> Any:
    if isinstance(document, list):
        return tuple([_read_value(part, places) for part in document])
    if isinstance(document, dict):
        if "n" in document:
            _require(0 <= _whole(document["n"]) < places, "number")
            return Ref(document["n"])
        _require(document["dtype"] in DTYPE_BYTES, "dtype")
        return TensorSpec(
            _read_extents(document["shape"], places),
            _read_extents(document["stride"], places),
            document["dtype"],
            bool(document.get("host", False)),
        )
    _require(document is None or isinstance(document, (bool, int, float, str)), "value")
    return document


def _read_extents(document: Any, places: int) -> tuple[Any, ...]:
    """A shape or a stride: whole numbers, and places of those that vary."""
    extents = _read_value(document, places)
    _require(
        isinstance(extents, tuple) and all(isinstance(each, (int, Ref)) for each in extents),
        "extents",
    )
    whole: tuple[Any, ...] = extents
    return whole


def _fields(call: SdpaCall) -> dict[str, Any]:
    return {field.name: _value(getattr(call, field.name)) for field in fields(call)}


def _weight(weight: Weight) -> list[Any]:
    flags = weight.trains | weight.decays << 1 | weight.has_grad << 2
    out = [weight.name, _value(weight.shape), _value(weight.stride), weight.dtype, flags]
    return [*out, weight.kept_dtype] if weight.kept_dtype else out


def _read_weight(document: Any, places: int) -> Weight:
    name, shape, stride, dtype, flags, *kept_dtypes = document
    _require(dtype in DTYPE_BYTES and 0 <= _whole(flags) < 8, "weight")
    _require(len(kept_dtypes) < 2 and all(one in DTYPE_BYTES for one in kept_dtypes), "weight")
    return Weight(
        _text(name),
        _read_extents(shape, places),
        _read_extents(stride, places),
        dtype,
        trains=bool(flags & 1),
        decays=bool(flags & 2),
        has_grad=bool(flags & 4),
        kept_dtype=kept_dtypes[0] if kept_dtypes else "",
    )


def _whole(value: Any) -> int:
    _require(isinstance(value, int) and not isinstance(value, bool), "whole number")
    number: int = value
    return number


def _text(value: Any) -> str:
    _require(isinstance(value, str), "text")
    text: str = value
    return text


# -- updates --------------------------------------------------------------------------------------


def rule_to_json(rule: UpdateRule) -> dict[str, Any]:
    """The document of what an optimizer does to weights of any shapes."""
    numbers = [[n.factor, n.weight, n.axis, *[n.block] * (n.block > 1)] for n in rule.numbers]
    managed = {"managed": [rule.managed, rule.managed_limit]} if rule.managed else {}
    return {"updates": family_to_json(rule.family), "numbers": numbers, **managed}


def rule_from_json(document: Any, weights: int) -> UpdateRule:
    """Read such a rule.

    Args:
        document: as :func:`rule_to_json` writes it.
        weights: how many weights it is for.

    Raises:
        BadDocumentError: it is none.
    """
    try:
        family = family_from_json(document["updates"])
        numbers = tuple(
            Number(_whole(factor), _whole(weight), _whole(axis), *map(_whole, block))
            for factor, weight, axis, *block in document["numbers"]
        )
        managed, limit = map(_whole, document.get("managed", (0, 0)))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BadDocumentError(f"{type(error).__name__}: {error}") from error
    _require(len(numbers) == len(family.table.formulas), "numbers")
    _require(
        all(-1 <= n.weight < weights and n.axis >= -1 and n.block >= 1 for n in numbers), "numbers"
    )
    return UpdateRule(family, numbers, managed, limit)


# -- sizings --------------------------------------------------------------------------------------


def sizing_to_json(sizing: Sizing) -> dict[str, Any]:
    """The document of a sizing."""
    return {
        "exact": [
            [[list(pair) for pair in sizes], dict(answer.batch_sizes), list(answer.notes)]
            for sizes, answer in sizing.exact.items()
        ],
        "rules": [
            {
                "names": list(rule.names),
                "lows": list(rule.lows),
                "highs": list(rule.highs),
                "moduli": list(rule.moduli),
                "taken": [[name, _formula(formula)] for name, formula in rule.size_formulas],
                "texts": list(rule.texts),
                "numbers": [[_formula(f) for f in formulas] for formulas in rule.numbers],
            }
            for rule in sizing.rules
        ],
    }


def sizing_from_json(document: Any) -> Sizing:
    """Read a sizing.

    Raises:
        BadDocumentError: it is none, or a damaged one.
    """
    try:
        exact = {
            tuple((_size(name), value) for name, value in sizes): SizeAnswer(
                {_size(name): value for name, value in batch_sizes.items()},
                tuple(_text(note) for note in notes),
            )
            for sizes, batch_sizes, notes in document["exact"]
        }
        return Sizing(exact, [_read_rule(rule) for rule in document["rules"]])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise BadDocumentError(f"{type(error).__name__}: {error}") from error


def _read_rule(document: Any) -> Rule:
    names = tuple(_size(name) for name in document["names"])
    count = len(names)
    lows, highs, moduli = (
        tuple(_whole(v) for v in document[key]) for key in ("lows", "highs", "moduli")
    )
    _require(len(lows) == len(highs) == len(moduli) == count and all(m > 0 for m in moduli), "rule")
    texts = tuple(_text(text) for text in document["texts"])
    numbers = tuple(
        tuple(_read_formula(f, count) for f in formulas) for formulas in document["numbers"]
    )
    _require(len(texts) == len(numbers), "rule")
    for text, formulas in zip(texts, numbers, strict=True):
        fields_of = [part[1:] for part in Formatter().parse(text) if part[1] is not None]
        _require(fields_of == [("", "", None)] * len(formulas), "rule")
    size_formulas = tuple((_size(name), _read_formula(f, count)) for name, f in document["taken"])
    return Rule(names, lows, highs, moduli, size_formulas, texts, numbers)


def _size(name: Any) -> str:
    _require(name in SIZES, "size")
    return _text(name)
