"""Why memory grew: what was read, the code that keeps, and what a prediction expects, together.

Each cause is told by its evidence, and no cause by the growth alone: what nothing tells is called
unexplained, with what would tell it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from memest.replay.sites import Role
from memest.report.growth_result import (
    Cause,
    ExpectedCourse,
    GrowingSite,
    GrowthFinding,
    MemoryPoint,
    Quantity,
)
from memest.search.growth_trend import Trend, trend_of
from memest.units import KIB, format_size

__all__ = ["Evidence", "findings_of"]

_SCALARS = 8 * KIB
"""Kept with every step, up to this: numbers and short vectors, 512 B of the allocator each."""
_SAME = 0.03
"""How far two sizes may be apart to be of one thing."""
_GRAPH_PLACES = 4
"""Places of a forward that keep, for it to be its graph: outputs are of a few."""
_GRAPH_SHARE = 0.2
"""And for each place of the forward: a cache of keys and hidden states are outputs, too."""
_MOST_SITES = 3

_LOG = "log torch.cuda.memory_allocated() and memory_reserved() when a step is over."
_RECORD = (
    "record who keeps it: torch.cuda.memory._record_memory_history() before, "
    "torch.cuda.memory._dump_snapshot('run.pickle') after ten steps, and memest explain-growth "
    "run.pickle."
)
_NUMBERS = "keep numbers, not tensors: total += loss.item(), or losses.append(loss.detach().cpu())."
_NO_GRAPH = (
    "look for an output or a loss that is stored with its graph: detach() what is kept, "
    "evaluate under torch.no_grad(), and leave retain_graph=True out."
)
_CARRIED = (
    "it may be a buffer that is made anew, and larger (torch.cat: allocate it once), or one that "
    "fills up, or samples that get longer and that a variable still names: more passes tell."
)
_ONE_COPY = "keep one copy of the weights, or move each to the host."
_OUTPUTS = (
    "move what is kept to the host (out.detach().cpu()), or keep less of it: indices in place of "
    "logits."
)
_LENGTHS = (
    "put the longest batch first, so that what the run needs is there at once, and give the "
    "allocator PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; samples sorted by length "
    "(group_by_length) or padded to one length vary less."
)
_PREDICTIONS = (
    "move predictions to the host on the way (eval_accumulation_steps=8), keep less of them "
    "(preprocess_logits_for_metrics), or none (prediction_loss_only=True)."
)
_OUTSIDE = (
    "nvidia-smi says which processes are on the card; kernels are loaded when they are first used, "
    "and communicators when they first talk, so this ends by itself where it is them."
)
_HOST = (
    "workers that copy what they read (lists of Python objects) grow with every sample: keep the "
    "data in arrays or on the disk; each worker has prefetch_factor batches, pinned ones stay."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of a run's course.

    Attributes:
        points: what was read, in order.
        unit: what a point is of.
        sites: code whose allocations stay, pass after pass.
        states: sites that kept in some passes and no more.
        carried: sites of which the last pass left some, and that keep nothing for long.
        forward_places: places of a forward in the recording, whether they keep or not.
        largest_bytes: the largest request of each pass; empty without a recording.
        has_sites: whether a recording said which code allocates.
        expected: of a prediction; None without a model.
    """

    points: tuple[MemoryPoint, ...]
    unit: str = "step"
    sites: tuple[GrowingSite, ...] = ()
    states: tuple[GrowingSite, ...] = ()
    carried: tuple[GrowingSite, ...] = ()
    forward_places: int = 0
    largest_bytes: tuple[int, ...] = ()
    has_sites: bool = False
    expected: ExpectedCourse | None = None
    trends: dict[Quantity, Trend | None] = field(init=False)

    def __post_init__(self) -> None:
        training = [point for point in self.points if not point.evaluation]
        trends = {
            quantity: trend_of(
                quantity,
                [(p.step, v) for p in training if (v := p.value(quantity)) is not None],
            )
            for quantity in Quantity
        }
        object.__setattr__(self, "trends", trends)

    def grown(self, quantity: Quantity) -> Trend | None:
        """The trend of a quantity, where it grows."""
        trend = self.trends[quantity]
        return trend if trend is not None and trend.grows else None

    @property
    def needs_more(self) -> bool:
        """Whether steps take more beyond what is alive between them, or nothing tells."""
        beyond = [
            (after.step, after.peak_allocated_bytes - before.allocated_bytes)
            for before, after in pairwise(p for p in self.points if not p.evaluation)
            if after.peak_allocated_bytes is not None and before.allocated_bytes is not None
        ]
        trend = trend_of(Quantity.PEAK_ALLOCATED, beyond)
        return trend is None or trend.grows

    def each(self, trend: Trend) -> str:
        """How a trend grows, in words."""
        over = f"{trend.steps:,} {self.unit}{'e' * (self.unit == 'pass')}s"
        if trend.step_bytes:
            return f"{format_size(trend.step_bytes)} with every {self.unit}, over {over}"
        return f"{format_size(trend.bytes)} in jumps, over {over}"


