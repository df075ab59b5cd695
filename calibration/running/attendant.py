"""A nursery and its workers, seen from the runner: send a case, hear what becomes of it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memest.calibration.case import Case
from memest.calibration.measurement import Failure, Status
from memest.errors import DeviceError, MemestError, MissingDependencyError

__all__ = ["Attendant", "WorkerEnd", "end_of_crash"]

_PROGRAM = Path(__file__).parents[1] / "__main__.py"
_IMPORTS_SECONDS = 300.0
_POLL_SECONDS = 0.5
_GONE_SECONDS = 10.0
_LAST_WORDS = 1500


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """How a worker ended."""

    status: Status
    failure: Failure | None = None
    events: str = ""


class Attendant:
    """Keeps one nursery alive and has it run one case after the other.

    Args:
        command: the command line of the campaign, for the records.
        environment: variables that workers get on top of this process's.
    """

    def __init__(self, command: str = "", environment: dict[str, str] | None = None) -> None:
        self._command = command
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel = -1
        self._rest = b""
        # a pipe that nobody reads would stop a parent that warns a lot
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this object

    def __enter__(self) -> Attendant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self, device: str) -> dict[str, Any]:
        """The environment of a device, as a worker sees it.

        Raises:
            DeviceError: there is no such device; the message says why.
        """
        environment: dict[str, Any] = {}

        def hear(message: dict[str, Any]) -> None:
            if message["kind"] == "environment":
                environment.update(message["environment"])

        end = self._run({"device": device}, hear, _IMPORTS_SECONDS, lambda: None)
        if not environment:
            why = end.failure.message if end.failure else "it gave no reason"
            raise DeviceError(f"--device {device} cannot be used: {why}")
        return environment

    def run(
        self,
        case: Case,
        device: str,
        hear: Callable[[dict[str, Any]], None],
        *,
        timeout: float,
        events: str = "",
        alive: Callable[[], None] = lambda: None,
    ) -> WorkerEnd:
        """Run a case to its end, whatever that is.

        Args:
            case: what to run.
            device: where.
            hear: takes the worker's messages as they come.
            timeout: seconds after which it is ended.
            events: where the worker writes the allocator's history.
            alive: called now and then while it runs.
        """
        request = {"case": case.to_dict(), "device": device, "events": events}
        return self._run(request, hear, timeout, alive)

    def close(self) -> None:
        """End the nursery, and a worker that may be left."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        if self._channel >= 0:
            os.close(self._channel)
            self._channel = -1
        self._rest = b""

    # -- the nursery

    def _run(
        self,
        request: dict[str, Any],
        hear: Callable[[dict[str, Any]], None],
        timeout: float,
        alive: Callable[[], None],
    ) -> WorkerEnd:
        self._ask(request)
        end: WorkerEnd | None = None
        pid = 0
        deadline = time.monotonic() + timeout
        for message in self._messages(alive):
            if message is not None:
                kind = message["kind"]
                if kind == "gone":
                    return end if end is not None else end_of_crash(message)
                if kind == "started":
                    pid = message["pid"]
                elif kind == "end":
                    end = _end_of(message)
                else:
                    hear(message)
            # also while it talks without end
            if time.monotonic() > deadline:
                return self._too_long(pid, timeout)
        self.close()
        return end or WorkerEnd(
            Status.CRASHED,
            Failure(
                kind="Gone",
                message="the process that starts "
                "workers is gone; the system may have run out of memory",
            ),
        )

    def _too_long(self, pid: int, timeout: float) -> WorkerEnd:
        if pid:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        # whatever state it is in: the next case gets a new nursery
        self.close()
        _wait_for(pid)
        message = f"no end after {timeout:.0f} s, so it was ended"
        return WorkerEnd(Status.TIMEOUT, Failure(kind="Timeout", message=message))

    def _ask(self, request: dict[str, Any]) -> None:
        request |= {"command": self._command, "environment": self._environment}
        line = (json.dumps(request) + "\n").encode()
        for attempt in (1, 2):
            process = self._open()
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except OSError:
                self.close()
                if attempt == 2:
                    raise
            else:
                return

    def _open(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        reading, writing = os.pipe()
        self._channel = reading
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, str(_PROGRAM), "--nursery", str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        deadline = time.monotonic() + _IMPORTS_SECONDS
        for message in self._messages(lambda: None):
            if message is not None and message["kind"] == "ready":
                return self._process
            if time.monotonic() > deadline:
                break
        last = self._last_words()
        if last.startswith("ModuleNotFoundError"):
            raise MissingDependencyError(
                f"workers cannot be started: {last}. Training needs torch, transformers and "
                "accelerate: pip install 'memest-gpu[calibration]'"
            )
        raise MemestError(f"workers cannot be started: {last or 'they did not say why'}")

    def _last_words(self) -> str:
        """The last line that the nursery wrote before it went."""
        process = self._process
        text = ""
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        self.close()
        return (text.splitlines() or [""])[-1]

    def _messages(self, alive: Callable[[], None]) -> Iterator[dict[str, Any] | None]:
        """Messages as they come, None now and then while none does; ends with the nursery."""
        alive_at = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while True:
                while b"\n" in self._rest:
                    line, _, self._rest = self._rest.partition(b"\n")
                    with contextlib.suppress(ValueError):
                        # a worker that was killed may leave half a line
                        yield json.loads(line)
                silent = not selector.select(_POLL_SECONDS)
                if silent or time.monotonic() - alive_at > _POLL_SECONDS:
                    alive_at = time.monotonic()
                    alive()
                if silent:
                    yield None
                    continue
                data = os.read(self._channel, 1 << 16)
                if not data:
                    return
                self._rest += data


def _wait_for(pid: int) -> None:
    """Until a worker that was killed is gone, and its memory on the device with it."""
    deadline = time.monotonic() + _GONE_SECONDS
    while pid and time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except OSError:
            return
        time.sleep(_POLL_SECONDS / 10)


def _end_of(message: dict[str, Any]) -> WorkerEnd:
    failure = message.get("failure")
    return WorkerEnd(
        Status(message["status"]),
        None if failure is None else Failure(**failure),
        message.get("events", ""),
    )


def end_of_crash(message: dict[str, Any]) -> WorkerEnd:
    """The end of a process that is gone without a word: by which signal, or with which code."""
    log = message.get("log", "").strip()[-_LAST_WORDS:]
    number = message.get("signal")
    if number is not None:
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        text = f"ended by signal {name}"
        if number == signal.SIGKILL:
            text += ": by hand, or by the system because host memory ran out"
    else:
        text = f"it left with code {message.get('code')}"
    last = f"; last words: {log}" if log else ""
    return WorkerEnd(Status.CRASHED, Failure(kind="Crashed", message=f"the worker {text}{last}"))
