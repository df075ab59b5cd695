"""Calibration: what corrects estimates, and the fit of a new one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from memest.app import answers, waiting
from memest.app.calibration_chart import ratio_chart
from memest.app.labels import in_page_words
from memest.app.link import linked, set_page_value
from memest.app.question import ExplorerQuestion
from memest.app.records import (
    STORE,
    content_of,
    draw_blocks,
    measurements,
    pairs_of,
    read_upload,
    runs_of,
    sources,
)
from memest.app.uploads import MAX_EXPORT_BYTES, calibration_files, calibration_name
from memest.app.views.measure import measure
from memest.app.views.what_if_parts import calibration_tab
from memest.app.widgets import download, gpu_label
from memest.app.words import plain
from memest.calibration.fitting.example import FACTOR, MODELS, RUNS, example_pairs
from memest.calibration.fitting.fit import Evaluation, evaluate, fit_calibration
from memest.calibration.fitting.report import report_blocks
from memest.calibration.measurement import Measurement
from memest.errors import ConfigError, MemestError
from memest.estimation.calibration import Calibration
from memest.estimation.calibration_files import read_calibration, write_calibration
from memest.estimation.gpu_target import calibration_folders
from memest.estimation.tracer import KNOWN_ALONE
from memest.report.words import interval_text, short_name
from memest.units import MIB, format_delta, format_size

__all__ = ["show"]

UPLOAD = "an uploaded export"
_STORY, _PROFILES, _MEASURE, _FIT = "What it does", "Profiles", "Measure", "Fit a profile"
SIMULATED = "Simulated: no GPU was measured"


def show(question: ExplorerQuestion) -> None:
    """The page."""
    st.markdown("#### Predicted → measured → factor")
    things = [_STORY, _PROFILES]
    if not os.environ.get(KNOWN_ALONE):  # what strangers may ask of a server keeps no card busy
        things += [_MEASURE, _FIT]
    do = st.segmented_control(
        "Do", things, **linked("do", _STORY, things), required=True, label_visibility="collapsed"
    )
    if do == _MEASURE:
        measure(_go_and_fit)
    elif do == _FIT:
        _fit()
    elif do == _PROFILES:
        _existing()
    else:
        _story(question)


# -- what it does ---------------------------------------------------------------------------------

_STEPS = (
    (
        "1 · Predicted",
        (
            "A trace of the real step and a replay of the allocator. Nothing in it is fitted: it "
            "is what you see on every page."
        ),
    ),
    (
        "2 · Measured",
        (
            "`memest calibrate run` trains real steps on your GPU, each in a process of its own, "
            "and writes down what the allocator and the driver say. It takes minutes."
        ),
    ),
    (
        "3 · Factor",
        (
            "`memest calibrate fit` finds by how much each part is to be multiplied (a factor), "
            "what comes on top of it (an offset: cache, CUDA context) and how far off it still is."
        ),
    ),
)


def _story(question: ExplorerQuestion) -> None:
    """What a calibration is, what it does to the question, or would."""
    for column, (head, words) in zip(st.columns(3), _STEPS, strict=True):
        with column.container(border=True, height="stretch"):
            st.markdown(f"**{head}**")
            st.markdown(words)
    answer = waiting.attempt(partial(answers.estimate, question), f"Working out {question.model}")
    if answer is not None and answer.calibration is not None:
        st.markdown("##### What it does to this question")
        calibration_tab(answer, with_coverage=False)
        path = Path(answer.calibration.path)
        applied = waiting.attempt(partial(read_calibration, path), "Reading the profile")
        if applied is not None:
            st.markdown(f"##### {plain(calibration_name(path))}")
            draw_calibration(applied)
            _its_runs(applied)
        return
    gpu = gpu_label(question.gpus[0]) if question.gpus else "this machine's GPU"
    st.markdown(f"##### No profile of {plain(gpu)} is on this machine")
    st.markdown("On a machine with that card, these two make one; every estimate then finds it:")
    st.code(
        "memest calibrate run --campaign standard\nmemest calibrate fit",
        language=None,
        wrap_lines=True,
    )
    if answer is not None:
        st.markdown(
            f"What would change: the range of the device peak, now {interval_text(answer)} by a "
            "built-in table without a level, would be that of your card and software, and contain "
            "90 % of such runs; the peaks would move by what was measured."
        )
    _example()


def _example() -> None:
    """A fit of simulated runs, from prediction to factor."""
    st.markdown("##### A simulated example")
    st.caption(
        f"{MODELS * RUNS} made-up runs of {MODELS} made-up models on a made-up card. Its "
        f"activations and temporaries are {FACTOR - 1:.0%} larger than predicted; its context and "
        "cache, too, are larger than the table and the replay say. The fit is the real one and "
        "finds all of it again."
    )
    fitted = waiting.attempt(_example_fit, "Fitting the example")
    if fitted is None:
        return
    calibration, evaluations = fitted
    _draw_ratios(evaluations, SIMULATED, "example_chart")
    draw_calibration(calibration)


def _draw_ratios(evaluations: Sequence[Evaluation], title: str, key: str) -> None:
    """Dots around 1.0, each with its range: runs, corrected by fits without their models."""
    chart = ratio_chart(evaluations, in_page_words(title))
    st.vega_lite_chart(spec=chart.spec, alt=chart.words, key=key)


@st.cache_resource(show_spinner=False)
def _example_fit() -> tuple[Calibration, tuple[Evaluation, ...]]:
    pairs = example_pairs()
    return fit_calibration(pairs), evaluate(pairs)


def _existing() -> None:
    files = calibration_files()
    if not files:
        st.info(
            "There is no profile yet. `memest calibrate run` and `memest calibrate fit` make one; "
            "estimates find it by themselves."
        )
        return
    paths = {calibration_name(path): path for path in files}
    name = st.selectbox(
        "Profile", list(paths), **linked("calibration_profile", next(iter(paths)), paths)
    )
    profile_path = paths[name or next(iter(paths))]
    try:
        calibration = read_calibration(profile_path)
    except MemestError as error:
        st.error(plain(str(error).replace(str(profile_path), profile_path.name)))
        return
    draw_calibration(calibration)
    _its_runs(calibration)


def _its_runs(calibration: Calibration) -> None:
    """Each run that a profile was fitted to around 1.0, predicted when it is asked for."""
    dataset = calibration.provenance.dataset_sha256
    runs = () if os.environ.get(KNOWN_ALONE) else runs_of(dataset)
    if not runs:
        return
    if st.button(
        "Each run around 1.0",
        key="its_runs",
        icon=":material/scatter_plot:",
        help="Predicts them anew, which takes minutes the first time.",
    ):
        work = partial(_evaluate_runs, runs)
        found = waiting.attempt(work, "Predicting its runs", stop="runs_stopped")
        st.session_state.ratios = dataset, found
    if st.session_state.pop("runs_stopped", False):
        st.info("It was stopped.", icon=":material/stop_circle:")
    of, evaluations = st.session_state.get("ratios", ("", None))
    if of == dataset and evaluations is not None:
        title = f"Measured on {', '.join(calibration.provenance.gpus)}"
        _draw_ratios(evaluations, title, "runs_chart")


def _evaluate_runs(runs: tuple[Measurement, ...]) -> tuple[Evaluation, ...]:
    return evaluate(pairs_of(runs, waiting.say))


def draw_calibration(calibration: Calibration) -> None:
    """How right it was, its factors and offsets, and where it is from."""
    validation, band = calibration.validation, calibration.band
    columns = st.columns(4)
    columns[0].metric("Runs", f"{validation.cases}", border=True, height="stretch")
    columns[1].metric("Models", f"{validation.models}", border=True, height="stretch")
    columns[2].metric(
        "Median error",
        _percent(validation.error),
        border=True,
        delta_color="off",
        delta=None if validation.raw_error is None else f"before {validation.raw_error:.2%}",
        delta_arrow="off",
        help="For models left out of the fit, before and after correction.",
    )
    columns[3].metric(
        "Inside their range",
        _percent(validation.coverage, 0),
        border=True,
        delta_color="off",
        delta=None if band.level is None else f"target {band.level:.0%}",
        delta_arrow="off",
        help="Share of runs of models left out of the fit, in ranges made without them.",
    )
    left, right = st.columns(2)
    with left:
        st.markdown("**Factors**: what a part is multiplied by")
        factors = [(name, f"× {value:.4f}") for name, value in calibration.factors.items()]
        rest = "all other parts" if factors else "all parts"
        factors.append((rest, f"× {calibration.other_factor:.4f}"))
        _table(("part", "factor"), factors)
        if calibration.tensors != "identity":
            st.caption(f"Model of the tensors: {calibration.tensors}.")
    with right:
        st.markdown("**Offsets**: what is added")
        rows = [("beyond the replayed cache", format_delta(calibration.gap_bytes), "")]
        rows += [
            (
                f"context and kernels, {short_name(part.gpu)}",
                format_size(part.constant_bytes),
                (
                    f"{format_delta(part.low_bytes)} to {format_delta(part.high_bytes)}, "
                    f"{part.cases} readings"
                ),
            )
            for part in calibration.process
        ]
        if calibration.per_kernel_bytes:
            each = format_size(round(calibration.per_kernel_bytes))
            rows.append(("for each distinct operator", each, ""))
        rows += [
            (f"with {kind} autocast", format_delta(size), "")
            for kind, size in calibration.precision_bytes.items()
        ]
        _table(("what", "offset", "spread"), rows)
    _origin(calibration)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A small table, whose words wrap where a column is narrow."""
    st.table(
        [dict(zip(head, map(plain, row), strict=True)) for row in rows],
        hide_index=True,
        border="horizontal",
        alt="; ".join(" ".join(filter(None, row)) for row in rows),
    )


