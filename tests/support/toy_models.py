"""Models on paper, whose numbers are formulas of the sizes, and families grown around them."""

from __future__ import annotations

from array import array

from memest.errors import TraceError
from memest.events import ALLOC, Trace
from memest.profiles.growth import MAX_TRACES, grow, range_of

# -- traces without torch: as many numbers as wanted, of any function of the sizes ----------------


def fake(numbers, structure=()):
    trace = Trace()
    trace.sizes = list(numbers)
    trace.events = array("q", [i << 2 | ALLOC for i in range(len(trace.sizes))])
    trace.notes = [str(part) for part in structure]
    return trace


def usual(b, s):
    """What every transformer has."""
    return [4 * 768 * 768, b * s * 8, b * s * 768 * 4, b * s * 3072 * 4, b * 12 * s * s * 4, s * s]


def up(size, multiple):
    return -(-size // multiple) * multiple


class Toy:
    """Counts what is traced; says what the family must say."""

    def __init__(self, numbers, structure=None, refuses=None):
        self.numbers = numbers
        self.structure = structure or (lambda b, s: ())
        self.refuses = refuses or (lambda b, s: False)
        self.num_traces = 0

    def truth(self, b, s):
        if self.refuses(b, s):
            raise TraceError("the model does not go there")
        return fake([*usual(b, s), *self.numbers(b, s)], self.structure(b, s))

    def trace_at(self, sizes):
        self.num_traces += 1
        return self.truth(sizes["batch"], sizes["seq_len"])


def grow_family(toy, b, s, limit=None, axes=("batch", "seq_len"), any_remainder=False):
    sizes = {"batch": b, "seq_len": s}
    ranges = {}
    for axis in axes:
        axis_limit = limit if axis == "seq_len" else None
        axis_range = range_of(
            axis, sizes[axis], axis_limit, s, any_remainder=any_remainder and axis == "seq_len"
        )
        if axis_range is not None:
            ranges[axis] = axis_range
    if not ranges:
        return None
    traces = {tuple(sizes[axis] for axis in ranges): toy.truth(b, s)}
    family = grow(sizes, ranges, traces, toy.trace_at, tied=False)
    assert toy.num_traces <= MAX_TRACES
    return family
