"""Why the allocated peaks of two runs differ, in words, from their two estimates alone.

Every sentence is said because figures of the two estimates satisfy its condition; nothing is known
here of what a particular option does. Three kinds of facts are compared:

- the rows of the two breakdowns: which categories grew, which shrank, adding up exactly;
- the moments of the two peaks: phase, micro-step, module, operator;
- the highest memory within every phase: what a change saves where the peak is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memest.config.setup import Precision
from memest.events import CATEGORY_ORDER, Category, Phase
from memest.report.findings import PhaseChange, Reasons, RowChange
from memest.report.layers import NO_MODULE, blocks
from memest.report.result import Estimate
from memest.report.words import format_count, moment_text
from memest.units import format_size

__all__ = ["explain", "row_changes"]

NAMED_SHARE = 0.95
"""Categories are named until they cover this much of what went their way."""
NEGLIGIBLE = 0.001
"""A difference below this share of the peak is none that anybody looks for."""
NOTABLE = 0.05
"""A difference below this share of the peak is not worth a sentence of its own."""

_PLACES = {
    Phase.LOAD: "loading",
    Phase.BATCH: "moving the batch",
    Phase.SCORING: "scoring completions",
    Phase.FORWARD: "the forward pass",
    Phase.BACKWARD: "the backward pass",
    Phase.CLIP: "gradient clipping",
    Phase.OPTIMIZER: "the optimizer step",
    Phase.ZERO_GRAD: "zero_grad",
    Phase.EVALUATION: "the evaluation",
    Phase.GENERATION: "the generation",
    Phase.SAVE: "saving",
    Phase.RESUME: "resuming",
}
_OF_MICRO_STEPS = (Phase.BATCH, Phase.FORWARD, Phase.BACKWARD)


def explain(before: Estimate, after: Estimate) -> Reasons:
    """Why the second estimate's allocated peak is another one than the first's."""
    rows = row_changes(before, after)
    phases = _phase_changes(before, after)
    delta = after.peak.allocated_bytes - before.peak.allocated_bytes
    sentences = [
        _headline(before, after, rows),
        *_moment_sentences(before, after),
        *_unseen_gain_sentences(before, after, phases),
        *_unchanged_sentences(before, after, rows),
        *_row_sentences(before, after, rows),
        *_remaining_sentences(before, after, rows),
    ]
    return Reasons(
        delta_bytes=delta,
        rows=rows,
        phases=phases,
        before=before.peak_at,
        after=after.peak_at,
        sentences=tuple(sentences),
    )


def row_changes(before: Estimate, after: Estimate) -> tuple[RowChange, ...]:
    """The rows that differ, largest difference first; their sum is that of the peaks."""
    first = {row.category: row.bytes for row in before.breakdown}
    second = {row.category: row.bytes for row in after.breakdown}
    changes = [
        RowChange(category=c, before_bytes=first.get(c, 0), after_bytes=second.get(c, 0))
        for c in CATEGORY_ORDER
    ]
    nonzero = tuple(
        sorted((c for c in changes if c.delta_bytes), key=lambda c: -abs(c.delta_bytes))
    )
    delta = after.peak.allocated_bytes - before.peak.allocated_bytes
    assert sum(change.delta_bytes for change in nonzero) == delta
    return nonzero


def _phase_changes(before: Estimate, after: Estimate) -> tuple[PhaseChange, ...]:
    first, second = _highest(before), _highest(after)
    return tuple(
        PhaseChange(phase=phase, before_bytes=first[phase], after_bytes=second[phase])
        for phase in Phase
        if phase in first and phase in second
    )


def _highest(estimate: Estimate) -> dict[Phase, int]:
    highest: dict[Phase, int] = {}
    for point in estimate.timeline:
        highest[point.phase] = max(highest.get(point.phase, 0), point.allocated_bytes)
    return highest


# -- the sum -----------------------------------------------------------------------------------


def _headline(before: Estimate, after: Estimate, rows: Sequence[RowChange]) -> str:
    """What grew and what shrank, and which of the two decides."""
    first, second = before.peak.allocated_bytes, after.peak.allocated_bytes
    delta = second - first
    increases = [row for row in rows if row.delta_bytes > 0]
    decreases = [row for row in rows if row.delta_bytes < 0]
    if not rows:
        return f"The allocated peak stays at {format_size(second)}, row by row."
    if abs(delta) < NEGLIGIBLE * first:
        sides = " against ".join(_rows_text(side) for side in (increases, decreases) if side)
        return f"The allocated peak stays at {format_size(second)} ({sides})."
    word = "more" if delta > 0 else "less"
    headline = (
        f"The allocated peak is {format_size(second)}, {format_size(abs(delta))} {word} than "
        f"{format_size(first)}"
    )
    decides, other = (increases, decreases) if delta > 0 else (decreases, increases)
    if not other:
        return f"{headline}: {_rows_text(decides)}."
    other_bytes = sum(abs(row.delta_bytes) for row in other)
    if other_bytes < NOTABLE * sum(abs(row.delta_bytes) for row in decides):
        return f"{headline}: {_rows_text(decides)}; {_rows_text(other)}."
    return f"{headline}: {_rows_text(decides)} outweigh{_plural_s(decides)} {_rows_text(other)}."


def _plural_s(rows: Sequence[RowChange]) -> str:
    # categories are plural words, but for rounding
    return "s" if len(rows) == 1 and rows[0].category is Category.ROUNDING else ""


def _rows_text(rows: Sequence[RowChange]) -> str:
    """The rows that make up nearly all of their sum by name, the others together."""
    total = sum(abs(row.delta_bytes) for row in rows)
    leading: list[RowChange] = []
    covered_bytes = 0
    for row in rows:
        last = len(leading) == len(rows) - 1  # a rest of one has a name of its own
        if leading and covered_bytes >= NAMED_SHARE * total and not last:
            break
        leading.append(row)
        covered_bytes += abs(row.delta_bytes)
    texts = [f"{row.category.value} {_signed_size(row.delta_bytes)}" for row in leading]
    rest = sum(row.delta_bytes for row in rows) - sum(row.delta_bytes for row in leading)
    if rest:
        texts.append(f"the rest {_signed_size(rest)}")
    return _join_texts(texts)


# -- the moments -------------------------------------------------------------------------------


def _moment_sentences(before: Estimate, after: Estimate) -> list[str]:
    """Where the peak was and is; what of another micro-step is alive there."""
    first, second = before.peak_at, after.peak_at
    was, now = moment_text(before, operator=False), moment_text(after, operator=False)
    if (first.phase, first.micro_step > 1) == (second.phase, second.micro_step > 1):
        if first.module == second.module:
            return [f"Both peaks are reached {now}."]
        return [(f"The peak stays in {_PLACES[first.phase]}: {was} and {now}.")]
    sentences = [f"The peak moves: it was reached {was}, it is {now}."]
    earlier, later = (
        before.bytes_of(Category.GRADIENTS),
        after.bytes_of(Category.GRADIENTS),
    )
    carried = second.phase in _OF_MICRO_STEPS and second.micro_step > 1
    if carried and later and (first.micro_step < 2 or later > earlier):
        text = (
            f"In micro-step {second.micro_step} the gradients of the micro-steps before are still "
            f"alive ({format_size(later)}; at the old peak there were {format_size(earlier)} of "
            "gradients) beside its own activations"
        )
        if second.phase is Phase.BACKWARD:
            text += ", and new ones are made beside the old before they are added"
        sentences.append(f"{text}.")
    return sentences


def _unseen_gain_sentences(
    before: Estimate, after: Estimate, phases: Iterable[PhaseChange]
) -> list[str]:
    """What the change saves in a phase that does not decide the peak."""
    delta = after.peak.allocated_bytes - before.peak.allocated_bytes
    notable = NOTABLE * before.peak.allocated_bytes
    by_phase = {change.phase: change for change in phases}
    deciding = by_phase.get(after.peak_at.phase)
    other_changes = [c for c in by_phase.values() if c.phase is not after.peak_at.phase]
    best_change = min(other_changes, key=lambda c: c.delta_bytes, default=None)
    if (
        best_change is None
        or deciding is None
        or -best_change.delta_bytes < 2 * max(-delta, 0) + notable
    ):
        return []
    change = "as before"
    if deciding.delta_bytes:
        change = f"{format_size(deciding.before_bytes)} before"
    text = (
        f"Memory falls by {format_size(-best_change.delta_bytes)} in {_PLACES[best_change.phase]} "
        f"(to {format_size(best_change.after_bytes)}), but the peak is in "
        f"{_PLACES[deciding.phase]}, which takes {format_size(deciding.after_bytes)} ({change}): "
        "what is saved elsewhere cannot lower it."
    )
    return [text]


def _unchanged_sentences(before: Estimate, after: Estimate, rows: Sequence[RowChange]) -> list[str]:
    """What the peak consists of, when a change hardly moves it."""
    peak = after.peak.allocated_bytes
    if abs(peak - before.peak.allocated_bytes) >= NOTABLE * before.peak.allocated_bytes:
        return []
    moved_categories = {
        row.category for row in rows if abs(row.delta_bytes) >= NOTABLE * row.before_bytes
    }
    remaining = sorted(
        (r for r in after.breakdown if r.category not in moved_categories), key=lambda r: -r.bytes
    )
    large = [row for row in remaining if row.bytes >= NOTABLE * peak]
    total = sum(row.bytes for row in large)
    if total < peak / 2:
        return []
    texts = [f"{row.category.value} {format_size(row.bytes)}" for row in large]
    sentences = [
        f"{total / peak:.0%} of the peak is not touched by the change: {_join_texts(texts)}."
    ]
    activations = after.bytes_of(Category.ACTIVATIONS)
    largest = max(blocks(after.layers), key=lambda b: b.activation_bytes, default=None)
    if largest is not None and largest.activation_bytes >= max(activations / 2, NOTABLE * peak):
        size = format_size(largest.activation_bytes)
        sentences.append(f"{size} of the activations are {_block_words(largest.name)}.")
    return sentences


# -- the rows ----------------------------------------------------------------------------------


def _row_sentences(before: Estimate, after: Estimate, rows: Sequence[RowChange]) -> list[str]:
    """For rows that matter: what their size depends on, where the estimates show it."""
    notable = NOTABLE * before.peak.allocated_bytes
    by_category = {row.category: row for row in rows}
    sentences = [
        *_trainable_sentences(before, after, by_category),
        *_weight_sentences(before, after, rows),
    ]
    copies = by_category.get(Category.AUTOCAST_COPIES)
    if copies is not None and abs(copies.delta_bytes) >= notable:
        sentences.append(_copies(before, after, copies, by_category.get(Category.ACTIVATIONS)))
    states = by_category.get(Category.OPTIMIZER_STATES)
    if states is not None and abs(states.delta_bytes) >= notable:
        sentences.append(
            f"{after.setup.optimizer} keeps {format_size(states.after_bytes)} of states, "
            f"{before.setup.optimizer} {format_size(states.before_bytes)}."
            if before.setup.optimizer != after.setup.optimizer
            else f"{format_size(states.after_bytes)} of optimizer states are alive at the new "
            f"peak, {format_size(states.before_bytes)} at the old one."
        )
    return sentences


def _trainable_sentences(
    before: Estimate, after: Estimate, rows: Mapping[Category, RowChange]
) -> list[str]:
    """How many parameters gradients and states belong to, where that changed."""
    count_before, count_after = before.model.trainable_parameters, after.model.trainable_parameters
    trained_rows = [rows[c] for c in (Category.GRADIENTS, Category.OPTIMIZER_STATES) if c in rows]
    delta = sum(row.delta_bytes for row in trained_rows)
    notable = NOTABLE * before.peak.allocated_bytes
    if (
        count_before == count_after
        or abs(delta) < notable
        or (delta > 0) is not (count_after > count_before)
    ):
        return []
    text = (
        f"{format_count(count_after)} of {format_count(after.model.parameters)} parameters train, "
        f"{format_count(count_before)} of {format_count(before.model.parameters)} did: gradients "
        "and optimizer states are theirs alone."
    )
    return [text]


def _weight_sentences(before: Estimate, after: Estimate, rows: Sequence[RowChange]) -> list[str]:
    """What a weight takes on average, where the row of the parameters changed by that."""
    change = next((row for row in rows if row.category is Category.PARAMETERS), None)
    if change is None or abs(change.delta_bytes) < NOTABLE * before.peak.allocated_bytes:
        return []
    bytes_per_weight = [
        e.model.parameter_bytes / max(e.model.parameters, 1) for e in (before, after)
    ]
    if abs(bytes_per_weight[1] - bytes_per_weight[0]) < NOTABLE * bytes_per_weight[0]:
        return []
    text = (
        f"A weight takes {bytes_per_weight[1]:.2f} bytes on average, {bytes_per_weight[0]:.2f} "
        f"before: parameters are {format_size(change.after_bytes)}, they were "
        f"{format_size(change.before_bytes)}."
    )
    return [text]


def _copies(
    before: Estimate, after: Estimate, copies: RowChange, activations: RowChange | None
) -> str:
    if copies.delta_bytes < 0:
        return (
            f"{format_size(-copies.delta_bytes)} of half-precision copies of weights are no longer "
            "alive at the peak."
        )
    size = format_size(copies.after_bytes)
    text = (
        f"Autocast keeps half-precision copies of the fp32 weights ({size} at the peak) while a "
        "forward and its backward need them. Their size is that of the weights, whatever the batch"
    )
    savings = 0 if activations is None else -activations.delta_bytes
    if before.setup.precision is not Precision.FP32 or savings <= 0:
        return f"{text}."
    batch = after.setup.batch
    if savings >= copies.delta_bytes:
        return f"{text}; smaller activations save {format_size(savings)} at batch {batch}."
    return (
        f"{text}; smaller activations save only {format_size(savings)} at batch {batch}, and that "
        "grows with the batch."
    )


def _remaining_sentences(before: Estimate, after: Estimate, rows: Sequence[RowChange]) -> list[str]:
    """Where what remains of the activations is, when they shrank and still count."""
    by_category = {row.category: row for row in rows}
    change = by_category.get(Category.ACTIVATIONS)
    notable = NOTABLE * before.peak.allocated_bytes
    remaining = after.bytes_of(Category.ACTIVATIONS)
    if change is None or change.delta_bytes > -notable or remaining < notable:
        return []
    largest = max(blocks(after.layers), key=lambda b: b.activation_bytes, default=None)
    if largest is None or largest.activation_bytes < NOTABLE * remaining:
        return []
    largest_text = f"{format_size(largest.activation_bytes)} {_block_words(largest.name)}"
    if largest.count > 1:
        largest_text = f"{format_size(largest.activation_bytes)} in each of {largest.name}"
    previous_size = format_size(change.before_bytes)
    return [
        (
            f"Of {previous_size} of activations {format_size(remaining)} are left at the new peak, "
            f"{largest_text}."
        )
    ]


def _block_words(block: str) -> str:
    if block == NO_MODULE:
        return "outside the layers, in the model's own forward (its loss, as a rule)"
    return f"in {block}"


def _signed_size(delta: int) -> str:
    return f"+{format_size(delta)}" if delta >= 0 else format_size(delta)


def _join_texts(texts: Sequence[str]) -> str:
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} and {texts[-1]}"
