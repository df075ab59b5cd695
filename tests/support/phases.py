"""Phases of a predicted rank against those of a real one."""

from typing import Any

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
        copied = copies if phase.name.startswith("optimizer") else 0
        assert abs(phase.alive - same.alive) <= host, f"alive when {phase.name} begins"
        assert abs(phase.peak - same.peak) <= host + copied, f"peak in {phase.name}"