def findings_of(evidence: Evidence) -> tuple[GrowthFinding, ...]:
    """What grew and why: leaks first, the largest first."""
    found = [
        *_first_step(evidence),
        *_evaluations(evidence),
        *_kept(evidence),
        *_varying(evidence),
        *_outside(evidence),
        *_host(evidence),
    ]
    return tuple(sorted(found, key=lambda each: (not each.is_leak, -each.bytes)))


def _first_step(evidence: Evidence) -> Iterator[GrowthFinding]:
    points = [p for p in evidence.points if p.allocated_bytes is not None][:2]
    added = sum(site.bytes for site in evidence.states)
    sentences = []
    if evidence.has_sites:
        optimizer = [site for site in evidence.states if site.role == Role.OPTIMIZER]
        rest = added - sum(site.bytes for site in optimizer)
        if optimizer:
            size = format_size(added - rest)
            sentences.append(f"{size} are made in the optimizer ({_name(optimizer[0])}), once.")
        if rest:
            sentences.append(f"{format_size(rest)} are made elsewhere, and no more is added.")
    elif len(points) > 1 and not points[0].step:
        # numbers can begin with 0 behind the first step, too: then no more stays than later
        trend = evidence.grown(Quantity.ALLOCATED)
        later = [p.allocated_bytes for p in evidence.points if p.step]
        least = min(size for size in later if size is not None)
        added = least - (points[0].allocated_bytes or 0) - (trend.step_bytes if trend else 0)
        size = format_size(added)
        sentences.append(f"{size} more after the first {evidence.unit} than before.")
    if added <= 0:
        return
    if evidence.expected is not None and evidence.expected.state_bytes:
        size = format_size(evidence.expected.state_bytes)
        sentences.append(f"the prediction has {size} of gradients and states that stay.")
    yield GrowthFinding(
        cause=Cause.FIRST_STEP,
        quantity=Quantity.ALLOCATED,
        bytes=added,
        step_bytes=None,
        evidence=tuple(sentences),
        remedy=(),
        is_leak=False,
    )


def _evaluations(evidence: Evidence) -> Iterator[GrowthFinding]:
    """Predictions that gather: allocated memory that rises through an evaluation."""
    most, readings = 0, 0
    for evaluating, group in groupby(evidence.points, key=lambda point: point.evaluation):
        values = [p.allocated_bytes for p in group if p.allocated_bytes is not None]
        if evaluating and len(values) > 2 and values == sorted(values):
            most, readings = max((most, readings), (values[-1] - values[0], len(values)))
    if not most:
        return
    sentence = f"allocated memory rises by {format_size(most)} through {readings} readings of one"
    yield GrowthFinding(
        cause=Cause.EVALUATION,
        quantity=Quantity.ALLOCATED,
        bytes=most,
        step_bytes=None,
        evidence=(f"{sentence} evaluation, and an evaluation keeps predictions until its end.",),
        remedy=(_PREDICTIONS,),
        is_leak=False,
    )


# -- tensors that are kept ---------------------------------------------------------------------


