"""Processes that die in the middle of what they do, at one moment after the other."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator

CHANGES = frozenset(
    "os.rename os.remove os.mkdir os.rmdir os.chmod os.utime os.truncate os.link os.symlink "
    "fcntl.flock shutil.copyfile".split()
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _changes(event: str, arguments: tuple[object, ...]) -> bool:
    if event == "open":
        flags = arguments[2]
        return isinstance(flags, int) and bool(flags & _WRITING)
    return event in CHANGES


def _run(work: Callable[[], object], arm: Callable[[], None]) -> int:
    """Run in a process of its own; returns the signal that ended it, 0 where it came to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            arm()
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert os.waitstatus_to_exitcode(status) == 0, "the work itself failed"
    return 0


def deaths_at_changes(work: Callable[[], object]) -> Iterator[int]:
    """Run ``work`` again and again, killed when it is about to change the file system.

    The first time before the first change, then before the second, until it comes to its end.
    Yields after each death.
    """
    for moment in range(1, 1000):
        left = moment

        def hear(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if _changes(event, arguments):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        signal_number = _run(work, lambda: sys.addaudithook(hear))
        if signal_number == 0:
            return
        assert signal_number == signal.SIGKILL
        yield moment
    raise AssertionError("the work comes to no end")


def deaths_at_bytes(work: Callable[[], object], *sizes: int) -> Iterator[int]:
    """Run ``work``, ended by the kernel when a file of its would grow beyond a size.

    What fits is written before: the file is cut in the middle of a write. Yields after each death.
    """
    for size in sizes:

        def arm() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))  # noqa: B023 - runs at once
            # Python 3.11 does not notice that bytecode it keeps was cut off
            sys.dont_write_bytecode = True

        if _run(work, arm) == 0:
            return
        yield size
