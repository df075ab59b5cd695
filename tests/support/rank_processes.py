"""Ranks of a case as processes apart from the tests, because the profiler remembers addresses."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from support.forked import run_apart, run_forked

STEPS = 3
"""Optimizer steps of every rank that is measured."""

Rank = Callable[[int, dict[str, Any], str], Any]
"""Given its number, the case and where processes meet, a rank gives its ``CpuRun``, or nothing."""


def real_ranks(be_rank: Rank, case: dict[str, Any], ranks: Iterable[int] = (0,)) -> dict[int, Any]:
    """What ranks of a case measured: a ``CpuRun`` each, of those that give one.

    Args:
        be_rank: of a module.
        case: what it is given.
        ranks: those that are there, at the same time.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = run_apart(_be_ranks, (be_rank, case, folder, tuple(ranks)))
        files = {int(path.suffix[1:]): path for path in Path(folder).glob("measured.*")}
        assert files, log
        return {rank: pickle.loads(files[rank].read_bytes()) for rank in sorted(files)}


def join_group(backend: str, rank: int, world: int, meeting: str) -> None:
    """Join a process group: gloo's, or PyTorch's fake one.

    The fake one gives a rank of any number of ranks what it would allocate, and moves no data.

    Args:
        backend: ``gloo`` or ``fake``.
        rank: of this process.
        world: how many ranks there are.
        meeting: a file where processes meet.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store: Any = dist.FileStore(meeting, world) if backend == "gloo" else FakeStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def measure_rank(run: Callable[[], Any], is_measured: bool = True) -> Any:
    """Run as a rank that is measured, a ``CpuRun``; or as one of the others, which nobody asks."""
    import torch

    from memest.calibration.running.cpu_memory import measure

    if is_measured:
        return measure(run)
    torch.set_num_threads(1)
    run()
    return None


class Marks:
    """Tells the profiler of phases, as the calibration's loops tell whoever measures them."""

    def mark(self, phase: str, step: int, micro_step: int) -> None:
        """A phase begins."""
        from memest.calibration.running.cpu_memory import mark

        mark(f"{phase} {step} {micro_step}")

    def step_done(self, step: int) -> None:
        """An optimizer step is over."""


def _be_ranks(be_rank: Rank, case: dict[str, Any], folder: str, ranks: tuple[int, ...]) -> None:
    if len(ranks) == 1:
        _be_rank(be_rank, ranks[0], case, folder)
    else:
        run_forked(_be_rank, [(be_rank, rank, case, folder) for rank in ranks])


def _be_rank(be_rank: Rank, rank: int, case: dict[str, Any], folder: str) -> None:
    import torch.distributed as dist

    run = be_rank(rank, case, f"{folder}/meeting")
    if run is not None:
        Path(folder, f"measured.{rank}").write_bytes(pickle.dumps(run))
    if dist.is_initialized():
        if dist.get_backend() == "gloo":
            dist.barrier()  # the others still need it
        dist.destroy_process_group()
