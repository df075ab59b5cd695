"""Ranks as processes: those of one case, and apart from the process that runs the tests."""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["run_apart", "run_forked"]

_KNOWN = [
    "torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.profiler",
    "torch.distributed.tensor.parallel", "accelerate", "peft", "transformers.trainer",
    "transformers.models.llama.modeling_llama",
]  # fmt: skip
"""What a rank would spend most of its time to import."""


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

    They are forked from one that has imported torch and transformers and has done nothing else.

    Args:
        function: of a module.
        each: the arguments of each process; they run at the same time.
        timeout: seconds until those that still run are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_KNOWN)
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / f"said{number}" for number in range(len(each))]
        running = [
            context.Process(target=_inside, args=(function, arguments, log, dict(os.environ)))
            for arguments, log in zip(each, said, strict=True)
        ]
        for process in running:
            process.start()
        end = time.monotonic() + timeout
        for process in running:
            process.join(max(end - time.monotonic(), 0))
            process.kill()
            process.join()
        return "\n".join(log.read_text() for log in said if log.exists())[-8000:]


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