def _kept(evidence: Evidence) -> Iterator[GrowthFinding]:
    trend = evidence.grown(Quantity.ALLOCATED)
    if trend is not None:
        size, step = trend.bytes, trend.step_bytes
        sentence = f"allocated memory between two steps grows by {evidence.each(trend)}."
    elif evidence.sites and evidence.trends[Quantity.ALLOCATED] is not None:
        size, step = sum(site.bytes for site in evidence.sites), 0
        sentence = "allocated memory between two steps goes up and down by more than is kept."
    else:
        return
    if not evidence.has_sites:
        assert trend is not None
        cause, more, remedy = _by_size(evidence, trend)
    elif evidence.sites:
        cause, more, remedy = _by_sites(evidence)
    elif size <= sum(s.bytes for s in evidence.states if s.role != Role.OPTIMIZER):
        return  # made in some passes, and no more is added: told with the first step
    else:
        cause, more, remedy = Cause.UNEXPLAINED, _carried(evidence), (_CARRIED,)
    yield GrowthFinding(
        cause=cause,
        quantity=Quantity.ALLOCATED,
        bytes=size,
        step_bytes=step or None,
        evidence=(sentence, *more),
        remedy=remedy,
        is_leak=bool(evidence.sites) or not evidence.has_sites,
    )


_Reason = tuple[Cause, list[str], tuple[str, ...]]


def _by_sites(evidence: Evidence) -> _Reason:
    """The cause by the code whose allocations stay."""
    sites = evidence.sites
    total = sum(site.pass_bytes for site in sites)
    sentences = [_sentence(site, evidence.unit) for site in sites[:_MOST_SITES]]
    if len(sites) > _MOST_SITES:
        rest = sum(site.bytes for site in sites[_MOST_SITES:])
        sentences.append(f"elsewhere {format_size(rest)} are kept, see below.")
    weights = evidence.expected.parameter_bytes if evidence.expected else 0
    if sites[0].role == Role.COPY or _is_near(total, weights):
        return Cause.KEPT_WEIGHTS, sentences, (_ONE_COPY,)
    of_forward = [s for s in sites if s.role in (Role.FORWARD, Role.EVALUATION)]
    places = sum(site.places for site in of_forward)
    if places >= max(_GRAPH_PLACES, _GRAPH_SHARE * evidence.forward_places):
        sentences.append("so many places of a forward stay only while something holds its graph.")
        return Cause.KEPT_GRAPH, sentences, (_NO_GRAPH,)
    return Cause.KEPT_TENSORS, sentences, (_NUMBERS if total <= _SCALARS else _OUTPUTS,)


def _by_size(evidence: Evidence, trend: Trend) -> _Reason:
    """The cause by how much is kept with each step."""
    expected, added = evidence.expected, trend.step_bytes
    if added and added <= _SCALARS:
        each = f"{format_size(added)} are a few small tensors a {evidence.unit}: losses, metrics."
        return Cause.KEPT_TENSORS, [each], (_NUMBERS, _RECORD)
    if added and expected is not None:
        forward, weights = expected.forward_bytes, expected.parameter_bytes
        if _is_near(added, forward):
            sentence = f"a forward keeps as much for its backward: {format_size(forward)}."
            return Cause.KEPT_GRAPH, [sentence], (_NO_GRAPH,)
        if _is_near(added, weights):
            return Cause.KEPT_WEIGHTS, [f"the weights take {format_size(weights)}."], (_ONE_COPY,)
    return Cause.UNEXPLAINED, ["the size alone does not tell what it is."], (_RECORD,)


def _is_near(size: int, other: int) -> bool:
    return other > 0 and abs(size - other) <= _SAME * other


def _carried(evidence: Evidence) -> list[str]:
    """Nothing stays for long, and still each pass leaves more."""
    sentences = [f"no code keeps some of every {evidence.unit}: what one leaves, later ones free."]
    if evidence.carried:
        site = max(evidence.carried, key=lambda each: each.bytes)
        size = format_size(site.bytes)
        sentences.append(f"most of what is alive at the end was made by {_name(site)}: {size}.")
    return sentences


def _sentence(site: GrowingSite, unit: str) -> str:
    size = f"{format_size(site.pass_bytes)} in each of {site.passes:,} {unit}es"
    return f"{_name(site)} keeps {size}: {site.count:,} tensors, {format_size(site.bytes)} by now."


