"""The URL as the state of a session: a question and a page's own inputs, written and read back.

Every change writes all of it at once: the browser's Back leads to the question before.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from memest.app.labels import in_page_words, label_of
from memest.app.presets import DEFAULT_GPU, DEFAULT_MODEL, DEFAULT_QUESTION
from memest.app.question import ExplorerQuestion
from memest.app.uploads import config_from_link, config_to_link
from memest.app.words import plain
from memest.catalog.gpu_counts import split_gpu_counts
from memest.config.option import Kind
from memest.config.options import find_option, read_bool, read_whole
from memest.config.spelling import option_texts, read_scenario
from memest.errors import ConfigError, MemestError, not_legal

__all__ = [
    "FIRST_PAGE",
    "asked",
    "change",
    "draw_problems",
    "go",
    "link_of",
    "link_to",
    "linked",
    "open_link",
    "page_to_open",
    "page_value",
    "read_question",
    "set_page_value",
    "write_link",
]

FIRST_PAGE = "what-if"
"""The path of the page that answers the question."""
NO_GPU = "none"
PAGE_INPUTS = frozenset(
    """all_steps any_precision batches by calibration_profile campaign clips do effective_batch
    fit_from image_sizes measurements metric only phase pin runs seq_lens tab vs zoom""".split()
)
"""Inputs of pages that live in the URL."""
_OF_OTHERS = ("utm_", "embed")
"""How parameters begin that Streamlit reads, or that other sites add to links."""
_CONFIG = "config"
_QUESTION, _PROBLEMS, _PLACE, _WRITTEN, _VALUES, _DEFAULTS, _TAKEN, _PAGE, _GO = (
    f"link {name}"
    for name in "question problems place written values defaults taken page go".split()
)
"""What the state of a session keeps here; no widget has such a key."""

Params = Mapping[str, list[str]]


# -- the question ---------------------------------------------------------------------------------


def asked() -> ExplorerQuestion:
    """The question that this session asks."""
    question: ExplorerQuestion = st.session_state.get(_QUESTION, DEFAULT_QUESTION)
    return question


def change(question: ExplorerQuestion) -> None:
    """Ask another question; what a link said wrong is no longer of interest."""
    st.session_state[_QUESTION] = question
    st.session_state[_PROBLEMS] = ()


def go(page: str) -> None:
    """Open another page in the next run.

    Args:
        page: its path.
    """
    st.session_state[_GO] = page


def page_to_open() -> str:
    """The path of the page that is to be opened, once; empty where this one stays."""
    path: str = st.session_state.pop(_GO, "")
    return path


def draw_problems() -> None:
    """Say here what the link says and what is not legal; also what the page finds later on."""
    st.session_state[_PLACE] = st.container()
    for text in _problems():
        _draw_problem(text)


def _problems() -> tuple[str, ...]:
    found: tuple[str, ...] = st.session_state.get(_PROBLEMS, ())
    return found


def _draw_problem(text: str) -> None:
    st.session_state[_PLACE].warning(plain(in_page_words(text)), icon=":material/link_off:")


def _leave_out(name: str, value: object, why: str) -> None:
    """Say that the link gives an input of a page a value that it cannot have."""
    text = f"{name}={value} of the link was left out: {why}"
    if text not in _problems():
        st.session_state[_PROBLEMS] = (*_problems(), text)
        _draw_problem(text)


def read_question(params: Params) -> tuple[ExplorerQuestion, tuple[str, ...]]:
    """The question of a URL, and what in it is not legal and was left out.

    Args:
        params: values of each parameter; those of pages, and of others' trackers, are passed over.
    """
    if not params:
        return DEFAULT_QUESTION, ()
    gpus: tuple[str, ...] = () if "gpu_memory" in params else (DEFAULT_GPU,)
    said: list[str] = []
    read: dict[str, dict[str, Any]] = {}
    for name, values in params.items():
        try:
            option = find_option(name)
        except ConfigError as error:
            if not _is_known(name):
                said.append(f"{name} of the link was left out: {error}")
            continue
        if option.name == "gpu":
            gpus = tuple(value for value in values if value not in ("", NO_GPU))
            continue
        try:
            if len(values) > 1 and option.kind is not Kind.LIST:
                raise ConfigError(f"{label_of(option)} is named {len(values)} times.")
            text = " ".join(_word(name, value) for value in values)
            read[name] = read_scenario(text)
            if not option.names_file:  # no file is opened because a link names it
                ExplorerQuestion.of("", read[name])
            if any(option.name in other for key, other in read.items() if key != name):
                raise ConfigError(f"{option.name} is named twice.")
        except MemestError as error:
            read.pop(name, None)
            said.append(f"{name}={','.join(values)} of the link was left out: {error}")
    for name, refusal in _left_out(read, gpus).items():
        del read[name]
        said.append(f"{name}={','.join(params[name])} of the link was left out: {refusal}")
    options: dict[str, Any] = {"gpu": gpus}
    for each in read.values():
        options |= each
    model, upload = params.get("model", [DEFAULT_MODEL])[-1].strip(), ""
    if _CONFIG in params:
        try:
            upload = config_from_link(model, params[_CONFIG][-1])
        except (MemestError, OSError) as error:
            said.append(f"The configuration in the link cannot be read: {error}")
    try:
        options = split_gpu_counts(options)
    except ConfigError as error:
        said.append(f"gpu={','.join(options.pop('gpu'))} of the link was left out: {error}")
    return ExplorerQuestion.of(model, options, upload), tuple(said)


def _left_out(
    read: Mapping[str, Mapping[str, Any]], gpus: tuple[str, ...]
) -> dict[str, MemestError]:
    """Which parameters are not legal, each with what is wrong with it.

    One may need others: ``tp`` has a meaning with ``num_gpus`` alone. Those that are legal alone
    and contradict each other all stay: the answer says so.
    """

    def wrong(names: Iterable[str]) -> MemestError | None:
        options: dict[str, Any] = {"gpu": gpus}
        for name in names:
            options |= read[name]
        with contextlib.suppress(ConfigError):  # names that say another number of GPUs: said below
            options = split_gpu_counts(options)
        del options["gpu"]
        try:
            ExplorerQuestion.of("", options).check_values()
        except MemestError as error:
            return error
        return None

    checked = [name for name in read if not find_option(name).names_file]
    if wrong(checked) is None:
        return {}
    legal: list[str] = []
    waiting = checked
    while more := [name for name in waiting if wrong([*legal, name]) is None]:
        legal.append(more[0])
        waiting = [name for name in waiting if name != more[0]]
    errors = {name: wrong([*legal, name]) for name in waiting if wrong([name]) is not None}
    return {name: error for name, error in errors.items() if error is not None}


def _is_known(name: str) -> bool:
    """Whether a parameter that is no option says anything else."""
    return name in PAGE_INPUTS or name in ("model", _CONFIG) or name.startswith(_OF_OTHERS)


def _word(name: str, value: str) -> str:
    word = name.replace("_", "-")
    if value.lower() == "true":
        return word
    if value.lower() == "false":
        return f"no-{word}"
    return shlex.quote(f"{word}={value}")


def _params_of(question: ExplorerQuestion) -> dict[str, list[str]]:
    """A question as parameters of the URL, for :func:`read_question`."""
    params = {"model": [question.model]}
    if question.upload:
        params[_CONFIG] = [config_to_link(question.upload)]
    params["gpu"] = list(question.gpus) or [NO_GPU]
    for name, value in question.given.items():
        if name != "gpu":
            params[name] = option_texts(name, value)
    return params


# -- inputs of a page -----------------------------------------------------------------------------


def linked(name: str, default: Any, legal: Iterable[Any] | None = None) -> dict[str, Any]:
    """Let an input of a page live in the URL: what its widget is given besides.

    The value is kept here, not by the widget: a run that another one cuts short has not drawn it,
    and the browser would say what stood there before.

    Args:
        name: of the parameter, and key of the widget.
        default: the value that is left out of the URL; its type is that of the others.
        legal: what it may be, or each of several; anything, if None.
    """
    value = page_value(name, default)
    if legal is not None:
        value = _legal(name, value, default, list(legal))
    st.session_state[name] = value
    return {"key": name, "on_change": _take, "args": (name,)}


def _legal(name: str, value: Any, default: Any, choices: list[Any]) -> Any:
    """What of a value can be chosen; of a link's the rest is said, once."""
    if isinstance(default, list):
        chosen: Any = [each for each in value if each in choices]
        wrong = [each for each in value if each not in choices]
    else:
        chosen = value if value in choices else default
        wrong = [] if value in choices else [value]
    if name in _values() and name not in _taken():
        for each in wrong:
            error = not_legal(f"{name} {each!r}", each, map(str, choices))
            _leave_out(name, each, str(error))
        set_page_value(name, chosen)
    return chosen


