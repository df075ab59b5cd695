"""Compare: scenarios as rows of a table, what each one buys, and why."""

from __future__ import annotations

import hashlib
import shlex
from functools import partial
from typing import Any

import streamlit as st

from memest.app import answers, scenarios
from memest.app.charts import breakdown_chart
from memest.app.question import ExplorerQuestion
from memest.app.words import plain
from memest.config.setup import OPTIMIZERS, Attention, Precision
from memest.report.findings import Comparison, Scenario
from memest.report.tables import change_sentence
from memest.report.words import batch_count
from memest.units import format_delta, format_size

__all__ = ["show"]

_FIRST = "fp16; checkpointing=full; fp16 checkpointing=full"


def show(question: ExplorerQuestion) -> None:
    """The page."""
    st.markdown("#### Runs side by side")
    st.caption(
        "The sidebar is the base; each row changes it. Empty cells stay as in the base. Add rows "
        "at the end of the table."
    )
    above = st.container()
    text = st.text_input(
        "Scenarios as text",
        _FIRST,
        key="vs",
        bind="query-params",
        help="As after --vs of memest compare, parted by semicolons.",
    )
    with above:
        _table(text or "")
    columns = tuple(scenarios.read(text or ""))
    if not columns:
        st.info("Add a row that changes something, for example precision bf16.")
        return
    comparison = answers.shown(
        partial(answers.comparison, question, columns), f"Comparing {question.model}"
    )
    if comparison is not None:
        _answer(comparison)
    words = "".join(f" --vs {shlex.quote(one)}" for one in columns)
    st.code(f"{question.command_line('compare')}{words}", language="bash", wrap_lines=True)
    if comparison is not None:
        st.download_button(
            "JSON",
            f"{comparison.to_json()}\n",
            "comparison.json",
            "application/json",
            key="compare_json",
            on_click="ignore",
            icon=":material/download:",
        )


def _table(text: str) -> None:
    """The editable table; a change goes into the text, and the text makes the next table."""
    rows = scenarios.to_rows(scenarios.read(text))
    key = f"table_{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def take() -> None:
        changed = scenarios.edited(rows, st.session_state[key])
        st.session_state["vs"] = scenarios.to_text(changed)

    # pixels that the names of the columns need; together no wider than a laptop's page
    whole = partial(st.column_config.NumberColumn, width=74, min_value=1, step=1, format="%d")
    choice = partial(st.column_config.SelectboxColumn, width=104)
    st.data_editor(
        _frame(rows),
        key=key,
        num_rows="dynamic",
        placeholder="",
        hide_index=True,
        on_change=take,
        column_config={
            "batch": whole("batch"),
            "seq_len": whole("tokens"),
            "grad_accum": whole("accum", help="Micro-batches of one optimizer step"),
            "precision": choice("precision", options=[p.value for p in Precision]),
            "checkpointing": st.column_config.TextColumn("checkpointing", width=134),
            "optim": choice("optim", options=list(OPTIMIZERS), width=84),
            "attn_implementation": choice("attention", options=[a.value for a in Attention]),
            "gpu": st.column_config.TextColumn("gpu", width=64),
            scenarios.OTHERS: st.column_config.TextColumn(
                "others", help="Any other options: dtype=bfloat16 padded"
            ),
        },
        alt=f"Scenarios: {text}",
    )


def _frame(rows: list[dict[str, Any]]) -> Any:
    """The rows with the types that their columns are edited as, also where all are empty."""
    import pandas as pd

    return pd.DataFrame(
        {
            name: pd.Series([row[name] for row in rows], dtype=scenarios.dtype_of(name))
            for name in (*scenarios.COLUMNS, scenarios.OTHERS)
        }
    )


def _answer(comparison: Comparison) -> None:
    first, *others = comparison.scenarios
    for one in others:
        st.markdown(f"- {plain(change_sentence(one, first))}")
    st.dataframe(
        [_row(one, first) for one in comparison.scenarios],
        hide_index=True,
        alt="; ".join(
            f"{one.name}: {format_size(one.estimate.peak.device_bytes)}, "
            f"{one.estimate.verdict.value}"
            for one in comparison.scenarios
        ),
    )
    gpus = {
        one.estimate.gpu.name: one.estimate.gpu for one in comparison.scenarios if one.estimate.gpu
    }
    drawn = breakdown_chart(
        [(one.name, one.estimate) for one in comparison.scenarios], gpus.values()
    )
    st.vega_lite_chart(spec=drawn.spec, alt=drawn.words, key="compare_chart")
    for one in others:
        if one.reasons is not None:
            with st.expander(f"Why: {plain(one.name)}", expanded=len(others) == 1):
                for sentence in one.reasons.sentences:
                    st.markdown(f"- {plain(sentence)}")
    st.caption(f"Time is {comparison.time_basis}.")
    for note in comparison.notes:
        st.caption(plain(note))


def _row(one: Scenario, first: Scenario) -> dict[str, str]:
    answer, base = one.estimate, first.estimate
    gpu = answer.gpu
    delta = answer.peak.device_bytes - base.peak.device_bytes
    return {
        "scenario": one.name,
        "verdict": answer.verdict.value,
        "headroom": "" if gpu is None else format_delta(gpu.headroom_bytes),
        "allocated": format_size(answer.peak.allocated_bytes),
        "reserved": format_size(answer.peak.reserved_bytes),
        "device": format_size(answer.peak.device_bytes),
        "change": "" if one is first else format_delta(delta),
        "largest batch": "" if answer.max_batch is None else batch_count(answer.max_batch),
        "time of a sample": "" if one.relative_time is None else f"{one.relative_time:.2f} ×",
    }
