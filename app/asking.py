"""The question, on top of every page: what is trained, on which card, and how."""

from __future__ import annotations

from html import escape
from pathlib import PurePath
from typing import Any

import streamlit as st

from memest.app.labels import label_of, value_words
from memest.app.link import asked, change
from memest.app.presets import PRESETS
from memest.app.question import METHODS, ExplorerQuestion, default_of
from memest.app.trust import trust_words
from memest.app.uploads import MAX_CONFIG_BYTES, keep_config
from memest.app.widgets import gpu_label, gpu_names, option_widget
from memest.app.words import plain
from memest.catalog.models import catalogue
from memest.config.option import Panel
from memest.config.option_table import OPTIONS, OWN_MODULE_NAMES
from memest.config.options import find_option
from memest.errors import MemestError
from memest.units import MIB, format_size

__all__ = ["AXES", "Inputs", "note_axis", "take_upload"]

AXES = ("seq_len", "image_size", "audio_seconds")
"""What may be the length of a model's samples."""
_TUNING = ("method", "precision", "checkpointing", "optim", "grad_accum", "num_gpus")
_KEYS = {"method": "trained_for"}
"""Of inputs, where the option's name is another one's: adapters are chosen as a method, too."""
_IN_SIGHT = ("gpu", "batch", *_TUNING)
"""Options with an input of their own, beside the length; every other one is a chip once set."""
_HIDDEN = (
    "trust_remote_code",
    *OWN_MODULE_NAMES,
    # other words for options that are there already
    "bf16",
    "fp16",
    "expandable_segments",
    "gradient_checkpointing_kwargs",
    "gpu",
)
_AXIS = "axis of"


class Inputs:
    """The question's inputs: they have their place where this is made, and are drawn once.

    Args:
        with_presets: whether this is the page that a first visit sees.
    """

    def __init__(self, *, with_presets: bool) -> None:
        self._with_presets = with_presets
        self._places = st.container(key="question"), st.container(key="tuning")
        self._drawn = False

    def draw(self) -> None:
        """Draw them, unless they are."""
        if self._drawn:
            return
        self._drawn = True
        question, (first, second) = asked(), self._places
        with first:
            if self._with_presets:
                st.html('<h1 class="mm-title">Will it fit?</h1>', width="content")
            _five(question)
            if self._with_presets:  # seen above, and reached by Tab after what most come for
                _trust(question)
                _presets(question)
        with second:
            _tuning()
            _chips(question)
            refused = st.session_state.pop("refused", "")
            if refused:
                st.warning(plain(refused))


def _trust(question: ExplorerQuestion) -> None:
    st.html(
        '<p class="mm-trust">The GPU memory of a PyTorch training run, before you rent the GPU. '
        f'<a href="accuracy" target="_self">{escape(trust_words(question))}</a></p>'
    )


def _presets(question: ExplorerQuestion) -> None:
    current = next((name for name, preset in PRESETS.items() if preset == question), None)
    st.session_state.preset = current
    st.pills(
        "Examples",
        list(PRESETS),
        key="preset",
        label_visibility="collapsed",
        on_change=_take_preset,
    )


def _take_preset() -> None:
    name = st.session_state.preset
    if name in PRESETS:
        change(PRESETS[name])


# -- the five -------------------------------------------------------------------------------------


def _five(question: ExplorerQuestion) -> None:
    model, gpu, method, sizes = st.columns([3.2, 2.1, 2, 2.7])
    with model:
        _model(question)
    with gpu:
        _gpu(question)
    with method:
        st.session_state.method = question.method
        st.segmented_control(
            "Method",
            METHODS,
            key="method",
            required=True,
            on_change=_take_method,
            help="All weights train; or low-rank adapters beside the frozen model (LoRA); or these "
            "beside a base of 4 bits (QLoRA).",
        )
    with sizes.container(key="sizes"):
        batch, length = st.columns([1, 1.25])
        with batch:
            option_widget("batch")
        with length:
            option_widget(_axis_of(question), by_default="the model's")


def _model(question: ExplorerQuestion) -> None:
    names = [entry.id for entry in catalogue()]
    if question.model not in names:
        names.insert(0, question.model)
    st.session_state.model = question.model
    st.selectbox(
        "Model",
        names,
        key="model",
        accept_new_options=True,
        on_change=_take_model,
        help="A model of the catalogue, or any id of the Hugging Face hub: type it. A config.json "
        "of your own is uploaded under All options.",
    )


def _take_model() -> None:
    name = (st.session_state.model or "").strip()
    change(ExplorerQuestion.of(name, asked().given))


