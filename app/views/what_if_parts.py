"""The lower half of What-if: reasons, tabs, and what one takes away."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st

from memest.app import answers, waiting
from memest.app.charts import timeline_chart
from memest.app.icicle import PART, icicle_chart, node_at
from memest.app.labels import in_page_words
from memest.app.link import asked, change, link_of, linked, page_value, set_page_value
from memest.app.question import ExplorerQuestion
from memest.app.uploads import calibration_name
from memest.app.widgets import download
from memest.app.words import plain
from memest.errors import MemestError
from memest.report.layers import phase_rows, tree, visible
from memest.report.plots import check_matplotlib
from memest.report.result import Estimate, Verdict
from memest.report.words import batch_sentence, moment_text
from memest.search.reasons import explain
from memest.search.suggest import effort_for
from memest.units import format_delta, format_size

__all__ = [
    "calibration_tab",
    "delta_reasons",
    "layers_tab",
    "notes_tab",
    "share",
    "suggestions_row",
    "take_away",
    "timeline_tab",
]


def delta_reasons(before: Estimate, after: Estimate) -> None:
    """Why this run's peak is another one than the pinned one's."""
    reasons = explain(before, after)
    if not reasons.delta_bytes and not reasons.rows:
        st.caption("The same peaks as the pinned scenario.")
        return
    with st.container(border=True):
        st.markdown("**Against the pinned scenario**")
        for sentence in reasons.sentences:
            st.markdown(f"- {plain(sentence)}")
        st.dataframe(
            [
                {
                    "category": row.category.value,
                    "pinned": format_size(row.before_bytes),
                    "this run": format_size(row.after_bytes),
                    "change": format_delta(row.delta_bytes),
                }
                for row in reasons.rows
            ],
            hide_index=True,
            alt="Changes: "
            + ", ".join(f"{row.category} {format_delta(row.delta_bytes)}" for row in reasons.rows),
        )


def suggestions_row(question: ExplorerQuestion, answer: Estimate) -> None:
    """What makes the run fit, or makes use of the room: one click each.

    Args:
        question: that was asked.
        answer: to it, its largest batch looked for.
    """
    if (effort := effort_for(answer)) is None:
        return
    work = partial(answers.suggestions, question, effort)
    found = waiting.attempt(work, "Looking for what makes it fit")
    if found is None:
        return
    largest = batch_sentence(answer)
    head = "It fits with room" if found.verdict is Verdict.FITS else "What makes it fit"
    if largest:
        none, _, why = largest.partition("none: ")
        head += f" · largest batch: {none}" if none else f" · {why}"
    if not found.changes:
        if found.closest is not None:
            words, miss = plain(found.closest.words), format_size(found.miss_bytes)
            head = f"Nothing that is tried makes it fit: {miss} too little with {words}"
        elif largest:
            head = f"Largest batch: {largest}"
        else:
            return
        st.markdown(f"**{head}**")
        return
    st.markdown(f"**{plain(head)}**")
    for column, made in zip(st.columns(3), found.changes, strict=False):
        with column:
            cost = [format_delta(-made.gain_bytes)]
            if made.relative_time is not None:
                cost.append(f"{made.relative_time:.2f} × time")
            if made.verdict is not Verdict.FITS:
                cost.append(made.verdict.value)
            st.button(
                made.words[0].upper() + made.words[1:],
                key=f"apply {made.arguments}",
                icon=":material/bolt:",
                width="stretch",
                help=made.arguments,
                on_click=_apply,
                args=(made.options,),
            )
            st.caption(plain(", ".join([*cost, *filter(None, [made.changes_training])])))


def _apply(options: tuple[tuple[str, Any], ...]) -> None:
    """Ask the question with a change."""
    change(asked().with_options(**dict(options)))


def timeline_tab(answer: Estimate) -> None:
    """Memory over the phases of the step that is fullest, or of all that are simulated."""
    all_rows = phase_rows(answer.timeline, answer.peak_at)
    fullest = next((row.step for row in all_rows if row.is_peak), 0)
    whole = st.toggle(f"All {answer.setup.num_steps} steps", **linked("all_steps", False))
    rows = [row for row in all_rows if whole or row.step == fullest] or all_rows
    where = moment_text(answer)
    chart = timeline_chart(rows, where)
    st.vega_lite_chart(spec=chart.spec, alt=chart.words, key="timeline_chart")
    if answer.calibration is not None:
        st.caption("As replayed, before the calibration corrects the peaks.")
    st.caption(
        "Step.micro-step and phase. Bars: what is alive when the most is allocated in that phase, "
        "by category; line: what the allocator has reserved. A bar tells which operator of which "
        "module its highest moment was reached by."
    )
    with st.expander("The same as a table"):
        st.dataframe(
            [
                {
                    "phase": row.label,
                    "allocated": format_size(row.allocated_bytes),
                    "reserved": format_size(row.reserved_bytes),
                    "": "peak" if row.is_peak else "",
                    "reached by": row.made_by,
                }
                for row in rows
            ],
            hide_index=True,
            alt=chart.words,
        )


def layers_tab(answer: Estimate) -> None:
    """What each part of the model holds: a click leads into it."""
    root = tree(answer.layers)
    path = str(page_value("zoom", ""))
    node = node_at(root, path)
    if node is None:
        path, node = "", root
    row = st.container(horizontal=True, vertical_alignment="center")
    row.markdown(
        f"**{plain(path.replace('/', '.') or 'The whole model')}**: activations at the "
        "peak and parameters. Click a part to look into it."
    )
    if path:
        up = path.rpartition("/")[0]
        row.button("Up", icon=":material/arrow_upward:", on_click=set_page_value, args=("zoom", up))
    chart = icicle_chart(node, path)
    key = f"layers at {path}"
    st.vega_lite_chart(
        spec=chart.spec,
        alt=chart.words,
        key=key,
        on_select=partial(_zoom, key),
        selection_mode=PART,
    )
    with st.expander("The same as a table"):
        st.dataframe(
            [
                {
                    "module": "\u2003" * level + part.name,
                    "count": part.count,
                    "activations": format_size(part.activation_bytes),
                    "parameters": format_size(part.parameter_bytes),
                }
                for level, part in visible(node)
            ],
            hide_index=True,
            alt=chart.words,
        )


def _zoom(key: str) -> None:
    """Look into the part that was clicked."""
    parts = st.session_state[key].selection.get(PART) or []
    if parts:
        set_page_value("zoom", parts[0]["path"])


def calibration_tab(answer: Estimate, *, with_coverage: bool = True) -> None:
    """What a calibration changed, part by part, and how right it is.

    Args:
        answer: to the question.
        with_coverage: whether to say how many runs lay in their ranges; not beside the profile.
    """
    facts = answer.calibration
    if facts is None:
        st.caption(
            "No calibration was applied: these are the figures of trace and replay, and "
            "the range is that of the built-in table. `memest calibrate run` and `memest calibrate "
            "fit` make a profile of a GPU; it is then found by itself."
        )
        st.caption(f"Range of the device peak: {answer.interval.basis}.")
        return
    name, basis = calibration_name(Path(facts.path)), in_page_words(answer.interval.basis)
    st.caption(plain(f"{name}: {basis}."))
    corrected_bytes = {row.category.value: row.bytes for row in answer.breakdown}
    rows = [
        (name, raw, facts.factors.get(name), corrected_bytes.get(name, 0))
        for name, raw in facts.raw_parts.items()
    ]
    peak = answer.peak
    rows += [
        ("allocated", facts.raw_allocated_bytes, None, peak.allocated_bytes),
        ("reserved", facts.raw_reserved_bytes, None, peak.reserved_bytes),
        ("context and kernels", facts.raw_process_bytes, None, facts.process_bytes),
        ("device", facts.raw_device_bytes, None, peak.device_bytes),
        ("range, lower end", facts.raw_low_bytes, None, answer.interval.low_bytes),
        ("range, upper end", facts.raw_high_bytes, None, answer.interval.high_bytes),
    ]
    st.dataframe(
        [
            {
                "part": name,
                "raw": format_size(raw),
                # of a part a factor, of what holds them together what is added
                "correction": format_delta(size - raw) if factor is None else f"× {factor:.4f}",
                "corrected": format_size(size),
            }
            for name, raw, factor, size in rows
        ],
        hide_index=True,
        height="content",
        alt="Correction: "
        + ", ".join(f"{n} {format_size(raw)} to {format_size(size)}" for n, raw, _, size in rows),
    )
    if with_coverage and facts.coverage is not None:
        st.caption(
            f"{facts.coverage:.0%} of the runs of models left out of the fit lay in the range made "
            "without them."
        )


def notes_tab(answer: Estimate) -> None:
    """What was assumed and what is not modelled."""
    assumed = [*answer.assumptions, f"range of the device peak: {answer.interval.basis}"]
    for title, sentences in (("Assumed", assumed), ("Notes", answer.notes)):
        lines = "\n".join(f"- {plain(in_page_words(text))}" for text in sentences)
        if lines:
            st.markdown(f"**{title}**\n{lines}")


def share(question: ExplorerQuestion, answer: Estimate) -> None:
    """The link, and the picture that goes with it."""
    st.markdown("**Link** to this question")
    st.code(link_of(question, st.context.url or ""), language=None, wrap_lines=True)
    stem = question.model.rpartition("/")[2].removesuffix(".json")
    try:
        check_matplotlib("A picture to post")
    except MemestError as error:
        st.caption(plain(error))
        return
    download(
        st, f"{stem}-memest", "PNG", answer.to_share_png, key="share_png",
        label="Picture, 1200 × 630",
    )  # fmt: skip


# -- to take away ---------------------------------------------------------------------------------


def take_away(question: ExplorerQuestion) -> None:
    """The same question on a command line and in Python, and the answer as files."""
    shell, python = st.tabs(["Command line", "Python"])
    shell.code(question.command_line(), language=None, wrap_lines=True)
    python.code(question.snippet(), language=None, wrap_lines=True)
    full_answer = waiting.attempt(
        partial(answers.estimate, question, max_batch=True), "Looking for the largest batch"
    )
    if full_answer is None:
        return
    stem = question.model.rpartition("/")[2].removesuffix(".json")
    row = st.container(horizontal=True)
    files: tuple[tuple[str, Any, str], ...] = (
        (
            "JSON",
            f"{full_answer.to_json()}\n",
            "Byte for byte what memest estimate prints with --json.",
        ),
        ("CSV", full_answer.to_csv(), "The parts of the device peak in bytes: they add up to it."),
        ("PNG", full_answer.to_png, "A picture: what fills the card, and memory phase by phase."),
    )
    for kind, content, words in files:
        download(row, stem, kind, content, key=kind.lower(), help_text=words)
    st.caption("The same files on the command line: --out run.json, .csv, .html or .png.")
