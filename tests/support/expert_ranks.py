"""Real ranks of expert parallelism: transformers' own sharding and its own exchange, on the CPU.

Two groups of processes: ``gloo``, in which every rank is there and tokens move, and PyTorch's fake
one, in which frees have an order (gloo's threads let go of what they sent when they come to it).
The fake one moves nothing, so what the others would send is put in where tokens are counted. In
both, the routers' choices are replaced by equal shares, which is what a trace assumes.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from support.rank_processes import STEPS, Marks, join_group, measure_rank, real_ranks


def real_rank(case: dict[str, Any], group: str) -> Any:
    """What the first rank of a case measured, a ``CpuRun``.

    Args:
        case: ``model``, ``spread`` for ``Distributed`` and options of ``Setup`` in ``setup``.
        group: ``gloo`` or ``fake``.
    """
    ranks = case["spread"]["num_gpus"] if group == "gloo" else 1
    return real_ranks(_be_rank, {**case, "group": group}, range(ranks))[0]


def _be_rank(rank: int, case: dict[str, Any], meeting: str) -> Any:
    import torch

    from memest.trace.parallel.tensor_parallel import meshes_of, shard_model
    from support.tensor_ranks import twins_of

    torch.manual_seed(0)
    twins = twins_of(case)
    distributed = twins.setup.distributed
    join_group(case["group"], rank, distributed.num_gpus, meeting)
    meshes = meshes_of(distributed, distributed.num_gpus)
    shard_model(twins.real, meshes, distributed)
    with _equal_shares(), _copy_counts(case["group"]):
        return _train_rank(twins, meshes, is_measured=rank == 0)


def _train_rank(twins: Any, meshes: Any, *, is_measured: bool) -> Any:
    import torch

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.loops import train
    from memest.calibration.running.material import host_batches
    from memest.trace.losses.loss import loss_for
    from support.tensor_ranks import optimizer_of_shards

    setup = twins.setup
    batches = host_batches(twins.plans, STEPS * setup.grad_accum)

    def run() -> None:
        mark("load 0 0")
        model = _apply_fsdp2(twins.real, setup.distributed, meshes)
        train(
            model, setup, batches, optimizer_of_shards, loss_for(twins.built_model),
            torch.device("cpu"), Marks(),
        )  # fmt: skip

    return measure_rank(run, is_measured)


def _apply_fsdp2(model: Any, distributed: Any, meshes: Any) -> Any:
    """transformers' own FSDP2, which knows where experts are."""
    from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism
    from transformers.distributed.utils import TransformersDeviceMesh

    from memest.trace.parallel.tensor_parallel import config_of

    if distributed.fsdp == "none":
        return model
    model.config.distributed_config = config = config_of(distributed)
    _, ep_plan, fsdp_plan = model._resolve_parallel_plans(config)
    manager = TransformersDeviceMesh(meshes.dense, meshes.expert)
    return apply_fully_sharded_data_parallelism(model, manager, fsdp_plan, ep_plan)


@contextmanager
def _equal_shares() -> Any:
    """Routers choose experts in turn: the first token the first ones, the next the next."""
    import torch

    real = torch.topk

    def topk(values: Any, count: int, *args: Any, **kwargs: Any) -> Any:
        out = real(values, count, *args, **kwargs)
        indices = out[1]
        indices.data.copy_((torch.arange(indices.numel()) % values.shape[-1]).view_as(indices))
        return out

    torch.topk = topk
    try:
        yield
    finally:
        torch.topk = real


@contextmanager
def _copy_counts(group: str) -> Any:
    """With a group that moves nothing, the others send as many tokens as are sent to them."""
    from transformers.distributed import expert_parallel

    real = expert_parallel.all_to_all_single

    def copy(output: Any, source: Any, **_: Any) -> None:
        output.copy_(source)

    if group == "fake":
        expert_parallel.all_to_all_single = copy
    try:
        yield
    finally:
        expert_parallel.all_to_all_single = real
