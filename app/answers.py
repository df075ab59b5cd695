"""Answers for all sessions: each made once, kept, and never in the way of another model's.

Work runs in threads of its own, so that a slow trace blocks neither its session's interface nor
other sessions; what a session no longer waits for is still finished and kept.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

import memest
from memest.app.labels import in_page_words
from memest.app.question import ExplorerQuestion
from memest.app.theme import MAX_MEMORY, MAX_SECONDS
from memest.app.uploads import calibration_files, check_question, kept_config
from memest.app.words import plain
from memest.calibration.running.meters import resident_bytes
from memest.catalog.gpus import COMMON_GPUS
from memest.errors import MemestError, NotKnownError, UnknownModelError
from memest.report.findings import Advice, Comparison
from memest.report.max_batch_result import MaxBatch
from memest.report.result import Estimate, GpuFit
from memest.report.suggestions import Suggestions
from memest.search.points import Sweep
from memest.search.profile import Profile

__all__ = [
    "advice",
    "attempt",
    "cards",
    "comparison",
    "duration",
    "estimate",
    "largest",
    "say",
    "suggestions",
    "sweep",
    "wait_for",
]

Answer = TypeVar("Answer")
Line = tuple[str, float | None]
"""What is done, and the share of the work that is over where that is known."""

QUIET_SECONDS = 0.3
"""Answers that come sooner show no progress."""
_POLL_SECONDS = 0.1
_LOADING = "loading PyTorch, for the first time since the server started"
_OF_TRACES = ("meta device", "for the first time", "a trace of this model")
"""Words of memest that tell a trace from whatever else takes long."""
_FIRST_TIME = (
    "This was not asked before and has to be traced: some 5 to 30 seconds, and only the first "
    "time. Later questions like it are answered at once."
)
_KEPT_MODELS = 64
_KEPT_ANSWERS = 2000


class TookTooLongError(MemestError):
    """An answer that takes longer than this server allows."""


class StoppedError(MemestError):
    """Work that somebody stopped."""


class NoMemoryLeftError(MemestError):
    """The server holds more memory than it is allowed."""


@dataclass
class _SharedState:
    """What all sessions share.

    Attributes:
        locks: one for each model: its profile answers one question after the other.
        listener: of the thread that asks, told what takes long.
    """

    locks: defaultdict[str, threading.RLock] = field(
        default_factory=lambda: defaultdict(threading.RLock)
    )
    guard: threading.Lock = field(default_factory=threading.Lock)
    listener: threading.local = field(default_factory=threading.local)

    def lock(self, model: str) -> threading.RLock:
        """The lock of a model."""
        with self.guard:
            return self.locks[model]

    def say(self, text: str, share: float | None = None) -> None:
        """Called by memest before whatever takes long.

        Args:
            text: what is done.
            share: how much of the work is over, where that is known.

        Raises:
            TookTooLongError: an answer takes longer than this server allows.
            StoppedError: it was stopped.
        """
        stop = getattr(self.listener, "stop", None)
        if stop is not None and stop.is_set():
            raise StoppedError
        end = getattr(self.listener, "end", None)
        if end is not None and time.monotonic() > end:
            raise TookTooLongError
        listen = getattr(self.listener, "say", None)
        if listen is not None:
            listen((text, share))


@st.cache_resource(show_spinner=False)
def _shared_state() -> _SharedState:
    # the libraries that a trace loads have warnings and bars of their own
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return _SharedState()


@st.cache_resource(show_spinner=False, max_entries=_KEPT_MODELS)
def _profile(model: str) -> Profile:
    """The one profile of a model: what it traced answers every session."""
    return memest.profile(model, progress=_shared_state().say)


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


def suggestions(question: ExplorerQuestion) -> Suggestions:
    """What makes the question fit its first GPU, or makes use of the room there."""
    found: Suggestions = _cached_answer("suggestions", question, (), _calibrations_on_disk())
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
    options, say = dict(question.options), _shared_state().say
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
        return memest.suggest(model, progress=say, quick=True, **{**options, "gpu": gpu})
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
    setup, place, lock = question.setup, question.place, _shared_state().lock(model)
    if not lock.acquire(blocking=False):
        try:
            disk_profile = memest.profile(model)
            with disk_profile.known_alone():
                return disk_profile.estimate(setup, max_batch=max_batch, **place)
        except NotKnownError:
            _shared_state().say("waiting for a trace of this model")
            lock.acquire()
    try:
        return _profile(model).estimate(setup, max_batch=max_batch, **place)
    finally:
        lock.release()


def _cards(model: str, question: ExplorerQuestion) -> Cards:
    """A card that cannot run this is left out."""
    setup, fits, unseen = question.setup, [], []
    place = {name: value for name, value in question.place.items() if name == "device_context"}
    with _shared_state().lock(model):
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


def say(text: str, share: float | None = None) -> None:
    """Tell whoever waits for this thread what is being done, and how much of it is over."""
    _shared_state().say(text, share)


# -- waiting --------------------------------------------------------------------------------------


def wait_for(
    work: Callable[[], Answer],
    doing: str,
    stop: str = "",
    before_waiting: Callable[[], None] | None = None,
) -> Answer:
    """Do something in a thread; shows what it does if it takes long.

    Args:
        work: what to do; must not touch the page.
        doing: how to call it, for example "Tracing gpt2".
        stop: where the session notes that it was stopped by hand, which is offered then.
        before_waiting: draws what is to stand on the page if it takes long.

    Raises:
        MemestError: whatever went wrong, as the library says it.
    """
    _check_memory()
    # drawn in any case: what stood below it keeps its place, and stands there, stale, for so long
    place = st.empty()
    lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
    stopped = threading.Event()
    results: list[Answer] = []
    errors: list[BaseException] = []
    shared_state = _shared_state()
    seconds = os.environ.get(MAX_SECONDS)

    def run() -> None:
        shared_state.listener.say = lines.put
        shared_state.listener.stop = stopped
        if seconds:
            shared_state.listener.end = time.monotonic() + float(seconds)
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - raised again where the page waits
            errors.append(error)

    loads_torch = "torch" not in sys.modules
    thread = threading.Thread(target=run, daemon=True, name="memest answer")
    thread.start()
    thread.join(QUIET_SECONDS)
    if thread.is_alive():
        if before_waiting is not None:
            before_waiting()
        ending = partial(_stop, stopped, stop) if stop else None
        _show_progress(place, thread, lines, doing, ending, loads_torch=loads_torch)
    if errors:
        raise errors[0]
    return results[0]


def _check_memory() -> None:
    """Forget what is kept where the server holds more than it may.

    Raises:
        NoMemoryLeftError: it still does then.
    """
    limit = int(os.environ.get(MAX_MEMORY) or 0)
    if not limit or (resident_bytes() or 0) <= limit:
        return
    _cached_answer.clear()
    _profile.clear()
    gc.collect()
    if (resident_bytes() or 0) > limit:
        raise NoMemoryLeftError


def _stop(stopped: threading.Event, note: str) -> None:
    stopped.set()
    st.session_state[note] = True


def _show_progress(
    place: DeltaGenerator,
    thread: threading.Thread,
    lines: queue.SimpleQueue[Line],
    doing: str,
    stop: Callable[[], None] | None,
    *,
    loads_torch: bool,
) -> None:
    """What is done, for how long it is done and will be, until the thread is over."""
    start, share = time.monotonic(), None
    with place.status(f"{plain(doing)} …", expanded=True) as status:
        stage, bar, note = st.empty(), st.empty(), st.empty()
        if stop is not None:
            st.button("Stop", key="stop_work", icon=":material/stop:", on_click=stop)
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            text = ""
            if loads_torch and "torch" in sys.modules:
                text, loads_torch = _LOADING, False
            while not lines.empty():
                text, share = lines.get()
            if text:
                stage.markdown(plain(text))
                if share is not None:
                    bar.progress(share)
                if any(words in text for words in _OF_TRACES):
                    note.caption(_FIRST_TIME)
            seconds = time.monotonic() - start
            left = f", about {duration(seconds / share - seconds)} left" if share else ""
            status.update(label=f"{plain(doing)} … {duration(seconds)}{left}", expanded=True)
    place.empty()


def duration(seconds: float) -> str:
    """A time as people say it: ``12 s``, ``3:05 min``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"


