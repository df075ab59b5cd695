"""What a run needs of a GPU: its peaks there and their range, corrected where it is calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from memest.config.parallelism import Distributed
from memest.estimation.breakdown import alive_at_peak, breakdown
from memest.estimation.engine import with_engine
from memest.estimation.gpu_target import TargetGpu
from memest.estimation.peak_ranges import band_for, kind_of
from memest.estimation.run import Run
from memest.estimation.run_facts import Peaks
from memest.profiles.stream import Stream
from memest.replay.replay import Replay
from memest.report.result import CalibrationFacts, Interval, PeakRanges, Row
from memest.sharding.nccl import communicators
from memest.units import MIB, format_size

if TYPE_CHECKING:
    from memest.estimation.calibration import Calibration
    from memest.estimation.correction import Correction

__all__ = ["calibration_facts", "corrected_rows", "peaks_of"]

_WHOLE = "all"


def peaks_of(
    target: TargetGpu, run: Run, stream: Stream, result: Replay, rows: tuple[Row, ...] | None = None
) -> Peaks:
    """What a run needs on a GPU.

    Args:
        target: the GPU.
        run: the run.
        stream: of the run on this GPU; the short one will do.
        result: of its replay.
        rows: the breakdown where it is known; it is made where a correction needs it.
    """
    if target.calibration is not None:
        peaks = _corrected_peaks(target, target.calibration.calibration, run, stream, result, rows)
    else:
        peaks = _predicted_peaks(target, run, stream, result)
    peaks = _with_nccl(peaks, target.spec.compute_capability, run.setup.distributed)
    return with_engine(peaks, target, run, stream)


def _predicted_peaks(target: TargetGpu, run: Run, stream: Stream, result: Replay) -> Peaks:
    context, slack = target.context, stream.workspace_slack_bytes
    basis = context.basis
    if slack >= MIB:
        basis += f"; up to {format_size(slack)} more where a library picks its own workspace"
    reserved = result.peak_reserved_bytes
    ranges = _uncorrected_ranges(run, result, slack)
    return Peaks(
        allocated_bytes=result.peak_allocated_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + context.expected_bytes,
        low_bytes=ranges.reserved.low_bytes + context.low_bytes,
        high_bytes=ranges.reserved.high_bytes + context.high_bytes,
        level=None,
        basis=f"{basis}; reserved memory {ranges.reserved.basis}",
        ranges=ranges,
        process_low_bytes=context.low_bytes,
        process_expected_bytes=context.expected_bytes,
        managed_bytes=run.program.trace.managed_bytes,
        slack_bytes=slack,
    )


def _uncorrected_ranges(run: Run, result: Replay, slack: int) -> PeakRanges:
    """The ranges of the allocator's peaks as runs of the kind showed them."""
    kind = kind_of(run.setup, result.peak_reserved_bytes, slack)
    allocated = band_for(kind, "allocated").around(result.peak_allocated_bytes, kind)
    reserved = band_for(kind, "reserved").around(result.peak_reserved_bytes, kind, slack)
    # what is allocated lies in what is reserved
    low = max(reserved.low_bytes, allocated.low_bytes)
    return PeakRanges(allocated=allocated, reserved=replace(reserved, low_bytes=low))


def _with_nccl(
    peaks: Peaks, capability: tuple[int, int] | str | None, distributed: Distributed
) -> Peaks:
    """The same with the communicator of several GPUs, which lies beside the allocator."""
    group = communicators(distributed, capability if isinstance(capability, tuple) else None)
    if group is None:
        return peaks
    return replace(
        peaks,
        device_bytes=peaks.device_bytes + group.expected_bytes,
        low_bytes=peaks.low_bytes + group.low_bytes,
        high_bytes=peaks.high_bytes + group.high_bytes,
        basis=f"{peaks.basis}; {group.basis}" if peaks.basis else group.basis,
        process_low_bytes=peaks.process_low_bytes + group.low_bytes,
        process_expected_bytes=peaks.process_expected_bytes + group.expected_bytes,
    )


