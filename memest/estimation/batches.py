"""The batches of a run as they come to the GPU: what waits for it on the host has their sizes."""

from __future__ import annotations

from memest.events import CATEGORY_ORDER, Category
from memest.profiles.stream import Stream

__all__ = ["batch_sizes"]

_ARRIVAL = "aten.empty"
"""How a batch comes to a device; what is counted or cast from it is made by other operators."""


def batch_sizes(stream: Stream, num_batches: int) -> list[int] | None:
    """Bytes of each tensor of one batch, as it comes to the GPU.

    Args:
        stream: of a run.
        num_batches: that it trains on.

    Returns:
        None where the tensors that are inputs are not the same number for each batch.
    """
    sizes = [
        size
        for size, category, label in zip(
            stream.sizes, stream.categories, stream.labels, strict=True
        )
        if CATEGORY_ORDER[category] is Category.INPUTS
        and stream.label_names[label].startswith(_ARRIVAL)
    ]
    each, left = divmod(len(sizes), num_batches)
    return None if left or not each else sizes[:each]