def _origin(calibration: Calibration) -> None:
    """When and with what it was measured, and what it covers."""
    source, measured = calibration.provenance, calibration.measured
    rows = [("GPUs", ", ".join(source.gpus)), ("measured", f"{source.first} to {source.last}")]
    rows += [(name, version) for name, version in source.versions.items()]
    rows += [
        (f"covers {name}", ", ".join(values)) for name, values in measured.seen.items() if values
    ]
    rows.append(("covers runs up to", f"{format_size(measured.allocated_bytes)} allocated"))
    with st.expander("When, with what, and which models it covers"):
        lines = (f"- {plain(name)}: {plain(in_page_words(words))}" for name, words in rows)
        st.markdown("\n".join(lines))
    for note in source.notes:
        st.caption(plain(in_page_words(note)))


def _percent(value: float | None, digits: int = 2) -> str:
    return "not known" if value is None else f"{value:.{digits}%}"


# -- a fit ----------------------------------------------------------------------------------------


def _go_and_fit() -> None:
    """Lead to the fit of what this machine measured."""
    set_page_value("do", _FIT)
    set_page_value("fit_from", STORE)


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
    answer = waiting.attempt(read, "Reading")
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
        new_fit = waiting.attempt(partial(_fit_runs, tuple(runs)), "Fitting", stop="fit_stopped")
        st.session_state.fitted = None if new_fit is None else (content, *new_fit)
    if st.session_state.pop("fit_stopped", False):
        st.info("The fit was stopped, and changed nothing.", icon=":material/stop_circle:")
    last_fit = st.session_state.get("fitted")
    if last_fit is not None and last_fit[0] == content:  # not that of another file
        _result(*last_fit[1:])


