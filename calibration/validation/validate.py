"""``memest.validate``: case records through memest, and how right it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memest.calibration.validation.predict import Predictor, RecordOutcome
from memest.calibration.validation.records import METRICS, Incomplete, read_records
from memest.calibration.validation.scores import Scores, VerdictTest, likely_cause, scores_by_group
from memest.files.texts import write_as
from memest.report.answer import Answer, register
from memest.report.page import as_html, as_markdown, as_text

__all__ = ["SUFFIXES", "Validation", "validate"]

SUFFIXES = (".json", ".html", ".md")
"""Files that a validation can be written to."""
SCHEMA_VERSION = 1
register("Validation", {"blocks": "memest.calibration.validation.report.blocks"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation(Answer):
    """How right memest was about measured runs.

    Attributes:
        outcomes: every complete record with its prediction.
        incomplete: records that lack what decides memory, with the names of what they lack.
        problems: lines that are no records.
        without_figure: runs that failed before anything was read, with their status.
        profile: file of the calibration that corrected the predictions, None without.
    """

    outcomes: tuple[RecordOutcome, ...]
    incomplete: tuple[Incomplete, ...]
    problems: tuple[str, ...]
    without_figure: Mapping[str, str]
    profile: str | None = None

    def scores(self) -> list[Scores]:
        """Of each counter against its own meter; device peaks by whether the context was read."""
        scores = [
            Scores.of(name, [o for o in self.outcomes if belongs(o)]) for name, belongs in _COUNTERS
        ]
        return [one for one in scores if one is not None]

    def verdicts(self) -> VerdictTest:
        """The two-step test."""
        return VerdictTest.of(self.outcomes)

    def unpredicted(self) -> list[RecordOutcome]:
        """Records for which there is no prediction."""
        return [one for one in self.outcomes if one.failure]

    def worst(self, count: int = 10) -> list[RecordOutcome]:
        """The outcomes farthest off, the worst first."""
        scored_outcomes = [one for one in self.outcomes if one.error is not None]
        return sorted(scored_outcomes, key=lambda o: (-abs(o.error or 0), o.record.id))[:count]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        test = self.verdicts()
        return {
            "schema_version": SCHEMA_VERSION,
            "profile": self.profile,
            "scores": [_scores(one) for one in self.scores()],
            "groups": {
                name: [_scores(one) for one in scores]
                for name, scores in scores_by_group(self.outcomes)
            },
            "verdict_test": {
                "tried": test.num_tried,
                "right": test.right,
                "wrong": [{"id": name, "said": verdict} for name, verdict in test.wrong],
                "too_close": list(test.close),
                "below_bound": test.num_bounded,
                "unproven": list(test.unproven),
                "failure_least": test.least,
                "failure_most": test.most,
            },
            "records": [_record(one) for one in self.outcomes],
            "incomplete": [{"id": one.id, "missing": list(one.missing)} for one in self.incomplete],
            "without_figure": dict(self.without_figure),
            "problems": list(self.problems),
        }

    def to_html(self) -> str:
        """One page of HTML with plots that needs nothing else."""
        return as_html(self._render("blocks"))

    def to_markdown(self) -> str:
        """The page as Markdown."""
        return as_markdown(self._render("blocks"))

    def __str__(self) -> str:
        return as_text(self._render("blocks"))

    def save(self, path: str | Path) -> None:
        """Write FILE.json, FILE.html or FILE.md.

        Raises:
            ConfigError: the suffix is another one.
        """
        write_as(
            path,
            {
                ".json": lambda: f"{self.to_json()}\n",
                ".html": self.to_html,
                ".md": self.to_markdown,
            },
        )


def validate(
    paths: str | Path | Iterable[str | Path],
    *,
    assume: Mapping[str, Any] | None = None,
    only: str = "",
    profile: str | None = None,
    trust_code: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Validation:
    """Score predictions on case records.

    Args:
        paths: files of case records, one JSON object a line, gzip where they end in ``.gz``.
        assume: fields declared for records that lack them, such as
            ``{"software.torch": "2.1", "setup.seq_len": 512}``; the report names them.
        only: take those records alone whose id, model, GPU, file or optimizer contains this.
        profile: file of a calibration to correct predictions with. Left out, none is
            taken, also where one would be found: it may have been fitted to these very records.
        trust_code: run the modules that records name for models, steps and losses of their own.
        progress: called before each record with its number, how many there are, and its id.

    Returns:
        The scores. Records are predicted one by one; one that fails is told, and fails no other.

    Raises:
        ConfigError: a file cannot be read, or a declared field is none.
    """
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    records = read_records(files, assume, only)
    predictor = Predictor(profile, trust_code=trust_code)
    outcomes = []
    for number, record in enumerate(sorted(records.complete, key=lambda r: r.model), start=1):
        if progress is not None:
            progress(number, len(records.complete), record.id)
        outcomes.append(predictor.predict(record))
    order = {record.id: at for at, record in enumerate(records.complete)}
    outcomes.sort(key=lambda o: order[o.record.id])
    return Validation(
        outcomes=tuple(outcomes),
        incomplete=tuple(records.incomplete),
        problems=tuple(records.problems),
        without_figure=records.without_figure,
        profile=profile,
    )


def _counter(metric: str, *, read: bool | None = None) -> Callable[[RecordOutcome], bool]:
    return lambda o: o.record.metric == metric and (read is None or o.context_read is read)


_COUNTERS = (
    (METRICS[0], _counter(METRICS[0])),
    (METRICS[1], _counter(METRICS[1])),
    ("device, context read on that GPU", _counter(METRICS[2], read=True)),
    ("device, context by the table", _counter(METRICS[2], read=False)),
    ("after the forward", _counter(METRICS[3])),
)


def _scores(one: Scores) -> dict[str, Any]:
    errors = one.errors
    return {
        "name": one.name,
        "runs": errors.count,
        "median_error": errors.median,
        "p90_error": errors.p90,
        "worst_error": errors.worst,
        "median_signed_error": errors.median_signed,
        "share_too_low": errors.below,
        "in_range": one.inside,
        "ranged": one.num_ranged,
    }


def _record(one: RecordOutcome) -> dict[str, Any]:
    record = one.record
    return {
        "id": record.id,
        "source": record.group,
        "model": record.model,
        "family": one.family,
        "gpu": record.gpu,
        "precision": one.precision,
        "optimizer": one.optimizer,
        "metric": record.metric,
        "measured_bytes": record.measured_bytes,
        "predicted_bytes": one.predicted_bytes,
        "low_bytes": one.low_bytes,
        "error": one.error,
        "bound_bytes": one.bound_bytes,
        "inside": one.inside,
        "oom": record.oom,
        "predicted_oom": one.runs_out,
        "peak_at": one.where,
        "taken": list(record.taken),
        "declared": list(record.declared),
        "cause": likely_cause(one),
        "failure": one.failure,
    }
