"""A stream copied event by event, while a wrapper of the model puts in, holds back and drops.

The stream of one process on whole parameters goes in. A :class:`Wrapper` sees every allocation and
free before it is copied, every phase that begins, and every cue; what it returns, allocates and
frees decides what comes out: the stream of one rank. Sizes are known by then, so what depends on
them (buckets, padding, thresholds) is decided as the libraries decide it, by comparing bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from memest.events import CATEGORY_ORDER, Category, CueKind, Mark, Phase
from memest.steps.stream import PlacedCue, Stream

__all__ = ["DEFAULT_STREAM", "RankStream", "Rewriter", "Wrapper", "rewrite"]

DEFAULT_STREAM = 0
"""The CUDA stream of kernels; blocks of others are never shared with it."""


@dataclass(slots=True)
class RankStream(Stream):
    """The stream of one rank.

    Attributes:
        rank: whose stream it is: of several that differ, the one that needs the most.
        host_bytes: what the wrapper keeps in host memory at most.
        notes: what the wrapper has to say.
    """

    rank: int = 0
    host_bytes: int = 0
    notes: tuple[str, ...] = ()


class Rewriter:
    """The stream that is being written.

    Args:
        stream: the one that is copied.
    """

    def __init__(self, stream: Stream) -> None:
        self.source = stream
        self.out = RankStream(
            events=array("q"),
            categories=bytearray(stream.categories),
            modules=array("l", stream.modules),
            labels=array("l", stream.labels),
            label_names=list(stream.label_names),
            module_names=stream.module_names,
            sizes=list(stream.sizes),
            workspace_slack_bytes=stream.workspace_slack_bytes,
        )
        self.phase = Phase.LOAD
        self._streams = bytearray(len(stream.sizes))
        self._label_index: dict[str, int] = {}

    def alloc(
        self, nbytes: int, category: Category, label: str, *, module: int = 0,
        stream: int = DEFAULT_STREAM,
    ) -> int:  # fmt: skip
        """Put in an allocation.

        Args:
            nbytes: requested.
            category: what it is for.
            label: who makes it.
            module: number of the module it belongs to.
            stream: the CUDA stream it is made on.

        Returns:
            Its number; one of no bytes makes no event.
        """
        out, number = self.out, len(self.out.sizes)
        out.sizes.append(nbytes)
        out.categories.append(CATEGORY_ORDER.index(category))
        out.modules.append(module)
        out.labels.append(self._label(label))
        self._streams.append(stream)
        out.events.append(number)
        return number

    def free(self, number: int) -> None:
        """Put in a free."""
        self.out.events.append(~number)

    def empty_cache(self) -> None:
        """The library calls ``torch.cuda.empty_cache`` here."""
        self.out.emptied = (*self.out.emptied, len(self.out.events))

    def copy(self, event: int) -> None:
        """Take over an event as it is."""
        self.out.events.append(event)

    def mark(self, mark: Mark) -> None:
        """A phase begins."""
        self.phase = mark.phase
        self.out.mark_positions.append(len(self.out.events))
        self.out.marks.append(mark)

    def done(self) -> RankStream:
        """The stream as it came out."""
        if any(self._streams):
            self.out.on_streams = bytes(self._streams)
        return self.out

    def category(self, number: int) -> Category:
        """What an allocation is for."""
        return CATEGORY_ORDER[self.out.categories[number]]

    def _label(self, text: str) -> int:
        index = self._label_index.get(text)
        if index is None:
            index = self._label_index[text] = len(self.out.label_names)
            self.out.label_names.append(text)
        return index


@dataclass(slots=True)
class Wrapper:
    """What a wrapper of the model does; by itself it does nothing.

    Attributes:
        to: the stream that is written.
        notes: what there is to say of the run.
        on_host: what it keeps in host memory, in words.
    """

    to: Rewriter
    notes: list[str] = field(default_factory=list)
    on_host: str = "shards and gradients, pinned; the optimizer's states come on top"

    def allocates(self, number: int) -> bool:
        """An allocation comes; False drops it."""
        del number
        return True

    def frees(self, number: int) -> bool:
        """A free comes; False drops it."""
        del number
        return True

    def leaves(self, phase: Phase) -> None:
        """A phase is at its end; the mark of the next is not written yet."""

    def begins(self, mark: Mark) -> None:
        """A phase begins; its mark is written already."""

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """A cue: see :class:`memest.events.Cue`; ``number`` is -1 where it is about none."""


def rewrite(stream: Stream, to: Rewriter, wrapper: Wrapper) -> RankStream:
    """Copy a stream under the hands of a wrapper.

    Args:
        stream: with cues.
        to: made for this stream.
        wrapper: that writes to it.
    """
    events = stream.events
    stops = _stops(stream)
    here = 0
    for position, mark, cue in stops:
        _copy(events[here:position], to, wrapper)
        here = position
        if mark is not None:
            wrapper.leaves(to.phase)
            to.mark(mark)
            wrapper.begins(mark)
        else:
            assert cue is not None
            wrapper.cue(cue.kind, cue.index, cue.number)
    _copy(events[here:], to, wrapper)
    out = to.done()
    out.notes = tuple(wrapper.notes)
    return out


def _copy(events: Sequence[int], to: Rewriter, wrapper: Wrapper) -> None:
    for event in events:
        keep = wrapper.allocates(event) if event >= 0 else wrapper.frees(~event)
        if keep:
            to.copy(event)


def _stops(stream: Stream) -> list[tuple[int, Mark | None, PlacedCue | None]]:
    """Marks and cues in their order."""
    out: list[tuple[int, Mark | None, PlacedCue | None]] = []
    marks = list(zip(stream.mark_positions, stream.marks, strict=True))
    done = 0
    for cue in stream.cues:
        while done < cue.marks_before:
            out.append((marks[done][0], marks[done][1], None))
            done += 1
        out.append((cue.position, None, cue))
    out.extend((position, mark, None) for position, mark in marks[done:])
    return out
