"""Apply a calibration to an estimate: corrected figures and an honest range.

With parts ``p`` of the breakdown, factors ``c``, allocated ``A``, reserved ``R``::

    A' = sum of c * p                 every part by its factor
    R' = R + (A' - A) + gap           what the allocator keeps beyond, as replayed, and a gap
    D' = R' + process                 context, kernels and libraries of this GPU

The range comes from how far measured peaks lay from corrected ones, in runs of models that the fit
had not seen. Its tails are equal, so the upper end of a 90 % range is a 95 % upper bound. Where too
few runs were measured, or the question lies beyond them, the range is widened and says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from memest.estimation.calibration import (
    CPU,
    FACTS,
    LEVEL,
    UNNAMED,
    Calibration,
    CrossValidation,
    ProcessPart,
    same_gpu,
)
from memest.estimation.run_facts import Peaks, RunFacts
from memest.report.result import Interval
from memest.units import format_size, plural

__all__ = ["Correction", "UncorrectedEstimate", "correct"]

SIZE_TOLERANCE = 1.1
"""Sizes up to so many times the largest measured one count as measured."""
UNSEEN_DISTANCE = 0.5
"""Distance of a value of a fact that was not measured."""
RELEASE_DISTANCE = 0.25
"""Distance of each minor release between the torch of the question and the nearest measured."""
MAX_RELEASES = 8
"""Releases that count: what lies further away is unknown, whatever the number."""
BORROWED_DISTANCE = {True: 0.25, False: 0.5}
"""Distance of a process part of another GPU: of the same compute capability, of another one."""
FEW_CASES = 5
"""Readings below which the process part of one of several GPUs is taken with caution."""
MARGIN = 0.01
"""Part of the peak by which the range grows at either end for each unit of distance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncorrectedEstimate(RunFacts):
    """An uncalibrated estimate, as far as a correction needs it: what kind of run, and its bytes.

    Attributes:
        parts: rows of the breakdown at the allocated peak, bytes by category.
        allocated_bytes: their sum.
        reserved_bytes: of the replay.
        gpu: name as the driver prints it.
        sm_count: streaming multiprocessors of the GPU.
        capability: its (major, minor).
        total_bytes: its memory.
        torch: (major, minor).
        cuda: (major, minor), None if not known.
        context_low_bytes: the least that the table expects for context and kernels.
        context_expected_bytes: what it expects.
        context_high_bytes: the most.
        slack_bytes: how much larger a workspace may be that a library chooses.
        reserved_range: of reserved memory by runs of the kind; None for the slack alone.
        family: ``model_type`` of the model.
    """

    parts: Mapping[str, int]
    allocated_bytes: int
    reserved_bytes: int
    gpu: str
    sm_count: int | None = None
    capability: tuple[int, int] | None = None
    total_bytes: int | None = None
    torch: tuple[int, int]
    cuda: tuple[int, int] | None = None
    context_low_bytes: int
    context_expected_bytes: int
    context_high_bytes: int
    slack_bytes: int = 0
    reserved_range: Interval | None = None
    family: str

    def __post_init__(self) -> None:
        if sum(self.parts.values()) != self.allocated_bytes:
            raise ValueError(
                f"the parts sum to {sum(self.parts.values())} bytes, allocated are "
                f"{self.allocated_bytes}"
            )

    @property
    def device_bytes(self) -> int:
        """Reserved, context and kernels as the table expects them."""
        return self.reserved_bytes + self.context_expected_bytes

    @property
    def low_bytes(self) -> int:
        """Lower end of the range of the device peak without a calibration."""
        low = self.reserved_range.low_bytes if self.reserved_range else self.reserved_bytes
        return low + self.context_low_bytes

    @property
    def high_bytes(self) -> int:
        """Upper end of it."""
        high = self.reserved_bytes + self.slack_bytes
        return (self.reserved_range.high_bytes if self.reserved_range else high) + (
            self.context_high_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction(Peaks):
    """An estimate after correction, beside what it was before.

    Attributes:
        process_bytes: context, kernels and libraries as expected on one GPU.
        process_high_bytes: the most they may take.
        factors: by part.
        gap_bytes: added to the reserved peak.
        distance: how far beyond what was measured; 0 within.
        process_gpu: whose process part was taken; empty for the table's.
        before: what was corrected.
        validation: how right the profile was for models it had not seen.
    """

    process_bytes: int
    process_high_bytes: int
    factors: Mapping[str, float]
    gap_bytes: int
    distance: float
    process_gpu: str
    before: UncorrectedEstimate
    validation: CrossValidation


@dataclass(frozen=True, slots=True)
class _Process:
    low: int
    expected: int
    high: int
    gpu: str


def correct(calibration: Calibration, estimate: UncorrectedEstimate) -> Correction:
    """Correct an estimate by a profile.

    Args:
        calibration: the profile.
        estimate: before the correction.

    Returns:
        The corrected figures. Outside what was measured the range is widened: with distance d
        either half grows to 1 + d times its width and 1 % of the peak for each d, and it then
        contains the uncalibrated one. Distances add up: 0.5 for each unseen fact, 0.25 for each
        release of torch, log2 of the ratio for sizes, 0.25 or 0.5 for a process part that is
        borrowed, 0.25 for one of several GPUs with hardly a run.
    """
    q = estimate
    factors = {part: calibration.factors.get(part, calibration.other_factor) for part in q.parts}
    parts = _scale(q.parts, factors)
    allocated = sum(parts.values())
    gap = 0 if calibration.on_cpu else calibration.gap_bytes
    reserved = max(q.reserved_bytes + allocated - q.allocated_bytes + gap, allocated)
    process, far, notes = _process(calibration, q)
    distance, more_notes = _beyond(calibration, q)
    distance += far
    notes += more_notes
    device = reserved + process.expected
    low, high = _range(calibration, q, allocated, reserved, process)
    level = calibration.band.level
    few = level is None or level < LEVEL
    if distance or not process.gpu or calibration.band.metric != "device":
        level = None
    low, high = min(low, device), max(high, device)
    if distance:
        more = MARGIN * distance * device
        low = math.floor(device - (device - low) * (1 + distance) - more)
        high = math.ceil(device + (high - device) * (1 + distance) + more)
    if few or distance:
        low, high = min(low, q.low_bytes), max(high, q.high_bytes)
    return Correction(
        parts=parts,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        process_low_bytes=process.low,
        process_expected_bytes=process.expected,
        process_bytes=process.expected,
        process_high_bytes=process.high,
        device_bytes=device,
        low_bytes=max(low, 0),
        high_bytes=high,
        level=level,
        basis=_basis(calibration, process, level, distance),
        factors=factors,
        gap_bytes=gap,
        notes=tuple(notes),
        distance=distance,
        process_gpu=process.gpu,
        before=q,
        validation=calibration.validation,
    )


def _scale(parts: Mapping[str, int], factors: Mapping[str, float]) -> dict[str, int]:
    """Parts times their factors, whole bytes whose sum is the rounded sum."""
    exact = {name: size * factors[name] for name, size in parts.items()}
    floors = {name: math.floor(value) for name, value in exact.items()}
    left = round(math.fsum(exact.values())) - sum(floors.values())
    by_rest = sorted(exact, key=lambda name: (floors[name] - exact[name], name))
    for name in by_rest[: max(left, 0)]:
        floors[name] += 1
    return floors


# -- the process part -----------------------------------------------------------------------------


def _process(calibration: Calibration, q: UncorrectedEstimate) -> tuple[_Process, float, list[str]]:
    """What the process holds beside its segments, how far that is fetched, and what to say."""
    table = _Process(q.context_low_bytes, q.context_expected_bytes, q.context_high_bytes, "")
    if calibration.on_cpu or not calibration.process:
        what = "on a CPU" if calibration.on_cpu else "without a reading of device memory"
        note = (
            f"The profile was measured {what}: it corrects tensors only; context and kernels, and "
            "their range, are as the table has them."
        )
        return table, 0.0, [note]
    own = calibration.part_of(q.gpu)
    if own is not None and (own.cases >= FEW_CASES or len(calibration.process) == 1):
        return _process_of(calibration, own, q), 0.0, []
    if own is not None:
        # the range is that of all GPUs together, and this one is hardly among them
        own_process = _process_of(calibration, own, q)
        wide = replace(
            own_process, low=min(own_process.low, table.low), high=max(own_process.high, table.high)
        )
        note = (
            f"Only {plural(own.cases, 'run')} of the calibration had device memory of {own.gpu} "
            "read, so the range is widened."
        )
        return wide, BORROWED_DISTANCE[True], [note]
    lender = _nearest(calibration.process, q)
    borrowed_process = _process_of(calibration, lender, q)
    alike = lender.capability is not None and lender.capability == q.capability
    process = _Process(
        min(borrowed_process.low, table.low),
        borrowed_process.expected,
        max(borrowed_process.high, table.high),
        lender.gpu,
    )
    why = "of the same compute capability" if alike else "the nearest that was measured"
    note = (
        f"No run was measured on {q.gpu}: context and kernels "
        f"({format_size(borrowed_process.expected)}) are borrowed from {lender.gpu}, {why}, and "
        "the range is widened."
    )
    return process, BORROWED_DISTANCE[alike], [note]


def _process_of(calibration: Calibration, part: ProcessPart, q: UncorrectedEstimate) -> _Process:
    expected = part.constant_bytes + round(calibration.per_kernel_bytes * q.kernels)
    expected += calibration.precision_bytes.get(q.precision, 0)
    low, high = max(expected + part.low_bytes, 0), expected + part.high_bytes
    return _Process(low, expected, high, part.gpu)


def _nearest(parts: tuple[ProcessPart, ...], q: UncorrectedEstimate) -> ProcessPart:
    return min(parts, key=lambda part: part.distance(q.capability, q.sm_count, q.total_bytes))


# -- the range ------------------------------------------------------------------------------------


def _range(
    calibration: Calibration,
    q: UncorrectedEstimate,
    allocated: int,
    reserved: int,
    process: _Process,
) -> tuple[int, int]:
    """The range of the device peak before anything is widened."""
    band = calibration.band
    device = reserved + process.expected
    peak = {"device": device, "reserved": reserved, "allocated": allocated}[band.metric]
    scale = peak if band.scale == "proportional" else 1
    low_margin, high_margin = math.floor(band.low * scale), math.ceil(band.high * scale)
    slack = max(q.slack_bytes - calibration.measured.slack_bytes, 0)
    if band.metric == "device" and process.gpu:
        if same_gpu(process.gpu, q.gpu):
            return device + low_margin, device + high_margin + slack
        # another GPU's process part: what the table allows is possible too
        low = min(device + low_margin, reserved + process.low)
        return low, max(device + high_margin, reserved + process.high) + slack
    slack = q.slack_bytes  # how a library chooses on a GPU was not measured
    low, high = (
        reserved + process.low + min(low_margin, 0),
        reserved + process.high + max(high_margin, 0),
    )
    return low, high + slack


def _beyond(calibration: Calibration, q: UncorrectedEstimate) -> tuple[float, list[str]]:
    """How far a question lies beyond what was measured, and in what.

    Who has made no calibration has one that came along: so runs are named, not the calibration.
    """
    distance, notes, measured = 0.0, [], calibration.measured
    runs = f"the runs measured on {_gpus(calibration)}"
    sizes = (
        ("allocated memory", q.allocated_bytes, measured.allocated_bytes, format_size),
        ("number of operators", q.kernels, measured.kernels, str),
    )
    for name, size, largest, words in sizes:
        if largest and size > SIZE_TOLERANCE * largest:
            distance += math.log2(size / largest)
            notes.append(
                f"The range is wider because the {name} ({words(size)}) is beyond the largest of "
                f"{runs} ({words(largest)})."
            )
    for fact in FACTS:
        value, values = str(getattr(q, fact)), measured.seen.get(fact, UNNAMED.get(fact, ()))
        if value not in values:
            distance += UNSEEN_DISTANCE
            listing = ", ".join(values) if 0 < len(values) <= 8 else f"{len(values)} others"
            notes.append(
                f"The range is wider because {fact} {value or 'unknown'} is in none of {runs} "
                f"(they have {listing})."
            )
    if q.torch not in measured.torch:
        distance += min(_releases(q.torch, measured.torch), MAX_RELEASES) * RELEASE_DISTANCE
        listing = ", ".join(_release(version) for version in measured.torch) or "none"
        notes.append(
            f"The range is wider because torch {_release(q.torch)} is in none of {runs} "
            f"(they have {listing})."
        )
    majors = {major for major, _ in measured.cuda}
    if q.cuda is not None and majors and q.cuda[0] not in majors:
        distance += UNSEEN_DISTANCE
        listing = ", ".join(str(major) for major in sorted(majors))
        notes.append(
            f"The range is wider because CUDA {q.cuda[0]} is in none of {runs} "
            f"(they have {listing})."
        )
    return distance, notes


def _gpus(calibration: Calibration) -> str:
    """What was measured on, in words."""
    return ", ".join("a CPU" if gpu == CPU else gpu for gpu in calibration.provenance.gpus)


def _releases(release: tuple[int, int], releases: tuple[tuple[int, int], ...]) -> int:
    """Minor releases to the nearest one known."""
    distances = [abs(a - release[0]) * MAX_RELEASES + abs(b - release[1]) for a, b in releases]
    return min(distances, default=MAX_RELEASES)


def _release(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _basis(
    calibration: Calibration, process: _Process, level: float | None, distance: float
) -> str:
    cross_validation, band = calibration.validation, calibration.band
    gpus = _gpus(calibration)
    dates = " to ".join(dict.fromkeys((calibration.provenance.first, calibration.provenance.last)))
    text = (
        f"calibrated on {plural(cross_validation.cases, 'run')} of "
        f"{plural(cross_validation.models, 'model')} on {gpus}"
        f"{f' ({dates})' if dates else ''}"
    )
    if level is not None and level >= LEVEL:
        text += (
            f": {level:.0%} of runs are expected in the range and {(1 + level) / 2:.0%} below its "
            "upper end, from how far models lay off that were left out of the fit"
        )
        return text + (
            f" ({cross_validation.coverage:.0%} lay inside)"
            if cross_validation.coverage is not None
            else ""
        )
    if distance:
        return text + "; the question lies beyond what was measured, so the range is widened"
    if not process.gpu or band.metric != "device":
        return text + "; tensors are corrected, the range is that of context and kernels"
    if level is None:
        return text + (
            "; the range joins the spread of these runs and the uncalibrated range: so few models "
            "say nothing of others"
        )
    return text + (
        f"; {plural(band.cases, 'run')}, which count as {band.draws:.0f} independent ones, are too "
        f"few for {LEVEL:.0%}, so the range joins their whole spread (which holds for {level:.0%} "
        "of runs) and the uncalibrated range"
    )
