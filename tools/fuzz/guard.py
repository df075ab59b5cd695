"""What an input must not bring about: a crash, a hang, too much memory, a write, a process, a call.

The guard listens to the interpreter's own audit events, so it sees what happens and not what the
code means to do.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Finding", "Guard", "TooSlowError"]

FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn",
    "subprocess.Popen", "socket.connect", "socket.getaddrinfo", "urllib.Request", "ctypes.dlopen",
    "os.kill", "pty.spawn", "webbrowser.open",
)  # fmt: skip
LIBRARIES = ("libnvidia-ml.so.1",)
"""The driver's own, which says what GPU this machine has: ``--gpu local`` asks it."""
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod",
           "os.truncate", "shutil.rmtree", "shutil.move", "shutil.copyfile")  # fmt: skip
_PATIENCE = 4


class TooSlowError(BaseException):
    """The time for one input is over; not an Exception, so that nobody swallows it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that did what no input may do."""

    what: str
    detail: str


@dataclass(slots=True)
class Guard:
    """Watches one process.

    Attributes:
        writable_folder: the folder that may be written to.
        seconds: that one input may take.
        findings: what was seen during the input at work.
    """

    writable_folder: Path
    seconds: float
    findings: list[Finding] = field(default_factory=list)
    _on: bool = False

    def listen(self) -> None:
        """Hear audit events and the alarm from now on; there is no way back."""
        sys.addaudithook(self._on_event)
        signal.signal(signal.SIGALRM, self._late)

    def hold(self, memory: int) -> None:
        """Hold the process to some bytes of address space."""
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """One input."""
        self.findings = []
        self._on = True
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        # a loop inside C hears no signal: that one ends the process
        faulthandler.dump_traceback_later(_PATIENCE * self.seconds, exit=True, file=sys.__stderr__)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
            self._on = False

    def _late(self, *_: object) -> None:
        raise TooSlowError

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        if event == "open":
            path, mode, flags = args
            if self._writes(mode, flags) and not self._inside(path):
                self.findings.append(Finding("wrote outside", f"{path!r}"))
        elif event in FORBIDDEN and not (event == "ctypes.dlopen" and args[0] in LIBRARIES):
            self.findings.append(Finding("called", f"{event} {args!r}"[:200]))
        elif event == "pickle.find_class":
            self.findings.append(Finding("unpickled a global", f"{args!r}"[:200]))
        elif event in CHANGES and not all(map(self._inside, _paths(args))):
            self.findings.append(Finding("changed files outside", f"{event} {args!r}"[:200]))

    def _writes(self, mode: Any, flags: Any) -> bool:
        if isinstance(mode, str):
            return any(letter in mode for letter in "wax+")
        return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))

    def _inside(self, path: Any) -> bool:
        if isinstance(path, int):
            return True
        try:
            place = Path(os.fsdecode(path)).absolute()
        except (TypeError, ValueError):
            return False
        inside = place.is_relative_to(self.writable_folder) or str(place) in (
            "/dev/null",
            "/dev/tty",
        )
        # an interpreter that imports a module for the first time may keep it compiled
        return inside or place.parent.name == "__pycache__"


def _paths(args: tuple[Any, ...]) -> list[Any]:
    return [a for a in args if isinstance(a, str | bytes | os.PathLike)]