def _name(site: GrowingSite) -> str:
    """The user's own line, and the code below it that allocates."""
    if not site.site:
        return "code without a Python frame (a backward)"
    inner = site.site.partition(" < ")[0]
    if not site.line or site.line in site.site:
        return site.line or inner
    return f"{site.line} (in {inner})"


# -- what is no tensor that is kept ------------------------------------------------------------


def _varying(evidence: Evidence) -> Iterator[GrowthFinding]:
    """Peaks and segments that grow while nothing is kept."""
    peak, reserved = evidence.grown(Quantity.PEAK_ALLOCATED), evidence.grown(Quantity.RESERVED)
    if not evidence.needs_more:
        peak = None  # it is higher by what stays since the beginning
    trend = reserved or peak
    if trend is None or evidence.grown(Quantity.ALLOCATED) is not None or evidence.sites:
        return
    if evidence.trends[Quantity.ALLOCATED] is None:
        yield _not_told(evidence, trend)
        return
    sentences = ["nothing is kept: allocated memory between two steps does not grow."]
    if peak is not None:
        sentences.append(
            f"the most within a step grows, by {format_size(peak.bytes)}: later steps had larger "
            "samples."
        )
    else:
        sentences.append(
            f"segments grow by {format_size(trend.bytes)}, and no more is needed at once: blocks "
            "of sizes that came before do not serve those that come."
        )
    least, most = min(evidence.largest_bytes, default=0), max(evidence.largest_bytes, default=0)
    if most > least:
        sentences.append(
            f"the largest request of a {evidence.unit} is between {format_size(least)} and "
            f"{format_size(most)}."
        )
    yield GrowthFinding(
        cause=Cause.VARYING_SIZES,
        quantity=trend.quantity,
        bytes=trend.bytes,
        step_bytes=None,
        evidence=tuple(sentences),
        remedy=(_LENGTHS,),
        is_leak=False,
    )


def _not_told(evidence: Evidence, trend: Trend) -> GrowthFinding:
    """Growth of which nobody can say whether tensors are kept or samples vary."""
    name = trend.quantity.value.replace("_", " ")
    return GrowthFinding(
        cause=Cause.UNEXPLAINED,
        quantity=trend.quantity,
        bytes=trend.bytes,
        step_bytes=trend.step_bytes or None,
        evidence=(
            f"{name} memory grows by {evidence.each(trend)}.",
            "memory between two steps, which tells kept tensors from samples, was not read.",
        ),
        remedy=(_LOG, _RECORD),
        is_leak=False,
    )


def _outside(evidence: Evidence) -> Iterator[GrowthFinding]:
    """What the driver sees beyond segments; or all that is known, where nothing else was read."""
    trend, reserved = evidence.grown(Quantity.DEVICE), evidence.trends[Quantity.RESERVED]
    if trend is None:
        return
    sentences = [f"device memory grows by {evidence.each(trend)}."]
    if reserved is not None:
        added = trend.bytes - max(reserved.bytes, 0)
        sentences.append(f"that is {format_size(added)} more than segments do.")
        cause, remedy = Cause.OUTSIDE, [_OUTSIDE]
    else:
        added = trend.bytes
        sentences.append("the driver's reading alone does not tell tensors from the cache.")
        cause, remedy = Cause.UNEXPLAINED, [_LOG, _RECORD]
        if evidence.grown(Quantity.ALLOCATED) or evidence.grown(Quantity.PEAK_ALLOCATED):
            return  # that is told by itself, and the driver shows the same
    if added > 0:
        yield GrowthFinding(
            cause=cause,
            quantity=Quantity.DEVICE,
            bytes=added,
            step_bytes=trend.step_bytes or None,
            evidence=tuple(sentences),
            remedy=tuple(remedy),
            is_leak=False,
        )


def _host(evidence: Evidence) -> Iterator[GrowthFinding]:
    trend = evidence.grown(Quantity.HOST)
    if trend is None:
        return
    yield GrowthFinding(
        cause=Cause.HOST,
        quantity=Quantity.HOST,
        bytes=trend.bytes,
        step_bytes=trend.step_bytes or None,
        evidence=(f"the process on the host grows by {evidence.each(trend)}.",),
        remedy=(_HOST,),
        is_leak=bool(trend.step_bytes),
    )
