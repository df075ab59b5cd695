"""Widgets made from the table of options: one for each, bound to the URL by the option's name."""

from __future__ import annotations

import enum
import typing
from typing import Any

import streamlit as st

from memest.catalog.gpus import COMMON_GPUS, find_gpu
from memest.catalog.spec import list_gpus
from memest.config.option import Kind, Option
from memest.config.options import find_option
from memest.config.setup import OPTIMIZERS, Setup

__all__ = ["download", "gpu_names", "label_of", "option_widget"]

_LEFT_OUT = "left out"
_MEDIA = {
    "JSON": ("application/json", ":material/download:"),
    "CSV": ("text/csv", ":material/download:"),
    "PNG": ("image/png", ":material/image:"),
}
"""By the kind of a file: its media type, the icon of its button."""
_CHECKPOINTING = ["none", "full", "every_n:2", "every_n:4"]
_BATCH_SIZES = ("batch", "grad_accum", "num_steps")
_TYPES = typing.get_type_hints(Setup)


def label_of(option: Option) -> str:
    """What a widget is called: the flag of the command line."""
    return option.flags[0].removeprefix("--").replace("-", " ").capitalize()


def option_widget(name: str, *, label: str | None = None) -> Any:
    """The widget of an option; its key is the option's keyword and stands in the URL.

    Returns:
        The value, None where it is what the option's default says.
    """
    option = find_option(name)
    common: dict[str, Any] = {
        "label": label or label_of(option),
        "key": name,
        "bind": "query-params",
        "help": option.help,
    }
    kind = _TYPES.get(option.field)
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return _choice(option, [member.value for member in kind], common)
    if name == "optim":
        return _choice(option, ["auto", *OPTIMIZERS], common)
    if name == "checkpointing":
        return _choice(option, _CHECKPOINTING, common, accept_new_options=True)
    if option.kind is Kind.WHOLE:
        return _whole_number(option, common)
    if option.kind is Kind.NUMBER:
        value = st.number_input(
            min_value=0.0, value=None, placeholder=_LEFT_OUT, format="%g", step=0.1, **common
        )
        return None if value is None else float(value)
    if option.kind is Kind.SWITCH:
        return st.toggle(**common) or None
    if option.kind is Kind.EITHER:
        answer = st.segmented_control(options=["yes", "no"], default=None, **common)
        return None if answer is None else answer == "yes"
    if option.kind is Kind.LIST:
        values = st.multiselect(options=[], accept_new_options=True, default=None, **common)
        return tuple(values) or None
    return (st.text_input(placeholder=_LEFT_OUT, **common) or "").strip() or None


def _default(option: Option) -> Any:
    setup = Setup()
    owner = setup.distributed if option.field == "distributed" else setup
    value = getattr(owner, option.name if owner is not setup else option.field)
    return value.value if isinstance(value, enum.Enum) else value


def _choice(
    option: Option, options: list[str], common: dict[str, Any], **selectbox_options: Any
) -> str | None:
    default = _default(option)
    if len(options) <= 3:
        value = st.segmented_control(options=options, default=default, required=True, **common)
    else:
        value = st.selectbox(
            options=options, index=options.index(default), **common, **selectbox_options
        )
    return None if value in (None, default) else str(value)


def _whole_number(option: Option, common: dict[str, Any]) -> int | None:
    if option.name in _BATCH_SIZES:
        default = _default(option)
        value = st.number_input(min_value=1, value=default, step=1, **common)
        return None if value == default else int(value)
    value = st.number_input(
        min_value=1, value=None, step=_step(option), placeholder=_LEFT_OUT, **common
    )
    return None if value is None else int(value)


def _step(option: Option) -> int:
    return {"seq_len": 128, "target_len": 128, "image_size": 32}.get(option.name, 1)


def gpu_names() -> list[str]:
    """The catalogue's short names, common cards first."""
    common = [find_gpu(name) for name in COMMON_GPUS]
    others = [spec for spec in list_gpus() if spec.backend == "cuda" and spec not in common]
    return [spec.slug for spec in (*common, *others)]


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
