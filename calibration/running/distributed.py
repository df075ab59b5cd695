"""Cases of several processes: one process a rank, each on its own device.

The worker of such a case does not train. It forks the ranks (so they start with everything imported
and no context, as any worker does), passes on what they say, and ends those that would wait for
ever for one that is gone. The ranks are in the process group of the nursery: what ends a worker
that takes too long ends them too.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from memest.calibration.case import Case, Parallel
from memest.calibration.measurement import Status
from memest.calibration.running.attendant import crashed
from memest.calibration.running.cpu_worker import CpuWorker
from memest.calibration.running.gpu_worker import GpuWorker
from memest.calibration.running.meters import count_devices
from memest.calibration.running.worker import Send, die_with_parent, failure_of, perform
from memest.errors import ConfigError

__all__ = ["launch"]

_GRACE_SECONDS = 10.0
"""What ranks have to end by themselves when one of them has failed: collectives wait for ever."""
_POLL_SECONDS = 0.5
_CAUSES = (Status.OOM, Status.CRASHED, Status.FAILED)
"""What of several ranks' ends ends the case: others fail because a connection is closed."""


def launch(case: Case, device: str, send: Send, *, events: str = "", command: str = "") -> None:
    """Run a case on several processes of this machine.

    Args:
        case: with ``processes`` above 1.
        device: ``cpu``, else rank i takes the i-th of the visible GPUs.
        send: takes messages; those of ranks above 0 name their ``rank``. The end of rank 0 is that
            of the case: if a rank fails, the case has failed.
        events: where rank 0 writes the allocator's history, if the case wants it.
        command: the command line of the campaign, for the record.
    """
    try:
        _check(case, device)
    except ConfigError as error:
        end = {"kind": "end", "status": Status.FAILED, "failure": failure_of(error, "start")}
        send(end)
        return
    if case.parallel is Parallel.FSDP:
        import torch.distributed.fsdp  # noqa: F401 - once, before the fork
    with tempfile.TemporaryDirectory() as folder:
        ranks = _Ranks(case, device, Path(folder) / "rendezvous", events, command)
        ends = ranks.follow(send)
    failed = [rank for rank, end in ends.items() if end["status"] in _CAUSES]
    culprit = min(failed, key=lambda r: _CAUSES.index(Status(ends[r]["status"])), default=0)
    for rank in range(1, case.processes):
        send(ends[rank] | {"rank": rank})
    whole = ends[culprit]
    if culprit:
        failure = whole["failure"] or {"kind": "Gone", "message": "no message"}
        whole = whole | {"failure": failure | {"message": f"rank {culprit}: {failure['message']}"}}
    send(whole)


def _check(case: Case, device: str) -> None:
    if case.setup.loop.value != "plain":
        raise ConfigError(
            f"several processes are measured in the plain loop, not in {case.setup.loop.value}."
        )
    if case.parallel is Parallel.FSDP and not _has_fsdp():
        raise ConfigError("this torch has no torch.distributed.fsdp.fully_shard: update it.")
    available = count_devices(device, dict(os.environ))
    if available is not None and available < case.processes:
        raise ConfigError(
            f"this case trains on {case.processes} GPUs, one a process, and this machine has "
            f"{available}."
        )


def _has_fsdp() -> bool:
    with contextlib.suppress(ImportError):
        from torch.distributed.fsdp import fully_shard

        return callable(fully_shard)
    return False


