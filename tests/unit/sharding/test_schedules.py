"""Orders of pipelines against the schedule objects of ``torch.distributed.pipelining``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from memest.config.parallelism import Schedule
from memest.errors import ConfigError
from memest.sharding.schedules import Action, rank_order, sharded_order, stages_of
from support.torch_schedules import THEIRS

CASES = [
    *((Schedule.GPIPE, ranks, 1, m) for ranks in (2, 4) for m in (1, 4, 9)),
    *((Schedule.ONE_F_ONE_B, ranks, 1, ranks) for ranks in (2, 3, 4, 8)),
    *((Schedule.ONE_F_ONE_B, ranks, 1, 2 * ranks + 1) for ranks in (2, 3, 4, 8)),
    *((Schedule.LOOPED_BFS, ranks, v, 4) for ranks in (2, 4) for v in (2, 3)),
    *((Schedule.INTERLEAVED, ranks, v, m) for ranks in (2, 4) for v in (2, 3) for m in (2, 4, 8)),
]  # fmt: skip


@pytest.fixture
def groups():
    """Fake process groups, one after the other."""

    def make(ranks):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    yield make
    dist.destroy_process_group()


def theirs(schedule, ranks, per_rank, micro_batches):
    """(work, stage, micro-batch) of every rank, as torch's own schedule has them."""
    own = [
        PipelineStage(torch.nn.Identity(), stage, ranks * per_rank, torch.device("cpu"))
        for stage in stages_of(0, ranks, per_rank)
    ]
    kind = THEIRS[schedule]
    if issubclass(kind, schedules.PipelineScheduleSingle):
        return {rank: run_of(kind, rank, ranks, micro_batches) for rank in range(ranks)}
    made = kind(own, micro_batches, loss_fn=lambda *_: None)
    return {
        rank: tuple(
            Action(a.computation_type.value, a.stage_index, a.microbatch_index)
            for a in made.pipeline_order[rank]
            if a is not None and a.computation_type.value in "FB"
        )
        for rank in range(ranks)
    }


class Logged(PipelineStage):
    """A stage that writes down what a schedule asks of it, and has nobody to talk to."""

    def __init__(self, index, count):
        super().__init__(torch.nn.Identity(), index, count, torch.device("cpu"))
        self.done = []

    def _nothing(self, *_args, **_more):
        return []

    get_fwd_recv_ops = get_bwd_recv_ops = get_fwd_send_ops = get_bwd_send_ops = _nothing

    def forward_one_chunk(self, number, *_args, **_more):
        self.done.append(Action("F", self.stage_index, number))

    def backward_one_chunk(self, number, **_more):
        self.done.append(Action("B", self.stage_index, number))


def run_of(kind, rank, ranks, micro_batches):
    """What a schedule of one stage runs: its ``pipeline_order`` is for pictures, and the last rank
    of 1F1B begins with the second micro-batch there.
    """
    stage = Logged(rank, ranks)
    schedule = kind(stage, micro_batches, loss_fn=lambda *_: torch.zeros(()))
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, [None] * micro_batches)
    return tuple(stage.done)


@pytest.mark.parametrize(("schedule", "ranks", "per_rank", "micro_batches"), CASES)
def test_orders_are_those_of_torch(groups, schedule, ranks, per_rank, micro_batches):
    groups(ranks)
    expected = theirs(schedule, ranks, per_rank, micro_batches)
    actual = {r: rank_order(schedule, r, ranks, per_rank, micro_batches) for r in range(ranks)}
    assert actual == expected


SEVERAL = [case for case in CASES if case[0] not in (Schedule.GPIPE, Schedule.ONE_F_ONE_B)]
"""Those whose schedules are lowered to actions; of four stages on a GPU not all are gathered."""
WORDS = {"UNSHARD": "U", "RESHARD": "R", "REDUCE_GRAD": "G"}


@pytest.mark.parametrize(
    ("schedule", "ranks", "per_rank", "micro_batches"),
    [*SEVERAL, *((Schedule.INTERLEAVED, 2, v, m) for v in (4, 5) for m in (2, 8))],
)
def test_shards_are_gathered_and_gradients_reduced_where_torch_does(
    groups, schedule, ranks, per_rank, micro_batches
):
    groups(ranks)
    for rank in range(ranks):
        own = stages_of(rank, ranks, per_rank)
        stages = [
            PipelineStage(torch.nn.Identity(), stage, ranks * per_rank, torch.device("cpu"))
            for stage in own
        ]
        made = THEIRS[schedule](stages, micro_batches, loss_fn=lambda *_: None)
        expected = [
            Action(
                WORDS.get(a.computation_type.value, a.computation_type.value), a.stage_index,
                -1 if a.microbatch_index is None else a.microbatch_index,
            )
            for a in made.pipeline_order_with_comms[rank]
            if a.computation_type.value in {*"FB", *WORDS}
        ]  # fmt: skip
        order = rank_order(schedule, rank, ranks, per_rank, micro_batches)
        assert list(sharded_order(order, micro_batches)) == expected


def test_an_unknown_schedule_is_refused_with_the_nearest():
    import memest

    with pytest.raises(ConfigError, match="Did you mean 'gpipe'"):
        memest.estimate("prajjwal1/bert-tiny", num_gpus=2, pp=2, pp_schedule="gpip")
