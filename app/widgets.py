"""Widgets made from the table of options: views of the question that change it."""

from __future__ import annotations

import enum
import functools
import typing
from pathlib import Path
from typing import Any

import streamlit as st

from memest.app.labels import choice_words, label_of
from memest.app.link import asked, change
from memest.app.question import default_of
from memest.app.uploads import calibration_files, calibration_name
from memest.catalog.gpus import COMMON_GPUS, find_gpu, plain_name
from memest.catalog.spec import list_gpus
from memest.config.option import Kind
from memest.config.options import find_option
from memest.config.setup import OPTIMIZERS, Setup
from memest.errors import MemestError
from memest.estimation.gpu_target import NO_CALIBRATION
from memest.report.words import short_name

__all__ = ["download", "gpu_label", "gpu_names", "option_widget"]

_MEDIA = {
    "JSON": ("application/json", ":material/download:"),
    "CSV": ("text/csv", ":material/download:"),
    "PNG": ("image/png", ":material/image:"),
}
"""By the kind of a file: its media type, the icon of its button."""
_CHECKPOINTING = ("none", "full", "every_n:2", "every_n:4")
_COUNTS = ("batch", "grad_accum", "num_gpus", "num_steps")
_STEPS = {"seq_len": 128, "target_len": 128, "image_size": 32}
_MOST_SEGMENTS = 3
_TYPES = typing.get_type_hints(Setup)


def option_widget(name: str, *, key: str | None = None, by_default: str = "by default") -> None:
    """The widget of an option.

    Args:
        name: keyword of the option.
        key: of the widget, the keyword if None.
        by_default: what stands in an empty field.
    """
    option = find_option(name)
    key = key or name
    value = dict(asked().options).get(name)
    common: dict[str, Any] = {
        "label": label_of(option),
        "key": key,
        "help": f"{option.help} `{option.flags[0]}`",
        "on_change": _take,
        "args": (name, key),
    }
    choices = _choices(name)
    if choices:
        current = default_of(option) if value is None else str(value)
        _choice(name, choices, current, common)
        return
    if option.kind in (Kind.WHOLE, Kind.NUMBER):
        counts = name in _COUNTS
        st.session_state[key] = default_of(option) if value is None and counts else value
        whole = option.kind is Kind.WHOLE
        # a link may name less, and a widget cannot hold what is below its least
        limits: dict[str, Any] = {"min_value": 0.0, "step": 0.1, "format": "%g"}
        if whole:
            limits = {"min_value": 1, "step": _STEPS.get(name, 1)}
        if value is not None:
            limits["min_value"] = min(limits["min_value"], value)
        st.number_input(
            **limits,
            # what has a default of its own cannot be empty
            value=1 if counts else None,
            placeholder=by_default,
            **common,
        )
        return
    if option.kind is Kind.SWITCH:
        st.session_state[key] = bool(value)
        st.toggle(**common)
    elif option.kind is Kind.EITHER:
        st.session_state[key] = None if value is None else ("yes" if value else "no")
        st.segmented_control(options=["yes", "no"], **common)
    elif option.kind is Kind.LIST:
        st.session_state[key] = list(value or ())
        st.multiselect(options=list(value or ()), accept_new_options=True, **common)
    else:
        st.session_state[key] = "" if value is None else str(value)
        st.text_input(placeholder=by_default, **common)


def _choices(name: str) -> tuple[str, ...]:
    """What an option of a closed list can be; empty for others."""
    if name == "optim":
        return ("auto", *OPTIMIZERS)
    if name == "checkpointing":
        return _CHECKPOINTING
    if name == "calibration":
        return (NO_CALIBRATION, *map(str, calibration_files()))
    kind = _TYPES.get(find_option(name).field)
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return tuple(member.value for member in kind)
    return ()


def _choice(
    name: str, choices: tuple[str, ...], current: str | None, common: dict[str, Any]
) -> None:
    st.session_state[common["key"]] = current
    if len(choices) <= _MOST_SEGMENTS and name != "calibration":
        st.segmented_control(options=choices, required=True, **common)
        return
    own = () if current is None or current in choices else (current,)
    open_list = name == "checkpointing"
    st.selectbox(
        options=(*choices, *own),
        index=None,
        accept_new_options=open_list,
        format_func=_calibration_words if name == "calibration" else choice_words,
        **common,
    )


def _calibration_words(value: str) -> str:
    return value if value == NO_CALIBRATION else calibration_name(Path(value))


def _take(name: str, key: str) -> None:
    """Ask what a widget was changed to; what cannot be is said on the page and left as it was."""
    value = st.session_state[key]
    option = find_option(name)
    if option.kind is Kind.EITHER and value is not None:
        value = value == "yes"
    if isinstance(value, str):
        value = value.strip()
    if option.kind is Kind.LIST:
        value = tuple(value)
    try:
        change(asked().with_options(**{name: value}))
    except MemestError as error:
        st.session_state["refused"] = str(error)


def gpu_names() -> list[str]:
    """The catalogue's short names, common cards first."""
    common = [find_gpu(name) for name in COMMON_GPUS]
    others = [spec for spec in list_gpus() if spec.backend == "cuda" and spec not in common]
    return [spec.slug for spec in (*common, *others)]


@functools.cache
def gpu_label(name: str) -> str:
    """A card's name and its memory, as the box says it."""
    try:
        plain, count = plain_name(name)
    except MemestError:
        return name
    if count is not None:
        return name  # as it is typed: the number goes to an input of its own
    spec = find_gpu(plain)
    size = spec.memory_marketing_gb
    short = short_name(spec.name)
    return short if size is None or "GB" in short else f"{short} · {size} GB"


def download(
    place: Any,
    stem: str,
    kind: str,
    content: Any,
    *,
    key: str,
    label: str | None = None,
    help_text: str | None = None,
) -> None:
    """A button that gives a file.

    Args:
        place: of the page.
        stem: name of the file without its suffix.
        kind: ``JSON``, ``CSV`` or ``PNG``.
        content: of the file, or what makes it when it is asked for.
        key: of the widget.
        label: what stands on the button; the kind if None.
        help_text: about it.
    """
    media, icon = _MEDIA[kind]
    place.download_button(
        label or kind,
        content,
        f"{stem}.{kind.lower()}",
        media,
        key=key,
        icon=icon,
        on_click="ignore",
        help=help_text,
    )
