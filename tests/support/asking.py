"""The question that tests of faults ask, answers of processes, a disk without room for them."""

from __future__ import annotations

import os

from support.commands import run_commands

MODEL = "prajjwal1/bert-tiny"
QUESTION = (MODEL, "--batch", "4", "--seq-len", "64")


def answers_apart(commands):
    """What processes of their own write to stdout, that ask at the same time.

    Args:
        commands: the cache and the words of each command.

    Returns:
        What each wrote, as bytes.
    """
    everywhere = {**os.environ, "HF_HUB_OFFLINE": "1"}
    processes = run_commands(
        *((words, {**everywhere, "MEMEST_CACHE": str(cache)}) for cache, words in commands)
    )
    assert all(one.returncode == 0 for one in processes), [one.stderr for one in processes]
    return [one.stdout for one in processes]


def fill(place):
    """Take what room a disk has left."""
    file = (place / "full").open("wb", buffering=0)
    with file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return
