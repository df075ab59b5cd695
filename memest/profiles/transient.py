"""What lies on the GPU besides a run's steps: for a moment behind the last one, or all the time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from memest.events import CATEGORY_ORDER, Category, Chains, Mark, Phase
from memest.profiles.stream import Stream

__all__ = ["with_resident", "with_transient"]


def with_transient(
    stream: Stream, phase: Phase, nbytes: int, label: str, category: Category
) -> Stream:
    """The stream with one allocation more at its end, which is freed at once.

    Args:
        stream: of a run; of one rank it stays one.
        phase: that it belongs to.
        nbytes: of the allocation.
        label: what it is.
        category: row of the breakdown.
    """
    number, out = len(stream.sizes), _with_numbers(stream, [nbytes], label, category)
    out.events = stream.events + array("q", [number, ~number])
    out.marks = [*stream.marks, Mark(phase, 0, 0)]
    out.mark_positions = [*stream.mark_positions, len(stream.events)]
    # what is remembered of the steps belongs to their own stream
    out.chains = Chains(stream.chains.chains)
    return out


def with_resident(stream: Stream, sizes: Sequence[int], label: str, category: Category) -> Stream:
    """The stream with allocations more that were made before all others, and stay.

    Args:
        stream: of one rank of a run, which it stays.
        sizes: of the allocations, bytes.
        label: what they are.
        category: row of the breakdown.
    """
    first, count = len(stream.sizes), len(sizes)
    out = _with_numbers(stream, sizes, label, category)
    out.events = array("q", range(first, first + count)) + stream.events
    # the phase that begins with the first event has them
    out.mark_positions = [place and place + count for place in stream.mark_positions]
    out.empty_cache_at = tuple(place + count for place in stream.empty_cache_at)
    out.chains = Chains()
    return out


def _with_numbers(stream: Stream, sizes: Sequence[int], label: str, category: Category) -> Stream:
    """The stream with numbers more, which no event has yet."""
    count, module_names = len(sizes), list(stream.module_names)
    if "" not in module_names:
        module_names.append("")
    modules, labels = [module_names.index("")] * count, [len(stream.label_names)] * count
    out = replace(stream)
    out.sizes = [*stream.sizes, *sizes]
    out.places = [*stream.places, *[0] * count]
    out.categories = stream.categories + bytes([CATEGORY_ORDER.index(category)] * count)
    out.modules = stream.modules + array(stream.modules.typecode, modules)
    out.labels = stream.labels + array(stream.labels.typecode, labels)
    out.module_names, out.label_names = module_names, [*stream.label_names, label]
    out.on_streams = stream.on_streams + bytes(count) if stream.on_streams else b""
    return out
