"""The question that tests of faults ask, answers of processes, a disk without room for them."""

from __future__ import annotations

import os

from support.commands import run_commands

MODEL = "prajjwal1/bert-tiny"
QUESTION = (MODEL, "--batch", "4", "--seq-len", "64")


def answers_apart(asked):
    """What processes of their own write to stdout, that ask at the same time.

    Args:
        asked: the cache and the words of each command.

    Returns:
        What each wrote, as bytes.
    """
    everywhere = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = run_commands(
        *((words, {**everywhere, "MEMEST_CACHE": str(cache)}) for cache, words in asked)
    )
    assert all(one.returncode == 0 for one in done), [one.stderr for one in done]
    return [one.stdout for one in done]


def fill(place):
    """Take what room a disk has left."""
    file = (place / "full").open("wb", buffering=0)
    with file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return
