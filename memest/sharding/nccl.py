"""What a communicator of NCCL takes of the device, beside the allocator.

Sources: NCCL 2.30, ``src/init.cc`` (``computeBuffSizes``), ``src/transport/p2p.cc`` (a buffer lies
on the receiver's side, rounded up to the 2 MiB of a ``cuMem`` allocation; the sender keeps one
such page), ``src/transport/nvls.cc``. How many channels a communicator has follows from the links
between the GPUs, which a setup does not name: hence a range, from two channels (what the search of
a plain PCIe topology ends with) to ``MAXCHANNELS`` of the releases up to 2.27, in which the rings
and the trees of a node share no connection.
"""

from __future__ import annotations

from dataclasses import dataclass

from memest.config.parallelism import Distributed, Strategy
from memest.units import KIB, MIB, format_size

__all__ = ["Communicators", "communicators"]

_PAGE = 2 * MIB
_LL = 8 * 512 * 8 * 16
_LL128 = 120 * 640 * 8 * 8
_SIMPLE = 4 * MIB
_HEADER = 8 * KIB
CONNECTION_BYTES = -(-(_HEADER + _LL + _LL128 + _SIMPLE) // _PAGE) * _PAGE + _PAGE
"""One connection: the buffers of the three protocols at the receiver, and a page at the sender."""
FEWEST_CHANNELS = 2
MOST_CHANNELS = 32
_NVLS_CHANNELS = 16
_NVLS_CHUNK = 128 * KIB
_NVLS_SLOTS = 8
_NVLS_HEADS = 8
_NVLS_BYTES = _NVLS_CHANNELS * 2 * _NVLS_CHUNK * _NVLS_SLOTS * _NVLS_HEADS
"""Multicast buffers where the GPUs hang on one NVSwitch: Hopper and later."""
_NVLS_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicators:
    """What NCCL takes, bytes, and what that is based on."""

    low_bytes: int
    expected_bytes: int
    high_bytes: int
    basis: str


def communicators(
    distributed: Distributed, capability: tuple[int, int] | None
) -> Communicators | None:
    """What the communicator of a run takes on each GPU; None where there is none.

    All ranks are in one group (DDP, FSDP2 on a mesh of one dimension, ZeRO), so there is one; with
    replicas of a sharded model there are two. The stages of a pipeline send to their neighbours,
    and where experts are shared, every rank sends to every other.
    An all-to-all sends to every other rank, so all of them are connected: those that share
    experts, and those that share sequences by Ulysses.
    The middle of the range is expected, for want of anything better.

    Args:
        distributed: how the run is spread over GPUs.
        capability: compute capability of the GPUs; None where it is not known.
    """
    alone = distributed.strategy is Strategy.NONE and distributed.pp == 1 and distributed.tp == 1
    if distributed.num_gpus == 1 or alone:
        return None
    if distributed.nccl_memory is not None:
        nbytes = distributed.nccl_memory
        return Communicators(
            low_bytes=nbytes,
            expected_bytes=nbytes,
            high_bytes=nbytes,
            basis=f"NCCL {format_size(nbytes)} as given",
        )
    groups = [n for n in (distributed.shard_ranks, distributed.num_copies, distributed.tp) if n > 1]
    if 1 < distributed.cp < distributed.shard_ranks:
        groups.append(
            distributed.cp
        )  # else those of a sequence are those that share the parameters
    if distributed.sp > 1:
        groups.append(distributed.sp)  # a group of its own, of all GPUs too (parallel_state_sp)
    # sending and receiving connects neighbours alone, one of them at the ends of a pipeline; the
    # gradients of keys and values go round the ring
    neighbours = (
        min(max(distributed.pp, distributed.cp) - 1, 2) + distributed.ep - 1 + distributed.sp - 1
    )
    low = (len(groups) + min(neighbours, 1)) * FEWEST_CHANNELS * CONNECTION_BYTES
    high = (len(groups) * 2 + neighbours) * MOST_CHANNELS * CONNECTION_BYTES
    if capability is None or capability >= _NVLS_CAPABILITY:
        high += sum(_NVLS_BYTES for ranks in groups if ranks > 2)
    return Communicators(
        low_bytes=low,
        expected_bytes=(low + high) // 2,
        high_bytes=high,
        basis=(
            f"NCCL {format_size(low)} to {format_size(high)}: the links between the GPUs decide "
            "(--nccl-memory for what nvidia-smi shows)"
        ),
    )
