"""What a run needs of a GPU: its peaks there and their range, corrected where it is calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from memest.estimation.breakdown import alive_at_peak, breakdown
from memest.estimation.gpu_target import TargetGpu
from memest.estimation.run import Run
from memest.profiles.stream import Stream
from memest.replay.replay import Replay
from memest.report.result import CalibrationFacts, Row
from memest.sharding.nccl import communicators
from memest.units import MIB, format_size

if TYPE_CHECKING:
    from memest.estimation.correction import Correction

__all__ = ["Peaks", "calibration_facts", "corrected_rows", "peaks_of"]

_WHOLE = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Memory on one GPU, bytes.

    Attributes:
        allocated_bytes: in tensors.
        reserved_bytes: in segments.
        device_bytes: reserved, context and kernels.
        low_bytes: the least that the device peak may be.
        high_bytes: the most.
        level: share of runs that lie between the two, None = no claim.
        basis: where the range is from.
        process_low_bytes: the least that context and kernels may take.
        process_expected_bytes: what they are expected to take.
        managed_bytes: beside the allocator, in memory that leaves the GPU where room is short.
        added_bytes: what a correction added to the reserved peak of the replay.
        corrected: what a calibration profile made of it; None without one.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    low_bytes: int
    high_bytes: int
    level: float | None
    basis: str
    process_low_bytes: int
    process_expected_bytes: int
    managed_bytes: int = 0
    added_bytes: int = 0
    corrected: Correction | None = None


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
        return _with_nccl(_corrected(target, run, stream, result, rows), target, run)
    context, slack = target.context, stream.workspace_slack_bytes
    basis = context.basis
    if slack >= MIB:
        basis += f"; up to {format_size(slack)} more where a library picks its own workspace"
    reserved = result.peak_reserved_bytes
    peaks = Peaks(
        allocated_bytes=result.peak_allocated_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + context.expected_bytes,
        low_bytes=reserved + context.low_bytes,
        high_bytes=reserved + context.high_bytes + slack,
        level=None,
        basis=basis,
        process_low_bytes=context.low_bytes,
        process_expected_bytes=context.expected_bytes,
        managed_bytes=run.program.trace.managed_bytes,
    )
    return _with_nccl(peaks, target, run)


def _with_nccl(peaks: Peaks, target: TargetGpu, run: Run) -> Peaks:
    """The same with the communicator of several GPUs, which lies beside the allocator."""
    capability = target.spec.compute_capability
    group = communicators(
        run.setup.distributed, capability if isinstance(capability, tuple) else None
    )
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


def _corrected(
    target: TargetGpu, run: Run, stream: Stream, result: Replay, rows: tuple[Row, ...] | None
) -> Peaks:
    from memest.estimation.correction import Uncorrected, correct
    from memest.estimation.run_facts import run_facts

    assert target.calibration is not None
    calibration = target.calibration.calibration
    parts = {_WHOLE: result.peak_allocated_bytes}
    if rows is None and (calibration.factors or calibration.other_factor != 1):
        rows = breakdown(stream, result, alive_at_peak(stream, result))
    if rows is not None:
        parts = {row.category.value: row.bytes for row in rows}
    facts = run_facts(run.setup, run.program.trace, run.card)
    spec, context = target.spec, target.context
    capability = spec.compute_capability
    answer = correct(
        calibration,
        Uncorrected(
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
            slack_bytes=stream.workspace_slack_bytes,
            family=run.family,
            **asdict(facts),
        ),
    )
    return Peaks(
        allocated_bytes=answer.allocated_bytes,
        reserved_bytes=answer.reserved_bytes,
        device_bytes=answer.device_bytes,
        low_bytes=answer.low_bytes,
        high_bytes=answer.high_bytes,
        level=answer.level,
        basis=answer.basis,
        process_low_bytes=answer.process_low_bytes,
        process_expected_bytes=answer.process_expected_bytes,
        managed_bytes=run.program.trace.managed_bytes,
        added_bytes=answer.reserved_bytes - result.peak_reserved_bytes,
        corrected=answer,
    )


def corrected_rows(rows: tuple[Row, ...], parts: Mapping[str, int]) -> tuple[Row, ...]:
    """The breakdown after correction; it sums to the corrected allocated peak."""
    return tuple(replace(row, bytes=parts[row.category.value]) for row in rows)


def calibration_facts(target: TargetGpu, peaks: Peaks) -> CalibrationFacts | None:
    """What to say of the profile that corrected an answer; None without one."""
    answer, calibration = peaks.corrected, target.calibration
    if answer is None or calibration is None:
        return None
    before, cross_validation = answer.before, answer.validation
    return CalibrationFacts(
        path=str(calibration.path),
        gpus=calibration.calibration.provenance.gpus,
        process_gpu=answer.process_gpu,
        factors={part: answer.factors[part] for part in answer.parts},
        raw_parts=dict(before.parts),
        raw_allocated_bytes=before.allocated_bytes,
        raw_reserved_bytes=before.reserved_bytes,
        raw_device_bytes=before.device_bytes,
        raw_low_bytes=before.low_bytes,
        raw_high_bytes=before.high_bytes,
        process_bytes=answer.process_expected_bytes,
        raw_process_bytes=before.context_expected_bytes,
        extrapolates=answer.distance > 0,
        cases=cross_validation.cases,
        models=cross_validation.models,
        coverage=cross_validation.coverage,
    )
