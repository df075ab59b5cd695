"""What PyTorch says when a GPU's memory runs out, read from a raw log.

The wording changed often; the figures are these (``CUDACachingAllocator.cpp``, and its counterparts
for ROCm and XPU; the issue trackers of public projects have examples of each):

- torch 1.0 to 1.3: ``... already allocated; ... free; ... cached`` (cached: free in segments),
- torch 1.4 to 2.0: ``... already allocated; ... free; ... reserved in total by PyTorch``,
- torch 2.1 and later: ``GPU 0 has a total capacity of ... of which ... is free``, the processes on
  the card where the driver tells them, ``... is allocated by PyTorch, and ... is reserved by
  PyTorch but unallocated``; since 2.4 also memory in private pools, and a limit (``allowed``).

``Tried to allocate`` is not the tensor but what the allocator asked the driver for: 2 MiB, 20 MiB,
or the request rounded up to 2 MiB. Figures are rounded to two digits, so each is a range.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from memest.report.answer import Document, document
from memest.units import GIB, KIB, MIB, format_size

__all__ = ["MessageSize", "OomMessage", "read_oom_messages"]

_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_SIZE = r"(\d{1,15}(?:\.\d{1,6})?)(bytes|KiB|MiB|GiB)"


def _broken(words: str) -> str:
    """A pattern of words that a narrow terminal may have broken anywhere."""
    return r"\s*".join(re.escape(letter) for letter in words if letter != " ")


_COLOURS = re.compile(r"(?:\x1b|\\u001b|\\x1b)\[[\d;?]*[A-Za-z]")
"""Of terminals, as they are or as JSON has them (notebooks)."""
_BEGIN = re.compile(
    rf"\b(?P<backend>CUDA|HIP|XPU|Device)\s+{_broken('out of memory')}\.?\s+"
    rf"(?:\[(?:rank\s?|default)\d+\]:?\s*)?{_broken('Tried to allocate')}"
)
_RANK = re.compile(r"\brank[ :=]{0,2}(\d{1,6})|\[\d+,(\d{1,6})\]<std", re.IGNORECASE)
_LOCAL_RANK = re.compile(r"\[default(\d{1,6})\]")
"""Of torchrun, which numbers the processes of each machine anew."""
_RANK_PREFIX = re.compile(r"\n\s*(?:\[(?:rank\s?|default)\d+\]:?\s*)")
_MOST = 2_500
"""Characters that one message has at most, with its list of processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSize(Document):
    """A number of a message, in bytes: it was rounded, so it lies between two.

    Attributes:
        low_bytes: the least it can have been.
        high_bytes: the most.
    """

    low_bytes: int
    high_bytes: int

    @property
    def bytes(self) -> int:
        """The middle."""
        return (self.low_bytes + self.high_bytes) // 2

    @property
    def text(self) -> str:
        """For people: the middle, or the most where it may be nothing at all."""
        if self.low_bytes == 0 < self.high_bytes:
            return f"at most {format_size(self.high_bytes)}"
        return format_size(self.bytes)

    def __add__(self, other: MessageSize) -> MessageSize:
        return MessageSize(
            low_bytes=self.low_bytes + other.low_bytes,
            high_bytes=self.high_bytes + other.high_bytes,
        )

    def __sub__(self, other: MessageSize) -> MessageSize:
        return MessageSize(
            low_bytes=max(self.low_bytes - other.high_bytes, 0),
            high_bytes=max(self.high_bytes - other.low_bytes, 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OomMessage(Document):
    """One message. What it does not say is None.

    Attributes:
        backend: ``CUDA``, ``HIP``, ``XPU``, ...
        rank: of the process, where the log names it.
        device: index of the GPU.
        tried: what the driver was asked for.
        total: the card's memory.
        free: what the driver still had.
        allocated: in tensors' blocks.
        unallocated: in segments, free.
        private_pools: part of ``allocated`` that belongs to pools of graphs or MemPools.
        allowed: the limit of this process, where one was set.
        this_process: everything this process had on the card.
        processes: everything that processes had, by their number, where the driver told.
        times: how often the log repeats it.
        before_expandable: it is worded as by torch before 2.1, which has no expandable segments.
    """

    backend: str
    rank: int | None
    device: int | None
    tried: MessageSize
    total: MessageSize | None
    free: MessageSize | None
    allocated: MessageSize | None
    unallocated: MessageSize | None
    private_pools: MessageSize | None
    allowed: MessageSize | None
    this_process: MessageSize | None
    processes: tuple[tuple[int, MessageSize], ...]
    times: int = 1
    before_expandable: bool = False

    @property
    def reserved(self) -> MessageSize | None:
        """In segments."""
        if self.allocated is None or self.unallocated is None:
            return None
        return self.allocated + self.unallocated

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; figures have a low and a high end."""
        names: tuple[str, ...] = (
            "backend",
            "rank",
            "device",
            "times",
            "tried",
            "total",
            "free",
            "allocated",
        )
        names += ("unallocated", "reserved", "private_pools", "allowed", "this_process")
        names += ("before_expandable",)
        return {
            **{name: document(getattr(self, name)) for name in names},
            "processes": [{"pid": pid, **figure.to_dict()} for pid, figure in self.processes],
        }


def read_oom_messages(text: str) -> tuple[OomMessage, ...]:
    """Every message of a log, in its order; one that is repeated is one.

    Args:
        text: a log, a traceback, or the message alone.
    """
    text = _COLOURS.sub("", text)
    starts = list(_BEGIN.finditer(text))
    index_by_key: dict[object, int] = {}
    messages: list[OomMessage] = []
    for at, start in enumerate(starts):
        end = starts[at + 1].start() if at + 1 < len(starts) else len(text)
        body = text[start.start() : min(end, start.start() + _MOST)]
        line = text[
            max(text.rfind("\n", 0, start.start()), start.start() - _MOST, 0) : start.start()
        ]
        message = _read(
            start["backend"], _rank_of(line), "".join(_RANK_PREFIX.sub("\n", body).split())
        )
        if message is None:
            continue
        key = (message.rank, message.device, message.tried, message.allocated, message.free)
        if key in index_by_key:
            index = index_by_key[key]
            messages[index] = replace(messages[index], times=messages[index].times + 1)
        else:
            index_by_key[key] = len(messages)
            messages.append(message)
    return tuple(messages)


def _rank_of(line: str) -> int | None:
    """The rank that a line names before its message, the nearest one: lines get mixed up."""
    ranks = [first or second for first, second in _RANK.findall(line)]
    ranks = ranks or _LOCAL_RANK.findall(line)
    return int(ranks[-1]) if ranks else None


def _read(backend: str, rank: int | None, body: str) -> OomMessage | None:
    """A message; its text is without white space, which lines of a log may have anywhere.

    Every figure is found by the words on both sides of it: one that is cut off must not be taken
    for a smaller one, nor figures of what the log goes on with for the message's.
    """

    def figure(*patterns: str) -> MessageSize | None:
        found = (re.search(pattern.replace("SIZE", _SIZE), body) for pattern in patterns)
        match = next(filter(None, found), None)
        return None if match is None else _figure(match[1], match[2])

    tried = figure("TriedtoallocateSIZE")
    if tried is None:
        return None
    allocated = figure(";SIZEalreadyallocated", "allocatedmemorySIZEisallocatedbyPyTorch")
    unallocated = figure("andSIZEisreservedbyPyTorchbutunallocated", ";SIZEcached")
    reserved = figure(";SIZEreservedintotalbyPyTorch")
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = reserved - allocated
    total_before = figure(r"\(GPU\d*;SIZEtotalcapacity")
    # "capacty" is how torch 2.1 spelt it
    total = total_before or figure("totalcapaci?tyofSIZE")
    device = re.search(r"GPU(\d+)(?:;|hasatotal)", body)

    def of_driver(size: MessageSize | None, least: MessageSize | None) -> MessageSize | None:
        # where NVML has no figure (WSL, containers), torch prints 0 or 2^64 less one for it
        if size is None or (total is not None and size.low_bytes > total.high_bytes):
            return None
        return None if least is not None and size.high_bytes < least.low_bytes else size

    listed = re.findall(rf"Process(\d+)has{_SIZE}memoryinuse", body)
    sizes = [(int(pid), of_driver(_figure(number, unit), None)) for pid, number, unit in listed]
    return OomMessage(
        backend=backend,
        rank=rank,
        device=None if device is None else int(device[1]),
        tried=tried,
        total=total,
        free=figure("ofwhichSIZEisfree", ";SIZEfree"),
        allocated=allocated,
        unallocated=unallocated,
        private_pools=figure("withSIZEallocatedinprivatepools"),
        allowed=figure(r"(?:free|use)\.SIZEallowed"),
        this_process=of_driver(figure("thisprocesshasSIZEmemoryinuse"), allocated),
        processes=tuple((pid, size) for pid, size in sizes if size is not None),
        before_expandable=total_before is not None,
    )


def _figure(number: str, unit: str) -> MessageSize:
    """The range of a rounded number: half of its last digit to both sides; bytes are exact."""
    factor = _UNITS[unit]
    value = float(number)
    half = 0.0 if unit == "bytes" else 0.5 / 10 ** len(number.partition(".")[2])
    return MessageSize(
        low_bytes=max(math.ceil((value - half) * factor), 0),
        high_bytes=math.floor((value + half) * factor),
    )
