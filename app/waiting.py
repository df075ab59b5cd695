"""Work that takes long, in a thread of its own: how far it is, its end by hand, how it failed.

A slow trace blocks neither its session's interface nor other sessions; what a session no longer
waits for is still finished and kept.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from memest.app.labels import in_page_words
from memest.app.theme import MAX_MEMORY, MAX_SECONDS
from memest.app.words import plain
from memest.calibration.running.meters import resident_bytes
from memest.errors import (
    MemestError,
    MissingDependencyError,
    NotKnownError,
    UnknownModelError,
)
from memest.estimation.tracer import KNOWN_ALONE

__all__ = ["attempt", "duration", "forget_when_short", "say", "wait_for"]

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


class TookTooLongError(MemestError):
    """An answer that takes longer than this server allows."""


class StoppedError(MemestError):
    """Work that somebody stopped."""


class NoMemoryLeftError(MemestError):
    """The server holds more memory than it is allowed."""


_listener = threading.local()
"""Of the thread that asks: told what takes long, and when that is to end."""
_forget: list[Callable[[], None]] = []


def forget_when_short(clear: Callable[[], None]) -> None:
    """Name something that forgets what is kept, to be called where the server is out of memory."""
    _forget.append(clear)


def say(text: str, share: float | None = None) -> None:
    """Tell whoever waits for this thread what is being done; memest calls it too.

    Args:
        text: what is done.
        share: how much of the work is over, where that is known.

    Raises:
        TookTooLongError: an answer takes longer than this server allows.
        StoppedError: it was stopped.
    """
    stop = getattr(_listener, "stop", None)
    if stop is not None and stop.is_set():
        raise StoppedError
    end = getattr(_listener, "end", None)
    if end is not None and time.monotonic() > end:
        raise TookTooLongError
    listen = getattr(_listener, "say", None)
    if listen is not None:
        listen((text, share))


def _silence_libraries() -> None:
    """What a trace loads has warnings and bars of its own."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


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
    _silence_libraries()
    # drawn in any case: what stood below it keeps its place, and stands there, stale, for so long
    place = st.empty()
    lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
    stopped = threading.Event()
    results: list[Answer] = []
    errors: list[BaseException] = []
    seconds = os.environ.get(MAX_SECONDS)

    def run() -> None:
        _listener.say = lines.put
        _listener.stop = stopped
        if seconds:
            _listener.end = time.monotonic() + float(seconds)
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
    for forget in _forget:
        forget()
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
    offer: Callable[[MemestError], None] | None = None,
) -> Answer | None:
    """:func:`wait_for`, with an error as its sentence on the page and None in its place.

    Args:
        work: what to do.
        doing: how to call it.
        stop: where the session notes that it was stopped by hand.
        before_waiting: draws what is to stand on the page if it takes long.
        offer: draws what can be done about an error.
    """
    try:
        return wait_for(work, doing, stop, before_waiting)
    except StoppedError:
        st.session_state[stop] = True
    except NotKnownError:
        _say_not_known()
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
        if offer is not None:
            offer(error)
    except MemestError as error:
        if os.environ.get(KNOWN_ALONE) and isinstance(error, MissingDependencyError):
            _say_not_known()  # nothing is traced here, and nothing was installed to do so
            return None
        st.error(plain(in_page_words(error)), icon=":material/error:")
        if offer is not None:
            offer(error)
    except OSError as error:
        st.error(f"The operating system refuses: {plain(error.strerror or error)}.")
    except Exception as error:  # noqa: BLE001 - the page never shows a traceback
        st.error(
            f"Unexpected {type(error).__name__}: {plain(error)}. This is a bug in memest: please "
            "report it with the command line below and the output of `memest env`."
        )
    return None


def _say_not_known() -> None:
    st.error(
        "This explorer answers what it knows without a trace, and this question is not among "
        "it. On your own machine: `pip install 'memest-gpu[torch]'`, and the command below.",
        icon=":material/lock:",
    )
