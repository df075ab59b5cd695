"""Will it fit: the verdict at a glance, what would make it fit, and all that is behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape

import streamlit as st

from memest.app import answers, waiting
from memest.app.asking import AXES, note_axis
from memest.app.charts import breakdown_rows
from memest.app.hero import hero
from memest.app.labels import in_page_words
from memest.app.link import change, linked, page_value, set_page_value
from memest.app.question import ExplorerQuestion
from memest.app.remedy import remedies
from memest.app.views.what_if_parts import (
    calibration_tab,
    delta_reasons,
    layers_tab,
    notes_tab,
    share,
    suggestions_row,
    take_away,
    timeline_tab,
)
from memest.app.words import plain
from memest.catalog.gpus import find_gpu
from memest.catalog.spec import GpuSpec
from memest.errors import MemestError
from memest.report.result import Estimate, GpuFit, Verdict
from memest.report.words import format_count, setup_items, short_name
from memest.units import format_delta, format_size

__all__ = ["show"]

_TABS = ("Parts", "Timeline", "Layers", "Calibration", "Assumptions", "Take it along")
_CARD_MARKS = {
    Verdict.FITS: ("fits", "✓"),
    Verdict.RELEASES_CACHE: ("tight", "↺"),
    Verdict.TIGHT: ("tight", "≈"),
    Verdict.DOES_NOT_FIT: ("no", "✕"),
    Verdict.CANNOT_SAY: ("unseen", "?"),
}
_NOT_LOOKED, _UNSEEN = "…", "not looked at"


def show(question: ExplorerQuestion, draw_inputs: Callable[[], None]) -> None:
    """The page.

    Args:
        question: that is asked.
        draw_inputs: draws the question's inputs. They take a browser longer than the verdict, which
            therefore comes first, unless it is waited for.
    """
    pinned_answer = _pinned(draw_inputs)
    answer = waiting.attempt(
        partial(answers.estimate, question),
        f"Working out {question.model}",
        before_waiting=draw_inputs,
        offer=partial(_offer, question),
    )
    if answer is None:
        draw_inputs()
        st.caption("The command line of this question:")
        st.code(question.command_line(), language=None, wrap_lines=True)
        return
    axis = next((axis for axis in AXES if getattr(answer.setup, axis) is not None), AXES[0])
    note_axis(question, axis)
    _hero(question, answer, pinned_answer)
    draw_inputs()
    cards, changes = st.empty(), st.container(key="changes")
    with st.container(key="behind"):
        _pin_row(question)
        if pinned_answer is not None:
            delta_reasons(pinned_answer, answer)
        _behind(question, answer)
    # last, for these take longer than the verdict
    _fill(cards, question, answer)
    full_answer = waiting.attempt(
        partial(answers.estimate, question, max_batch=True), "Looking for the largest batch"
    )
    if full_answer is not None and full_answer.gpu is not None:
        with changes:
            suggestions_row(question, full_answer)


def _offer(question: ExplorerQuestion, error: MemestError) -> None:
    """One click for what an error says to do."""
    row = st.container(horizontal=True, key="remedies")
    for words, other in remedies(question, error):
        row.button(
            plain(words),
            key=f"do {words}",
            icon=":material/bolt:",
            on_click=change,
            args=(other,),
        )


def _hero(question: ExplorerQuestion, answer: Estimate, pinned_answer: Estimate | None) -> None:
    left, right = st.columns([3.4, 1], gap="medium")
    main, peaks = hero(answer, pinned_answer)
    left.html(main)
    right.html(peaks)
    if answer.calibration is not None and answer.gpu is not None:
        change = format_delta(answer.peak.device_bytes - answer.calibration.raw_device_bytes)
        left.button(
            f"Calibrated on {short_name(answer.calibration.gpus[0])}: {change}",
            key="calibrated",
            icon=":material/straighten:",
            type="tertiary",
            help="From raw to factor to corrected, part by part.",
            on_click=set_page_value,
            args=("tab", _TABS[3]),
        )
    with right.popover("Share", icon=":material/share:"):
        share(question, answer)


# -- cards ----------------------------------------------------------------------------------------


def _fill(
    place: st.delta_generator.DeltaGenerator, question: ExplorerQuestion, answer: Estimate
) -> None:
    """The strip of cards."""
    cards = waiting.attempt(partial(answers.cards, question), "Looking at common cards")
    if cards is not None and cards.fits:
        unseen = [find_gpu(name) for name in cards.unseen]
        place.html(_strip(answer.named_gpus, cards.fits, unseen))


def _strip(asked: Sequence[GpuFit], common: Sequence[GpuFit], unseen: Sequence[GpuSpec]) -> str:
    """Cards that people have and those asked about, from small to large; the smallest that fits.

    Args:
        asked: those that the question names, as the verdict has them.
        common: of the cards that people have those that were looked at.
        unseen: the others; one of them may be smaller than the smallest that fits.
    """
    names = {fit.name for fit in asked}
    fits = {fit.name: fit for fit in (*common, *asked)}
    unseen = [spec for spec in unseen if spec.name not in fits]
    ordered = sorted(fits.values(), key=lambda fit: fit.usable_bytes)
    chips = []
    for fit in ordered:
        kind, mark = _CARD_MARKS[fit.verdict]
        title = f"{fit.name}: {fit.verdict.value}, headroom {format_delta(fit.headroom_bytes)}"
        chips.append((fit.usable_bytes, kind, mark, fit.name, title))
    for spec in unseen:
        title = f"{spec.name}: {_UNSEEN}, its kernels ask for a trace of their own; choose it"
        chips.append((spec.torch_total_bytes or 0, "unseen", _NOT_LOOKED, spec.name, title))
    cards = "".join(
        f'<span class="mm-card mm-{kind}{" mm-asked" if name in names else ""}" '
        f'title="{escape(title)}">{mark} '
        f"{escape(short_name(name))}</span>"
        for _, kind, mark, name, title in sorted(chips)
    )
    smallest = next((fit for fit in ordered if fit.verdict is Verdict.FITS), None)
    if smallest is None:
        words = f"None of the cards {'looked at' if unseen else 'below'} surely fits"
    else:
        of = " of those looked at" if unseen else ""
        words = f"Smallest card{of} that fits: {short_name(smallest.name)}"
    meanings = {mark: verdict.value for verdict, (_, mark) in _CARD_MARKS.items()}
    meanings[_NOT_LOOKED] = _UNSEEN
    marks = {mark for _, _, mark, _, _ in chips}
    key = " · ".join(f"{mark} {meaning}" for mark, meaning in meanings.items() if mark in marks)
    return f'<div class="mm-strip"><b>{escape(words)}</b>{cards}<small>{escape(key)}</small></div>'


# -- the pinned scenario --------------------------------------------------------------------------


def _pinned(draw_inputs: Callable[[], None]) -> Estimate | None:
    """The answer to the pinned scenario."""
    text = page_value("pin", "")
    if not text.strip():
        return None
    try:
        pinned_question = ExplorerQuestion.from_short(text)
    except MemestError as error:
        st.error(f"The pinned scenario: {plain(in_page_words(error))}")
        return None
    answer = waiting.attempt(
        partial(answers.estimate, pinned_question),
        f"Working out {pinned_question.model}",
        before_waiting=draw_inputs,
    )
    if answer is None:  # the error above does not say whose it is
        st.caption("This is about the pinned scenario: nothing is compared with it.")
    return answer


def _pin_row(question: ExplorerQuestion) -> None:
    """What is pinned, and the buttons for it."""
    row = st.container(horizontal=True, vertical_alignment="bottom", key="pin_row")
    row.text_input(
        "Pinned, to compare with",
        **linked("pin", ""),
        placeholder="nothing is pinned",
        help="A model and options as after --vs of memest compare. It is part of the link.",
    )
    row.button(
        "Pin this",
        icon=":material/keep:",
        key="pin_now",
        on_click=set_page_value,
        args=("pin", question.short()),
        help="Every later change is shown as a difference from it.",
    )
    if page_value("pin", ""):
        unpin = {"on_click": set_page_value, "args": ("pin", "")}
        row.button("Unpin", icon=":material/keep_off:", key="unpin", **unpin)


# -- what is behind the verdict -------------------------------------------------------------------


def _behind(question: ExplorerQuestion, answer: Estimate) -> None:
    """One of the tabs; those that are not looked at are not made."""
    tab = st.segmented_control(
        "Behind it",
        _TABS,
        **linked("tab", _TABS[0], _TABS),
        required=True,
        label_visibility="collapsed",
    )
    if tab == "Timeline":
        timeline_tab(answer)
    elif tab == "Layers":
        layers_tab(answer)
    elif tab == "Calibration":
        calibration_tab(answer)
    elif tab == "Assumptions":
        notes_tab(answer)
    elif tab == "Take it along":
        take_away(question)
    else:
        _parts_table(answer)


def _parts_table(answer: Estimate) -> None:
    model = answer.model
    items = [model.task, f"{format_count(model.parameters)} parameters", *setup_items(answer.setup)]
    st.caption(plain(" · ".join(items)))
    rows = breakdown_rows(answer)
    # exact bytes are taken along as CSV
    table = [
        {"part": row["part"], "size": row["size"], "share": 100 * row["share"]} for row in rows
    ]
    total = format_size(answer.peak.device_bytes)
    table.append({"part": "device", "size": total, "share": 100.0})
    st.dataframe(
        table,
        hide_index=True,
        height="content",
        column_config={
            "part": st.column_config.TextColumn("part", width=145),
            "share": st.column_config.ProgressColumn(
                "share of device", format="%.1f%%", min_value=0, max_value=100, width=120
            ),
        },
        alt="Breakdown: " + ", ".join(f"{row['part']} {row['size']}" for row in rows),
    )
