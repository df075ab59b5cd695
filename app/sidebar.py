"""The inputs that all pages share: they stand in the sidebar and in the URL."""

from __future__ import annotations

from typing import Any

import streamlit as st

from memest.app.question import ExplorerQuestion
from memest.app.uploads import MAX_CONFIG_BYTES, calibration_files, keep_config
from memest.app.widgets import gpu_names, option_widget
from memest.app.words import plain
from memest.catalog.models import catalogue
from memest.config.option import Panel
from memest.config.option_table import OPTIONS, OWN_MODULE_NAMES
from memest.config.options import find_option
from memest.errors import MemestError
from memest.estimation.gpu_target import NO_CALIBRATION
from memest.units import MIB, format_size

__all__ = ["DEFAULT_GPU", "DEFAULT_MODEL", "ask"]

DEFAULT_MODEL = "bert-large-uncased"
DEFAULT_GPU = "rtx-4090"
_FIRST = (
    "batch",
    "seq_len",
    "grad_accum",
    "precision",
    "checkpointing",
    "optim",
    "dtype",
    "attn_implementation",
)
_APART = ("gpu", "calibration", "trust_remote_code", *OWN_MODULE_NAMES)
_SPELT_TWICE = ("bf16", "fp16", "expandable_segments", "gradient_checkpointing_kwargs")
"""Short forms of other options, which have widgets already."""


def ask() -> ExplorerQuestion:
    """Draw the inputs; returns the question that they make."""
    options: dict[str, Any] = {}
    for name in find_option("calibration").aliases:
        if name in st.query_params:
            st.query_params["calibration"] = st.query_params.pop(name)
    with st.sidebar:
        model = _model()
        options["gpu"] = _gpus()
        left, right = st.columns(2)
        with left:
            options["batch"] = option_widget("batch")
        with right:
            options["seq_len"] = option_widget("seq_len")
        for name in _FIRST[2:]:
            options[name] = option_widget(name)
        _advanced_options(options)
    return ExplorerQuestion.of(model, options)


def _model() -> str:
    names = [entry.id for entry in catalogue()]
    _upload()
    name = st.selectbox(
        "Model",
        names,
        index=names.index(DEFAULT_MODEL),
        key="model",
        bind="query-params",
        accept_new_options=True,
        help="A model of the catalogue, or any id of the Hugging Face hub: type it. A config.json "
        "is uploaded below.",
    )
    return (name or "").strip()


def _gpus() -> tuple[str, ...]:
    names = st.multiselect(
        "GPU",
        gpu_names(),
        default=[DEFAULT_GPU],
        key="gpu",
        bind="query-params",
        accept_new_options=True,
        max_selections=6,
        help=f"{find_option('gpu').help} The first one decides the verdict.",
    )
    return tuple(names)


def _upload() -> None:
    """Take an uploaded configuration over into the model's widget, before that is drawn."""
    upload = st.session_state.get("config_file")
    last_upload_id = st.session_state.get("taken_upload")
    if upload is None or upload.file_id == last_upload_id:
        return
    st.session_state.taken_upload = upload.file_id
    try:
        if upload.size > MAX_CONFIG_BYTES:
            size = format_size(MAX_CONFIG_BYTES)
            st.session_state.upload_error = f"{upload.name} is larger than {size}."
            return
        st.session_state.model = keep_config(upload.name, upload.getvalue())
        st.session_state.upload_error = ""
    except (MemestError, OSError, ValueError) as error:
        st.session_state.upload_error = str(error)


def _advanced_options(options: dict[str, Any]) -> None:
    with st.expander("Own config.json", icon=":material/upload_file:"):
        st.file_uploader(
            "config.json of a model",
            type=["json"],
            key="config_file",
            max_upload_size=MAX_CONFIG_BYTES // MIB,
            help=f"Read as data, never run; at most {format_size(MAX_CONFIG_BYTES)}. It stays on "
            "the machine that runs this.",
        )
        if st.session_state.get("upload_error"):
            st.error(plain(st.session_state.upload_error))
    for panel in Panel:
        members = [
            option
            for option in OPTIONS
            if option.panel is panel and option.name not in (*_FIRST, *_APART, *_SPELT_TWICE)
        ]
        if not members:
            continue
        with st.expander(f"More: {panel.value}"):
            for option in members:
                options[option.name] = option_widget(option.name)
            if panel is Panel.GPU:
                options["calibration"] = _chosen_calibration()


def _chosen_calibration() -> str | None:
    return st.selectbox(
        "Calibration",
        [NO_CALIBRATION, *map(str, calibration_files())],
        index=None,
        placeholder="one of this GPU, if there is any",
        key="calibration",
        bind="query-params",
        help=find_option("calibration").help,
    )
