"""vLLM on the GPU of the trainer that it writes completions for: what it takes there.

A documented rule, not proved here: an engine takes ``gpu_memory_utilization`` of the GPU's memory,
for its own weights, its activations and a cache that fills the rest; asleep at level 2 it holds
neither weights nor cache. CUDA graphs may come on top of that, awake and asleep: they are the
upper end of the range.

Sources: vLLM ``v1/worker/gpu_worker.py`` (``determine_available_memory``, which takes graphs off
the cache in newer releases alone; ``sleep``, which leaves them), ``worker/model_runner.py``
(``capture_model``: "CUDA graphs can take additional 1~3 GiB memory per GPU"); TRL 1.16
``generation/vllm_generation.py`` (wakes the engine to generate, behind ``empty_cache``).
"""

from __future__ import annotations

import math
from dataclasses import replace

from memest.config.rollouts import Engine
from memest.errors import UnfitGpuError
from memest.estimation.breakdown import alive_at_end
from memest.estimation.gpu_target import TargetGpu
from memest.estimation.run import Run
from memest.estimation.run_facts import Peaks
from memest.profiles.stream import Stream
from memest.units import GIB, format_size

__all__ = ["with_engine"]

_WEIGHT_BYTES = 2
"""Of a number in vLLM, which makes weights of float32 half ones (``dtype="auto"``)."""

_CACHE_SHARE = 0.05
"""Of the GPU's memory, what a share should have beyond the weights."""

_GRAPH_BYTES = 3 * GIB
"""The most that vLLM says its CUDA graphs take beside its share."""


def with_engine(peaks: Peaks, target: TargetGpu, run: Run, stream: Stream) -> Peaks:
    """What a run needs of a GPU with the engine that shares it; the same where none does.

    Args:
        peaks: of the trainer alone.
        target: the GPU.
        run: the run.
        stream: of it, on this GPU.

    Raises:
        UnfitGpuError: the engine's share does not hold its weights.
    """
    rollouts = run.setup.rollouts
    if rollouts is None or rollouts.engine is not Engine.VLLM:
        return peaks
    total = target.usable_bytes
    if not target.spec.is_memory_alone:  # else the card is whatever has the memory given
        total = target.spec.torch_total_bytes or total
    share = int(rollouts.engine_share * total)
    size = f"{format_size(share)} ({rollouts.engine_share:g} of {target.name})"
    quantised = run.setup.quantization is not None
    weights = run.counts[3] if quantised else run.counts[0] * _WEIGHT_BYTES
    least = math.ceil(100 * (weights / total + _CACHE_SHARE)) / 100
    if share <= weights:
        larger = f"Write --engine-share {least:.2f}, or take a larger GPU."
        if least > 1:
            larger = "No share of this GPU holds both: take a larger one, or write --engine server."
        raise UnfitGpuError(
            f"vLLM's share is {size}, and its own weights take {format_size(weights)}: it needs "
            f"room for them and a cache. {larger}",
            "vLLM's share does not hold its weights",
        )
    rest = f"its weights take {format_size(weights)} of that, activations and cache the rest"
    graphs = (
        f"CUDA graphs may come on top, {format_size(_GRAPH_BYTES)} at most by vLLM's own words, "
        "and are in the upper end of the range alone: documented rules, not measured"
    )
    peaks = replace(
        peaks,
        high_bytes=peaks.high_bytes + _GRAPH_BYTES,
        engine_slack_bytes=_GRAPH_BYTES,
    )
    # a share that was named is taken at its word, however little cache it leaves
    least = min(least, rollouts.engine_share)
    room = target.usable_bytes - peaks.high_bytes
    if not rollouts.engine_sleeps:
        peaks = replace(peaks, largest_engine_share=_largest_share(room, total, least))
        note = f"vLLM holds {size} all the time: {rest}; {graphs}."
        return _beside(peaks, share, note)
    # what is alive between two steps, when the allocator's cache has been emptied
    held = sum(map(sum, alive_at_end(stream).values()))
    if room >= 0:  # else training alone has no room, whatever an engine takes that sleeps then
        awake_room = room + peaks.reserved_bytes - held
        largest = _largest_share(awake_room, total, least)
        peaks = replace(peaks, largest_engine_share=largest)
    added = held + share - peaks.reserved_bytes
    note = (
        f"vLLM sleeps while the model trains, and takes {size} to generate, beside "
        f"{format_size(held)} of the trainer's: {rest}; {graphs}."
    )
    if added <= 0:
        return replace(peaks, notes=(*peaks.notes, f"{note} The peak is that of training."))
    awake = _beside(peaks, added, f"{note} The device peak is that of generation.")
    return replace(
        awake,
        process_low_bytes=peaks.process_low_bytes,
        process_expected_bytes=peaks.process_expected_bytes,
        engine_low_bytes=held + share + peaks.process_low_bytes,
    )


def _largest_share(room: int, total: int, least: float) -> float | None:
    """The largest share that lies in a room, in hundredths rounded down; None below the least.

    Args:
        room: bytes that are sure to be left for an engine.
        total: bytes of the GPU, of which shares are.
        least: share that is worth taking.
    """
    share = math.floor(100 * room / total) / 100
    return share if share >= least else None


def _beside(peaks: Peaks, nbytes: int, note: str) -> Peaks:
    """Peaks with something that lies on the device besides, while the peak is reached."""
    return replace(
        peaks,
        device_bytes=peaks.device_bytes + nbytes,
        low_bytes=peaks.low_bytes + nbytes,
        high_bytes=peaks.high_bytes + nbytes,
        process_low_bytes=peaks.process_low_bytes + nbytes,
        process_expected_bytes=peaks.process_expected_bytes + nbytes,
        engine_bytes=nbytes,
        notes=(*peaks.notes, note),
    )
