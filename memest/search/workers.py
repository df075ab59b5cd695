"""A sweep in several processes of this machine.

Processes are spawned, never forked: a fork of a process that has loaded torch can hang. Each one
takes a unit at a time and sends every point as soon as it is answered, so a process that dies
costs the rest of its unit and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from memest.errors import MemestError, MissingDependencyError
from memest.search.answer import Unit, answer, failed
from memest.search.points import SweepPoint

__all__ = ["answer_in_processes"]

_READY, _DONE = "ready", "done"
_PATIENCE_SECONDS = 5


def answer_in_processes(units: Sequence[Unit], jobs: int) -> Iterator[SweepPoint]:
    """Answer units in ``jobs`` processes; points come in the order in which they are answered.

    Raises:
        MissingDependencyError: without torch no point at all can be answered.
        MemestError: if no process can be started.
    """
    waiting = deque(units)
    workers: list[_Worker] = []
    try:
        workers.extend(_start() for _ in range(min(jobs, len(waiting))))
        while workers:
            for connection in wait([worker.connection for worker in workers]):
                worker = next(each for each in workers if each.connection is connection)
                try:
                    message = worker.connection.recv()
                except (EOFError, OSError):
                    yield from _lost(worker)
                    workers.remove(worker)
                    if waiting:
                        workers.append(_start())
                    continue
                if isinstance(message, SweepPoint):
                    worker.answered.add(message.index)
                    yield message
                elif isinstance(message, MissingDependencyError):
                    raise message
                elif not worker.give(waiting):
                    workers.remove(worker)
                    worker.stop()
    finally:
        for worker in workers:
            worker.stop()


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A process, this end of the pipe to it, and what it is at."""

    process: BaseProcess
    connection: Connection
    unit: Unit | None = None
    answered: set[int] = field(default_factory=set)
    ready: bool = False

    def give(self, waiting: deque[Unit]) -> bool:
        """Send the next unit, if there is one."""
        self.ready = True
        self.unit = waiting.popleft() if waiting else None
        if self.unit is None:
            return False
        with contextlib.suppress(OSError):  # it died: the end of the pipe will tell
            self.connection.send(self.unit)
        return True

    def stop(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.terminate()
        self.process.join(_PATIENCE_SECONDS)
        if self.process.is_alive():
            self.process.kill()


def _start() -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    # Ctrl-C reaches every process of the terminal: only this one is to act on it
    mask: Any = getattr(signal, "pthread_sigmask", None)
    if mask:
        # starting it unblocks SIGINT, and the first process would begin with it unblocked
        resource_tracker.ensure_running()
    before = mask(signal.SIG_BLOCK, {signal.SIGINT}) if mask else None
    try:
        process.start()
    finally:
        if mask:
            mask(signal.SIG_SETMASK, before)
    # the other end must be open in the process alone, or its death would go unnoticed
    theirs.close()
    return _Worker(process=process, connection=ours)


def _lost(worker: _Worker) -> Iterator[SweepPoint]:
    """The points that a dead process leaves behind."""
    worker.stop()
    code = worker.process.exitcode
    how = f"with exit code {code}"
    if code is not None and code < 0:
        how = f"by {signal.Signals(-code).name}"
        if -code == getattr(signal, "SIGKILL", None):
            how += " (this machine's own memory may have run out: fewer --jobs need less)"
    if not worker.ready:
        raise MemestError(
            f"a process of the sweep ended {how} before it began. A script that calls "
            "memest.sweep with several jobs needs `if __name__ == '__main__':` around the call, "
            "because every process reads the script again."
        )
    if worker.unit is None:
        return
    for question in worker.unit.questions:
        if question.index not in worker.answered:
            yield failed(worker.unit, question, f"the process at this point ended {how}.")


def _serve(connection: Connection) -> None:
    """What a process does: units in, points out, until the pipe ends."""
    # what matters comes back in the points
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.suppress(EOFError, OSError):
        connection.send(_READY)
        while True:
            unit: Unit = connection.recv()
            try:
                for point in answer(unit):
                    connection.send(point)
            except MissingDependencyError as error:
                connection.send(error)
                return
            connection.send(_DONE)
