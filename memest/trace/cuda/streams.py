"""Streams of one's own where there is no driver: on which of them memory is taken.

The caching allocator keeps the free blocks of each stream apart, so a trace notes the stream that
is current when a tensor is made, in backward the one that its forward ran on, as autograd does.
Nothing is waited for: what one stream makes, another reads in the order of the program.

Source: ``CUDACachingAllocator.cpp`` (blocks belong to the stream current at allocation),
``torch/csrc/autograd/engine.cpp`` (``opt_parent_stream``), ``input_buffer.cpp`` (what crosses
streams is recorded on the consumer's), ``CUDAStream.cpp`` (32 streams of a priority, in turn).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from memest.errors import ConfigError

__all__ = [
    "DEFAULT",
    "Event",
    "Graphs",
    "Stream",
    "Streams",
    "current_streams",
    "in_stream",
    "named_stream",
    "record_stream",
    "set_stream",
    "watched_streams",
]

# AccumulateGrad has the greatest sequence number there is, and its weights' stream
_ACCUMULATES = 1 << 63
_RECORDED = (
    "a tensor that another stream uses (record_stream) is reused when that stream is done with it, "
    "which no trace knows"
)
_CROSSING = (
    "gradients that cross streams are reused when the other stream is done with them, which no "
    "trace knows"
)
_MADE_ANEW = "streams that a step makes anew have blocks of their own in each of its first 32"


class Streams:
    """Which stream is current, and what of streams has no price.

    Attributes:
        unpriced: what may take more memory than is noted, in words.
    """

    def __init__(self) -> None:
        self.unpriced: dict[str, None] = {}
        self._numbers: dict[Any, int] = {}
        self._stack: list[Stream] = []
        self._starts: list[int] = []
        self._since: list[int] = []
        self._forwards = 0
        self._made_in_step = 0

    def step_begins(self) -> None:
        """A forward begins; what makes streams behind the first makes them anew in each."""
        self._forwards += 1
        self._made_in_step = 0

    def key_of_new(self) -> Any:
        """What tells a stream that is made now from others; None for the stream itself."""
        if not self._forwards:
            return None
        if self._forwards > 1:
            self.unpriced[_MADE_ANEW] = None
        self._made_in_step += 1
        return self._made_in_step

    def number_of(self, stream: Stream) -> int:
        """The number of a stream, in the order of their first use; 0 is the default one."""
        if stream is DEFAULT:
            return 0
        key = stream if stream.key is None else stream.key
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def enter(self, stream: Stream) -> None:
        """A stream becomes the current one."""
        self._stack.append(stream)
        self._note()

    def leave(self) -> None:
        """The one before is current again."""
        self._stack.pop()
        self._note()

    def put(self, stream: Stream) -> None:
        """``torch.cuda.set_stream``: current until another is."""
        self._stack[-1:] = [stream]
        self._note()

    @property
    def named(self) -> Stream:
        """The stream that the program made current, else the default one."""
        return self._stack[-1] if self._stack else DEFAULT

    def _note(self) -> None:
        self._starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._since.append(self.number_of(self.named))

    def here(self, *, in_backward: bool) -> int:
        """The stream that an operator runs on now."""
        if not self._starts:
            return 0
        number = self.number_of(self.named)
        if in_backward and not self._stack:
            node = torch._C._current_autograd_node()
            if node is None or node._sequence_nr() >= _ACCUMULATES:
                return 0
            place = bisect_right(self._starts, node._sequence_nr()) - 1
            number = self._since[place] if place >= 0 else 0
        elif number and torch.is_grad_enabled():
            self.unpriced[_CROSSING] = None
        return number

    def recorded(self) -> None:
        """``Tensor.record_stream``: blocks that the allocator gives back later than the program."""
        self.unpriced[_RECORDED] = None


_watched: list[Streams] = []


def current_streams() -> Streams | None:
    """Those of the trace that runs, None where no code of one's own does."""
    return _watched[-1] if _watched else None


@contextmanager
def watched_streams() -> Iterator[Streams]:
    """Streams of one's own from here on."""
    _watched.append(Streams())
    try:
        yield _watched[-1]
    finally:
        _watched.pop()


class _Clock:
    """There is nothing to wait for, and no time passes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("meta")

    def query(self) -> bool:
        """Everything is done."""
        return True

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    wait = synchronize = _nothing


class Event(_Clock):
    """``torch.cuda.Event``."""

    cuda_event = 0
    record = _Clock._nothing

    def elapsed_time(self, _other: Any) -> float:
        """Milliseconds."""
        return 0.0


class Stream(_Clock):
    """``torch.cuda.Stream``, and ``torch.cuda.stream`` as the block that it is current in."""

    cuda_stream = stream_id = priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        streams = current_streams()
        self.key = None if streams is None else streams.key_of_new()

    def record_event(self, event: Event | None = None) -> Event:
        """An event of this stream."""
        return event or Event()

    wait_event = wait_stream = _Clock._nothing

    def __enter__(self) -> Stream:
        if (streams := current_streams()) is not None:
            streams.enter(self)
        return self

    def __exit__(self, *_: Any) -> None:
        if (streams := current_streams()) is not None:
            streams.leave()


DEFAULT = Stream()
"""The stream that everything runs on that is told no other."""


def named_stream(*_: Any) -> Stream:
    """``torch.cuda.current_stream``."""
    streams = current_streams()
    return DEFAULT if streams is None else streams.named


def set_stream(stream: Any) -> None:
    """``torch.cuda.set_stream``."""
    if (streams := current_streams()) is not None:
        streams.put(_followed(stream))


def in_stream(stream: Any) -> AbstractContextManager[Any]:
    """``torch.cuda.stream``: None is no stream."""
    return nullcontext() if stream is None else _followed(stream)


def _followed(stream: Any) -> Stream:
    """A stream of a live module, made where there is a driver, as one that is followed."""
    if isinstance(stream, Stream):
        return stream
    followed = Stream()
    followed.key = stream
    return followed


def record_stream(_tensor: torch.Tensor, _stream: Stream) -> None:
    """``Tensor.record_stream``."""
    if (streams := current_streams()) is not None:
        streams.recorded()


class Graphs:
    """``torch.cuda.CUDAGraph``, ``torch.cuda.graph`` and private pools, which are refused."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ConfigError(
            "torch.cuda.graph, CUDAGraph and MemPool take memory from pools of their own, which "
            "is not priced yet: price the step as it runs without them."
        )
