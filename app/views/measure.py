"""Measuring on this machine: a campaign, how far it is, and its end by hand."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from memest.app import waiting
from memest.app.campaign_run import (
    CampaignRun,
    campaign_words,
    latest,
    measuring_devices,
    start,
)
from memest.app.link import linked
from memest.app.words import plain
from memest.calibration.campaign import CAMPAIGNS, read_campaign
from memest.calibration.store import default_store
from memest.errors import MemestError

__all__ = ["measure"]

_LAST_LINES = 8
_FIRST = "quick"


def measure(go_and_fit: Callable[[], None]) -> None:
    """The campaign that runs, or the inputs to begin one.

    Args:
        go_and_fit: leads to the fit of what was measured.
    """
    run = latest()
    if run is not None and run.under_way:
        _watch()
        return
    if run is not None:
        _outcome(run, go_and_fit)
    name = st.selectbox(
        "Campaign",
        list(CAMPAIGNS),
        **linked("campaign", _FIRST, CAMPAIGNS),
        format_func=_campaign_label,
        help="Real training steps, case after case, each in a process of its own.",
    )
    name = name or _FIRST
    st.caption(plain(read_campaign(name).about.partition("\n")[0]))
    try:
        devices = measuring_devices()
    except MemestError as error:
        # what it says behind the colon is about estimates
        _no_card(name, f": {str(error).partition(':')[0]}")
        return
    if not devices:
        _no_card(name, "")
        return
    device = next(iter(devices))
    if len(devices) > 1:
        device = st.selectbox(
            "Card", list(devices), key="device", format_func=lambda key: f"{devices[key]} ({key})"
        )
    st.caption(
        plain(
            f"It trains on the {devices[device]} of this machine, which had better be idle. What "
            f"was measured before is passed over; each result is kept at once in {default_store()}."
        )
    )
    st.button(
        "Measure",
        type="primary",
        key="measure_now",
        icon=":material/play_arrow:",
        on_click=_begin,
        args=(name, device),
    )
    refused = st.session_state.pop("measure_refused", "")
    if refused:
        st.error(plain(refused), icon=":material/error:")


def _campaign_label(name: str) -> str:
    return f"{name} · {len(read_campaign(name).cases)} cases"


def _no_card(name: str, why: str) -> None:
    """What to do where nothing can be measured."""
    st.info(
        f"There is no NVIDIA GPU on the machine that this explorer runs on{plain(why)}. Nothing "
        "can be measured here. On a machine with one, this does the same; a run that was ended "
        "goes on where it stopped:",
        icon=":material/memory_alt:",
    )
    st.code(" ".join(campaign_words(name)), language=None, wrap_lines=True)
    st.caption(
        "`memest calibrate export --out campaign.jsonl.gz` there takes the results along, and "
        "**Fit a profile** here reads them."
    )


def _begin(name: str, device: str) -> None:
    try:
        start(name, device)
    except (MemestError, OSError) as error:
        st.session_state.measure_refused = str(error)


@st.fragment(run_every=1.0)
def _watch() -> None:
    """How far the campaign is; the page is drawn again when it is over."""
    run = latest()
    if run is None or not run.under_way:
        st.rerun()
        return
    done = run.cases_over
    words = f"{run.name}: {done} of {run.total} cases, {waiting.duration(run.seconds)}"
    if run.stopped:
        words += "; stopping, what was measured is kept"
    elif left := _time_left(run):
        words += f", {left}"
    st.progress(done / run.total, text=plain(words))
    st.button(
        "Stop",
        key="stop_campaign",
        icon=":material/stop:",
        on_click=run.stop,
        disabled=run.stopped,
        help="The case under way is given up; all that was measured stays, and a later campaign "
        "goes on from there.",
    )
    _lines(run)


def _time_left(run: CampaignRun) -> str:
    """What the command says of it in its last line."""
    last = run.lines[-1] if run.lines else ""
    return last.rpartition(", ")[2] if last.endswith(" left") else ""


def _lines(run: CampaignRun) -> None:
    st.code(run.command, language=None, wrap_lines=True)
    if run.lines:
        st.code("\n".join(run.lines[-_LAST_LINES:]), language=None, wrap_lines=True)


def _outcome(run: CampaignRun, go_and_fit: Callable[[], None]) -> None:
    """What became of the last campaign."""
    cases = f"{run.cases_over} of {run.total} cases in {waiting.duration(run.seconds)}"
    if run.stopped:
        text = f"{run.name} was stopped after {cases}: these are kept. It goes on where it was."
        st.info(plain(text), icon=":material/stop_circle:")
    elif run.failed:
        st.warning(
            plain(f"{run.name} ended with something wrong, after {cases}: its last words tell."),
            icon=":material/error:",
        )
    else:
        st.success(plain(f"{run.name} is over: {cases}."), icon=":material/check_circle:")
    if run.failed or not run.stopped:
        _lines(run)
    if run.cases_over:
        st.button("Fit a profile to it", key="fit_it", on_click=go_and_fit)
