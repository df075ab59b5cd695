"""The order of work on each GPU of a pipeline.

The orders are those of ``torch.distributed.pipelining.schedules`` (2.13), without the slots in
which a GPU waits: ``tests/unit/sharding/test_schedules.py`` compares them with torch's own objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memest.config.parallelism import Schedule

__all__ = ["Action", "Work", "rank_order", "sharded_order", "stages_of"]

Work = str
"""``F`` forward, ``B`` backward; for stages whose parameters are sharded also ``U`` they are
gathered, ``R`` given back, ``G`` their gradients are reduced."""
_ACTIVE_STAGES = 3
"""``max_active_stages`` of ``_add_unshard_reshard``: this many are gathered at a time."""


class Action(NamedTuple):
    """One piece of work.

    Attributes:
        work: which.
        stage: of the pipeline.
        micro_batch: from 0; -1 for what is about all of them.
    """

    work: Work
    stage: int
    micro_batch: int


def stages_of(rank: int, ranks: int, per_rank: int) -> tuple[int, ...]:
    """The stages that a rank has, in the order of the model.

    Args:
        rank: of the pipeline.
        ranks: in the pipeline.
        per_rank: stages on each.
    """
    return tuple(rank + ranks * local for local in range(per_rank))


def rank_order(
    schedule: Schedule, rank: int, ranks: int, per_rank: int, micro_batches: int
) -> tuple[Action, ...]:
    """What a rank does, in order.

    Args:
        schedule: the schedule.
        rank: of the pipeline.
        ranks: in the pipeline.
        per_rank: stages on each.
        micro_batches: of one step.
    """
    stages = stages_of(rank, ranks, per_rank)
    all_of = range(micro_batches)
    if schedule is Schedule.GPIPE:
        forward = [Action("F", rank, number) for number in all_of]
        return (*forward, *(Action("B", rank, number) for number in all_of))
    if schedule is Schedule.LOOPED_BFS:
        forward = [Action("F", stage, number) for stage in stages for number in all_of]
        backward = [Action("B", s, n) for s in reversed(stages) for n in reversed(all_of)]
        return (*forward, *backward)
    if schedule is Schedule.ONE_F_ONE_B:
        # the backward of a micro-batch comes after the forward that fills the pipeline
        return _one_forward_one_backward(stages, micro_batches, micro_batches, ranks - 1 - rank)
    per_round = micro_batches // max(1, micro_batches // ranks)
    ahead = (per_rank - 1) * per_round + 2 * (ranks - 1 - rank)
    return _one_forward_one_backward(stages, micro_batches, per_round, ahead)


def sharded_order(order: Sequence[Action], micro_batches: int) -> tuple[Action, ...]:
    """What a rank does with stages whose parameters are sharded.

    Source: ``_add_unshard_reshard`` and ``_add_reduce_grad``: the next stages are gathered ahead,
    those that are not among them are given back, and gradients are reduced behind the last
    backward of a stage.

    Args:
        order: of :func:`rank_order`.
        micro_batches: of one step.
    """
    out: list[Action] = []
    active: set[int] = set()
    num_backwards: dict[int, int] = {}
    for place, action in enumerate(order):
        coming = tuple(dict.fromkeys(later.stage for later in order[place:]))[:_ACTIVE_STAGES]
        new_stages = [stage for stage in coming if stage not in active]
        for stage in [stage for stage in active if stage not in coming]:
            active.remove(stage)
            out.append(Action("R", stage, -1))
        for stage in new_stages:
            active.add(stage)
            out.append(Action("U", stage, -1))
        out.append(action)
        if action.work == "B":
            num_backwards[action.stage] = num_backwards.get(action.stage, 0) + 1
            if num_backwards[action.stage] == micro_batches:
                out.append(Action("G", action.stage, -1))
    return (*out, *(Action("R", stage, -1) for stage in active))


def _one_forward_one_backward(
    stages: tuple[int, ...], micro_batches: int, per_round: int, ahead: int
) -> tuple[Action, ...]:
    """Some forwards ahead, then one backward behind each forward, then the rest.

    Args:
        stages: of the rank.
        micro_batches: of one step.
        per_round: micro-batches that go through a stage before the next stage has its turn.
        ahead: forwards before the first backward's.
    """
    total = len(stages) * micro_batches
    ahead = min(ahead, total)
    forwards = list(_in_rounds("F", stages, micro_batches, per_round))
    out = forwards[:ahead]
    backwards = _in_rounds("B", stages[::-1], micro_batches, per_round)
    for number, backward in enumerate(backwards, ahead):
        out += [*forwards[number : number + 1], backward]
    return tuple(out)


def _in_rounds(
    work: Work, stages: tuple[int, ...], micro_batches: int, per_round: int
) -> Iterator[Action]:
    for start in range(0, micro_batches, per_round):
        for stage in stages:
            for number in range(start, min(start + per_round, micro_batches)):
                yield Action(work, stage, number)
