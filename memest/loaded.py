"""What a report says of batches on the host."""

from __future__ import annotations

from memest.events import CATEGORY_ORDER, Category
from memest.setup import Setup
from memest.steps.stream import Stream
from memest.units import format_size

__all__ = ["batch_sizes", "host_notes"]

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
        size for size, category, label
        in zip(stream.sizes, stream.categories, stream.labels, strict=True)
        if CATEGORY_ORDER[category] is Category.INPUTS
        and stream.label_names[label].startswith(_ARRIVAL)
    ]  # fmt: skip
    each, left = divmod(len(sizes), num_batches)
    return None if left or not each else sizes[:each]


def host_notes(setup: Setup, stream: Stream, num_batches: int) -> list[str]:
    """Host memory of batches that wait, where the setup says how they are loaded."""
    loading = setup.data_loading
    if loading is None:
        return []
    sizes = batch_sizes(stream, num_batches)
    uncounted = "the dataset, and workers' own processes, are not counted"
    if sizes is None:
        return [f"host memory of batches is unknown: the step makes inputs itself; {uncounted}."]
    parts = [
        f"{format_size(nbytes)} {where}" for nbytes, where in (
            (loading.pinned_bytes(sizes), "pinned (each tensor rounded up to a power of two)"),
            (loading.shared_bytes(sizes), "in shared memory (/dev/shm)"),
            (loading.pageable_bytes(sizes), "of the batch that is being made"),
        ) if nbytes
    ]  # fmt: skip
    count = "1 batch" if loading.held == 1 else f"{loading.held} batches"
    each = format_size(sum(sizes))
    said = f"host memory of each process: {count} of {each} loaded ahead: {', '.join(parts)}"
    return [f"{said}; {uncounted}."]
