"""A stream copied event by event, while a wrapper of the model puts in, holds back and drops.

The stream of one process on whole parameters goes in. A :class:`Wrapper` sees every allocation and
free before it is copied, every phase that begins, and every cue; what it returns, allocates and
frees decides what comes out: the stream of one rank. Sizes are known by then, so what depends on
them (buckets, padding, thresholds) is decided as the libraries decide it, by comparing bytes.

FSDP and ZeRO are kinds of :class:`ShardedRank`: it knows where parameters lie, which gradients they
have, and where in a step the run is. When something is gathered, given back and reduced, and in
which storages, is the matter of its subclasses.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memest.events import CATEGORY_ORDER, Category, CueKind, Mark, Phase, Weight
from memest.profiles.stream import PlacedCue, Stream
from memest.workspaces.operator_call import DTYPE_BYTES

__all__ = [
    "DEFAULT_STREAM",
    "RankStream",
    "Rewriter",
    "ShardedRank",
    "Wrapper",
    "num_elements",
    "rewrite",
    "weight_bytes",
]

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

    def with_sizes_of(self, stream: Stream) -> RankStream:
        """The same with the sizes of another stream in place of the one that was copied."""
        return replace(
            self,
            sizes=[*stream.sizes, *self.sizes[len(stream.sizes) :]],
            workspace_slack_bytes=stream.workspace_slack_bytes,
        )


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
        self.asked_sizes: dict[int, int] = {}
        """Bytes of the allocations of that stream whose size a wrapper has asked for: what it did
        rests on them, and on no other size there."""
        self._streams = bytearray(stream.on_streams or len(stream.sizes))
        self._label_index: dict[str, int] = {}

    def alloc(
        self,
        nbytes: int,
        category: Category,
        label: str,
        *,
        module: int = 0,
        stream: int = DEFAULT_STREAM,
    ) -> int:
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
        out.labels.append(self._label_number(label))
        self._streams.append(stream)
        out.events.append(number)
        return number

    def free(self, *numbers: int) -> None:
        """Put in frees, one after the other."""
        self.out.events.extend(~number for number in numbers)

    def move(self, number: int, stream: int) -> None:
        """An allocation that was copied is made on another stream."""
        self._streams[number] = stream

    def empty_cache(self) -> None:
        """The library calls ``torch.cuda.empty_cache`` here."""
        self.out.empty_cache_at = (*self.out.empty_cache_at, len(self.out.events))

    def copy(self, event: int) -> None:
        """Take over an event as it is."""
        self.out.events.append(event)

    def mark(self, mark: Mark) -> None:
        """A phase begins."""
        self.phase = mark.phase
        self.out.mark_positions.append(len(self.out.events))
        self.out.marks.append(mark)

    def finish(self) -> RankStream:
        """The stream as it came out."""
        if any(self._streams):
            self.out.on_streams = bytes(self._streams)
        return self.out

    def size(self, number: int) -> int:
        """Requested bytes of an allocation."""
        nbytes = self.out.sizes[number]
        if number < len(self.source.sizes):
            self.asked_sizes[number] = nbytes
        return nbytes

    def category(self, number: int) -> Category:
        """What an allocation is for."""
        return CATEGORY_ORDER[self.out.categories[number]]

    def label(self, number: int) -> str:
        """Who makes an allocation."""
        return self.out.label_names[self.out.labels[number]]

    def _label_number(self, text: str) -> int:
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
    on_host: str = "shards and gradients, pinned"

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
    out = to.finish()
    out.notes = tuple(wrapper.notes)
    return out


def _copy(events: Sequence[int], to: Rewriter, wrapper: Wrapper) -> None:
    allocates, frees, copy = wrapper.allocates, wrapper.frees, to.out.events.append
    for event in events:
        if allocates(event) if event >= 0 else frees(~event):
            copy(event)


def _stops(stream: Stream) -> list[tuple[int, Mark | None, PlacedCue | None]]:
    """Marks and cues in their order."""
    out: list[tuple[int, Mark | None, PlacedCue | None]] = []
    marks = list(zip(stream.mark_positions, stream.marks, strict=True))
    num_marks = 0
    for cue in stream.cues:
        while num_marks < cue.marks_before:
            out.append((marks[num_marks][0], marks[num_marks][1], None))
            num_marks += 1
        out.append((cue.position, None, cue))
    out.extend((position, mark, None) for position, mark in marks[num_marks:])
    return out


def num_elements(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    count = 1
    for extent in shape:
        count *= extent
    return count


def weight_bytes(weight: Weight) -> int:
    """Bytes of the elements of a weight."""
    return num_elements(weight.shape) * DTYPE_BYTES[weight.dtype]


@dataclass(slots=True, kw_only=True)
class ShardedRank(Wrapper):
    """One rank whose parameters or gradients are shared by several; by itself it shares nothing.

    The stream of one process loads whole parameters. Where a library partitions them, these
    storages are left out until every parameter has its place, and shards are constructed then.

    It also keeps the gradients of a step: the first micro-step hands them over, later ones add to
    them in place. Where a library takes them away as they come (a reduction, a shard), every
    micro-step finds the parameter without one, so what later ones compute is handed over too.

    Attributes:
        weights: parameters of the model, as the stream has them.
        last_micro_step: number of the last micro-step of a step.
        leaves_out: whole parameters are not on the device when they have been loaded.
        kept_as: what its part of the parameters is for.
        storages: the storage of each parameter as the stream has it.
        gradients: the storage of what each parameter has, by weight.
        in_backward: the phase is a backward.
        is_boundary: the micro-step is the last one of a step.
    """

    weights: Sequence[Weight]
    last_micro_step: int
    leaves_out: bool = True
    kept_as: Category = Category.PARAMETERS
    storages: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    in_backward: bool = False
    is_boundary: bool = True
    _left_out: list[int] = field(default_factory=list)
    _weight_of_gradient: dict[int, int] = field(default_factory=dict)
    _taken_gradients: set[int] = field(default_factory=set)
    _freed_gradients: set[int] = field(default_factory=set)
    _new_gradients: dict[int, int] = field(default_factory=dict)

    # -- what libraries do

    @abstractmethod
    def construct(self) -> None:
        """Every parameter has its place: the wrapper is made, and cuts them."""

    @abstractmethod
    def hook(self, kind: CueKind, index: int) -> None:
        """A cue about modules or an update."""

    @abstractmethod
    def end_backward(self) -> None:
        """Autograd is done with a micro-step."""

    def ready(self, weight: int) -> None:
        """The gradient of a weight is there."""

    def zero_grad(self, weight: int) -> None:
        """``zero_grad`` drops the gradient of a weight that was taken before."""

    # -- what the stream brings

    def allocates(self, number: int) -> bool:
        """See :meth:`Wrapper.allocates`."""
        loads = self.leaves_out and self.to.phase is Phase.LOAD
        if loads and self.to.category(number) is Category.PARAMETERS:
            self._left_out.append(number)
            return False
        return True

    def frees(self, number: int) -> bool:
        """See :meth:`Wrapper.frees`; gradients that it knows go when the library drops them."""
        if number not in self._weight_of_gradient:
            return True
        if number in self._taken_gradients:
            # zero_grad drops what there is in its place
            self._taken_gradients.discard(number)
            self.zero_grad(self._weight_of_gradient.pop(number))
        else:
            # added in place by the stream; here it is what the parameter has
            self._freed_gradients.add(number)
        return False

    def begins(self, mark: Mark) -> None:
        """See :meth:`Wrapper.begins`."""
        self.in_backward = mark.phase is Phase.BACKWARD
        if mark.phase is Phase.FORWARD:
            self.is_boundary = mark.micro_step == self.last_micro_step

    def cue(self, kind: CueKind, index: int, number: int) -> None:
        """See :meth:`Wrapper.cue`."""
        if kind is CueKind.PLACED:
            self.storages[index] = number
            if index == len(self.weights) - 1:
                # what was left out and is nobody's parameter after all is taken over as it is
                storages = set(self.storages.values())
                for left_out in self._left_out:
                    if left_out not in storages:
                        self.to.copy(left_out)
                self.construct()
        elif kind is CueKind.GRADIENT:
            self._hand_over(index, number)
        elif kind is CueKind.READY:
            self._accumulate(index, number)
        elif kind is CueKind.DONE:
            self.end_backward()
        else:
            self.hook(kind, index)

    # -- what libraries ask

    def module_of(self, weight: int) -> int:
        """Number of the module whose parameter a weight is, once it has its place."""
        return self.to.out.modules[self.storages[weight]]

    def take_gradient(self, weight: int) -> None:
        """The gradient of a weight goes, where there is one."""
        number = self.gradients.pop(weight, None)
        if number is None:
            return
        self.to.free(number)
        if number in self._freed_gradients:
            self._freed_gradients.discard(number)
            self._weight_of_gradient.pop(number, None)
        elif number in self._weight_of_gradient:
            self._taken_gradients.add(number)

    # -- gradients

    def _hand_over(self, weight: int, number: int) -> None:
        """A gradient comes; where nothing is there yet, the parameter takes it over."""
        if number >= 0 and weight not in self.gradients:
            self._new_gradients[weight] = number
            self._weight_of_gradient[number] = weight

    def _accumulate(self, weight: int, number: int) -> None:
        """It has been added. The stream has its sum; here it may be the first."""
        new_gradient = self._new_gradients.pop(weight, None)
        if weight not in self.gradients:
            known = number in self._taken_gradients or number in self._weight_of_gradient
            if number >= 0 and number != new_gradient and not known:
                # it was copied: autograd could not hand over what it had computed
                if new_gradient is not None:
                    self._give_back(new_gradient)
                self._weight_of_gradient[number] = weight
                self.gradients[weight] = number
            elif new_gradient is not None:
                self.gradients[weight] = new_gradient
        if weight in self.gradients:
            self.ready(weight)

    def _give_back(self, number: int) -> None:
        """What was kept for nothing."""
        del self._weight_of_gradient[number]
        if number in self._freed_gradients:
            self._freed_gradients.discard(number)
            self.to.free(number)
