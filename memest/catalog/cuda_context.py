"""Device memory outside the allocator: the CUDA context and the kernels it loads.

Neither is in torch's allocated or reserved figures; both are in nvidia-smi's. Since modules load
lazily (CUDA 11.7; torch asks for it from 1.13 on) a context alone is small and goes with the card:
readings from 24 to 142 SMs lie within 16 MiB of one line through the threads that a card can hold
at once, each of which has memory of its own. Kernels come on top as they are first used, so every
answer is a range. One reading of the real machine replaces all of this.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from typing import Any

from memest.catalog.gpus import find_gpu
from memest.catalog.spec import GpuSpec
from memest.files.folders import data_folder
from memest.units import MIB, format_size

__all__ = ["ContextEstimate", "context_estimate", "loaded_kernels_later", "loads_lazily"]

_LAZY_TORCH = (1, 13)
_LAZY_CUDA = (11, 7)
_CUDA12_TORCH = (2, 1)
"""First torch whose default wheels carry CUDA 12; the newer readings begin there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextEstimate:
    """Bytes outside the allocator, with an honest range.

    Attributes:
        expected_bytes: the figure to add.
        low_bytes: the least to be expected.
        high_bytes: the most to be expected.
        basis: where the figures are from.
    """

    expected_bytes: int
    low_bytes: int
    high_bytes: int
    basis: str


