"""A sweep in several processes: of this machine, or of a Ray cluster.

Processes are spawned, never forked: a fork of a process that has loaded torch can hang. Each one
takes a unit at a time and sends every point as soon as it is answered, so a process that dies
costs the rest of its unit and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import socket
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from memest.config.installed import DISTRIBUTION
from memest.errors import ConfigError, MemestError, MissingDependencyError
from memest.search.answer import WorkUnit, answer, failed_point, units_of
from memest.search.points import SweepPoint

__all__ = ["answer_in_processes", "answer_on_ray", "check_ray", "connect"]

_READY, _DONE = "ready", "done"
_PATIENCE_SECONDS = 5


def answer_in_processes(units: Sequence[WorkUnit], jobs: int) -> Iterator[SweepPoint]:
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
                    yield from _lost_points(worker)
                    workers.remove(worker)
                    if waiting:
                        workers.append(_start())
                    continue
                if isinstance(message, SweepPoint):
                    worker.answered_indices.add(message.index)
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
    unit: WorkUnit | None = None
    answered_indices: set[int] = field(default_factory=set)
    ready: bool = False

    def give(self, waiting: deque[WorkUnit]) -> bool:
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
    own_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end,), daemon=True)
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
    child_end.close()
    return _Worker(process=process, connection=own_end)


def _lost_points(worker: _Worker) -> Iterator[SweepPoint]:
    """The points that a dead process leaves behind."""
    worker.stop()
    code = worker.process.exitcode
    ending = f"with exit code {code}"
    if code is not None and code < 0:
        ending = f"by {signal.Signals(-code).name}"
        if -code == getattr(signal, "SIGKILL", None):
            ending += " (this machine's own memory may have run out: fewer --jobs need less)"
    if not worker.ready:
        raise MemestError(
            f"a process of the sweep ended {ending} before it began. A script that calls "
            "memest.sweep with several jobs needs `if __name__ == '__main__':` around the call, "
            "because every process reads the script again."
        )
    if worker.unit is None:
        return
    for question in worker.unit.questions:
        if question.index not in worker.answered_indices:
            yield failed_point(worker.unit, question, f"the process at this point ended {ending}.")


def _serve(connection: Connection) -> None:
    """What a process does: units in, points out, until the pipe ends."""
    # what matters comes back in the points
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.suppress(EOFError, OSError):
        connection.send(_READY)
        while True:
            unit: WorkUnit = connection.recv()
            try:
                for point in answer(unit):
                    connection.send(point)
            except MissingDependencyError as error:
                connection.send(error)
                return
            connection.send(_DONE)


_HOST = re.compile(r"^(?:ray://)?(?P<host>[^/:\s]+|\[[^\]]+\]):(?P<port>\d+)$")
_WORTH_A_TASK = 50
"""Points below which splitting a model's work is not worth tracing it once more."""


def check_ray(address: str, *, what: str = "A sweep on a cluster") -> None:
    """Refuse what cannot lead to a cluster, before anything slow.

    Args:
        address: ``auto`` (the cluster this machine is part of), ``local`` (one is started for the
            sweep), ``host:port`` or ``ray://host:port``.
        what: needs it.

    Raises:
        MissingDependencyError: without ray.
        ConfigError: if ``address`` is no address.
    """
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"{what} needs ray: pip install 'memest-gpu[ray]'.") from error
    if address not in ("auto", "local") and not _HOST.match(address):
        raise ConfigError(
            f"--ray {address!r} is no address: write auto for the cluster of this machine, local "
            "to start one here, HOST:PORT or ray://HOST:PORT."
        )


def connect(address: str) -> None:
    """Make this process a driver of a cluster.

    Args:
        address: as for :func:`check_ray`.

    Raises:
        MemestError: no cluster can be reached.
    """
    import ray

    match = _HOST.match(address)
    if match:
        # Ray itself keeps trying for minutes
        try:
            with socket.create_connection((match["host"].strip("[]"), int(match["port"])), 10):
                pass
        except (OSError, OverflowError) as error:
            raise MemestError(
                f"--ray {address}: nobody answers there ({error}). `ray status` on the cluster "
                "tells its address; --ray local starts one here."
            ) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    extra_options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **extra_options)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise MemestError(
            f"--ray {address}: no Ray cluster can be reached ({reason}). Start one with `ray start "
            "--head`, or use --ray local."
        ) from error


def _answer(unit: WorkUnit, expected: str) -> list[SweepPoint] | str:
    """What runs on the cluster; text is a reason why the whole sweep cannot be."""
    own_version = version(DISTRIBUTION)
    if own_version != expected:
        return (
            f"{socket.gethostname()} of the Ray cluster has memest {own_version} and this machine "
            f"has {expected}: install the same version everywhere."
        )
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(answer(unit))
    except MissingDependencyError as error:
        return f"{socket.gethostname()} of the Ray cluster: {error}"


def answer_on_ray(
    units: Sequence[WorkUnit], address: str, jobs: int | None
) -> Iterator[SweepPoint]:
    """Answer units on a cluster; points come in the order in which units are done.

    Args:
        units: the work, one unit a model.
        address: as for :func:`check_ray`; a connection that is there already is used as it is.
        jobs: units to make of it, None for as many as the cluster has CPUs where that pays.

    Raises:
        MissingDependencyError: without ray, or a node has no torch.
        MemestError: if no cluster can be reached, or it runs another memest.
    """
    check_ray(address)
    import ray

    connected = ray.is_initialized()
    if not connected:
        connect(address)
    pending: dict[Any, WorkUnit] = {}
    try:
        if jobs is None:
            points = sum(len(unit.questions) for unit in units)
            resources: dict[str, float] = ray.cluster_resources()
            jobs = min(int(resources.get("CPU", 1)), points // _WORTH_A_TASK)
        task = ray.remote(num_cpus=1)(_answer)
        expected = version(DISTRIBUTION)
        pending = {task.remote(unit, expected): unit for unit in units_of(units, jobs)}
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1)
            for reference in ready:
                yield from _fetch(reference, pending.pop(reference))
    finally:
        for reference in pending:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)
        if not connected:
            ray.shutdown()


def _fetch(reference: Any, unit: WorkUnit) -> Iterator[SweepPoint]:
    import ray

    try:
        answer = ray.get(reference)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"the Ray task of this point failed: {type(error).__name__}: {lines[-1].strip()}"
        for question in unit.questions:
            yield failed_point(unit, question, reason)
        return
    if isinstance(answer, str):
        missing = "pip install" in answer
        raise (MissingDependencyError if missing else MemestError)(answer)
    yield from answer
