"""What a run needs of a card: its peaks there and their range, corrected where it is calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from memest.assemble import alive_at_peak, breakdown
from memest.cards import Card
from memest.replay.replay import Replay
from memest.result import CalibrationFacts, Row
from memest.sharding.nccl import communicators
from memest.steps.stream import Stream
from memest.tracing import Found
from memest.units import MIB, format_size

if TYPE_CHECKING:
    from memest.correction import Corrected

__all__ = ["Needs", "calibration_facts", "corrected_rows", "needs_of"]

_WHOLE = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Memory on one card, bytes.

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
    corrected: Corrected | None = None


def needs_of(
    card: Card, found: Found, stream: Stream, result: Replay, rows: tuple[Row, ...] | None = None
) -> Needs:
    """What a run needs on a card.

    Args:
        card: the card.
        found: the run.
        stream: of the run on this card; the short one will do.
        result: of its replay.
        rows: the breakdown where it is known; it is made where a correction needs it.
    """
    if card.calibration is not None:
        return _with_nccl(_corrected(card, found, stream, result, rows), card, found)
    context, slack = card.context, stream.workspace_slack_bytes
    basis = context.basis
    if slack >= MIB:
        basis += f"; up to {format_size(slack)} more where a library picks its own workspace"
    reserved = result.peak_reserved_bytes
    needs = Needs(
        allocated_bytes=result.peak_allocated_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + context.expected_bytes,
        low_bytes=reserved + context.low_bytes,
        high_bytes=reserved + context.high_bytes + slack,
        level=None,
        basis=basis,
        process_low_bytes=context.low_bytes,
        process_expected_bytes=context.expected_bytes,
        managed_bytes=found.program.trace.managed_bytes,
    )
    return _with_nccl(needs, card, found)


def _with_nccl(needs: Needs, card: Card, found: Found) -> Needs:
    """The same with the communicator of several GPUs, which lies beside the allocator."""
    capability = card.spec.compute_capability
    group = communicators(
        found.setup.distributed, capability if isinstance(capability, tuple) else None
    )
    if group is None:
        return needs
    return replace(
        needs,
        device_bytes=needs.device_bytes + group.expected_bytes,
        low_bytes=needs.low_bytes + group.low_bytes,
        high_bytes=needs.high_bytes + group.high_bytes,
        basis=f"{needs.basis}; {group.basis}" if needs.basis else group.basis,
        process_low_bytes=needs.process_low_bytes + group.low_bytes,
        process_expected_bytes=needs.process_expected_bytes + group.expected_bytes,
    )


def _corrected(
    card: Card, found: Found, stream: Stream, result: Replay, rows: tuple[Row, ...] | None
) -> Needs:
    from memest.correction import Question, correct
    from memest.run_facts import run_facts

    assert card.calibration is not None
    profile = card.calibration.profile
    parts = {_WHOLE: result.peak_allocated_bytes}
    if rows is None and (profile.factors or profile.other_factor != 1):
        rows = breakdown(stream, result, alive_at_peak(stream, result))
    if rows is not None:
        parts = {row.category.value: row.bytes for row in rows}
    facts = run_facts(found.setup, found.program.trace, found.card)
    spec, context = card.spec, card.context
    capability = spec.compute_capability
    answer = correct(
        profile,
        Question(
            parts=parts,
            allocated_bytes=result.peak_allocated_bytes,
            reserved_bytes=result.peak_reserved_bytes,
            gpu=spec.name,
            sm_count=spec.sm_count,
            capability=capability if isinstance(capability, tuple) else None,
            total_bytes=spec.torch_total_bytes,
            torch=found.gpu.torch,
            cuda=found.setup.software.cuda,
            context_low_bytes=context.low_bytes,
            context_expected_bytes=context.expected_bytes,
            context_high_bytes=context.high_bytes,
            slack_bytes=stream.workspace_slack_bytes,
            family=found.family,
            **asdict(facts),
        ),
    )
    return Needs(
        allocated_bytes=answer.allocated_bytes,
        reserved_bytes=answer.reserved_bytes,
        device_bytes=answer.device_bytes,
        low_bytes=answer.low_bytes,
        high_bytes=answer.high_bytes,
        level=answer.level,
        basis=answer.basis,
        process_low_bytes=answer.process_low_bytes,
        process_expected_bytes=answer.process_expected_bytes,
        managed_bytes=found.program.trace.managed_bytes,
        added_bytes=answer.reserved_bytes - result.peak_reserved_bytes,
        corrected=answer,
    )


def corrected_rows(rows: tuple[Row, ...], parts: Mapping[str, int]) -> tuple[Row, ...]:
    """The breakdown after correction; it sums to the corrected allocated peak."""
    return tuple(replace(row, bytes=parts[row.category.value]) for row in rows)


def calibration_facts(card: Card, needs: Needs) -> CalibrationFacts | None:
    """What to say of the profile that corrected an answer; None without one."""
    answer, calibration = needs.corrected, card.calibration
    if answer is None or calibration is None:
        return None
    found = answer.validation
    return CalibrationFacts(
        path=str(calibration.path),
        gpus=calibration.profile.provenance.gpus,
        process_gpu=answer.process_gpu,
        factors={part: answer.factors[part] for part in answer.parts},
        raw_parts=dict(answer.raw_parts),
        raw_allocated_bytes=answer.raw_allocated_bytes,
        raw_reserved_bytes=answer.raw_reserved_bytes,
        raw_device_bytes=answer.raw_device_bytes,
        raw_low_bytes=answer.raw_low_bytes,
        raw_high_bytes=answer.raw_high_bytes,
        process_bytes=answer.process_expected_bytes,
        raw_process_bytes=answer.raw_process_bytes,
        extrapolates=answer.distance > 0,
        cases=found.cases,
        models=found.models,
        coverage=found.coverage,
    )
