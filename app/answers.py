"""Answers for all sessions: each made once, kept, and never in the way of another model's."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import streamlit as st

import memest
from memest.app.question import ExplorerQuestion
from memest.app.uploads import calibration_files, check_question, kept_config
from memest.app.waiting import forget_when_short, say
from memest.catalog.gpus import COMMON_GPUS
from memest.errors import MemestError, NotKnownError
from memest.report.findings import Advice, Comparison
from memest.report.max_batch_result import MaxBatch
from memest.report.result import Estimate, GpuFit
from memest.report.suggestions import Suggestions
from memest.search.points import Sweep
from memest.search.profile import Profile

__all__ = [
    "advice",
    "cards",
    "comparison",
    "estimate",
    "largest",
    "suggestions",
    "sweep",
]

_KEPT_MODELS = 64
_KEPT_ANSWERS = 2000
_locks: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
_guard = threading.Lock()


def _lock(model: str) -> threading.RLock:
    """The lock of a model: its profile answers one question after the other."""
    with _guard:
        return _locks[model]


@st.cache_resource(show_spinner=False, max_entries=_KEPT_MODELS)
def _profile(model: str) -> Profile:
    """The one profile of a model: what it traced answers every session."""
    return memest.profile(model, progress=say)


# -- questions ------------------------------------------------------------------------------------


def estimate(question: ExplorerQuestion, *, max_batch: bool = False) -> Estimate:
    """The estimate of a question, the one that ``memest estimate`` prints if with ``max_batch``."""
    estimate: Estimate = _cached_answer("estimate", question, (max_batch,), _calibrations_on_disk())
    return estimate


def sweep(question: ExplorerQuestion, axes: tuple[tuple[str, str], ...]) -> Sweep:
    """A grid over options; axes as text, in the syntax of ``memest sweep --over``."""
    sweep: Sweep = _cached_answer("sweep", question, axes, _calibrations_on_disk())
    return sweep


def largest(question: ExplorerQuestion) -> MaxBatch:
    """The largest batch on each GPU of the question."""
    max_batch: MaxBatch = _cached_answer("largest", question, (), _calibrations_on_disk())
    return max_batch


def comparison(question: ExplorerQuestion, scenarios: tuple[str, ...]) -> Comparison:
    """The question beside scenarios that change it."""
    comparison: Comparison = _cached_answer(
        "comparison", question, scenarios, _calibrations_on_disk()
    )
    return comparison


def advice(question: ExplorerQuestion, effective_batch: int, *, any_precision: bool) -> Advice:
    """Ranked plans for an effective batch."""
    limits = (effective_batch, any_precision)
    advice: Advice = _cached_answer("advice", question, limits, _calibrations_on_disk())
    return advice


def suggestions(question: ExplorerQuestion, effort: Mapping[str, Any]) -> Suggestions:
    """What makes the question fit its first GPU, or makes use of the room there.

    Args:
        question: to change.
        effort: how thoroughly to look: arguments of :func:`memest.suggest`.
    """
    found: Suggestions = _cached_answer(
        "suggestions", question, tuple(effort.items()), _calibrations_on_disk()
    )
    return found


@dataclass(frozen=True, slots=True)
class Cards:
    """The question on the cards that people have.

    Attributes:
        fits: on each that was looked at.
        unseen: names of those whose kernels ask for a trace of their own.
    """

    fits: tuple[GpuFit, ...]
    unseen: tuple[str, ...]


def cards(question: ExplorerQuestion) -> Cards:
    """The question on the cards that people have, as far as that needs no trace."""
    found: Cards = _cached_answer("cards", question, (), _calibrations_on_disk())
    return found


@st.cache_data(show_spinner=False, max_entries=_KEPT_ANSWERS)
def _cached_answer(
    kind: str,
    question: ExplorerQuestion,
    arguments: tuple[Any, ...],
    calibrations: tuple[tuple[str, int], ...],  # noqa: ARG001 - part of the key
) -> Any:
    """An answer, made once as long as the calibrations on disk stay the same."""
    check_question(question, arguments if kind == "comparison" else ())
    if not question.upload:
        return _answer(kind, question.model, question, arguments)
    path = str(kept_config(question.upload))
    try:
        return _renamed(_answer(kind, path, question, arguments), path, question.model)
    except MemestError as error:
        raise type(error)(str(error).replace(path, question.model)) from None


def _renamed(value: Any, path: str, name: str) -> Any:
    """An answer in which an upload is called by its file's name, wherever its copy's path is."""
    if isinstance(value, str):
        return value.replace(path, name) if path in value else value  # else an enum stays one
    if isinstance(value, (list, tuple)):
        return type(value)(_renamed(part, path, name) for part in value)
    if isinstance(value, dict):
        return {key: _renamed(part, path, name) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: getattr(value, part.name) for part in fields(value) if part.init}
        named = {key: _renamed(part, path, name) for key, part in parts.items()}
        changed = {key: part for key, part in named.items() if part != parts[key]}
        return replace(value, **changed) if changed else value
    return value


def _answer(kind: str, model: str, question: ExplorerQuestion, arguments: tuple[Any, ...]) -> Any:
    """What the library answers; ``model`` is the reference that it is asked by."""
    options = question.given  # as a command has them: a scenario may imply others
    if kind == "estimate":
        return _estimate(model, question, max_batch=arguments[0])
    if kind == "cards":
        return _cards(model, question)
    if kind == "sweep":
        return memest.sweep(model, dict(arguments), progress=say, **options)
    if kind == "largest":
        return memest.max_batch(model, progress=say, **options)
    if kind == "comparison":
        return memest.compare(model, arguments, progress=say, **options)
    if kind == "suggestions":
        gpu = question.gpus[0] if question.gpus else None
        effort = dict(arguments)
        return memest.suggest(model, progress=say, **effort, **{**options, "gpu": gpu})
    if not arguments[1]:  # the page shows which it is, named or not
        options.setdefault("precision", question.setup.precision)
    return memest.advise(
        model,
        effective_batch=arguments[0],
        any_precision=arguments[1],
        progress=say,
        **options,
    )


def _estimate(model: str, question: ExplorerQuestion, *, max_batch: bool) -> Estimate:
    """An estimate by the model's one profile; while that traces, by what is on disk already."""
    setup, place, lock = question.setup, question.place, _lock(model)
    if not lock.acquire(blocking=False):
        try:
            disk_profile = memest.profile(model)
            with disk_profile.known_alone():
                return disk_profile.estimate(setup, max_batch=max_batch, **place)
        except NotKnownError:
            say("waiting for a trace of this model")
            lock.acquire()
    try:
        return _profile(model).estimate(setup, max_batch=max_batch, **place)
    finally:
        lock.release()


def _cards(model: str, question: ExplorerQuestion) -> Cards:
    """A card that cannot run this is left out."""
    setup, fits, unseen = question.setup, [], []
    place = {name: value for name, value in question.place.items() if name == "device_context"}
    with _lock(model):
        profile = _profile(model)
        for gpu in COMMON_GPUS:
            try:
                with profile.known_alone():
                    spot = profile.spot(setup, gpu=[gpu], **place)
            except NotKnownError:
                unseen.append(gpu)
            except MemestError:
                continue
            else:
                if spot.gpu is not None:
                    fits.append(spot.gpu)
    return Cards(tuple(fits), tuple(unseen))


def _calibrations_on_disk() -> tuple[tuple[str, int], ...]:
    """The calibrations that an estimate may find, and when each was written."""
    stamps = []
    for path in calibration_files():
        with contextlib.suppress(OSError):
            stamps.append((str(path), path.stat().st_mtime_ns))
    return tuple(sorted(stamps))


forget_when_short(_cached_answer.clear)
forget_when_short(_profile.clear)
