"""What-if: one run, its verdict, what fills it, and what a change would do."""

from __future__ import annotations

from functools import partial

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from memest.app import answers
from memest.app.charts import breakdown_chart, breakdown_rows
from memest.app.question import ExplorerQuestion
from memest.app.theme import VERDICT_COLOURS, VERDICT_ICONS
from memest.app.views.what_if_parts import (
    calibration_tab,
    delta_reasons,
    layers_tab,
    notes_tab,
    suggestions_row,
    take_away,
    timeline_tab,
)
from memest.app.words import plain
from memest.config.installed import release
from memest.errors import MemestError
from memest.report.result import Estimate, GpuFit
from memest.report.words import (
    batch_sentence,
    format_count,
    interval_text,
    setup_items,
    verdict_sentence,
)
from memest.units import format_delta, format_size

__all__ = ["show"]

_METERS = {
    "Allocated": "torch.cuda.max_memory_allocated()",
    "Reserved": "torch.cuda.max_memory_reserved()",
    "Device": "nvidia-smi, this process: reserved memory, CUDA context and loaded kernels",
}


def show(question: ExplorerQuestion) -> None:
    """The page."""
    top = st.container()
    # before what stands above it, for its text may come with the link
    pinned_answer = _pin(question)
    below = st.container()
    with top:
        answer = answers.attempt(
            partial(answers.estimate, question), f"Working out {question.model}"
        )
        if answer is None:
            st.caption("The command line of this question:")
            st.code(question.command_line(), language="bash", wrap_lines=True)
            return
        _headline(answer)
        _metrics(answer, pinned_answer)
        place = st.empty()
        changes = st.container()
    with below:
        full_answer = _lower(question, answer, pinned_answer, place)
    take_away(question, full_answer)
    # last, for it takes longest, and not where each change would be traced or compiled
    looked_for = full_answer is not None and full_answer.max_batch is not None
    if answer.gpu is not None and (looked_for or release("torch") is None):
        with changes:
            suggestions_row(question)


def _lower(
    question: ExplorerQuestion,
    answer: Estimate,
    pinned_answer: Estimate | None,
    place: DeltaGenerator,
) -> Estimate | None:
    """Reasons, charts and tabs; returns the answer with the largest batch, said in ``place``."""
    if pinned_answer is not None:
        delta_reasons(pinned_answer, answer)
    _breakdown(answer, pinned_answer)
    names = ["Timeline", "Layers", "Calibration", "Assumptions"]
    timeline, layers, calibration, notes = st.tabs(names, key="tab", bind="query-params")
    with timeline:
        timeline_tab(answer)
    with layers:
        layers_tab(answer)
    with calibration:
        calibration_tab(answer)
    with notes:
        notes_tab(answer)
    full_answer = _full_answer(question)
    if full_answer is not None and (sentence := batch_sentence(full_answer)):
        place.markdown(f"**Largest batch:** {sentence}")
    return full_answer


def _full_answer(question: ExplorerQuestion) -> Estimate | None:
    """The answer with the largest batch, which takes a moment longer."""
    return answers.attempt(
        partial(answers.estimate, question, max_batch=True), "Looking for the largest batch"
    )


def _headline(answer: Estimate) -> None:
    verdict = answer.verdict.value
    row = st.container(horizontal=True, vertical_alignment="center")
    row.badge(verdict.capitalize(), icon=VERDICT_ICONS[verdict], color=VERDICT_COLOURS[verdict])  # type: ignore[arg-type]
    if answer.gpu is not None:
        row.badge(
            f"headroom {format_delta(answer.gpu.headroom_bytes)}",
            color="gray",
            help=f"Of {format_size(answer.gpu.usable_bytes)} that PyTorch can have on "
            f"{answer.gpu.name}",
        )
    st.markdown(f"#### {plain(verdict_sentence(answer))}")
    model = answer.model
    st.caption(
        " · ".join(
            [model.task, f"{format_count(model.parameters)} parameters", *setup_items(answer.setup)]
        )
    )