def attempt(
    work: Callable[[], Answer],
    doing: str,
    stop: str = "",
    before_waiting: Callable[[], None] | None = None,
) -> Answer | None:
    """:func:`wait_for`, with an error as its sentence on the page and None in its place."""
    try:
        return wait_for(work, doing, stop, before_waiting)
    except StoppedError:
        st.session_state[stop] = True
    except NotKnownError:
        st.error(
            "This explorer answers what it knows without a trace, and this question is not among "
            "it. On your own machine: `pip install 'memest-gpu[torch]'`, and the command below.",
            icon=":material/lock:",
        )
    except TookTooLongError:
        st.error(
            "This takes longer than this server allows for one answer. On your own machine it runs "
            "to its end: the command line below."
        )
    except (MemoryError, NoMemoryLeftError):
        st.error(
            "This server has no memory left for it. Come back later, or take the command line."
        )
    except UnknownModelError as error:
        st.error(plain(error.why), icon=":material/error:")
        st.caption(
            "The field Model lists the catalogue and takes any id of the Hugging Face hub; a "
            "config.json of your own is uploaded under All options."
        )
    except MemestError as error:
        st.error(plain(in_page_words(error)), icon=":material/error:")
    except OSError as error:
        st.error(f"The operating system refuses: {plain(error.strerror or error)}.")
    except Exception as error:  # noqa: BLE001 - the page never shows a traceback
        st.error(
            f"Unexpected {type(error).__name__}: {plain(error)}. This is a bug in memest: please "
            "report it with the command line below and the output of `memest env`."
        )
    return None
