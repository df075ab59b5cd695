"""Scores of predictions: relative errors by groups, the two-step test of the verdict, causes.

A likely cause is what is known of the run that could explain a miss. None is proof: each rule looks
at facts of the record and of the prediction alone; where no rule applies the cause is not known,
and is said to be so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from memest.calibration.validation.predict import RecordOutcome
from memest.config.software import torch_release_year
from memest.units import MIB, format_size

__all__ = ["GROUPINGS", "Errors", "Scores", "VerdictTest", "likely_cause", "scores_by_group"]

_SMALL_BATCH = 10
"""Batches of texts from which on the longest row surely has the full length."""
_FULL = 0.98
"""Share of a limit from which on the allocator surely gave cache back."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of one figure over some runs, signed: below 0 is predicted too low.

    Attributes:
        count: runs.
        median_signed: median.
        mean_signed: mean.
        median: of absolute errors.
        mean: of absolute errors.
        p90: of absolute errors, nine of ten are at most this.
        worst: the error farthest from 0, with its sign.
        below: share of runs that were predicted too low.
    """

    count: int
    median_signed: float
    mean_signed: float
    median: float
    mean: float
    p90: float
    worst: float
    below: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Errors | None:
        """Of (measured, predicted), None where there are none."""
        return cls.of_signed([predicted / measured - 1 for measured, predicted in pairs])

    @classmethod
    def of_signed(cls, errors: Sequence[float]) -> Errors | None:
        """Of signed errors, None where there are none."""
        if not errors:
            return None
        sizes = sorted(abs(error) for error in errors)
        return cls(
            count=len(errors),
            median_signed=median(errors),
            mean_signed=mean(errors),
            median=median(sizes),
            mean=mean(sizes),
            p90=sizes[-(-9 * len(sizes) // 10) - 1],
            worst=max(errors, key=lambda error: (abs(error), error)),
            below=sum(error < 0 for error in errors) / len(errors),
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """A group of runs.

    Attributes:
        name: of the group.
        errors: of those with a number to be hit.
        inside: figures that lie in the range told.
        num_ranged: figures for which a range was told.
    """

    name: str
    errors: Errors
    inside: int
    num_ranged: int

    @classmethod
    def of(cls, name: str, outcomes: Iterable[RecordOutcome]) -> Scores | None:
        """The scores of outcomes, None where none of them has a number to be hit."""
        every = list(outcomes)
        errors = Errors.of_signed([o.error for o in every if o.error is not None])
        if errors is None:
            return None
        inside = [o.inside for o in every if o.inside is not None]
        return cls(name, errors, sum(inside), len(inside))


@dataclass(frozen=True, slots=True)
class VerdictTest:
    """The two-step test: is the verdict right, and would the run live in what it was promised?

    Attributes:
        right: verdicts that were right: runs that went out of memory were said to, others not.
        wrong: verdicts that were not, by id with what was said.
        close: runs for which no verdict was given, because context or workspaces decide it.
        num_bounded: runs with a right verdict whose figure lies below the upper bound that was
            told: capped there, they live.
        unproven: ids of those whose figure lies above: capped at the bound they might still live,
            by giving cache back, and only another run would tell.
    """

    right: int
    wrong: tuple[tuple[str, str], ...]
    close: tuple[str, ...]
    num_bounded: int
    unproven: tuple[str, ...]

    @classmethod
    def of(cls, outcomes: Iterable[RecordOutcome]) -> VerdictTest:
        """The test of outcomes; those without a limit or a prediction take no part."""
        right, num_bounded = 0, 0
        wrong: list[tuple[str, str]] = []
        close: list[str] = []
        unproven: list[str] = []
        for one in outcomes:
            record = one.record
            if one.limit_bytes is None or one.predicted_bytes is None:
                continue
            if one.low_bytes is not None:
                continue
            if one.runs_out is None:
                close.append(record.id)
                continue
            if one.runs_out != record.oom:
                verdict = "out of memory" if one.runs_out else "fits"
                wrong.append((record.id, verdict))
                continue
            right += 1
            if record.oom or one.bound_bytes is None or record.measured_bytes is None:
                continue
            if record.measured_bytes <= one.bound_bytes:
                num_bounded += 1
            else:
                unproven.append(record.id)
        return cls(right, tuple(wrong), tuple(close), num_bounded, tuple(unproven))

    @property
    def num_tried(self) -> int:
        """Runs with a verdict."""
        return self.right + len(self.wrong)

    @property
    def least(self) -> float | None:
        """Share that fails if all unproven ones live; None where nothing was tried."""
        return len(self.wrong) / self.num_tried if self.num_tried else None

    @property
    def most(self) -> float | None:
        """Share that fails if none of the unproven ones lives."""
        num_failures = len(self.wrong) + len(self.unproven)
        return num_failures / self.num_tried if self.num_tried else None


def _software(outcome: RecordOutcome) -> str:
    version = outcome.record.software.get("torch", "")
    year = torch_release_year(version)
    return f"{year}: torch {version}" if year else f"torch {version}"


def _decade(outcome: RecordOutcome) -> str:
    year = torch_release_year(outcome.record.software.get("torch", ""))
    return f"{year // 10 * 10}s" if year else "unknown"


GROUPINGS: tuple[tuple[str, Callable[[RecordOutcome], str]], ...] = (
    ("source", lambda o: o.record.group),
    ("family", lambda o: o.family),
    ("model", lambda o: o.record.model),
    ("precision", lambda o: o.precision),
    ("optimizer", lambda o: o.optimizer),
    ("GPU", lambda o: o.record.gpu),
    ("software", _software),
    ("decade of software", _decade),
)
"""What outcomes are grouped by: a name and its value."""


def scores_by_group(outcomes: Sequence[RecordOutcome]) -> Iterator[tuple[str, list[Scores]]]:
    """The scores by each grouping that has more than one group."""
    for name, value in GROUPINGS:
        groups: dict[str, list[RecordOutcome]] = {}
        for one in outcomes:
            groups.setdefault(value(one) or "unknown", []).append(one)
        scores = [s for key in sorted(groups) if (s := Scores.of(key, groups[key])) is not None]
        if len(scores) > 1:
            yield name, scores


def likely_cause(outcome: RecordOutcome) -> str:
    """What may explain the error of an outcome, in words; empty where there is no error."""
    if outcome.failure:
        return outcome.failure
    if not outcome.error:
        return _runs_out(outcome)
    for rule in _RULES:
        cause = rule(outcome)
        if cause:
            return cause
    return "not known"


def _error_bytes(outcome: RecordOutcome) -> int:
    return (outcome.predicted_bytes or 0) - (outcome.record.measured_bytes or 0)


def _runs_out(outcome: RecordOutcome) -> str:
    if outcome.runs_out and not outcome.record.oom:
        return "predicted to go out of memory on this GPU, and did not"
    return ""


def _full(outcome: RecordOutcome) -> str:
    limit, measured = outcome.limit_bytes, outcome.record.measured_bytes or 0
    if outcome.record.metric == "allocated" or limit is None:
        return ""
    if outcome.retries or measured - outcome.context_bytes >= _FULL * limit:
        return (
            "the GPU was full: what stays reserved then depends on when the allocator gave its "
            "cache back"
        )
    return ""


def _context(outcome: RecordOutcome) -> str:
    if outcome.record.metric != "device" or outcome.context_read:
        return ""
    floor, bound = outcome.floor_bytes, outcome.bound_bytes
    measured = outcome.record.measured_bytes or 0
    if floor is not None and bound is not None and floor <= measured <= bound:
        return (
            "context and kernels of this GPU were not read: the figure lies in the range that they "
            f"leave open ({format_size(floor)} to {format_size(bound)})"
        )
    return ""


def _lengths(outcome: RecordOutcome) -> str:
    setup = outcome.record.setup
    batch = setup.get("batch")
    if setup.get("padded") and isinstance(batch, int) and batch < _SMALL_BATCH:
        return (
            "few samples padded to the longest of each batch: the longest may never have had the "
            "length that was predicted"
        )
    return ""


def _workspaces(outcome: RecordOutcome) -> str:
    slack = outcome.slack_bytes
    if slack >= MIB and -slack <= _error_bytes(outcome) < 0:
        return f"libraries pick their own workspace: up to {format_size(slack)} are left open"
    return ""


def _fragments(outcome: RecordOutcome) -> str:
    pad = bool(outcome.record.setup.get("padded"))
    share = outcome.fragmentation_bytes / max(outcome.predicted_bytes or 1, 1)
    if outcome.record.metric == "allocated":
        return ""
    if pad and _error_bytes(outcome) < 0:
        return (
            "batches of several lengths: segments made for one do not always serve the next, and "
            "the prediction has batches of one length"
        )
    if share > 0.1:
        return (
            f"a tenth and more of it is cached blocks ({format_size(outcome.fragmentation_bytes)}),"
            " which depend on the order of every allocation"
        )
    return ""


def _default_options(outcome: RecordOutcome) -> str:
    options = [name for name in ("attn_implementation", "loop") if name in outcome.record.taken]
    if options:
        return f"the record does not say {' and '.join(options)}: defaults were taken"
    return ""


_RULES: tuple[Callable[[RecordOutcome], str], ...] = (
    _runs_out,
    _full,
    _context,
    _lengths,
    _workspaces,
    _fragments,
    _default_options,
)
