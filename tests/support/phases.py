"""Phases of a predicted rank against those of a real one."""

from collections import Counter
from typing import Any

from memest.replay.replay import check_events
from support.ranks import as_run, without_updates
from support.real_memory import differences

__all__ = ["check_phases", "check_sums", "check_talking_rank"]


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


def check_talking_rank(real: Any, stream: Any, *, at_least: int, more_than: int) -> None:
    """Every allocation of the steps but the optimizer's, in order, where gloo connects processes.

    gloo copies what it sends, and its threads let go of it when they come to it: frees have no
    order.

    Args:
        real: a ``CpuRun`` of a process that talked.
        stream: the predicted one.
        at_least: bytes of the smallest allocations that are compared.
        more_than: how many are compared, at least.
    """
    run = as_run(stream)
    real.events = [event for event in real.events if "gloo:" not in event.op]
    check_sums(real, run, at_least)
    allocated, predicted = (
        [e.nbytes for e in without_updates(each).events if e.nbytes >= at_least]
        for each in (real, run)
    )
    assert len(allocated) > more_than
    assert allocated == predicted


def check_sums(real: Any, run: Any, at_least: int) -> None:
    """Compare how many sums a backward makes in new memory, and leave them out of the events.

    Autograd cannot add in place where one of gloo's threads still holds what it gathered, so a
    real process makes more of them, and how many depends on how busy the machine is.
    """
    made, foretold = _take_sums(real, at_least), _take_sums(run, at_least)
    assert foretold <= made
    assert (made - foretold).total() < 20


def _take_sums(run: Any, at_least: int) -> "Counter[tuple[str, int]]":
    sums = [
        e for e in run.events
        if e.phase.startswith("backward") and e.op.endswith(("/aten::add", "/aten.add.Tensor"))
    ]  # fmt: skip
    run.events = [e for e in run.events if e not in sums]
    return Counter((e.phase, e.nbytes) for e in sums if e.nbytes >= at_least)
