"""A rank that DeepSpeed was measured to run, beside the predicted one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memest.replay.replay import check_events
from support.ranks import as_run, of_steps
from support.real_memory import differences
from support.releases import in_one_order


def updates_or_first(phase: str) -> bool:
    """What of an offloaded run a CPU cannot tell: where the update happens, and what is new."""
    return phase.split()[0] in ("optimizer", "zero_grad") or phase.endswith((" 1 1", " 1 0"))


def check_recorded(
    real: Any, stream: Any, host: int, *, slack: float = 0.005, fewest: int = 150,
    any_order: bool = False, by_phase: bool = False,
    untold: Callable[[str], bool] = updates_or_first,
) -> None:  # fmt: skip
    """Every phase; where nothing is offloaded, every allocation and free from 8 KiB on, in order.

    In a CPU run the host's memory is the device's, so what is offloaded is alive in it.

    Args:
        real: the measured run.
        stream: the predicted one.
        host: bytes that a CPU run has in the device's memory and a GPU in the host's.
        slack: of the peak, which phases may differ by besides, in their own peaks.
        fewest: allocations that there must be.
        any_order: frees that follow each other have no order.
        by_phase: only phases are compared.
        untold: phases that an offloaded run says nothing of.
    """
    check_events(stream.events, stream.sizes)
    for number, label in enumerate(stream.labels):
        if stream.label_names[label].endswith("from the host"):
            stream.sizes[number] = 0  # what a CPU has in the host's memory is there already
    predicted = as_run(stream)
    measured = {phase.name: phase for phase in real.phases}
    steps = [phase for phase in predicted.phases if not phase.name.startswith("load")]
    assert len(steps) > 10
    away = stream.host_bytes
    for phase in steps:
        if away and untold(phase.name):
            continue
        same = measured[phase.name]
        assert abs(phase.alive + away - same.alive) <= host, f"alive when {phase.name} begins"
        assert abs(phase.peak + away - same.peak) <= host + slack * real.peak, phase.name
    if away or by_phase:
        return
    assert len(predicted.allocations(at_least=8192)) > fewest
    runs = [of_steps(run) for run in (real, predicted)]
    if any_order:
        runs = [in_one_order(run) for run in runs]
    assert differences(*runs, at_least=8192) == []