def _corrected_peaks(
    target: TargetGpu,
    calibration: Calibration,
    run: Run,
    stream: Stream,
    result: Replay,
    rows: tuple[Row, ...] | None,
) -> Peaks:
    from memest.estimation.correction import UncorrectedEstimate, correct
    from memest.estimation.run_facts import run_facts

    parts = {_WHOLE: result.peak_allocated_bytes}
    if rows is None and (calibration.factors or calibration.other_factor != 1):
        rows = breakdown(stream, result, alive_at_peak(stream, result))
    if rows is not None:
        parts = {row.category.value: row.bytes for row in rows}
    facts = run_facts(run.setup, run.program.trace, run.weights, run.card)
    spec, context, slack = target.spec, target.context, stream.workspace_slack_bytes
    ranges = _uncorrected_ranges(run, result, slack)
    capability = spec.compute_capability
    correction = correct(
        calibration,
        UncorrectedEstimate(
            parts=parts,
            allocated_bytes=result.peak_allocated_bytes,
            reserved_bytes=result.peak_reserved_bytes,
            gpu=spec.name,
            sm_count=spec.sm_count,
            capability=capability if isinstance(capability, tuple) else None,
            total_bytes=spec.torch_total_bytes,
            torch=run.gpu.torch,
            cuda=run.setup.software.cuda,
            context_low_bytes=context.low_bytes,
            context_expected_bytes=context.expected_bytes,
            context_high_bytes=context.high_bytes,
            slack_bytes=slack,
            reserved_range=ranges.reserved,
            family=run.family,
            **asdict(facts),
        ),
    )
    return replace(
        correction,
        managed_bytes=run.program.trace.managed_bytes,
        slack_bytes=slack,
        ranges=_corrected_ranges(ranges, result, correction),
        added_bytes=correction.reserved_bytes - result.peak_reserved_bytes,
    )


def _corrected_ranges(ranges: PeakRanges, result: Replay, correction: Correction) -> PeakRanges:
    """The same around corrected peaks.

    Where a calibration promises a range of the device peak, whose process part is known on its
    GPU, the rest of that is its range of reserved memory.
    """
    if correction.level is None:
        reserved = _moved(ranges.reserved, correction.reserved_bytes - result.peak_reserved_bytes)
    else:
        process = correction.process_bytes
        reserved = Interval(
            low_bytes=correction.low_bytes - process,
            high_bytes=correction.high_bytes - process,
            level=correction.level,
            basis=correction.basis,
        )
    added = correction.allocated_bytes - result.peak_allocated_bytes
    return PeakRanges(allocated=_moved(ranges.allocated, added), reserved=reserved)


def _moved(interval: Interval, added: int) -> Interval:
    low, high = interval.low_bytes + added, interval.high_bytes + added
    return replace(interval, low_bytes=low, high_bytes=high)


def corrected_rows(rows: tuple[Row, ...], parts: Mapping[str, int]) -> tuple[Row, ...]:
    """The breakdown after correction; it sums to the corrected allocated peak."""
    return tuple(replace(row, bytes=parts[row.category.value]) for row in rows)


def calibration_facts(target: TargetGpu, peaks: Peaks) -> CalibrationFacts | None:
    """What to say of the profile that corrected an answer; None without one."""
    calibration = target.calibration
    if calibration is None:
        return None
    from memest.estimation.correction import Correction

    assert isinstance(peaks, Correction)
    before, cross_validation = peaks.before, peaks.validation
    return CalibrationFacts(
        path=str(calibration.path),
        gpus=calibration.calibration.provenance.gpus,
        process_gpu=peaks.process_gpu,
        factors={part: peaks.factors[part] for part in peaks.parts},
        raw_parts=dict(before.parts),
        raw_allocated_bytes=before.allocated_bytes,
        raw_reserved_bytes=before.reserved_bytes,
        raw_device_bytes=before.device_bytes,
        raw_low_bytes=before.low_bytes,
        raw_high_bytes=before.high_bytes,
        process_bytes=peaks.process_bytes,
        raw_process_bytes=before.context_expected_bytes,
        extrapolates=peaks.distance > 0,
        cases=cross_validation.cases,
        models=cross_validation.models,
        coverage=cross_validation.coverage,
    )
