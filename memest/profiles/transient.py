"""Something that lies on the GPU for a moment behind a run's last step, appended to its stream."""

from __future__ import annotations

from array import array
from dataclasses import replace

from memest.events import CATEGORY_ORDER, Category, Chains, Mark, Phase
from memest.profiles.stream import Stream

__all__ = ["with_transient"]


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
    number, module_names = len(stream.sizes), list(stream.module_names)
    if "" not in module_names:
        module_names.append("")
    out = replace(stream)
    out.events = stream.events + array("q", [number, ~number])
    out.sizes = [*stream.sizes, nbytes]
    out.places = [*stream.places, 0]
    out.categories = stream.categories + bytes([CATEGORY_ORDER.index(category)])
    out.modules = stream.modules + array(stream.modules.typecode, [module_names.index("")])
    out.labels = stream.labels + array(stream.labels.typecode, [len(stream.label_names)])
    out.module_names, out.label_names = module_names, [*stream.label_names, label]
    out.on_streams = stream.on_streams + b"\0" if stream.on_streams else b""
    out.marks = [*stream.marks, Mark(phase, 0, 0)]
    out.mark_positions = [*stream.mark_positions, len(stream.events)]
    # what is remembered of the steps belongs to their own stream
    out.chains = Chains(stream.chains.chains)
    return out