def page_value(name: str, default: Any) -> Any:
    """The value of an input of a page, before or after it is drawn."""
    assert name in PAGE_INPUTS, name
    value = _values().get(name, default)
    _defaults()[name] = default
    _page_names().add(name)
    if isinstance(value, list) and name not in _taken():
        try:
            value = _typed(name, value, default)
        except ConfigError as error:
            _leave_out(name, ",".join(value), str(error))
            value = default
        _values()[name] = value
    return value


def set_page_value(name: str, value: Any) -> None:
    """Give an input of a page another value."""
    _values()[name] = value
    _taken().add(name)


def _take(name: str) -> None:
    set_page_value(name, st.session_state[name])


def _taken() -> set[str]:
    """Inputs whose values are no texts of a link."""
    names: set[str] = st.session_state.setdefault(_TAKEN, set())
    return names


def _typed(name: str, texts: list[str], default: Any) -> Any:
    """What a link says, in the type of an input's default.

    Raises:
        ConfigError: it cannot be.
    """
    if isinstance(default, list):
        return texts
    text = texts[-1] if texts else ""
    if isinstance(default, bool):
        return read_bool(name, text)
    if isinstance(default, int):
        number = read_whole(name, text)
        if number < 1:
            raise ConfigError(f"{name} must be 1 or more.")
        return number
    return text


