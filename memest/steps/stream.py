"""The stream the allocator sees: segments played in order, workspaces at their operators."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from memest.events import ALLOC, CALL, CATEGORY_ORDER, FREE, Category, Mark, Trace
from memest.hidden.call import GpuTraits, Hidden, Lifetime
from memest.hidden.registry import hidden_allocations
from memest.steps.phases import compose, rotation

__all__ = ["Stream", "make_stream"]

_WORKSPACE = CATEGORY_ORDER.index(Category.WORKSPACES)


@dataclass(slots=True)
class Stream:
    """Events for :func:`memest.replay.replay.replay`, and what each allocation is.

    Attributes:
        events: v >= 0 allocates number v, v < 0 frees number ~v.
        sizes: requested bytes of each number.
        categories: index into ``CATEGORY_ORDER`` for each number.
        modules: index into the trace's ``module_names``.
        labels: index into ``label_names``: operator, or workspace by name.
        label_names: names for ``labels``.
        mark_positions: index of the first event of each mark.
        marks: the marks, steps and micro-steps as in the whole run.
        module_names: as in the trace.
        workspace_slack_bytes: how much larger the largest single workspace may be than assumed.
    """

    events: array[int] = field(default_factory=lambda: array("q"))
    sizes: list[int] = field(default_factory=list)
    categories: bytearray = field(default_factory=bytearray)
    modules: array[int] = field(default_factory=lambda: array("l"))
    labels: array[int] = field(default_factory=lambda: array("l"))
    label_names: list[str] = field(default_factory=list)
    mark_positions: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    module_names: list[str] = field(default_factory=list)
    workspace_slack_bytes: int = 0


def make_stream(
    trace: Trace, gpu: GpuTraits, *, num_steps: int, grad_accum: int = 1, high: bool = False
) -> Stream:
    """Compose the run and fill in what the kernels allocate on this GPU.

    Args:
        trace: the traced steps.
        gpu: decides workspaces.
        num_steps: optimizer steps of the run.
        grad_accum: micro-steps of each step.
        high: take the upper bound of workspaces that are only known as a range.

    Raises:
        TraceError: a step that cannot be repeated.
    """
    stream = Stream(module_names=trace.module_names, label_names=list(trace.op_names))
    player = _Player(trace, gpu, stream, high=high)
    rotations: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for segment in compose(trace, num_steps=num_steps, grad_accum=grad_accum):
        if segment.repeats is not None:
            pairs = rotations.get(segment.repeats)
            if pairs is None:
                pairs = rotations[segment.repeats] = rotation(trace, *segment.repeats)
            player.inherit(pairs)
        player.play(segment.start, segment.stop, segment.step, segment.micro_shift)
    return stream


class _Player:
    """Plays segments; knows which stream number a trace allocation has now."""

    def __init__(self, trace: Trace, gpu: GpuTraits, stream: Stream, *, high: bool) -> None:
        self._trace = trace
        self._gpu = gpu
        self._stream = stream
        self._high = high
        self._now: dict[int, int] = {}
        self._hidden: dict[int, tuple[Hidden, ...]] = {}
        self._persistent: set[tuple[str, ...]] = set()
        self._label_index: dict[str, int] = {}
        self._settled = 0

    def inherit(self, pairs: list[tuple[int, int]]) -> None:
        """What the repeated part drops is what its predecessor left behind."""
        now = self._now
        moved = [(dropped, now[left]) for dropped, left in pairs]
        for dropped, number in moved:
            now[dropped] = number

    def play(self, start: int, stop: int, step: int, micro_shift: int) -> None:
        """Append the events of one segment."""
        trace, stream, now = self._trace, self._stream, self._now
        events, sizes = stream.events, stream.sizes
        append = events.append
        trace_sizes, trace_categories = trace.sizes, trace.categories
        trace_modules, trace_ops = trace.modules, trace.ops
        for value in trace.events[start:stop]:
            kind, index = value & 3, value >> 2
            if kind == ALLOC:
                number = now[index] = len(sizes)
                sizes.append(trace_sizes[index])
                stream.categories.append(trace_categories[index])
                stream.modules.append(trace_modules[index])
                stream.labels.append(trace_ops[index])
                append(number)
            elif kind == FREE:
                append(~now.pop(index))
            elif kind == CALL:
                self._call(index)
                self._settled = len(events)
            else:
                mark = trace.marks[index]
                self._settled = len(events)
                stream.mark_positions.append(len(events))
                micro = mark.micro_step + micro_shift if mark.micro_step else 0
                stream.marks.append(Mark(mark.phase, step, micro))

    def _call(self, site: int) -> None:
        call = self._trace.call_of_site[site]
        found = self._hidden.get(call)
        if found is None:
            found = self._hidden[call] = hidden_allocations(self._trace.calls[call], self._gpu)
        if not found:
            return
        stream = self._stream
        temporary: list[tuple[int, int | None]] = []
        outputs = self._take_outputs(call) if found[0].before_outputs else None
        for index, hidden in enumerate(found):
            if outputs is not None and not hidden.before_outputs:
                stream.events.extend(outputs)
                outputs = None
            gone = [n for n, before in temporary if before is not None and before <= index]
            if gone:
                stream.events.extend(~number for number in gone)
                temporary = [t for t in temporary if t[0] not in gone]
            upper = hidden.high_nbytes if hidden.high_nbytes is not None else hidden.nbytes
            stream.workspace_slack_bytes = max(stream.workspace_slack_bytes, upper - hidden.nbytes)
            size = upper if self._high else hidden.nbytes
            persistent = hidden.lifetime is Lifetime.PERSISTENT
            if size <= 0 or (persistent and hidden.key in self._persistent):
                continue
            number = len(stream.sizes)
            stream.sizes.append(size)
            stream.categories.append(_WORKSPACE)
            stream.modules.append(self._trace.site_modules[site])
            stream.labels.append(self._label(f"{self._trace.calls[call].op}: {hidden.label}"))
            stream.events.append(number)
            if persistent:
                self._persistent.add(hidden.key)
            else:
                temporary.append((number, hidden.freed_before))
        if outputs is not None:
            stream.events.extend(outputs)
        stream.events.extend(~number for number, _ in reversed(temporary))

    def _take_outputs(self, call: int) -> array[int]:
        """Take the births of a call's results off the stream, to be put back after others."""
        stream, op = self._stream, self._trace.calls[call].op
        start = len(stream.events)
        while start > self._settled:
            number = stream.events[start - 1]
            if number < 0 or stream.label_names[stream.labels[number]] != op:
                break
            start -= 1
        outputs = stream.events[start:]
        del stream.events[start:]
        return outputs

    def _label(self, text: str) -> int:
        index = self._label_index.get(text)
        if index is None:
            index = self._label_index[text] = len(self._stream.label_names)
            self._stream.label_names.append(text)
        return index
