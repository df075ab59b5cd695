"""Advice on a terminal: the plans as a table, then each with its reasons."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memest.findings import Advice, Plan
from memest.report.glyphs import ASCII, UNICODE, Glyphs
from memest.report.text import VERDICT_STYLES, wide_enough
from memest.result import Verdict
from memest.units import format_delta, format_size

__all__ = ["advice_sentence", "print_advice", "render_advice"]


def advice_sentence(advice: Advice) -> str:
    """The best plan in one sentence, or how far the closest one is from fitting."""
    what = f"{advice.model} with {advice.effective_batch:,} samples a step on {advice.gpu}"
    if advice.plans:
        best = advice.plans[0]
        fit = best.estimate.gpu
        assert fit is not None
        size = f"{format_size(fit.device_bytes)} of {format_size(advice.usable_bytes)}"
        if best.verdict is Verdict.FITS:
            return f"Fits: {what}: {plan_words(best)}, {size}."
        high = format_size(best.estimate.interval.high_bytes)
        return f"Tight: {what}: {plan_words(best)}, {size}, may take up to {high}."
    closest = advice.closest
    assert closest is not None
    miss = advice.miss_bytes
    by = f"misses by {format_size(miss)}" if miss else "runs out of memory all the same"
    return f"Does not fit: {what}: the closest plan, {plan_words(closest)}, {by}."


def plan_words(plan: Plan, *, times: str = "x") -> str:
    """A plan in short phrases."""
    setup = plan.estimate.setup
    words = [f"micro-batch {plan.batch}"]
    if plan.grad_accum > 1:
        words[0] += f" {times} {plan.grad_accum} accumulated"
    words.append(setup.precision.value)
    if setup.checkpointing != "none":
        words.append(f"checkpointing {setup.checkpointing}")
    words.append(setup.optim)
    if setup.attn_implementation.value != "auto":
        words.append(f"{setup.attn_implementation.value} attention")
    return ", ".join(words)


def render_advice(advice: Advice, *, width: int = 80, ascii_only: bool = False) -> str:
    """The advice as plain text, lines without blanks at their ends."""
    out = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, _environ={}
    )
    print_advice(advice, out, ascii_only=ascii_only)
    assert isinstance(out.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in out.file.getvalue().splitlines())


def print_advice(advice: Advice, console: Console, *, ascii_only: bool = False) -> None:
    """Write the advice to a console, as :func:`render_advice` does."""
    glyphs = ASCII if ascii_only else UNICODE
    width = wide_enough(console.width)
    for part in _parts(advice, glyphs):
        console.print(part, width=width, highlight=False, markup=False)


def _parts(advice: Advice, glyphs: Glyphs) -> Iterator[RenderableType]:
    yield Text(advice_sentence(advice), style=VERDICT_STYLES[advice.verdict])
    if len(advice.plans) > 1:
        yield Padding(_table(advice, glyphs), (1, 0, 0, 0))
    for number, plan in enumerate(advice.plans, start=1):
        yield Padding(_plan(f"{number}", plan, glyphs), (1, 0, 0, 0))
    if advice.closest is not None:
        yield Padding(_plan("closest", advice.closest, glyphs), (1, 0, 0, 0))
    yield Padding(Text(f"Time is {advice.time_basis}.", style="dim"), (1, 0, 0, 0))
    for note in advice.notes:
        yield Text(f"{glyphs.bullet} {note}", style="dim")


def _table(advice: Advice, glyphs: Glyphs) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    for side in ("left", "right", "right", "right"):
        table.add_column(justify=side, no_wrap=True)
    table.add_column(overflow="fold")
    head = ("", "verdict", "device", "headroom", "time", "plan")
    table.add_row(*(Text(title, style="dim") for title in head))
    for number, plan in enumerate(advice.plans, start=1):
        fit = plan.estimate.gpu
        assert fit is not None
        words = Text(plan_words(plan, times=glyphs.times))
        if plan.changes_training:
            words.append(f" (changes the training: {'; '.join(plan.changes_training)})", "yellow")
        table.add_row(
            str(number),
            Text(plan.verdict.value, style=VERDICT_STYLES[plan.verdict]),
            format_size(fit.device_bytes),
            format_delta(fit.headroom_bytes),
            f"{plan.relative_time:.2f} {glyphs.times}",
            words,
        )
    return table


def _plan(label: str, plan: Plan, glyphs: Glyphs) -> RenderableType:
    title = Text(f"{label}  {plan_words(plan, times=glyphs.times)}", style="bold")
    if plan.verdict is not Verdict.FITS:
        title.append(f"  ({plan.verdict.value})", style=VERDICT_STYLES[plan.verdict])
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for step in plan.steps:
        grid.add_row(f"{step.option} {step.value}", Text(step.why))
    words = Text(" ".join(plan.arguments), style="cyan")
    return Group(title, Padding(Group(grid, words), (0, 0, 0, 3)))
