"""Advise: ranked ways to train with an effective batch on one GPU."""

from __future__ import annotations

from functools import partial

import streamlit as st

from memest.app import answers, waiting
from memest.app.hero import verdict_line
from memest.app.labels import in_page_words
from memest.app.link import linked
from memest.app.question import ExplorerQuestion
from memest.app.widgets import download
from memest.app.words import plain
from memest.report.findings import Advice, Plan
from memest.report.result import Verdict
from memest.report.suggestions import Suggestions
from memest.report.tables import advice_sentence, plan_words, training_words
from memest.report.words import short_name
from memest.units import format_delta, format_size

__all__ = ["show"]


def show(question: ExplorerQuestion) -> None:
    """The page."""
    st.markdown("#### The fastest ways that fit")
    left, right = st.columns([1, 2], vertical_alignment="bottom")
    samples = left.number_input(
        "Effective batch",
        min_value=1,
        step=8,
        **linked("effective_batch", 64),
        help="Samples of one optimizer step: micro-batch times accumulation.",
    )
    any_precision = right.toggle(
        "Any precision",
        **linked("any_precision", False),
        help="Use bf16 or fp16 autocast wherever the GPU has it and it is faster. Otherwise the "
        "precision asked for is kept unless nothing surely fits with it.",
    )
    if not question.gpus and "gpu_memory" not in question.place:
        st.info("Name a GPU above: plans are for one.")
        return
    base = question.without("batch", "grad_accum")
    if base.gpus:
        base = base.with_options(gpu=base.gpus[:1])
    answer = waiting.attempt(
        partial(answers.advice, base, int(samples), any_precision=any_precision),
        f"Planning {base.model}",
    )
    if answer is None:
        return
    if len(question.gpus) > 1:
        st.caption(f"Plans are for one GPU, the first that is named: {short_name(answer.gpu)}.")
    st.html(verdict_line(answer.verdict, in_page_words(_headline(answer))))
    if answer.plans:
        _table(answer)
    for number, plan in enumerate(answer.plans, start=1):
        _plan(f"Plan {number}", plan, expanded=number == 1)
    if answer.closest is not None:
        _plan("The closest", answer.closest, expanded=True)
    if answer.otherwise is not None:
        _otherwise(answer.otherwise)
    st.caption(f"Time is {in_page_words(answer.time_basis)}.")
    for note in answer.notes:
        st.caption(plain(in_page_words(note)))
    st.code(
        _command(base, int(samples), any_precision=any_precision), language=None, wrap_lines=True
    )
    download(st, "advice", "JSON", f"{answer.to_json()}\n", key="advice_json")


def _headline(answer: Advice) -> str:
    """What is to be said beside the verdict; sizes of plans are in their table."""
    if not answer.plans:
        return advice_sentence(answer).partition(": ")[2]
    best = answer.plans[0]
    count = len(answer.plans)
    many = f"{count} plans, the fastest first" if count > 1 else "one plan"
    words = f"on {answer.gpu} with {answer.effective_batch:,} samples a step: {many}"
    words += training_words(best)
    if answer.unpriced:
        return f"{words}; not priced: {'; '.join(answer.unpriced)}"
    if best.verdict is not Verdict.FITS:
        high = format_size(best.estimate.interval.high_bytes)
        words += f"; plan 1 may take up to {high} of {format_size(answer.usable_bytes)}"
    return words


def _command(question: ExplorerQuestion, samples: int, *, any_precision: bool) -> str:
    text = f"{question.command_line('advise')} --effective-batch {samples}"
    if any_precision:
        return f"{text} --any-precision"
    named = "precision" in dict(question.options)
    return text if named else f"{text} --precision {question.setup.precision.value}"


def _table(answer: Advice) -> None:
    changes_training = any(plan.changes_training for plan in answer.plans)
    rows = [
        {
            "plan": number,
            "verdict": plan.verdict.value,
            "device": format_size(plan.estimate.peak.device_bytes),
            "headroom": _headroom(plan),
            **_time(plan),
            **_share(plan),
            **({"changes training": ", ".join(plan.changes_training)} if changes_training else {}),
            "what": plan_words(plan, times="×"),  # last: long, and the plans below begin with it
        }
        for number, plan in enumerate(answer.plans, start=1)
    ]
    words = "; ".join(f"{r['plan']}: {r['what']}, {r['verdict']}, {r['device']}" for r in rows)
    st.dataframe(rows, hide_index=True, alt=f"Plans. {words}")


def _time(plan: Plan) -> dict[str, str]:
    """The column of relative times, where there are any."""
    time = plan.relative_time
    return {} if time is None else {"time": f"{time:.2f} ×"}


def _share(plan: Plan) -> dict[str, str]:
    """The column of the largest shares of an engine, where one shares the GPU."""
    if plan.engine is None:
        return {}
    most = plan.engine.largest_share
    return {"engine share up to": "none" if most is None else f"{most:.2f}"}


def _headroom(plan: Plan) -> str:
    gpu = plan.estimate.gpu
    return "" if gpu is None else format_delta(gpu.headroom_bytes)


def _plan(label: str, plan: Plan, *, expanded: bool) -> None:
    with st.expander(f"{label}: {plan_words(plan, times='×')}", expanded=expanded):
        for step in plan.steps:
            st.markdown(f"- **{step.option} {plain(step.value)}**: {plain(step.why)}")
        for whose, words in plan.written:
            st.caption(whose)
            st.code(words, language=None, wrap_lines=True)


def _otherwise(found: Suggestions) -> None:
    """What would fit that trains otherwise than was asked."""
    if not found.changes:
        return
    st.markdown("**Trained otherwise, it fits**")
    for made in found.changes:
        words = f"{made.words} ({made.changes_training}): {made.verdict.value}, {made.arguments}"
        st.markdown(f"- {plain(words)}")
