"""A sweep on a Ray cluster: one task a unit."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from memest.errors import ConfigError, MemestError, MissingDependencyError
from memest.search.answer import Unit, answer, failed, units_of
from memest.search.points import SweepPoint

__all__ = ["answer_on_ray", "check_ray", "connect"]

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
        raise MissingDependencyError(f"{what} needs ray: pip install 'memest[ray]'.") from error
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

    found = _HOST.match(address)
    if found:
        # Ray itself keeps trying for minutes
        try:
            with socket.create_connection((found["host"].strip("[]"), int(found["port"])), 10):
                pass
        except (OSError, OverflowError) as error:
            raise MemestError(
                f"--ray {address}: nobody answers there ({error}). `ray status` on the cluster "
                "tells its address; --ray local starts one here."
            ) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise MemestError(
            f"--ray {address}: no Ray cluster can be reached ({reason}). Start one with `ray start "
            "--head`, or use --ray local."
        ) from error


def _answer(unit: Unit, expected: str) -> list[SweepPoint] | str:
    """What runs on the cluster; text is a reason why the whole sweep cannot be."""
    found = version("memest")
    if found != expected:
        return (
            f"{socket.gethostname()} of the Ray cluster has memest {found} and this machine has "
            f"{expected}: install the same version everywhere."
        )
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(answer(unit))
    except MissingDependencyError as error:
        return f"{socket.gethostname()} of the Ray cluster: {error}"


def answer_on_ray(units: Sequence[Unit], address: str, jobs: int | None) -> Iterator[SweepPoint]:
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
    pending: dict[Any, Unit] = {}
    try:
        if jobs is None:
            points = sum(len(unit.questions) for unit in units)
            resources: dict[str, float] = ray.cluster_resources()
            jobs = min(int(resources.get("CPU", 1)), points // _WORTH_A_TASK)
        task = ray.remote(num_cpus=1)(_answer)
        expected = version("memest")
        pending = {task.remote(unit, expected): unit for unit in units_of(units, jobs)}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1)
            for reference in done:
                yield from _fetch(reference, pending.pop(reference))
    finally:
        for reference in pending:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)
        if not connected:
            ray.shutdown()


def _fetch(reference: Any, unit: Unit) -> Iterator[SweepPoint]:
    import ray

    try:
        found = ray.get(reference)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"the Ray task of this point failed: {type(error).__name__}: {lines[-1].strip()}"
        for question in unit.questions:
            yield failed(unit, question, reason)
        return
    if isinstance(found, str):
        missing = "pip install" in found
        raise (MissingDependencyError if missing else MemestError)(found)
    yield from found
