"""Real ranks of FSDP2 over layers that tensor parallelism shares, on the CPU.

The process group is PyTorch's fake one, in which frees have an order, or gloo's with real
processes. Who shards what: a script by PyTorch's recipe, or as torchtitan does; transformers as it
loads the model (``DistributedConfig``); accelerate's own preparation.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from support.rank_processes import STEPS, Marks, join_group, measure_rank, real_ranks


def real_rank(case: dict[str, Any]) -> Any:
    """What the first rank of a case measured, a ``CpuRun``.

    Args:
        case: as for ``ranks.real_rank``, whether it accumulates ``as_trainer``, and whether
            ``gloo`` connects real processes.
    """
    ranks = case["ranks"] if case.get("gloo") else 1
    return real_ranks(_be_rank, case, range(ranks))[0]


def _be_rank(rank: int, case: dict[str, Any], meeting: str) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.loops import train
    from memest.calibration.running.material import host_batches
    from memest.trace.losses.loss import loss_for
    from memest.trace.parallel.sequence_parallel import drop_attention_mask
    from support.cases import twin
    from support.ranks import accelerate_loop, setup_of_case
    from support.sequence_ranks import as_torchtitan
    from support.tensor_ranks import optimizer_of_shards, shard_with_adapters

    torch.manual_seed(0)
    setup = setup_of_case(case)
    distributed, options = setup.distributed, dict(case.get("setup", {}))
    if setup.computes_in_half:
        options.pop("precision")  # that is the policy's, not autocast's
    # what says that the model is sharded, and not how it computes
    spread = replace(distributed, fsdp_mixed_precision=False)
    twins = twin(case["model"], distributed=spread, **options)
    plans = drop_attention_mask(twins.plans, distributed)
    batches = host_batches(plans, STEPS * setup.grad_accum)
    loss_of, cpu = loss_for(twins.built_model), torch.device("cpu")
    join_group("gloo" if case.get("gloo") else "fake", rank, distributed.num_gpus, meeting)
    shape = (1, distributed.num_copies, distributed.shard_ranks, distributed.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    context: Any = contextlib.nullcontext()
    if distributed.tp_sequence_parallel:
        model, context = as_torchtitan(twins.real, mesh["tp"], distributed, gloo=case.get("gloo"))
    elif distributed.tp > 1:
        twins = replace(twins, real=shard_with_adapters(twins.real, mesh["tp"]))
        model = twins.real
    else:
        model = twins.real

    def run() -> None:
        mark("load 0 0")
        _shard(twins.real, setup, mesh)
        if setup.loop == "plain":
            train(model, twins.setup, batches, optimizer_of_shards, loss_of, cpu, Marks())
        else:
            waits = not setup.is_sharded_at_load or case.get("as_trainer", False)
            accelerate_loop(model, setup, batches, optimizer_of_shards, loss_of, waits=waits)

    with context:
        return measure_rank(run, rank == 0)


def _shard(model: Any, setup: Any, mesh: Any) -> None:
    """``fully_shard``, by who does it."""
    from support.ranks import apply_fsdp2, prepare_fsdp2

    distributed = setup.distributed
    names = ("dp_replicate", "fsdp") if distributed.num_copies > 1 else ("fsdp",)
    if setup.is_sharded_at_load:
        _shard_at_load(model, distributed, mesh)
    elif setup.loop == "plain":
        reshards = distributed.fsdp == "full_shard"
        apply_fsdp2(model, mesh[names], reshards=reshards, options=distributed)
    else:
        prepare_fsdp2(model, setup, mesh[names])


def _shard_at_load(model: Any, distributed: Any, mesh: Any) -> None:
    """transformers' own FSDP2."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism
    from transformers.distributed.utils import TransformersDeviceMesh

    config = DistributedConfig(
        tp_size=distributed.tp,
        fsdp_size=distributed.shard_ranks,
        dp_replicate_size=distributed.num_copies,
        fsdp_mixed_precision=distributed.fsdp_mixed_precision,
    )
    model.config.distributed_config = config
    _, ep_plan, fsdp_plan = model._resolve_parallel_plans(config)
    manager = TransformersDeviceMesh(mesh, mesh)
    apply_fully_sharded_data_parallelism(model, manager, fsdp_plan, ep_plan)
