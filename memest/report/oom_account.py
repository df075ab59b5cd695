"""What a message of PyTorch says by itself: whose memory it was, and what could be to blame."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memest.catalog.capacity import DRIVER_SPREAD_RATIO
from memest.catalog.cuda_context import context_estimate
from memest.catalog.spec import GpuSpec, list_gpus
from memest.report.oom_message import MessageSize, OomMessage
from memest.units import GIB, MIB, format_size

__all__ = ["Account", "Share", "account_of", "cards_of_size", "whole_board_gib"]

_BACKENDS = {"CUDA": "cuda", "HIP": "rocm"}
_ERAS = ((1, 10), (2, 0), (2, 13))
"""Releases of torch whose contexts differ: all kernels at start, lazily, CUDA 12."""
_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_BOARD_SPREAD = 16 * MIB
"""How far a total of Windows may be from a whole number of GiB: 23.99 GiB are 24."""
_LAST_BYTES = 32 * MIB
"""What a driver may call free and not give: the last pages of a card that is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of the card's memory: what it is, and how much."""

    name: str
    size: MessageSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A message, explained without a prediction.

    Attributes:
        message: the message.
        shares: of the card's memory, as far as they are told apart.
        cards: of the catalogue with so much memory, the nearest first.
        limit: what the allocator could have had in all: reserved and free, or the limit set.
        fragmented: whether as much was free in segments as was asked for; None if unknown.
        others: held by other processes; None where the message does not tell them apart.
        sentences: the findings in words.
    """

    message: OomMessage
    shares: tuple[Share, ...]
    cards: tuple[GpuSpec, ...]
    limit: MessageSize | None
    fragmented: bool | None
    others: MessageSize | None
    sentences: tuple[str, ...]


def account_of(message: OomMessage, *, expandable: bool = False) -> Account:
    """Explain a message.

    Args:
        message: as it was read.
        expandable: the run is known to have had expandable segments.
    """
    reserved, total, free = message.reserved, message.total, message.free
    own, others = _processes(message)
    shares = []
    if message.allocated is not None:
        shares.append(Share(name="tensors (allocated)", size=message.allocated))
    if message.unallocated is not None:
        shares.append(Share(name="free in PyTorch's segments", size=message.unallocated))
    if own is not None and reserved is not None:
        shares.append(Share(name="context, kernels, libraries", size=own - reserved))
        if others is not None:
            shares.append(Share(name="other processes", size=others))
    elif reserved is not None and total is not None and free is not None:
        rest = total - free - reserved
        others = _beyond_a_context(rest, message)
        shares.append(Share(name="context, kernels, other processes", size=rest))
    if free is not None:
        shares.append(Share(name="free", size=free))
    fragmented = None
    if message.unallocated is not None:
        fragmented = message.unallocated.high_bytes >= message.tried.low_bytes
    limit = None if reserved is None or free is None else reserved + free
    if message.allowed is not None:
        memory_limit = message.allowed
        limit = memory_limit if limit is None or memory_limit.bytes < limit.bytes else limit
    return Account(
        message=message,
        shares=tuple(shares),
        cards=() if total is None else cards_of_size(total, message.backend),
        limit=limit,
        fragmented=fragmented,
        others=others,
        sentences=tuple(_sentences(message, own, others, expandable=expandable)),
    )


def _processes(message: OomMessage) -> tuple[MessageSize | None, MessageSize | None]:
    """What this process had, and what others had, as far as the message tells."""
    processes, total, free = message.processes, message.total, message.free
    own = message.this_process
    if own is None and len(processes) == 1 and message.reserved is not None:
        # torch 2.1 in a container names the process by the number it has outside
        (_, only_size), reserved = processes[0], message.reserved
        own = only_size if only_size.high_bytes >= reserved.low_bytes else None
    if own is None or total is None or free is None:
        return own, None
    return own, total - free - own


def _beyond_a_context(rest: MessageSize, message: OomMessage) -> MessageSize | None:
    """What is surely no context of this process, where more was taken than any context needs."""
    spec = next(iter(cards_of_size(message.total, message.backend) if message.total else ()), None)
    if spec is None:
        return None
    context_bytes = max(context_estimate(spec, torch, None).high_bytes for torch in _ERAS)
    if rest.low_bytes <= context_bytes:
        return None
    return rest - MessageSize(low_bytes=0, high_bytes=context_bytes)


def whole_board_gib(total: MessageSize, backend: str = "CUDA") -> int | None:
    """What a whole board has, where a total is that: under WDDM Windows counts nothing off."""
    board = round(total.bytes / GIB)
    is_whole = backend == "CUDA" and board > 1 and abs(total.bytes - board * GIB) <= _BOARD_SPREAD
    return board if is_whole else None


def _with_board(gib: int) -> list[GpuSpec]:
    """Cards that are sold with so much, the newest first."""
    cards = [
        (each.compute_capability, each)
        for each in list_gpus()
        if each.memory_marketing_gb == gib and isinstance(each.compute_capability, tuple)
    ]
    return [each for _, each in sorted(cards, key=lambda row: row[0], reverse=True)]


def cards_of_size(total: MessageSize, backend: str = "CUDA") -> tuple[GpuSpec, ...]:
    """Cards of the catalogue whose memory a message's total can be, the nearest first.

    Totals of one card differ between drivers, by up to 1.5 %. Of cards that have so much as a whole
    board, the newest are the first.
    """
    board = whole_board_gib(total, backend)
    if board is not None:
        return tuple(_with_board(board))
    backend_slug = _BACKENDS.get(backend)
    tolerance = int(total.bytes * DRIVER_SPREAD_RATIO)
    candidates = [
        (abs(spec.torch_total_bytes - total.bytes), index, spec)
        for index, spec in enumerate(list_gpus())
        if spec.backend == backend_slug
        and spec.torch_total_bytes is not None
        and total.low_bytes - tolerance <= spec.torch_total_bytes <= total.high_bytes + tolerance
    ]
    return tuple(spec for _, _, spec in sorted(candidates, key=lambda row: row[:2]))


def _sentences(
    message: OomMessage,
    own: MessageSize | None,
    others: MessageSize | None,
    *,
    expandable: bool,
) -> Iterator[str]:
    tried, free, reserved, total = message.tried, message.free, message.reserved, message.total
    if total is None and free is None and reserved is None:
        yield (
            "the message goes on in the log, with what the card has and what is allocated, "
            "reserved and free: give all of it, or the log itself."
        )
    board = None if total is None else whole_board_gib(total, message.backend)
    if board is not None:
        number = len(_with_board(board))
        yield (
            f"{board} GiB are a whole board, which Windows counts (WDDM): the card can be any that "
            f"has so much, as {number} of the catalogue have."
        )
    if reserved is not None and total is not None and reserved.low_bytes > total.high_bytes:
        yield (
            f"PyTorch held {reserved.text}, more than the card's {total.text}: the driver had lent "
            "it memory of the host (Windows calls it shared GPU memory), which is much slower. "
            "The card was full long before this message."
        )
    if message.allowed is not None:
        yield (
            f"this process was limited to {message.allowed.text} of the card "
            "(set_per_process_memory_fraction): the card itself may have had room."
        )
    if message.allowed is None and free is not None and _is_refused(free, tried):
        yield (
            f"the driver reported {free.text} free, more than the {tried.text} asked for: it was "
            "the driver that refused. A MIG slice, a limit of the system or container, or another "
            "process that took and gave back memory meanwhile can do that."
        )
    else:
        yield from _of_fragmentation(message, expandable=expandable)
    outside = others
    if own is not None:
        outside = None if reserved is None else _beyond_a_context(own - reserved, message)
    if own is not None and others is not None and others.low_bytes > 64 * MIB:
        yield (
            f"at least {format_size(others.low_bytes)} of the card were held by others than this "
            "process: look with nvidia-smi for processes that can be ended."
        )
    if outside is not None and outside.low_bytes > 64 * MIB:
        yield (
            f"at least {format_size(outside.low_bytes)} lay outside PyTorch's allocator and are "
            "more than any CUDA context takes: other processes (look with nvidia-smi for some that "
            "can be ended), or an engine (vLLM) or a library (NCCL) that allocates by itself."
        )
    if message.private_pools is not None and message.private_pools.low_bytes > 0:
        yield (
            f"{message.private_pools.text} lie in private pools (CUDA graphs, MemPools), where "
            "nothing else can use them."
        )
    if message.backend == "XPU":
        yield "an Intel GPU: predictions are about CUDA's allocator, this one's rules differ."


def _is_refused(free: MessageSize, tried: MessageSize) -> bool:
    """Whether the driver had enough, and did not give it."""
    return free.low_bytes > tried.high_bytes + _LAST_BYTES


def _of_fragmentation(message: OomMessage, *, expandable: bool) -> Iterator[str]:
    """Whether holes between blocks can be to blame, by what was free in segments."""
    tried, free, cache = message.tried, message.free, message.unallocated
    if cache is None:
        return
    if cache.high_bytes >= tried.low_bytes:
        yield (
            f"{cache.text} were free in PyTorch's own segments, at least as much as the "
            f"{tried.text} asked for, but in no block large enough that could be used or given "
            f"back: fragmentation.{_remedy(message, 'is the first thing to try', expandable)}"
        )
    elif free is not None and cache.high_bytes + free.high_bytes >= tried.low_bytes:
        yield (
            f"the {cache.text} free in PyTorch's segments and the {free.text} free on the card "
            f"together would hold the {tried.text} asked for: without fragmentation it might just "
            f"have fitted.{_remedy(message, 'is worth a try', expandable)}"
        )
    else:
        missing_bytes = 0 if free is None else max(tried.bytes - cache.bytes - free.bytes, 0)
        missing = "" if free is None else f"; with both, {format_size(missing_bytes)} were missing"
        yield (
            f"fragmentation is not to blame: only {cache.text} were free in PyTorch's segments, "
            f"{tried.text} were asked for{missing}."
        )


def _remedy(message: OomMessage, words: str, expandable: bool) -> str:
    """What to do about fragmentation; empty where nothing is known to help."""
    if message.backend == "XPU":
        return ""
    if expandable:
        return (
            " The command has expandable segments, which leave few holes: look whether the run "
            "had them."
        )
    if message.before_expandable:  # which stops at an option that it does not know
        return f" Torch 2.1 or newer, with {_EXPANDABLE}, {words}."
    on_windows = message.total is not None and whole_board_gib(message.total, message.backend)
    if message.backend == "HIP" or on_windows:
        return (
            f" {_EXPANDABLE} {words}, where torch has it: on Windows and on ROCm old releases warn "
            "that they do not."
        )
    return f" {_EXPANDABLE} {words}."
