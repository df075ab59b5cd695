"""Answers about several runs on a terminal: a comparison, advice, what each stage buys."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from memest.config.compilation import fused_loss_words
from memest.config.kinds import Strategy
from memest.events import CATEGORY_ORDER
from memest.report.findings import Advice, Comparison, Plan, Scenario
from memest.report.result import Estimate, Verdict
from memest.report.stages_result import StageRow, StageTable
from memest.report.suggestions import Suggestion, Suggestions
from memest.report.terminal import VERDICT_STYLES, Glyphs, Grid, Page, bullets
from memest.report.words import batch_count, each_gpu, moment_text, setup_items
from memest.units import GIB, format_delta, format_size

__all__ = [
    "advice_sentence",
    "change_sentence",
    "plan_words",
    "stage_lines",
    "stage_parts",
    "suggestion_parts",
    "training_words",
]

LABEL, FIRST, COLUMN = 18, 12, 24
"""Widths of the row labels, of the first scenario and of every further one."""
_HEADS = {
    "parameters": "param",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "communication": "comm",
    "other": "other",
    "cached": "cached",
    "process": "proc",
}
_SMALLEST = 0.01
"""GiB that a table of stages shows."""


_DOES = {
    Verdict.FITS: "fits",
    Verdict.RELEASES_CACHE: "fits by releasing cache",
    Verdict.TIGHT: "is tight",
    Verdict.CANNOT_SAY: "is open",
    Verdict.DOES_NOT_FIT: "does not fit",
}
"""What is said of a run with a verdict."""


def change_sentence(scenario: Scenario, first: Scenario) -> str:
    """What a scenario buys or costs against the first, in one sentence.

    The time is of one sample, so that scenarios with other batch sizes compare.
    """
    before, after = first.estimate, scenario.estimate
    delta = after.peak.device_bytes - before.peak.device_bytes
    share = delta / before.peak.device_bytes
    if delta:
        text = f"{scenario.name}: {format_delta(delta)} on the device ({share:+.1%})"
    else:
        text = f"{scenario.name}: the same on the device"
    if scenario.relative_time is not None:
        text += f", {scenario.relative_time:.2f} times the time of a sample (estimated)"
    if after.gpu is not None and before.gpu is not None:
        if after.verdict is before.verdict:
            text += f", {after.verdict.value} as before"
        else:
            base = "the base" if first.name == "base" else first.name
            text += f", {after.verdict.value}, where {base} {_DOES[before.verdict]}"
    if after.max_batch is not None and before.max_batch is not None:
        text += f", largest batch {batch_count(after.max_batch)} against "
        text += batch_count(before.max_batch)
    return f"{text}."


def comparison_parts(comparison: Comparison, page: Page) -> Iterator[RenderableType]:
    """Runs as columns, categories as rows, reasons below."""
    glyphs = page.glyphs
    first, *others = comparison.scenarios
    for scenario in others:
        yield Text(change_sentence(scenario, first), style="bold")
    phrases = setup_items(first.estimate.setup, times=glyphs.times)
    gpu = first.estimate.gpu
    head = [first.model, *phrases, *([gpu.name] if gpu else [])]
    yield Text(f"{first.name}: " + f" {glyphs.dot} ".join(head), style="dim")
    num_columns = max(1, (page.width - LABEL - FIRST) // COLUMN)
    for start in range(0, len(others), num_columns):
        yield Padding(
            _comparison_table(first, others[start : start + num_columns], glyphs), (1, 0, 0, 0)
        )
    yield Padding(Text("Why", style="bold"), (1, 0, 0, 0))
    yield Padding(Text(f"{first.name}: peak reached {moment_text(first.estimate)}."), (0, 0, 0, 2))
    for scenario in others:
        yield Padding(_reasons_part(scenario, page), (1, 0, 0, 2))
    yield Padding(Text(f"Time is {comparison.time_basis}.", style="dim"), (1, 0, 0, 0))
    for note in comparison.notes:
        yield Text(f"{glyphs.bullet} {note}", style="dim")


def _reasons_part(scenario: Scenario, page: Page) -> RenderableType:
    assert scenario.reasons is not None
    return Group(Text(scenario.name, style="bold"), bullets(scenario.reasons.sentences, page))


def _comparison_table(first: Scenario, others: Sequence[Scenario], glyphs: Glyphs) -> Grid:
    names = ["\n".join(textwrap.wrap(scenario.name, COLUMN - 2)) for scenario in (first, *others)]
    table = Grid("left", "right", *("right" for _ in others), head=("", *names), folds=True)

    def sizes(label: str, of: Callable[[Estimate], int], *, style: str = "") -> None:
        first_size = of(first.estimate)
        cells = [Text(label, style=style), Text(format_size(first_size), style=style)]
        for scenario in others:
            size = of(scenario.estimate)
            delta = format_delta(size - first_size) if size != first_size else "="
            cells.append(Text(format_size(size), style=style).append(f"{delta:>11}", style="dim"))
        table.add_row(*cells)

    def words(label: str, of: Callable[[Scenario], Text]) -> None:
        table.add_row(Text(label), of(first), *map(of, others))

    for category in CATEGORY_ORDER:
        if any(s.estimate.bytes_of(category) for s in (first, *others)):
            sizes(category.value, lambda e, c=category: e.bytes_of(c))  # type: ignore[misc]
    rule = [Text(glyphs.rule * (COLUMN - 3))] * len(others)
    table.add_row(Text(glyphs.rule * 16), Text(glyphs.rule * 10), *rule)
    sizes("allocated", lambda e: e.peak.allocated_bytes, style="bold")
    sizes("reserved", lambda e: e.peak.reserved_bytes)
    sizes("device", lambda e: e.peak.device_bytes)
    if first.estimate.gpu is not None:
        words("verdict", _verdict)
    if first.estimate.max_batch is not None:
        words("largest batch", _largest_batch)
    if first.relative_time is not None:
        words("time of a sample", lambda s: Text(f"{s.relative_time:.2f} {glyphs.times}"))
    return table


def _largest_batch(scenario: Scenario) -> Text:
    """Its number; it is looked for where that takes no trace of each batch."""
    largest = scenario.estimate.max_batch
    return Text("not looked for" if largest is None else batch_count(largest))


def _verdict(scenario: Scenario) -> Text:
    verdict = scenario.estimate.verdict
    return Text(verdict.value, style=VERDICT_STYLES[verdict])


def advice_sentence(advice: Advice) -> str:
    """The best plan in one sentence, or how far the closest one is from fitting."""
    subject = f"{advice.model} with {advice.effective_batch:,} samples a step on {advice.gpu}"
    if advice.plans:
        best_plan = advice.plans[0]
        fit = best_plan.estimate.gpu
        assert fit is not None
        each = each_gpu(best_plan.estimate.setup)
        size = f"{format_size(fit.device_bytes)} of {format_size(advice.usable_bytes)}{each}"
        changes = training_words(best_plan)
        if advice.unpriced:
            reason = f"not priced: {'; '.join(advice.unpriced)}"
            return f"Cannot say: {subject}: {plan_words(best_plan)}, {size}{changes}; {reason}."
        if best_plan.verdict is Verdict.FITS:
            return f"Fits: {subject}: {plan_words(best_plan)}, {size}{changes}."
        high = format_size(best_plan.estimate.interval.high_bytes)
        verdict = best_plan.verdict.value.capitalize()
        size += f", may take up to {high}"
        return f"{verdict}: {subject}: {plan_words(best_plan)}, {size}{changes}."
    closest = advice.closest
    assert closest is not None
    miss = advice.miss_bytes
    if advice.overpriced:
        words = "; ".join(advice.overpriced)
        return (
            f"Cannot say: {subject}: by what is priced nothing fits; the run takes less: {words}."
        )
    miss_text = "runs out of memory all the same"
    if miss:
        miss_text = f"misses by {format_size(miss)}{each_gpu(closest.estimate.setup)}"
    sentence = f"Does not fit: {subject}: the closest plan, {plan_words(closest)}, {miss_text}."
    fitting = advice.otherwise.changes if advice.otherwise is not None else ()
    if fitting:
        best = fitting[0]
        words = f"{best.words[0].upper()}{best.words[1:]}"
        sentence += f" {words} ({best.changes_training}): {best.verdict.value}."
    return sentence


def training_words(plan: Plan) -> str:
    """What a plan trains otherwise than was asked, to stand behind a verdict; empty for most."""
    if not plan.changes_training:
        return ""
    words = "; ".join(plan.changes_training)
    return f"; nothing surely fits as asked, so this changes the training: {words}"


def plan_words(plan: Plan, *, times: str = "x") -> str:
    """A plan in short phrases."""
    setup = plan.estimate.setup
    words = [f"micro-batch {plan.batch}"]
    if plan.grad_accum > 1:
        words[0] += f" {times} {plan.grad_accum} accumulated"
    if setup.distributed.data_ranks > 1:
        words[0] += f" {times} {setup.distributed.data_ranks} GPUs"
    words.append(setup.precision.value)
    if setup.checkpointing != "none":
        words.append(f"checkpointing {setup.checkpointing}")
    words.append(setup.optimizer)
    if setup.attn_implementation.value != "auto":
        words.append(f"{setup.attn_implementation.value} attention")
    distributed = setup.distributed
    if distributed.strategy is Strategy.FSDP:
        words.append(f"FSDP{distributed.fsdp_version} {distributed.fsdp}")
    if setup.use_liger_kernel:
        words.append("Liger's kernels")
    if setup.fused_loss:
        words.append(fused_loss_words(setup.fused_loss))
    if plan.engine is not None:
        words.append(plan.engine.words)
    if setup.rollouts is not None and setup.rollouts.engine_sleeps:
        words.append("asleep while the model trains")
    return ", ".join(words)


def advice_parts(advice: Advice, page: Page) -> Iterator[RenderableType]:
    """The plans as a table, then each with its reasons."""
    glyphs = page.glyphs
    yield Text(advice_sentence(advice), style=VERDICT_STYLES[advice.verdict])
    if len(advice.plans) > 1:
        yield Padding(_plan_table(advice, glyphs), (1, 0, 0, 0))
    for number, plan in enumerate(advice.plans, start=1):
        yield Padding(_plan(f"{number}", plan, glyphs), (1, 0, 0, 0))
    if advice.closest is not None:
        yield Padding(_plan("closest", advice.closest, glyphs), (1, 0, 0, 0))
    if advice.otherwise is not None:
        yield Padding(Group(*_otherwise_parts(advice.otherwise, page)), (1, 0, 0, 0))
    yield Padding(Text(f"Time is {advice.time_basis}.", style="dim"), (1, 0, 0, 0))
    for note in advice.notes:
        yield Text(f"{glyphs.bullet} {note}", style="dim")


def _otherwise_parts(found: Suggestions, page: Page) -> Iterator[RenderableType]:
    """What would fit that trains otherwise, and what to type next."""
    yield Text("No plan surely fits that trains as asked. Trained otherwise:", style="bold")
    yield from suggestion_parts(found, page)
    if found.changes:
        yield Text(
            "Added to what was asked, without --batch and --grad-accum, memest advise plans with "
            "them.",
            style="dim",
        )


def _plan_table(advice: Advice, glyphs: Glyphs) -> Grid:
    timed = any(plan.relative_time is not None for plan in advice.plans)
    head = ["", "verdict", "device", "headroom", *(["time"] if timed else [])]
    head += [*(["share up to"] if any(plan.engine for plan in advice.plans) else []), "plan"]
    table = Grid("right", "left", *("right" for _ in head[3:]), "left", head=head)
    for number, plan in enumerate(advice.plans, start=1):
        fit = plan.estimate.gpu
        assert fit is not None
        words = Text(plan_words(plan, times=glyphs.times))
        if plan.changes_training:
            words.append(f" (changes the training: {'; '.join(plan.changes_training)})", "yellow")
        cells = [format_size(fit.device_bytes), format_delta(fit.headroom_bytes)]
        if plan.relative_time is not None:
            cells.append(f"{plan.relative_time:.2f} {glyphs.times}")
        if plan.engine is not None:
            most = plan.engine.largest_share
            cells.append("none" if most is None else f"{most:.2f}")
        verdict = Text(plan.verdict.value, style=VERDICT_STYLES[plan.verdict])
        table.add_row(str(number), verdict, *cells, words)
    return table


def _plan(label: str, plan: Plan, glyphs: Glyphs) -> RenderableType:
    title = Text(f"{label}  {plan_words(plan, times=glyphs.times)}", style="bold")
    if plan.verdict is not Verdict.FITS:
        title.append(f"  ({plan.verdict.value})", style=VERDICT_STYLES[plan.verdict])
    steps = Grid("left", "left")
    for step in plan.steps:
        steps.add_row(f"{step.option} {step.value}", Text(step.why))
    written = Grid("left", "left")
    for whose, words in plan.written:
        written.add_row(whose, Text(words, style="cyan"))
    return Group(title, Padding(Group(steps, written), (0, 0, 0, 3)))


def stage_parts(
    table: StageTable, page: Page, *, deepspeed: bool = False
) -> Iterator[RenderableType]:
    """The table, and what is not in it.

    Args:
        table: to show.
        page: where it is written.
        deepspeed: the figures of DeepSpeed's own estimator too.
    """
    yield Text(f"{table.model}, {table.num_gpus} GPUs: GiB of each GPU, and of host memory")
    yield ""
    yield _stage_grid(table.rows)
    yield ""
    yield Text(
        "param to other: alive at the allocated peak of each, which is not at the same moment in "
        "all of them; optim: states and master weights; comm: buckets and gathered parameters; "
        "cached: what the allocator holds beyond it; proc: CUDA context, kernels, NCCL; host: of "
        "the fullest process at the fullest moment of loading and training, and node: of those "
        "that share one together, as memest estimate --host-memory says it."
    )
    phases = [phase for row in table.rows if row.host is not None for phase in row.host.phases]
    unpriced = dict.fromkeys(f"{p.phase}: {p.not_priced}" for p in phases if p.not_priced)
    yield from (Text(f"not in host and node: {each}.") for each in unpriced)
    yield from map(Text, _stage_verdicts(table))
    if deepspeed and table.official:
        yield ""
        yield Text("DeepSpeed's own estimator (model states alone)")
        for official in table.official:
            gpu, host = official.states.gpu_bytes, official.states.host_bytes
            sentence = f"{format_size(gpu)} on a GPU, {format_size(host)} in the host of a node"
            differs = f"; {official.difference}" if official.difference else ""
            yield Padding(Text(f"{official.name}: {sentence}{differs}."), (0, 0, 0, 2))
    names_by_reason: dict[str, list[str]] = {}
    for row in table.rows:
        if row.estimate is None:
            names_by_reason.setdefault(row.refused, []).append(row.name)
    if names_by_reason:
        yield ""
    for reason, names in names_by_reason.items():
        yield Text(f"{'; '.join(names)}: {reason}")
    if table.notes:
        yield ""
        yield bullets(table.notes, page)


def _stage_grid(rows: Sequence[StageRow]) -> Grid:
    head = ("", *_HEADS.values(), "GPU", "host", "node")
    grid = Grid("left", *("right" for _ in head[1:]), head=head, pad=1)
    for row in rows:
        if row.estimate is None or row.host is None:
            grid.add_row(row.name, *("-" for _ in head[1:]))
            continue
        values = [row.columns[name] for name in _HEADS]
        values += [row.estimate.peak.device_bytes, row.host_bytes, row.host.node_bytes]
        grid.add_row(row.name, *map(_cell, values))
    return grid


def _cell(nbytes: int) -> str:
    """GiB, with as many digits as tell a small size from none."""
    gib = nbytes / GIB
    return "0" if not nbytes else f"{gib:,.2f}" if gib >= _SMALLEST else f"<{_SMALLEST}"


def _stage_verdicts(table: StageTable) -> Iterator[str]:
    """Which of them fit, where a GPU was named; and the host, where its memory was.

    Args:
        table: whose rows these are.
    """
    by_verdict: dict[str, list[str]] = {}
    for row in table.rows:
        if row.estimate is not None and (fit := row.estimate.gpu) is not None:
            place = f"{fit.name} ({format_size(fit.usable_bytes)} usable)"
            by_verdict.setdefault(f"{fit.verdict.value} on {place}", []).append(row.name)
    for row in table.rows:
        if row.host is not None and (budget := row.host.budget_bytes) is not None:
            place = f"the host of {format_size(budget)}"
            by_verdict.setdefault(f"{row.host.verdict.value} on {place}", []).append(row.name)
    for verdict, names in by_verdict.items():
        yield f"{verdict}: {'; '.join(names)}."


def stage_lines(table: StageTable) -> Iterator[str]:
    """A line a row: what it takes of each GPU, and of a node's host.

    Args:
        table: whose rows these are.
    """
    for row in table.rows:
        if row.estimate is None or row.host is None:
            yield f"{row.name}: no estimate: {row.refused}"
            continue
        fit = row.estimate.gpu
        verdict = "" if fit is None else f", {fit.verdict.value}"
        gpu, node = row.estimate.peak.device_bytes, row.host.node_bytes
        yield f"{row.name}: {format_size(gpu)} of each GPU{verdict}; {format_size(node)} of a node"


_NO_CHANGE = {
    Verdict.FITS: "No larger micro-batch is known to fit",
    Verdict.CANNOT_SAY: "No change is known that tells whether it fits",
}
_NONE_TRIED = "No change that is tried would change the verdict on"


def suggestion_parts(suggestions: Suggestions, page: Page) -> Iterator[RenderableType]:
    """A table of the changes, or a sentence where there are none."""
    card = f"{suggestions.gpu} ({format_size(suggestions.usable_bytes)} usable)"
    if suggestions.changes:
        if suggestions.verdict is Verdict.FITS:
            head = "What makes use of the room"
        elif any(change.verdict is Verdict.FITS for change in suggestions.changes):
            head = "What makes it fit"
        else:
            head = "What brings it nearest"
        yield Text(f"{head} on {card}", style="bold")
        yield _changes_table(suggestions.changes, page)
    elif suggestions.closest is None:
        yield Text(f"{_NO_CHANGE.get(suggestions.verdict, _NONE_TRIED)} {card}.")
    else:
        miss = format_size(suggestions.miss_bytes)
        yield Text(f"Nothing that is tried makes it fit {card}. {miss} too little with", "bold")
        yield _changes_table((suggestions.closest,), page)


def _changes_table(changes: Sequence[Suggestion], page: Page) -> Grid:
    table = Grid("left", "left")
    for number, change in enumerate(changes, start=1):
        says = Text(change.words, "bold")
        if change.changes_training:
            says.append(f" ({change.changes_training})", "not bold yellow")
        says.append(f"\n{change.verdict.value}", VERDICT_STYLES[change.verdict])
        says.append(f", {format_delta(-change.gain_bytes)}", "not bold")
        if change.relative_time is not None:
            says.append(f", {change.relative_time:.2f} {page.glyphs.times} time", "not bold")
        says.append(": ", "not bold").append(change.arguments, "not bold cyan")
        table.add_row(f"  {number}", says)
    return table