def _values() -> dict[str, Any]:
    values: dict[str, Any] = st.session_state.setdefault(_VALUES, {})
    return values


def _defaults() -> dict[str, Any]:
    defaults: dict[str, Any] = st.session_state.setdefault(_DEFAULTS, {})
    return defaults


def _page_names() -> set[str]:
    names: set[str] = st.session_state.setdefault(f"{_PAGE} {st.session_state[_PAGE]}", set())
    return names


def _page_params() -> dict[str, list[str]]:
    params = {}
    for name in sorted(_page_names()):
        value = _values().get(name)
        if value in (None, _defaults().get(name), []):
            continue
        if isinstance(value, bool):
            value = str(value).lower()
        params[name] = list(map(str, value)) if isinstance(value, (list, tuple)) else [str(value)]
    return params


# -- the URL --------------------------------------------------------------------------------------


def open_link(page: str) -> None:
    """Take over what the URL says, where somebody else wrote it: a link, or the browser's Back.

    Args:
        page: path of the page; its menu leads to it without parameters, and changes no question.
    """
    st.session_state[_PAGE] = page
    params = {name: st.query_params.get_all(name) for name in st.query_params}
    if params == st.session_state.get(_WRITTEN) or (not params and _QUESTION in st.session_state):
        return
    question, said = read_question(params)
    st.session_state[_QUESTION], st.session_state[_PROBLEMS] = question, said
    own = {name: values for name, values in params.items() if name in PAGE_INPUTS}
    for name in {*own, *_page_names()}:
        _values().pop(name, None)
        _taken().discard(name)
    _values().update(own)
    _page_names().update(own)


def link_of(question: ExplorerQuestion, base: str) -> str:
    """The link that asks a question and shows this page as it is: its tab, what is pinned.

    Args:
        question: to ask.
        base: address of the page, with or without parameters.
    """
    params = _params_of(question) | _page_params()
    return f"{base.partition('?')[0]}?{urlencode(params, doseq=True)}"


def link_to(page: str) -> dict[str, list[str]]:
    """Parameters to open another page with: as it would write them, for one step of Back.

    Args:
        page: its path.
    """
    st.session_state[_PAGE] = page
    params = _params_of(asked()) | _page_params()
    st.session_state[_WRITTEN] = params
    return params


def write_link() -> None:
    """Write the question and the page's inputs into the URL, if they are others than there."""
    params = link_to(st.session_state[_PAGE])
    now = {name: st.query_params.get_all(name) for name in st.query_params}
    if params != now:
        st.query_params.from_dict(params)
