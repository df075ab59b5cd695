"""Calibration: the profiles that correct estimates, and the fit of a new one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st

from memest.app import answers
from memest.app.question import Question
from memest.app.records import content_of, draw_blocks, measurements, pairs_of, sources, uploaded
from memest.app.uploads import MAX_EXPORT_BYTES, profile_files
from memest.app.words import plain
from memest.calibration.fitting.fit import fit_profile
from memest.calibration.fitting.report import report_blocks
from memest.calibration.measurement import Measurement
from memest.calibration_profile import CalibrationProfile
from memest.cards import profile_folders
from memest.errors import ConfigError, MemestError
from memest.profile_file import read_profile, write_profile
from memest.units import MIB, format_size

__all__ = ["show"]

UPLOAD = "an uploaded export"


def show(question: Question) -> None:  # noqa: ARG001 - pages share one signature
    """The page."""
    st.markdown("#### Calibration profiles")
    st.caption(
        "What theory leaves open is measured: a profile corrects the parts of an estimate, adds "
        "what a process holds on a GPU, and gives a range with a level."
    )
    existing, fit = st.tabs(["Profiles", "Fit a profile"], key="do", bind="query-params")
    with existing:
        _existing()
    with fit:
        _fit()


def _existing() -> None:
    files = profile_files()
    if not files:
        st.info(
            "There is no profile yet. `memest calibrate run` and `memest calibrate fit` make one; "
            f"estimates find it in {profile_folders()[0]}."
        )
        return
    twice = Counter(path.name for path in files)
    names = {
        str(path): path.name if twice[path.name] == 1 else f"{path.name} in {path.parent}"
        for path in files
    }
    chosen = st.selectbox(
        "Profile", list(names), format_func=lambda path: names.get(path, path),
        key="calibration_profile", bind="query-params",
    )  # fmt: skip
    try:
        profile = read_profile(chosen)
    except MemestError as error:
        st.error(plain(error))
        return
    st.caption(chosen)
    draw_profile(profile)


def draw_profile(profile: CalibrationProfile) -> None:
    """Coefficients of a profile, its range, and how right it was."""
    found = profile.validation
    columns = st.columns(4)
    columns[0].metric("Runs", f"{found.cases}", border=True)
    columns[1].metric("Models", f"{found.models}", border=True)
    columns[2].metric(
        "Median error", _percent(found.error), border=True, delta_color="off",
        delta=None if found.raw_error is None else f"before {found.raw_error:.2%}",
        delta_arrow="off", help="For models left out of the fit, before and after correction.",
    )  # fmt: skip
    columns[3].metric("Inside their range", _percent(found.coverage, 0), border=True)
    st.markdown("##### Factors of the tensors")
    factors = [(name, f"{value:.4f}") for name, value in profile.factors.items()]
    factors.append(("others", f"{profile.other_factor:.4f}"))
    st.dataframe(
        [{"part": name, "factor": value} for name, value in factors],
        hide_index=True,
        alt="Factors: " + ", ".join(f"{name} {value}" for name, value in factors),
    )
    st.caption(
        f"Model of the tensors: {profile.tensors}; beyond the replayed reserved memory: "
        f"{format_size(profile.gap_bytes)}."
    )
    if profile.process:
        st.markdown("##### Context, kernels and libraries")
        st.dataframe(
            [
                {
                    "GPU": part.gpu,
                    "constant": format_size(part.constant_bytes),
                    "range": f"{format_size(part.low_bytes)} to {format_size(part.high_bytes)}",
                    "readings": part.cases,
                }
                for part in profile.process
            ],
            hide_index=True,
            alt="What a process holds beside its tensors, by GPU",
        )
    st.markdown("##### Where it is from")
    source = profile.provenance
    st.markdown(
        f"- GPUs: {', '.join(source.gpus)}\n- from {source.first} to {source.last}\n- "
        + "\n- ".join(f"{name} {version}" for name, version in source.versions.items())
    )
    for note in source.notes:
        st.caption(plain(note))


def _percent(value: float | None, digits: int = 2) -> str:
    return "not known" if value is None else f"{value:.{digits}%}"


# -- a fit ----------------------------------------------------------------------------------------


def _fit() -> None:
    known = sources()
    name = st.selectbox(
        "Measurements", [UPLOAD, *known], key="fit_from", bind="query-params",
        help="What memest calibrate export wrote, or what comes with the package.",
    )  # fmt: skip
    if name in known:
        read: Callable[[], Any] = partial(measurements, known[name])
    else:
        given = st.file_uploader(
            "Export of a campaign", type=["jsonl", "gz"], key="records",
            max_upload_size=MAX_EXPORT_BYTES // MIB,
            help="JSON lines of memest calibrate export, gzip or not; read as data, at most "
            f"{format_size(MAX_EXPORT_BYTES)}.",
        )  # fmt: skip
        if given is None:
            st.caption("`memest calibrate export --out campaign.jsonl.gz` writes one.")
            return
        read = partial(uploaded, given.name, given.getvalue())
    answer = answers.shown(read, "Reading")
    if answer is None:
        return
    some, problems = answer
    for problem in problems[:5]:
        st.warning(plain(problem))
    if not some:
        st.info("It holds no run: `memest calibrate run` measures some.")
        return
    st.markdown(f"{len(some)} runs were read.")
    content = content_of(some)
    if st.button("Fit a profile", type="primary", key="fit_now"):
        found = answers.shown(partial(_fitted, tuple(some)), "Fitting")
        st.session_state.fitted = None if found is None else (content, *found)
    fitted = st.session_state.get("fitted")
    if fitted is not None and fitted[0] == content:  # not that of another file
        _result(*fitted[1:])


def _fitted(some: tuple[Measurement, ...]) -> tuple[CalibrationProfile, list[Any]]:
    pairs = pairs_of(some, answers.say)
    profile = fit_profile(pairs)
    return profile, report_blocks(pairs, profile)


def _result(profile: CalibrationProfile, blocks: list[Any]) -> None:
    draw_profile(profile)
    row = st.container(horizontal=True, vertical_alignment="bottom")
    row.download_button(
        "Profile", f"{json.dumps(profile.to_dict(), indent=2)}\n", "profile.json",
        "application/json", key="profile_json", on_click="ignore", icon=":material/download:",
    )  # fmt: skip
    name = row.text_input("Keep it as", "explorer", key="keep_as", max_chars=60)
    if row.button("Keep", key="keep", help=f"In {profile_folders()[0]}: estimates find it."):
        kept = answers.shown(partial(_keep, profile, name or ""), "Writing")
        if kept is not None:
            st.success(plain(f"Written to {kept}: estimates for its GPU find it."))
    with st.expander("Predicted against measured, before and after"):
        draw_blocks(blocks)


def _keep(profile: CalibrationProfile, name: str) -> Path:
    if not name or Path(name).name != name or name.startswith("."):
        raise ConfigError(f"{name!r} is no name of a file: use letters, digits and dashes.")
    target = profile_folders()[0] / f"{name.removesuffix('.json')}.json"
    if target.exists():
        raise ConfigError(f"{target} is there already: choose another name.")
    write_profile(profile, target)
    return target