def _fit_runs(
    runs: tuple[Measurement, ...],
) -> tuple[Calibration, tuple[Evaluation, ...], list[Any]]:
    pairs = pairs_of(runs, waiting.say)
    calibration = fit_calibration(pairs)
    return calibration, evaluate(pairs), report_blocks(pairs, calibration)


def _result(
    calibration: Calibration, evaluations: tuple[Evaluation, ...], blocks: list[Any]
) -> None:
    _draw_ratios(evaluations, f"Measured on {', '.join(calibration.provenance.gpus)}", "fit_chart")
    draw_calibration(calibration)
    row = st.container(horizontal=True, vertical_alignment="bottom")
    document = f"{json.dumps(calibration.to_dict(), indent=2)}\n"
    download(row, "profile", "JSON", document, key="profile_json", label="Profile")
    _offer_to_keep(row, calibration)
    with st.expander("Predicted against measured, before and after"):
        draw_blocks(blocks)


def _offer_to_keep(row: DeltaGenerator, calibration: Calibration) -> None:
    """Keep a profile on this machine, under a name."""
    name = row.text_input("Keep it as", "explorer", key="keep_as", max_chars=60)
    if row.button("Keep", key="keep", help="Beside the others of this machine: estimates find it."):
        target = waiting.attempt(partial(_keep, calibration, name or ""), "Writing")
        if target is not None:
            st.success(plain(f"Kept as {target.name}: estimates for its GPU find it."))


def _keep(calibration: Calibration, name: str) -> Path:
    if not name or Path(name).name != name or name.startswith("."):
        raise ConfigError(f"{name!r} is no name of a file: use letters, digits and dashes.")
    target = calibration_folders()[0] / f"{name.removesuffix('.json')}.json"
    if target.exists():
        raise ConfigError(f"{target} is there already: choose another name.")
    write_calibration(calibration, target)
    return target