@functools.cache
def _data() -> dict[str, Any]:
    text = (data_folder() / "cuda_context.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def _estimate(expected: float, low: float, high: float, basis: str) -> ContextEstimate:
    """Sizes in MiB to bytes."""
    return ContextEstimate(
        expected_bytes=int(expected * MIB),
        low_bytes=int(low * MIB),
        high_bytes=int(high * MIB),
        basis=basis,
    )


def loads_lazily(torch_version: tuple[int, int], cuda: tuple[int, int] | None) -> bool:
    """Whether kernels load when first used rather than all at start.

    torch sets ``CUDA_MODULE_LOADING=LAZY`` from 1.13 on (pytorch PR 86509); it has an effect from
    CUDA 11.7 on. An unknown CUDA is taken as recent enough.
    """
    return torch_version >= _LAZY_TORCH and (cuda is None or cuda >= _LAZY_CUDA)


def _first_lazy() -> ContextEstimate:
    """Context after training of the torch 1.13-2.0 era."""
    first = _data()["first_lazy"]
    growth = (first["later_low_mib"] + first["later_high_mib"]) / 2
    # only one card was published after real training; other cards start lower (274 MiB)
    return _estimate(
        first["first_touch_mib"] + growth,
        first["least_mib"],
        first["first_touch_mib"] + first["later_high_mib"] + _data()["spread_mib"],
        f"CUDA context and lazily loaded kernels after training, torch 1.13-2.0: {first['source']}",
    )


def _eager(spec: GpuSpec, torch_version: tuple[int, int]) -> ContextEstimate:
    """Context with every kernel of the build loaded at start."""
    readings = [
        reading
        for reading in _data()["readings"]
        if reading["loading"] == "eager" and reading["architecture"] == spec.architecture
    ]
    if not readings:
        default = _data()["eager_default"]
        return _estimate(
            default["expected_mib"],
            default["low_mib"],
            default["high_mib"],
            f"all kernels loaded at start; no reading for {spec.architecture}: {default['source']}",
        )

    def age(reading: dict[str, Any]) -> int:
        major, minor = int(reading["torch"][0]), int(reading["torch"][1])
        return abs((torch_version[0] - major) * 20 + torch_version[1] - minor)

    nearest = min(map(age, readings))
    sizes = [reading["mib"] for reading in readings if age(reading) == nearest]
    source = "; ".join(
        f"{reading['gpu']}, torch {reading['torch'][0]}.{reading['torch'][1]}: {reading['mib']} "
        f"MiB, {reading['source']}"
        for reading in readings
        if age(reading) == nearest
    )
    spread = _data()["spread_mib"]
    return _estimate(
        sum(sizes) / len(sizes),
        min(sizes) - spread,
        max(sizes) + spread,
        f"all kernels loaded at start; nearest published readings: {source}",
    )


def context_estimate(
    spec: GpuSpec, torch_version: tuple[int, int], cuda: tuple[int, int] | None = None
) -> ContextEstimate:
    """CUDA context plus loaded kernels at the peak of a training run, for one process.

    NCCL and other libraries that allocate on their own are not in it.

    Args:
        spec: the card; with lazy loading its threads say what its context takes, before that its
            architecture picks between readings.
        torch_version: (major, minor).
        cuda: (major, minor) of the CUDA that torch was built for, None if not known.

    Returns:
        Expected size and range in bytes.
    """
    if not loads_lazily(torch_version, cuda):
        return _eager(spec, torch_version)
    if torch_version < _CUDA12_TORCH:
        return _first_lazy()
    context, kernels = _lazy_context(spec), _lazy_kernels(spec)
    return _estimate(
        context.expected + kernels.expected,
        context.low + kernels.low,
        context.high + kernels.high,
        f"{context.basis}, and {kernels.basis}",
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of what lies outside the allocator, in MiB."""

    low: float
    expected: float
    high: float
    basis: str


def _readings(stage: str) -> list[dict[str, Any]]:
    """Readings under lazy loading, of torch from 2.1 on where it is known."""
    return [
        reading
        for reading in _data()["readings"]
        if reading["loading"] == "lazy"
        and reading["stage"] == stage
        and tuple(reading["torch"] or _CUDA12_TORCH) >= _CUDA12_TORCH
    ]


def _threads(spec: GpuSpec) -> int | None:
    """Threads that a CUDA card can hold at once; None if that is not known of it."""
    if spec.backend != "cuda" or spec.is_memory_alone:
        return None
    if not spec.sm_count or not spec.max_threads_per_sm:
        return None
    return spec.sm_count * spec.max_threads_per_sm


@functools.cache
def _line() -> tuple[float, float, float]:
    """(MiB of any context, MiB for each thread, largest distance of a reading) by least squares."""
    points: list[tuple[int, float]] = []
    for reading in _readings("context"):
        threads = _threads(find_gpu(reading["gpu"]))
        assert threads is not None, f"a reading of a card that is not known: {reading['gpu']}"
        points.append((threads, reading["mib"]))
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
    base = mean_y - slope * mean_x
    return base, slope, max(abs(y - base - slope * x) for x, y in points)


def _lazy_context(spec: GpuSpec) -> _Part:
    """The context alone; other cards and drivers may lie twice as far off as those read."""
    threads = _threads(spec)
    if threads is None:
        sizes = [reading["mib"] for reading in _readings("context")]
        low, high = min(sizes), max(sizes)
        basis = f"{low}-{high} MiB of CUDA context, as read on cards of all sizes"
        if spec.backend != "cuda":
            basis += f" (no reading of {spec.backend}, taken over from CUDA)"
        return _Part(low, (low + high) / 2, high, basis)
    base, slope, distance = _line()
    size = base + slope * threads
    basis = (
        f"{size:.0f} +/- {2 * distance:.0f} MiB of CUDA context: {base:.0f} MiB and "
        f"{slope * 1024:.2f} KiB for each of {threads:,} resident threads, by "
        f"{len(_readings('context'))} readings"
    )
    return _Part(size - 2 * distance, size, size + 2 * distance, basis)


@functools.cache
def _kernels_read() -> list[tuple[str, float]]:
    """(architecture, MiB) of kernels: where a card was read after use, beyond its context."""
    after_use = [
        (reading["architecture"], reading["mib"] - _lazy_context(find_gpu(reading["gpu"])).expected)
        for reading in _readings("after use")
    ]
    kernels = [(reading["architecture"], reading["mib"]) for reading in _readings("kernels")]
    return kernels + after_use


def _lazy_kernels(spec: GpuSpec) -> _Part:
    """Kernels and libraries of a whole run: what was read on cards of the architecture is expected.

    A run may use others than those that were read, so the range is that of all readings.
    """
    read = _kernels_read()
    sizes = [size for _, size in read]
    alike = [size for architecture, size in read if architecture == spec.architecture] or sizes
    low, high = min(sizes), max(sizes)
    basis = f"{low:.0f}-{high:.0f} MiB of kernels loaded when first used"
    return _Part(low, sum(alike) / len(alike), high, basis)


def loaded_kernels_later(
    torch_version: tuple[int, int], cuda: tuple[int, int] | None = None
) -> ContextEstimate:
    """Kernels still to come when the context was read after one small tensor.

    People read nvidia-smi after ``torch.ones(1).cuda()`` and give that as the context. With lazy
    loading most kernels are not there yet. Published bert-large runs on an RTX 3090 (torch
    1.13-2.0) show 413 to 491 MiB beyond their 665 MiB first touch, in all four rows, whatever the
    batch, the accumulation or the checkpointing: so it is one constant, the middle of the four.
    From torch 2.1 on the growth that is known is smaller, 14 to 152 MiB. With eager loading the
    first touch holds all kernels already and nothing comes later: the published 1343 MiB on a V100
    (torch 1.10, CUDA 11.2) is context and kernels.

    Args:
        torch_version: (major, minor).
        cuda: (major, minor), None if not known.

    Returns:
        Bytes to add to a first-touch reading, with range and source; zero with eager loading.
    """
    if not loads_lazily(torch_version, cuda):
        return _estimate(0, 0, 0, "all kernels load at start: a first-touch reading holds them")
    if torch_version < _CUDA12_TORCH:
        first = _data()["first_lazy"]
        low, high = first["later_low_mib"], first["later_high_mib"]
    else:
        first = _data()["lazy"]
        low, high = first["first_touch_to_end_low_mib"], first["first_touch_to_end_high_mib"]
    estimate = _estimate((low + high) / 2, low, high, "")
    basis = (
        f"{format_size(estimate.expected_bytes)} of kernels loaded after the first touch "
        f"({low}-{high} MiB): {first['source']}"
    )
    return replace(estimate, basis=basis)
