"""Compare: scenarios beside each other, what each one buys, and why."""

from __future__ import annotations

import shlex
from functools import partial
from html import escape

import streamlit as st

from memest.app import answers, waiting
from memest.app.hero import small_bar, verdict_words
from memest.app.labels import in_page_words
from memest.app.link import linked
from memest.app.question import ExplorerQuestion
from memest.app.widgets import download
from memest.app.words import plain
from memest.report.findings import Comparison, Scenario
from memest.report.result import Estimate
from memest.report.words import batch_count
from memest.units import format_delta, format_size

__all__ = ["show"]

_FIRST = "fp16; checkpointing=full; fp16 checkpointing=full"


def show(question: ExplorerQuestion) -> None:
    """The page."""
    st.markdown("#### Runs side by side")
    st.caption("The question above is the base; each scenario changes some of its options.")
    text = st.text_input(
        "Scenarios",
        **linked("vs", _FIRST),
        help="As after --vs of memest compare, parted by semicolons.",
    )
    columns = tuple(filter(None, (part.strip() for part in (text or "").split(";"))))
    if not columns:
        st.info("Add a scenario that changes something, for example bf16.")
        return
    comparison = waiting.attempt(
        partial(answers.comparison, question, columns), f"Comparing {question.model}"
    )
    if comparison is not None:
        _answer(comparison)
    words = "".join(f" --vs {shlex.quote(scenario)}" for scenario in columns)
    st.code(f"{question.command_line('compare')}{words}", language=None, wrap_lines=True)
    if comparison is not None:
        download(st, "comparison", "JSON", f"{comparison.to_json()}\n", key="compare_json")


def _answer(comparison: Comparison) -> None:
    first = comparison.scenarios[0]
    whole = max(
        max(
            scenario.estimate.interval.high_bytes,
            scenario.estimate.gpu.usable_bytes if scenario.estimate.gpu else 0,
        )
        for scenario in comparison.scenarios
    )
    cards = "".join(_card(scenario, first, whole) for scenario in comparison.scenarios)
    st.html(f'<div class="mm-cards">{cards}</div>')
    with st.expander("The same as a table"):
        st.dataframe(
            [_row(scenario, first) for scenario in comparison.scenarios],
            hide_index=True,
            alt="; ".join(
                f"{scenario.name}: {format_size(scenario.estimate.peak.device_bytes)}, "
                f"{scenario.estimate.verdict.value}"
                for scenario in comparison.scenarios
            ),
        )
    st.caption(f"Time is {in_page_words(comparison.time_basis)}.")
    for note in comparison.notes:
        st.caption(plain(in_page_words(note)))


def _card(scenario: Scenario, first: Scenario, whole: int) -> str:
    """A scenario as a card: verdict, bar, figures, and why they are others than the first one's."""
    answer = scenario.estimate
    row = _row(scenario, first)
    figures = [
        (name, row[name])
        for name in ("device", "change", "headroom", "largest batch", "time of a sample")
        if row[name]
    ]
    table = "".join(f"<tr><td>{name}</td><td>{escape(words)}</td></tr>" for name, words in figures)
    reasons = scenario.reasons.sentences if scenario.reasons is not None else ()
    why = "".join(f"<li>{escape(sentence)}</li>" for sentence in reasons)
    return (
        f"<section><h3>{escape(scenario.name)}</h3><p>{verdict_words(answer.verdict)}</p>"
        f"{small_bar(answer, whole)}<table>{table}</table>"
        f"{f'<ul>{why}</ul>' if why else ''}</section>"
    )


def _row(scenario: Scenario, first: Scenario) -> dict[str, str]:
    answer, base = scenario.estimate, first.estimate
    gpu = answer.gpu
    delta = answer.peak.device_bytes - base.peak.device_bytes
    return {
        "scenario": scenario.name,
        "verdict": answer.verdict.value,
        "headroom": "" if gpu is None else format_delta(gpu.headroom_bytes),
        "allocated": format_size(answer.peak.allocated_bytes),
        "reserved": format_size(answer.peak.reserved_bytes),
        "device": format_size(answer.peak.device_bytes),
        "change": "" if scenario is first else format_delta(delta),
        "largest batch": _largest(answer),
        "time of a sample": ""
        if scenario.relative_time is None
        else f"{scenario.relative_time:.2f} ×",
    }


def _largest(answer: Estimate) -> str:
    """The largest batch, and how much of it is safe, as the other pages have both."""
    if answer.max_batch is None:
        return ""
    words, safe = batch_count(answer.max_batch), answer.safe_batch
    return words if safe in (None, answer.max_batch) else f"{words}, {safe or 'none'} safe"
