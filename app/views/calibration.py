"""Calibration: what corrects estimates, and the fit of a new one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st

from memest.app import answers
from memest.app.link import linked
from memest.app.question import ExplorerQuestion
from memest.app.records import content_of, draw_blocks, measurements, pairs_of, read_upload, sources
from memest.app.uploads import MAX_EXPORT_BYTES, calibration_files
from memest.app.widgets import download
from memest.app.words import plain
from memest.calibration.fitting.fit import fit_calibration
from memest.calibration.fitting.report import report_blocks
from memest.calibration.measurement import Measurement
from memest.errors import ConfigError, MemestError
from memest.estimation.calibration import Calibration
from memest.estimation.calibration_files import read_calibration, write_calibration
from memest.estimation.gpu_target import calibration_folders
from memest.units import MIB, format_size

__all__ = ["show"]

UPLOAD = "an uploaded export"
_DO = ("Profiles", "Fit a profile")


def show(question: ExplorerQuestion) -> None:  # noqa: ARG001 - pages share one signature
    """The page."""
    st.markdown("#### Calibrations")
    st.caption(
        "What theory leaves open is measured: a profile corrects the parts of an estimate, adds "
        "what a process holds on a GPU, and gives a range with a level."
    )
    do = st.segmented_control(
        "Do", _DO, **linked("do", _DO[0], _DO), required=True, label_visibility="collapsed"
    )
    if do == _DO[1]:
        _fit()
    else:
        _existing()


def _existing() -> None:
    files = calibration_files()
    if not files:
        st.info(
            "There is no profile yet. `memest calibrate run` and `memest calibrate fit` make one; "
            f"estimates find it in {calibration_folders()[0]}."
        )
        return
    name_counts = Counter(path.name for path in files)
    names = {
        str(path): path.name if name_counts[path.name] == 1 else f"{path.name} in {path.parent}"
        for path in files
    }
    profile_path = st.selectbox(
        "Profile",
        list(names),
        format_func=lambda path: names.get(path, path),
        **linked("calibration_profile", next(iter(names)), names),
    )
    try:
        calibration = read_calibration(profile_path)
    except MemestError as error:
        st.error(plain(error))
        return
    st.caption(profile_path)
    draw_calibration(calibration)


def draw_calibration(calibration: Calibration) -> None:
    """Coefficients of a calibration, its range, and how right it was."""
    cross_validation = calibration.validation
    columns = st.columns(4)
    columns[0].metric("Runs", f"{cross_validation.cases}", border=True)
    columns[1].metric("Models", f"{cross_validation.models}", border=True)
    columns[2].metric(
        "Median error",
        _percent(cross_validation.error),
        border=True,
        delta_color="off",
        delta=None
        if cross_validation.raw_error is None
        else f"before {cross_validation.raw_error:.2%}",
        delta_arrow="off",
        help="For models left out of the fit, before and after correction.",
    )
    columns[3].metric("Inside their range", _percent(cross_validation.coverage, 0), border=True)
    st.markdown("##### Factors of the tensors")
    factors = [(name, f"{value:.4f}") for name, value in calibration.factors.items()]
    factors.append(("others", f"{calibration.other_factor:.4f}"))
    st.dataframe(
        [{"part": name, "factor": value} for name, value in factors],
        hide_index=True,
        alt="Factors: " + ", ".join(f"{name} {value}" for name, value in factors),
    )
    st.caption(
        f"Model of the tensors: {calibration.tensors}; beyond the replayed reserved memory: "
        f"{format_size(calibration.gap_bytes)}."
    )
    if calibration.process:
        st.markdown("##### Context, kernels and libraries")
        st.dataframe(
            [
                {
                    "GPU": part.gpu,
                    "constant": format_size(part.constant_bytes),
                    "range": f"{format_size(part.low_bytes)} to {format_size(part.high_bytes)}",
                    "readings": part.cases,
                }
                for part in calibration.process
            ],
            hide_index=True,
            alt="What a process holds beside its tensors, by GPU",
        )
    st.markdown("##### Where it is from")
    source = calibration.provenance
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
    files = sources()
    name = st.selectbox(
        "Measurements",
        [UPLOAD, *files],
        **linked("fit_from", UPLOAD, (UPLOAD, *files)),
        help="What memest calibrate export wrote, or what comes with the package.",
    )
    if name in files:
        read: Callable[[], Any] = partial(measurements, files[name])
    else:
        upload = st.file_uploader(
            "Export of a campaign",
            type=["jsonl", "gz"],
            key="records",
            max_upload_size=MAX_EXPORT_BYTES // MIB,
            help="JSON lines of memest calibrate export, gzip or not; read as data, at most "
            f"{format_size(MAX_EXPORT_BYTES)}.",
        )
        if upload is None:
            st.caption("`memest calibrate export --out campaign.jsonl.gz` writes one.")
            return
        read = partial(read_upload, upload.name, upload.getvalue())
    answer = answers.attempt(read, "Reading")
    if answer is None:
        return
    runs, problems = answer
    for problem in problems[:5]:
        st.warning(plain(problem))
    if not runs:
        st.info("It holds no run: `memest calibrate run` measures some.")
        return
    st.markdown(f"{len(runs)} runs were read.")
    content = content_of(runs)
    if st.button("Fit a profile", type="primary", key="fit_now"):
        new_fit = answers.attempt(partial(_fit_runs, tuple(runs)), "Fitting")
        st.session_state.fitted = None if new_fit is None else (content, *new_fit)
    last_fit = st.session_state.get("fitted")
    if last_fit is not None and last_fit[0] == content:  # not that of another file
        _result(*last_fit[1:])


def _fit_runs(runs: tuple[Measurement, ...]) -> tuple[Calibration, list[Any]]:
    pairs = pairs_of(runs, answers.say)
    calibration = fit_calibration(pairs)
    return calibration, report_blocks(pairs, calibration)


def _result(calibration: Calibration, blocks: list[Any]) -> None:
    draw_calibration(calibration)
    row = st.container(horizontal=True, vertical_alignment="bottom")
    document = f"{json.dumps(calibration.to_dict(), indent=2)}\n"
    download(row, "profile", "JSON", document, key="profile_json", label="Profile")
    name = row.text_input("Keep it as", "explorer", key="keep_as", max_chars=60)
    if row.button("Keep", key="keep", help=f"In {calibration_folders()[0]}: estimates find it."):
        target = answers.attempt(partial(_keep, calibration, name or ""), "Writing")
        if target is not None:
            st.success(plain(f"Written to {target}: estimates for its GPU find it."))
    with st.expander("Predicted against measured, before and after"):
        draw_blocks(blocks)


def _keep(calibration: Calibration, name: str) -> Path:
    if not name or Path(name).name != name or name.startswith("."):
        raise ConfigError(f"{name!r} is no name of a file: use letters, digits and dashes.")
    target = calibration_folders()[0] / f"{name.removesuffix('.json')}.json"
    if target.exists():
        raise ConfigError(f"{target} is there already: choose another name.")
    write_calibration(calibration, target)
    return target
