"""Releases that the profiler of a real rank did not hear, or heard in no order that is anybody's.

The last who holds a tensor of a collective is the process's own thread or gloo's, whichever is
later, and the profiler hears the process's own alone: such bytes stay in its count to the end.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, groupby, takewhile
from typing import Any

__all__ = ["as_heard", "in_one_order"]

MOST = 10
"""Releases of one phase that are looked at, the largest first."""


def as_heard(real: Any, predicted: Any, host: int) -> Any:
    """A prediction without the releases that the profiler of a real rank cannot have heard.

    Where a phase of the real rank begins with more bytes, it is looked which of DDP's own tensors,
    let go of in the phase before, add up to them. Nothing else is taken from the prediction.

    Args:
        real, predicted: a ``CpuRun`` each, of the same phases.
        host: bytes by which phases may differ and agree.
    """
    begins = _begins(real, predicted)
    phases, events = [], []
    alive = predicted.phases[0].alive
    rest = list(predicted.events)
    for phase, begin_bytes in zip(predicted.phases, [*begins[1:], None], strict=True):
        own = list(takewhile(lambda event, name=phase.name: event.phase == name, rest))
        del rest[: len(own)]
        if begin_bytes is not None:
            surplus = begin_bytes - alive - sum(event.nbytes for event in own)
            if surplus > host:
                own = _without(own, surplus)
        counts = [alive]
        for event in own:
            counts.append(counts[-1] + event.nbytes)
        phases.append(replace(phase, alive=alive, peak=max(counts)))
        events += own
        alive = counts[-1]
    return replace(predicted, phases=phases, events=events)


def _begins(real: Any, predicted: Any) -> list[int]:
    """The bytes with which the real rank begins each phase; a name may come again later."""
    out, place = [], 0
    for phase in predicted.phases:
        names = [same.name for same in real.phases[place:]]
        place += names.index(phase.name)
        out.append(real.phases[place].alive)
        place += 1
    return out


def _without(events: list[Any], surplus: int) -> list[Any]:
    """Events of a phase without those releases of DDP's that add up to a surplus best."""
    own = [index for index, event in enumerate(events) if event.nbytes < 0 and "/ddp: " in event.op]
    own = sorted(own, key=lambda index: events[index].nbytes)[:MOST]
    choices = [some for n in range(len(own) + 1) for some in combinations(own, n)]
    unheard = min(
        choices, key=lambda some: abs(surplus + sum(events[index].nbytes for index in some))
    )
    return [event for index, event in enumerate(events) if index not in unheard]


def in_one_order(run: Any, at_least: int = 8192) -> Any:
    """A run whose frees, as long as they follow each other, come by their size.

    What a layer recomputed DeepSpeed gives back in the order of a Python set, and what is held by
    the nodes of a graph goes as Python comes by them.

    Args:
        run: a ``CpuRun``.
        at_least: bytes of the events that are looked at.
    """
    large = [event for event in run.events if abs(event.nbytes) >= at_least]
    runs = groupby(large, lambda event: event.nbytes < 0 and event.phase)
    return replace(run, events=[
        event for frees, some in runs
        for event in (sorted(some, key=lambda event: event.nbytes) if frees else some)
    ])  # fmt: skip
