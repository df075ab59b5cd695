"""vLLM on the GPU of the trainer that it writes completions for: what it takes there.

A documented rule, not proved here: an engine takes ``gpu_memory_utilization`` of the GPU's memory,
for its own weights, its activations and a cache that fills the rest; asleep at level 2 it holds
neither weights nor cache. CUDA graphs may come on top of that, awake and asleep: they are the
upper end of the range. verl's engine is a process of its own, with a CUDA context that vLLM counts
before it measures, and is given weights through a bucket before it has its cache again.

Sources: vLLM ``v1/worker/gpu_worker.py`` (``determine_available_memory``, which takes graphs off
the cache in newer releases alone; ``sleep``, which leaves them), ``worker/model_runner.py``
(``capture_model``: "CUDA graphs can take additional 1~3 GiB memory per GPU"); TRL 1.16
``generation/vllm_generation.py`` (wakes the engine to generate, behind ``empty_cache``); verl 0.9.1
``workers/engine_workers.py`` (``update_weights``), ``vllm_rollout/bucketed_weight_transfer.py``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from memest.config.kinds import LogProbs
from memest.config.rollouts import Engine, Moved
from memest.errors import UnfitGpuError
from memest.estimation.breakdown import alive_at_end
from memest.estimation.gpu_target import TargetGpu
from memest.estimation.run import Run
from memest.estimation.run_facts import Peaks
from memest.events import Category
from memest.profiles.stream import Stream
from memest.units import GIB, format_size

__all__ = ["MOVED", "with_engine"]

_WEIGHT_BYTES = 2
"""Of a number in vLLM, which makes weights of float32 half ones (``dtype="auto"``)."""

_CACHE_SHARE = 0.05
"""Of the GPU's memory, what a share should have beyond the weights."""

_BUCKET_BYTES = 2 * GIB
"""In which verl hands weights over (``update_weights_bucket_megabytes``)."""

MOVED = {
    Moved.NOTHING: (),
    Moved.MODEL: (Category.PARAMETERS,),
    Moved.OPTIMIZER: (Category.OPTIMIZER_STATES,),
    Moved.BOTH: (Category.PARAMETERS, Category.OPTIMIZER_STATES),
}
"""Rows of what an offload has on the host."""

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
    weights = -(-weights // rollouts.engine_gpus)
    own_process = peaks.process_expected_bytes if run.setup.log_probs is LogProbs.VERL else 0
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
    if own_process:
        size_of_it = format_size(own_process)
        graphs = f"its process has a CUDA context of its own, taken as {size_of_it}; {graphs}"
        peaks = replace(_beside(peaks, own_process), engine_bytes=0)
    room = target.usable_bytes - peaks.high_bytes
    if not rollouts.engine_sleeps:
        peaks = replace(peaks, largest_engine_share=_largest_share(room, total, least))
        note = f"vLLM holds {size} all the time: {rest}; {graphs}."
        beside = _beside(peaks, share, note)
        return replace(beside, engine_bytes=share + own_process)
    # what is alive between two steps, when the allocator's cache has been emptied
    alive = alive_at_end(run.before_writing(stream))
    moved = MOVED[rollouts.engine_moves]
    held = sum(sum(sizes) for category, sizes in alive.items() if category not in moved)
    if room >= 0:  # else training alone has no room, whatever an engine takes that sleeps then
        awake_room = room + peaks.reserved_bytes - held
        largest = _largest_share(awake_room, total, least)
        peaks = replace(peaks, largest_engine_share=largest)
    awake_bytes, phase = held + share, "generation"
    if own_process:
        # the model is on the GPU, and moves behind it
        stays = sum(alive.get(Category.PARAMETERS, ())) if Category.PARAMETERS in moved else 0
        handed_over = held + stays + weights + _BUCKET_BYTES
        if handed_over > awake_bytes:
            awake_bytes, phase = handed_over, "the hand-over of weights"
    added = awake_bytes - peaks.reserved_bytes
    note = (
        f"vLLM sleeps while the model trains, and takes {size} to generate, beside "
        f"{format_size(held)} of the trainer's: {rest}; {graphs}."
    )
    if added <= 0:
        peaks = replace(peaks, engine_bytes=own_process)
        return replace(peaks, notes=(*peaks.notes, f"{note} The peak is that of training."))
    awake = _beside(peaks, added, f"{note} The device peak is that of {phase}.")
    return replace(
        awake,
        engine_bytes=added + own_process,
        process_low_bytes=peaks.process_low_bytes,
        process_expected_bytes=peaks.process_expected_bytes,
        engine_low_bytes=awake_bytes + peaks.process_low_bytes,
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


def _beside(peaks: Peaks, nbytes: int, note: str = "") -> Peaks:
    """Peaks with something that lies on the device besides, while the peak is reached."""
    return replace(
        peaks,
        device_bytes=peaks.device_bytes + nbytes,
        low_bytes=peaks.low_bytes + nbytes,
        high_bytes=peaks.high_bytes + nbytes,
        process_low_bytes=peaks.process_low_bytes + nbytes,
        process_expected_bytes=peaks.process_expected_bytes + nbytes,
        engine_bytes=nbytes,
        notes=(*peaks.notes, note) if note else peaks.notes,
    )