def _gpu(question: ExplorerQuestion) -> None:
    names = gpu_names()
    first = question.gpus[0] if question.gpus else None
    if first is not None and first not in names:
        names.insert(0, first)
    st.session_state.gpu = first
    more = ", ".join(map(gpu_label, question.gpus[1:]))
    st.selectbox(
        "GPU",
        names,
        index=None,
        key="gpu",
        format_func=gpu_label,
        accept_new_options=True,
        placeholder="none named",
        on_change=_take_gpu,
        help=find_option("gpu").help + (f" Beside it: {more}." if more else ""),
    )


def _take_gpu() -> None:
    name = (st.session_state.gpu or "").strip()
    change(asked().with_gpu(name))


def _take_method() -> None:
    change(asked().with_method(st.session_state.method))


def _axis_of(question: ExplorerQuestion) -> str:
    axes: dict[str, str] = st.session_state.setdefault(_AXIS, {})
    return axes.get(question.model, AXES[0])


def note_axis(question: ExplorerQuestion, axis: str) -> None:
    """Remember what the length of a model's samples is; the inputs are drawn again if need be."""
    if _axis_of(question) != axis:
        st.session_state[_AXIS][question.model] = axis
        st.rerun()


# -- tuning, and all the rest ---------------------------------------------------------------------


def _tuning() -> None:
    columns = st.columns([1.45, 1.75, 1.5, 2, 1.2, 1.2, 1.55], vertical_alignment="bottom")
    for column, name in zip(columns, _TUNING, strict=False):
        with column:
            option_widget(name, key=_KEYS.get(name))
    with columns[-1].popover(
        "All options", icon=":material/tune:", width="stretch", key="all_options"
    ):
        _all_options()


def _all_options() -> None:
    """One list to search, and the input of what was chosen from it."""
    panels = list(Panel)
    names = sorted(
        (option.name for option in OPTIONS if option.name not in (*_HIDDEN, *_TUNING, "batch")),
        key=lambda name: panels.index(find_option(name).panel),
    )
    name = st.selectbox(
        "Find an option",
        names,
        index=None,
        key="option",
        placeholder=f"{len(names)} options: type what you look for",
        format_func=_option_words,
    )
    if name is not None:
        option_widget(name, key=f"set {name}")
        st.caption(plain(find_option(name).help))
    st.file_uploader(
        "A config.json of your own",
        type=["json"],
        key="config_file",
        max_upload_size=MAX_CONFIG_BYTES // MIB,
        help=f"Read as data, never run; at most {format_size(MAX_CONFIG_BYTES)}.",
    )
    if st.session_state.get("upload_error"):
        st.error(plain(st.session_state.upload_error))


def _option_words(name: str) -> str:
    option = find_option(name)
    return f"{option.panel.value} · {label_of(option)} ({option.flags[0]})"


def take_upload() -> None:
    """Ask about an uploaded configuration, once."""
    upload = st.session_state.get("config_file")
    if upload is None or upload.file_id == st.session_state.get("taken_upload"):
        return
    st.session_state.taken_upload = upload.file_id
    st.session_state.upload_error = ""
    try:
        if upload.size > MAX_CONFIG_BYTES:
            size = format_size(MAX_CONFIG_BYTES)
            st.session_state.upload_error = f"{upload.name} is larger than {size}."
            return
        kept = keep_config(upload.name, upload.getvalue())
    except (MemestError, OSError, ValueError) as error:
        st.session_state.upload_error = str(error)
        return
    name = PurePath(upload.name).name
    change(ExplorerQuestion.of(name, asked().given, kept))


def _chips(question: ExplorerQuestion) -> None:
    """What else was set: each is taken away by a click."""
    in_sight = (*_IN_SIGHT, _axis_of(question))
    set_options = [(name, value) for name, value in question.options if name not in in_sight]
    if len(question.gpus) > 1:
        set_options.insert(0, ("gpu", question.gpus[1:]))
    if not set_options:
        return
    row = st.container(horizontal=True, gap="xsmall", key="chips")
    for name, value in set_options:
        row.button(
            f"{_chip_words(name, value)} ✕",
            key=f"drop {name}",
            help=f"Take away {find_option(name).flags[0]}",
            on_click=_drop,
            args=(name,),
        )


def _chip_words(name: str, value: Any) -> str:
    if name == "gpu":
        return f"also on {', '.join(map(gpu_label, value))}"
    label = label_of(find_option(name))
    if name == "calibration":
        value = PurePath(value).name
    return plain(label if value is True else f"{label} {value_words(value)}")


def _drop(name: str) -> None:
    question = asked()
    if name == "gpu":
        change(question.with_options(gpu=question.gpus[:1]))
    elif name in question.implied:  # left out it would be implied again
        change(question.with_options(**{name: default_of(find_option(name))}))
    else:
        change(question.without(name))
