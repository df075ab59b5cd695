"""Scores of predictions: relative errors by groups, and the two-step test of the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from memest.software import torch_release_year
from memest.validation.predict import Outcome

__all__ = ["GROUPINGS", "Errors", "Scores", "VerdictTest", "grouped"]


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
        """Of (measured, said), None where there are none."""
        return cls.of_signed([said / measured - 1 for measured, said in pairs])

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
        ranged: figures for which a range was told.
    """

    name: str
    errors: Errors
    inside: int
    ranged: int

    @classmethod
    def of(cls, name: str, outcomes: Iterable[Outcome]) -> Scores | None:
        """The scores of outcomes, None where none of them has a number to be hit."""
        every = list(outcomes)
        errors = Errors.of_signed([o.error for o in every if o.error is not None])
        if errors is None:
            return None
        told = [o.inside for o in every if o.inside is not None]
        return cls(name, errors, sum(told), len(told))


@dataclass(frozen=True, slots=True)
class VerdictTest:
    """The two-step test: is the verdict right, and would the run live in what it was promised?

    Attributes:
        right: verdicts that were right: runs that went out of memory were said to, others not.
        wrong: verdicts that were not, by id with what was said.
        close: runs for which no verdict was given, because context or workspaces decide it.
        bounded: runs with a right verdict whose figure lies below the upper bound that was told:
            capped there, they live.
        unproven: ids of those whose figure lies above: capped at the bound they might still live,
            by giving cache back, and only another run would tell.
    """

    right: int
    wrong: tuple[tuple[str, str], ...]
    close: tuple[str, ...]
    bounded: int
    unproven: tuple[str, ...]

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> VerdictTest:
        """The test of outcomes; those without a limit or a prediction take no part."""
        right, bounded = 0, 0
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
                said = "out of memory" if one.runs_out else "fits"
                wrong.append((record.id, said))
                continue
            right += 1
            if record.oom or one.bound_bytes is None or record.measured_bytes is None:
                continue
            if record.measured_bytes <= one.bound_bytes:
                bounded += 1
            else:
                unproven.append(record.id)
        return cls(right, tuple(wrong), tuple(close), bounded, tuple(unproven))

    @property
    def tried(self) -> int:
        """Runs with a verdict."""
        return self.right + len(self.wrong)

    @property
    def least(self) -> float | None:
        """Share that fails if all unproven ones live; None where nothing was tried."""
        return len(self.wrong) / self.tried if self.tried else None

    @property
    def most(self) -> float | None:
        """Share that fails if none of the unproven ones lives."""
        failed = len(self.wrong) + len(self.unproven)
        return failed / self.tried if self.tried else None


def _software(outcome: Outcome) -> str:
    version = outcome.record.software.get("torch", "")
    year = torch_release_year(version)
    return f"{year}: torch {version}" if year else f"torch {version}"


def _decade(outcome: Outcome) -> str:
    year = torch_release_year(outcome.record.software.get("torch", ""))
    return f"{year // 10 * 10}s" if year else "unknown"


GROUPINGS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
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


def grouped(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[Scores]]]:
    """The scores by each grouping that has more than one group."""
    for name, value in GROUPINGS:
        groups: dict[str, list[Outcome]] = {}
        for one in outcomes:
            groups.setdefault(value(one) or "unknown", []).append(one)
        scores = [s for key in sorted(groups) if (s := Scores.of(key, groups[key])) is not None]
        if len(scores) > 1:
            yield name, scores
