"""Phases of a predicted rank against those of a real one."""

from typing import Any

from memest.replay.replay import check_events
from support.ranks import as_run, without_updates
from support.real_memory import differences

__all__ = ["check_phases"]


def check_phases(
    real: Any, predicted: Any, host: int, copies: int, *, all_told: bool = True
) -> None:
    """Bytes alive when each phase of the steps begins, and its peak.

    Args:
        real, predicted: a ``CpuRun`` each.
        host: bytes that a CPU run cannot tell from the device's.
        copies: what the CPU's foreach kernels copy in the optimizer, which are not CUDA's.
        all_told: the real loop tells all phases apart; otherwise those that it does not are left
            out.
    """
    measured = {phase.name: phase for phase in real.phases}
    steps = [phase for phase in predicted.phases if not phase.name.startswith("load")]
    if not all_told:
        steps = [phase for phase in steps if phase.name in measured]
    assert len(steps) > 10
    for phase in steps:
        same = measured[phase.name]
        copied_bytes = copies if phase.name.startswith("optimizer") else 0
        assert abs(phase.alive - same.alive) <= host, f"alive when {phase.name} begins"
        assert abs(phase.peak - same.peak) <= host + copied_bytes, f"peak in {phase.name}"


def check_rank(
    real: Any, stream: Any, host: int, copies: int, *, at_least: int, all_told: bool = True
) -> None:
    """Every phase, and every allocation and free of the steps but the optimizer's, in order.

    Args:
        real: a ``CpuRun``.
        stream: the predicted one.
        host, copies, all_told: as for :func:`check_phases`.
        at_least: bytes of the smallest events that are compared.
    """
    check_events(stream.events, stream.sizes)
    run = as_run(stream)
    check_phases(real, run, host, copies, all_told=all_told)
    assert differences(without_updates(real), without_updates(run), at_least=at_least) == []
