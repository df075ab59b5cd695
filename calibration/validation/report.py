"""The page of a validation: scores, verdicts, plots, the worst runs, what could not be scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from memest.calibration.validation.predict import RecordOutcome
from memest.calibration.validation.scores import Scores, VerdictTest, likely_cause, scores_by_group
from memest.calibration.validation.validate import Validation
from memest.report.error_plots import Point, against_measured, error_plot, error_words
from memest.report.page import Block, Figure, Heading, Items, Table, Text
from memest.units import format_size

__all__ = ["blocks"]

_MOST_ITEMS = 200
_HEAD = (
    "runs",
    "median |error|",
    "p90",
    "worst",
    "median, signed",
    "predicted too low",
    "in range",
)


def blocks(validation_result: Validation) -> list[Block]:
    """The parts of the page, in order."""
    out: list[Block] = [
        Heading("Predictions against measured GPU memory", 1),
        _opening(validation_result),
    ]
    scores = validation_result.scores()
    if scores:
        out += [Heading("Errors"), _table("Each counter against its own meter", "peak", scores)]
    out += _verdicts(validation_result.verdicts())
    out += _plots(validation_result)
    for name, groups in scores_by_group(validation_result.outcomes):
        out.append(_table(f"By {name}", name, groups))
    out += _worst(validation_result)
    out += _ranges(validation_result.outcomes)
    return out + _left_out(validation_result)


def _opening(validation_result: Validation) -> Text:
    num_scored = sum(one.error is not None for one in validation_result.outcomes)
    summary = (
        f"{len(validation_result.outcomes)} complete records, {num_scored} of them with a "
        "number to be hit; "
        f"{len(validation_result.incomplete)} incomplete ones and "
        f"{len(validation_result.without_figure)} failed runs "
        "without a figure are listed and not scored."
    )
    defaults = Counter(name for one in validation_result.outcomes for name in one.record.taken)
    if defaults:
        names = ", ".join(f"{name} ({count})" for name, count in defaults.most_common())
        summary += f" Defaults of the software were taken where records are silent: {names}."
    declarations = Counter(
        item for one in validation_result.outcomes for item in one.record.declared
    )
    if declarations:
        names = ", ".join(f"{item} ({count})" for item, count in declarations.most_common())
        summary += f" Declared from outside: {names}."
    how = (
        "no calibration"
        if validation_result.profile is None
        else f"calibration {validation_result.profile}"
    )
    return Text(f"{summary} Predictions with {how}.")


def _table(caption: str, name: str, groups: Sequence[Scores]) -> Table:
    rows = []
    for one in groups:
        errors = one.errors
        rows.append(
            (
                one.name,
                str(errors.count),
                f"{errors.median:.2%}",
                f"{errors.p90:.2%}",
                f"{errors.worst:+.2%}",
                f"{errors.median_signed:+.2%}",
                f"{errors.below:.0%}",
                f"{one.inside} of {one.num_ranged}" if one.num_ranged else "-",
            )
        )
    return Table(caption, (name, *_HEAD), rows)


def _verdicts(test: VerdictTest) -> list[Block]:
    if not test.num_tried and not test.close:
        return []
    one = (
        f"Step one: of {test.num_tried} verdicts {test.right} were right; for {len(test.close)} "
        "more runs none was given, because what is left open of context and workspaces decides "
        "them."
    )
    two = (
        f"Step two: {test.num_bounded} runs lie below the upper bound that was promised and live "
        f"when they are capped there; {len(test.unproven)} lie above it: whether they live, the "
        "allocator giving cache back, only another run would show."
    )
    sentences = [one, two]
    if test.least is not None and test.most is not None:
        share = f"{test.least:.1%}"
        if test.most > test.least:
            share += f" to {test.most:.1%}"
        sentences.append(f"Failures of the two steps: {share}.")
    sentences += [f"Wrong: {name}, said to be: {what}." for name, what in test.wrong]
    if test.unproven:
        sentences.append(f"Above the bound: {', '.join(test.unproven)}.")
    return [Heading("The verdict test"), Items(sentences)]


def _plots(validation_result: Validation) -> list[Block]:
    points = [
        Point(one.record.id, one.record.measured_bytes, one.predicted_bytes, None)
        for one in validation_result.outcomes
        if one.error is not None and one.record.measured_bytes and one.predicted_bytes
    ]
    if not points:
        return []
    words = error_words(points)
    errors, against = "Error of each run", "Predicted over measured"
    return [
        Heading("Plots"),
        Figure(errors, error_plot(points, errors), words),
        Figure(against, against_measured(points, against), words),
    ]


def _size(size: int | None) -> str:
    return "-" if size is None else format_size(size)


def _worst(validation_result: Validation) -> list[Block]:
    rows = [
        (
            one.record.id,
            one.record.gpu,
            one.record.metric,
            likely_cause(one),
            _size(one.record.measured_bytes),
            _size(one.predicted_bytes),
            f"{one.error:+.2%}",
        )
        for one in validation_result.worst()
        if one.error is not None
    ]
    if not rows:
        return []
    head = ("run", "GPU", "counter", "likely cause", "measured", "predicted", "error")
    return [Heading("Worst cases"), Table(f"The {len(rows)} farthest off", head, rows, 4)]


def _ranges(outcomes: Sequence[RecordOutcome]) -> list[Block]:
    rows = [
        (
            one.record.id,
            _size(one.record.measured_bytes),
            _size(one.low_bytes),
            _size(one.predicted_bytes),
            "inside" if one.inside else "outside",
        )
        for one in outcomes
        if one.low_bytes is not None
    ]
    if not rows:
        return []
    head = ("run", "measured", "shortest", "longest", "measured lies")
    return [Heading("Runs of which only bounds are known"), Table("Not scored", head, rows)]


def _left_out(validation_result: Validation) -> list[Block]:
    out: list[Block] = []
    unpredicted_outcomes = validation_result.unpredicted()
    if unpredicted_outcomes:
        out += [
            Heading("Without a prediction"),
            Items(
                [f"{one.record.id}: {one.failure}" for one in unpredicted_outcomes[:_MOST_ITEMS]]
            ),
        ]
    oom_outcomes = [one for one in validation_result.outcomes if one.record.oom and not one.failure]
    if oom_outcomes:
        words = {True: "out of memory", False: "fits", None: "too close to say"}
        out += [
            Heading("Runs that went out of memory"),
            Items([f"{one.record.id}: predicted: {words[one.runs_out]}" for one in oom_outcomes]),
        ]
    if validation_result.incomplete:
        sets = Counter(one.missing for one in validation_result.incomplete)
        rows = [
            (", ".join(missing), ", ".join(_record_names(validation_result, missing)), str(count))
            for missing, count in sets.most_common()
        ]
        out += [
            Heading("Incomplete records"),
            Text(
                "They do not say what decides memory, and nothing is guessed. Who knows it "
                "declares it: --assume software.torch=2.1."
            ),
            Table("What is missing", ("missing", "records", "count"), rows, 2),
        ]
    if validation_result.without_figure:
        out += [
            Heading("Runs without a figure"),
            Items(
                [f"{name}: {status}" for name, status in validation_result.without_figure.items()]
            ),
        ]
    if validation_result.problems:
        out += [
            Heading("Lines that are no records"),
            Items(validation_result.problems[:_MOST_ITEMS]),
        ]
    return out


def _record_names(validation_result: Validation, missing: tuple[str, ...]) -> list[str]:
    names = [one.id for one in validation_result.incomplete if one.missing == missing]
    return [*names[:5], f"and {len(names) - 5} more"] if len(names) > 5 else names