class _Ranks:
    """The processes of one case, seen from the worker that started them."""

    def __init__(
        self, case: Case, device: str, rendezvous: Path, events: str, command: str
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._readers: dict[Connection, int] = {}
        self._processes: list[Any] = []
        for rank in range(case.processes):
            reading, writing = context.Pipe(duplex=False)
            own = device if device == "cpu" else f"cuda:{rank}"
            process = context.Process(
                target=_be_rank,
                args=(case, own, rank, rendezvous, writing, "" if rank else events, command),
            )
            process.start()
            writing.close()  # the rank's alone: its end is the end of the pipe
            self._readers[reading] = rank
            self._processes.append(process)

    def follow(self, send: Send) -> dict[int, dict[str, Any]]:
        """Pass on what ranks say until all are gone.

        Returns:
            How each ended, in the order in which they did.
        """
        ends: dict[int, dict[str, Any]] = {}
        deadline: float | None = None
        while self._readers:
            for rank, message in self._heard():
                if message is None:
                    ends.setdefault(rank, self._gone(rank))
                elif message["kind"] == "end":
                    ends[rank] = message
                else:
                    send(message | {"rank": rank} if rank else message)
            failed = [rank for rank, end in ends.items() if end["status"] != Status.OK]
            if failed and deadline is None:
                deadline = time.monotonic() + _GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                self._end_others(ends, failed[0])
                deadline = None if not self._readers else time.monotonic() + _GRACE_SECONDS
        return ends

    def _heard(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """A message of each rank that has one; None of one that is gone."""
        for reader in wait(list(self._readers), _POLL_SECONDS):
            assert isinstance(reader, Connection)
            try:
                yield self._readers[reader], reader.recv()
            except (EOFError, OSError):
                yield self._readers.pop(reader), None

    def _gone(self, rank: int) -> dict[str, Any]:
        process = self._processes[rank]
        process.join()
        code = process.exitcode
        end = crashed({"signal": -code if code < 0 else None, "code": code})
        assert end.failure is not None
        failure = {"kind": end.failure.kind, "message": end.failure.message}
        return {"kind": "end", "status": end.status, "failure": failure}

    def _end_others(self, ends: dict[int, dict[str, Any]], failed: int) -> None:
        for rank in self._readers.values():
            why = {"kind": "Ended", "message": f"it waited for rank {failed}, which had failed"}
            ends.setdefault(rank, {"kind": "end", "status": Status.INTERRUPTED, "failure": why})
            self._processes[rank].kill()


def _be_rank(
    case: Case,
    device: str,
    rank: int,
    rendezvous: Path,
    connection: Connection,
    events: str,
    command: str,
) -> None:
    """The life of a rank."""
    die_with_parent()
    kind = _CpuRank if device == "cpu" else _GpuRank
    worker = kind(case, device, connection.send, events, command)
    worker.rank, worker.rendezvous = rank, rendezvous
    perform(worker, connection.send)
    sys.stdout.flush()
    sys.stderr.flush()
    # no teardown of the process group: it may wait for a rank that is gone
    connection.close()
    os._exit(0)


def _join(backend: str, rank: int, case: Case, rendezvous: Path) -> None:
    import torch.distributed as dist

    if backend == "gloo" and sys.platform == "linux":
        # the name of this host need not lead anywhere in a container
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(rendezvous), case.processes)
    dist.init_process_group(backend, store=store, rank=rank, world_size=case.processes)


class _CpuRank(CpuWorker):
    """One rank on the CPU, with gloo."""

    rank: int
    rendezvous: Path

    def _placed(self, model: Any) -> Any:
        import torch

        _join("gloo", self.rank, self._case, self.rendezvous)
        if self._case.parallel is Parallel.FSDP:
            # shards take the place of weights: with them as they are then, counting begins
            return _sharded(model, "cpu", self._case.processes)
        # buckets come on top of the weights, and are replaced after the first step
        self.mark("load", 0, 0)
        return torch.nn.parallel.DistributedDataParallel(model)

    def run(self) -> str:
        import torch.distributed as dist

        written = super().run()
        dist.barrier()  # nobody leaves while another still needs a connection
        return written


class _GpuRank(GpuWorker):
    """One rank on its own GPU, with NCCL."""

    rank: int
    rendezvous: Path

    def _placed(self, model: Any) -> Any:
        import torch

        self._connect()
        if self._case.parallel is Parallel.FSDP:
            # moves to the device what it shards, block by block
            return _sharded(model, "cuda", self._case.processes)
        return torch.nn.parallel.DistributedDataParallel(model.to("cuda"), device_ids=[0])

    def _connect(self) -> None:
        """Make the communicator, which takes memory beside the allocator's."""
        import torch
        import torch.distributed as dist

        _join("nccl", self.rank, self._case, self.rendezvous)
        one = torch.ones(1, device="cuda")
        dist.all_reduce(one)
        torch.cuda.synchronize()
        self._reading(self._meter.read("communicator"))
        del one
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def run(self) -> str:
        import torch.distributed as dist

        written = super().run()
        dist.barrier(device_ids=[0])
        return written


def _sharded(model: Any, device: str, processes: int) -> Any:
    """The model with its parameters sharded: each block on its own, and what is left together."""
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (processes,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _blocks(model: Any) -> list[Any]:
    """The layers of a model: members of its outermost lists that have parameters."""
    import torch

    lists: list[str] = []
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, torch.nn.ModuleList) and not inner:
            lists.append(name)
    members = itertools.chain.from_iterable(model.get_submodule(name) for name in lists)
    return [block for block in members if any(True for _ in block.parameters())]
