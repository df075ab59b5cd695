"""A campaign on this machine: the command line's own, in a process that the server looks after.

There is one at a time, and every session sees it. Whatever ends it, what was measured is in the
store: each case is kept as soon as it is over, and the next campaign goes on from there.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import streamlit as st

from memest.calibration.campaign import read_campaign
from memest.calibration.store import MeasurementStore, default_store
from memest.catalog.nvml import local_gpus
from memest.errors import ConfigError, MemestError

__all__ = ["CampaignRun", "campaign_words", "latest", "measuring_devices", "start"]

_CASE = re.compile(r"(\d+)/(\d+) ")
"""How the line of a case begins."""
_PATIENCE_SECONDS = 10.0


def measuring_devices() -> dict[str, str]:
    """What ``--device`` can be here: the name of each card by it.

    Raises:
        MemestError: there is no card, or nothing that could tell.
    """
    return {f"cuda:{gpu.index}": gpu.name for gpu in local_gpus()}


def campaign_words(name: str, device: str = "cuda") -> list[str]:
    """The command line of a campaign, word by word."""
    words = ["memest", "calibrate", "run", "--campaign", name]
    return words if device == "cuda" else [*words, "--device", device]


class CampaignRun:
    """A campaign under way, or over.

    Args:
        name: of the campaign.
        device: as ``--device`` has it.

    Attributes:
        name: of the campaign.
        total: its cases.
        lines: what the command said so far.
        stopped: somebody asked for its end.
    """

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.total = len(read_campaign(name).cases)
        self.lines: list[str] = []
        self.stopped = False
        self._began = time.monotonic()
        self._seconds: float | None = None
        self.words = campaign_words(name, device)
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-u", "-m", *self.words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Ctrl-C at the server's terminal is the server's, which ends this one in its own way
            start_new_session=True,
        )
        self._watch = threading.Thread(target=self._listen, daemon=True, name="memest campaign")
        self._watch.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                if line.strip():
                    self.lines.append(line.rstrip())
        self._process.wait()
        # one that was killed leaves its case behind
        with contextlib.suppress(MemestError), MeasurementStore(default_store(), create=False) as s:
            s.recover()
        self._seconds = time.monotonic() - self._began

    @property
    def command(self) -> str:
        """The command line."""
        return shlex.join(self.words)

    @property
    def under_way(self) -> bool:
        """Whether it still measures."""
        return self._seconds is None

    @property
    def failed(self) -> bool:
        """Whether it ended with an error, and nobody asked for its end."""
        return not self.under_way and not self.stopped and self._process.returncode != 0

    @property
    def seconds(self) -> float:
        """Since it began, until now or its end."""
        return time.monotonic() - self._began if self._seconds is None else self._seconds

    @property
    def cases_over(self) -> int:
        """How many of its cases are over."""
        told = [found for line in self.lines if (found := _CASE.match(line))]
        return min(int(told[-1][1]), self.total) if told else 0

    def stop(self) -> None:
        """Ask for its end: the case under way is kept as interrupted; returns at once."""
        if self.under_way and not self.stopped:
            self.stopped = True
            threading.Thread(target=self.end, daemon=True, name="memest campaign's end").start()

    def end(self) -> None:
        """End it and wait: as Ctrl-C does, and by force if it does not hear that."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                break
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_SECONDS)
        self._watch.join(_PATIENCE_SECONDS)


@st.cache_resource(show_spinner=False)
def _runs() -> list[CampaignRun]:
    """The latest campaign of this server, if there was one; it does not outlive the server."""
    runs: list[CampaignRun] = []
    atexit.register(_end_all, runs)
    return runs


def _end_all(runs: Sequence[CampaignRun]) -> None:
    for run in runs:
        run.end()


_guard = threading.Lock()


def latest() -> CampaignRun | None:
    """The campaign that runs, or that ran last."""
    runs = _runs()
    return runs[-1] if runs else None


def start(name: str, device: str) -> CampaignRun:
    """Begin a campaign.

    Raises:
        ConfigError: one runs already, or there is none of this name.
    """
    with _guard:
        before = latest()
        if before is not None and before.under_way:
            raise ConfigError(
                f"the campaign {before.name} runs on this machine: stop it, or wait for its end."
            )
        run = CampaignRun(name, device)
        _runs()[:] = [run]
        return run
