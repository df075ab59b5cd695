"""Ranks as processes of one case."""

import multiprocessing
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["run_forked"]


def run_forked(be_rank: Callable[..., None], each: Iterable[tuple[Any, ...]]) -> None:
    """Fork a process for every tuple of arguments, and wait for all of them."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=be_rank, args=arguments) for arguments in each]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
