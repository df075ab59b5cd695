"""Ranks as processes: those of one case, and apart from the process that runs the tests."""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from support.paths import TESTS

__all__ = ["run_apart", "run_forked", "start_apart"]

WARM = ["support.warm"]
"""What the process that others are forked from imports; to be told before the first of them."""


def run_forked(be_rank: Callable[..., None], each: Iterable[tuple[Any, ...]]) -> None:
    """Fork a process for every tuple of arguments, and wait for all of them."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=be_rank, args=arguments) for arguments in each]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def run_apart(function: Callable[..., None], *each: tuple[Any, ...], timeout: float = 300) -> str:
    """Run a function in processes that know nothing of the tests, and give what they printed.

    They are forked from one that has imported all that they need, and has done nothing else: there
    is one for each process that runs tests.

    Args:
        function: of a module.
        each: the arguments of each process; they run at the same time.
        timeout: seconds until those that still run are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"said{number}" for number in range(len(each))]
        running = [
            start_apart(_inside, function, arguments, log, dict(os.environ))
            for arguments, log in zip(each, logs, strict=True)
        ]
        end = time.monotonic() + timeout
        for process in running:
            process.join(max(end - time.monotonic(), 0))
            process.kill()
            process.join()
        return "\n".join(log.read_text() for log in logs if log.exists())[-8000:]


def start_apart(function: Callable[..., None], *arguments: Any) -> multiprocessing.Process:
    """Start a process forked from one that has imported what :data:`WARM` names.

    That one is not told where modules are looked for, so the environment in which it starts says
    it; and what libraries read from theirs when they are imported says that there is no hub.
    No process imports what is ``__main__`` here: a page of the explorer, where one was run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WARM)
    search_path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = context.Process(target=function, args=arguments)
    with (
        mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}),
        mock.patch.dict(os.environ, {"PYTHONPATH": search_path, "HF_HUB_OFFLINE": "1"}),
    ):
        process.start()
    return process


def _inside(
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    log: Path,
    environment: dict[str, str],
) -> None:
    """Run with the caller's environment, and write what is said to a file."""
    os.environ.clear()
    os.environ.update(environment)
    with log.open("w") as out:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(out.fileno(), stream.fileno())
    function(*arguments)