def _metrics(answer: Estimate, pinned_answer: Estimate | None) -> None:
    peak = answer.peak
    sizes = (peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)
    before: tuple[int | None, ...] = (None, None, None)
    if pinned_answer is not None:
        pinned_peak = pinned_answer.peak
        before = (pinned_peak.allocated_bytes, pinned_peak.reserved_bytes, pinned_peak.device_bytes)
    columns = st.columns(3)
    for column, (name, meter), size, size_before in zip(
        columns, _METERS.items(), sizes, before, strict=True
    ):
        column.metric(
            name,
            format_size(size),
            delta=None if size_before is None else format_delta(size - size_before),
            delta_color="inverse" if size_before != size else "off",
            help=meter,
            border=True,
        )
    st.caption(f"Range of the device peak: {interval_text(answer)}.")
    if peak.managed_bytes:
        st.caption(
            f"Beside these, {format_size(peak.managed_bytes)} of paged optimizer states: managed "
            "memory, which moves between host and GPU and no counter of PyTorch's sees."
        )


# -- the pinned scenario --------------------------------------------------------------------------


def _set_pin(text: str) -> None:
    st.session_state["pin"] = text


def _pin(question: ExplorerQuestion) -> Estimate | None:
    """The button and the text of the pinned scenario; returns its answer."""
    row = st.container(horizontal=True, vertical_alignment="bottom")
    text = row.text_input(
        "Pinned scenario",
        key="pin",
        bind="query-params",
        placeholder="none",
        help="A model and options as after --vs of memest compare. It is part of the link.",
    )
    row.button(
        "Pin",
        icon=":material/keep:",
        key="pin_now",
        on_click=_set_pin,
        args=(question.short(),),
        help="Every later change is shown as a difference from it.",
    )
    if not (text or "").strip():
        return None
    row.button("Unpin", icon=":material/keep_off:", key="unpin", on_click=_set_pin, args=("",))
    try:
        pinned_question = ExplorerQuestion.from_short(text)
    except MemestError as error:
        st.error(f"The pinned scenario: {plain(error)}")
        return None
    return answers.attempt(
        partial(answers.estimate, pinned_question), f"Working out {pinned_question.model}"
    )


# -- what fills it --------------------------------------------------------------------------------


def _gpus(answer: Estimate) -> list[GpuFit]:
    if answer.gpu is None:
        return []
    return [answer.gpu, *answer.common_gpus]


def _breakdown(answer: Estimate, pinned_answer: Estimate | None) -> None:
    st.subheader("What fills it")
    runs = [("this run", answer)] + (
        [("pinned", pinned_answer)] if pinned_answer is not None else []
    )
    chart = breakdown_chart(runs, _gpus(answer))
    st.vega_lite_chart(spec=chart.spec, alt=chart.words, key="breakdown_chart")
    fits = _gpus(answer) or list(answer.common_gpus)
    st.dataframe(
        [
            {
                "GPU": fit.name,
                "verdict": fit.verdict.value,
                "headroom": format_delta(fit.headroom_bytes),
                "usable": format_size(fit.usable_bytes),
            }
            for fit in fits
        ],
        hide_index=True,
        height="content",
        alt="GPUs: "
        + "; ".join(
            f"{fit.name} {fit.verdict.value}, headroom {format_delta(fit.headroom_bytes)}"
            for fit in fits
        ),
    )
    _parts_table(answer)


def _parts_table(answer: Estimate) -> None:
    rows = breakdown_rows(answer)
    table = [
        {"part": row["part"], "size": row["size"], "share": row["share"], "bytes": row["bytes"]}
        for row in rows
    ]
    total = answer.peak.device_bytes
    table.append({"part": "device", "size": format_size(total), "share": 1.0, "bytes": total})
    st.dataframe(
        table,
        hide_index=True,
        height="content",
        column_config={
            "part": st.column_config.TextColumn("part", width=160),
            "share": st.column_config.ProgressColumn(
                "share", format="percent", min_value=0, max_value=1
            ),
            "bytes": st.column_config.NumberColumn("bytes", format="localized"),
        },
        alt="Breakdown: " + ", ".join(f"{row['part']} {row['size']}" for row in rows),
    )
