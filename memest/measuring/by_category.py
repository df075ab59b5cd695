"""The allocated difference by category, from the allocator's own history of the first steps."""

from __future__ import annotations

from collections import Counter

from memest.calibration.recording.conformance import compare
from memest.calibration.recording.history import History
from memest.events import CATEGORY_ORDER
from memest.steps.stream import Stream

__all__ = ["NOT_PREDICTED", "REST", "difference_by_category"]

NOT_PREDICTED = "not predicted"
"""Allocations that only the run has: nothing says what they are for but their line of code."""
REST = "rest"
"""What no single allocation explains: order, rounding, peaks of other steps."""


def difference_by_category(
    history: History, stream: Stream, difference_bytes: int
) -> dict[str, int]:
    """Share the difference of the allocated peaks out over what allocations are for.

    Args:
        history: of the run from its start, as far as it was kept.
        stream: that was predicted for it.
        difference_bytes: measured less predicted, of the allocated peak.

    Returns:
        Measured less predicted by category, bytes; the values add up to ``difference_bytes``.
    """
    found: Counter[str] = Counter()
    for one in compare(history, stream).differences:
        name = NOT_PREDICTED
        if one.predicted_event >= 0:
            event = stream.events[one.predicted_event]
            number = event if event >= 0 else ~event
            name = CATEGORY_ORDER[stream.categories[number]].value
        found[name] -= one.peak_bytes
    found[REST] = difference_bytes - found.total()
    return {name: size for name, size in found.items() if size}
