"""Real pipelines: processes with gloo, ``PipelineStage`` and the schedules of torch, on the CPU.

Copies of a pipeline are processes too, and DDP's gradients go between them by gloo. Shards of FSDP2
are those of a fake process group, which moves no data and keeps no reference in a thread of its
own; its ranks are the processes of the pipeline, so there are as many shards as stages. So are
those that share layers.
"""

from __future__ import annotations

import copy
from typing import Any

from support import rank_processes
from support.rank_processes import STEPS, join_group, measure_rank
from support.ranks import apply_fsdp2, make_optimizer_of


def real_ranks(case: dict[str, Any]) -> list[Any]:
    """What every rank of a case measured, ``CpuRun`` each.

    Args:
        case: ``model``, and options of ``Setup`` and of ``Distributed`` in ``setup``, ``spread``.
    """
    runs = rank_processes.real_ranks(_be_rank, case, range(world_of(case)))
    return [runs[rank] for rank in range(case["spread"]["pp"])]


def predicted_ranks(case: dict[str, Any]) -> list[Any]:
    """The streams of all ranks as memest makes them, with the CPU's operators and no workspaces."""
    from dataclasses import replace

    from memest.estimation.pipeline import parts_of, rank_runs
    from memest.trace.inputs.batch import realise
    from memest.trace.model.adapters import base_of
    from memest.trace.parallel.pipeline_stage import layers_of, trace_stage
    from memest.trace.session import rank_model
    from memest.trace.training import trace_updates
    from support.cases import GPU

    twins = twins_of(case, runs=False)
    setup, model = twins.setup, twins.built_model.trained_model
    parts = parts_of(setup.distributed, layers_of(base_of(model)))
    with rank_model(model, setup) as sharded_model:
        traces = [
            trace_stage(
                base_of(sharded_model), setup, part=part,
                make_batch=lambda: realise(twins.plans), gpu=GPU, operators="cpu",
            )
            for part in parts
        ]  # fmt: skip
    for trace in traces:
        trace.calls = [replace(call, op="none") for call in trace.calls]

    def updates_of(weights: Any) -> Any:
        updates = trace_updates(weights, setup, GPU)
        updates.calls = [replace(call, op="none") for call in updates.calls]
        return updates

    weights = [trace.weights for trace in traces]
    return [run.stream for run in rank_runs(setup, parts, traces, weights, updates_of, GPU)]


def world_of(case: dict[str, Any]) -> int:
    """Processes of a case: every copy of the pipeline is real under DDP, one of them is else."""
    parallelism = case["spread"]
    alone = parallelism.get("fsdp") or parallelism.get("tp")
    return parallelism["pp"] if alone else parallelism.get("num_gpus", parallelism["pp"])


def twins_of(case: dict[str, Any], *, runs: bool = True) -> Any:
    from memest.config.parallelism import Distributed
    from support.cases import twin

    distributed = Distributed(**{"num_gpus": case["spread"]["pp"], **case["spread"]})
    return twin(case["model"], runs=runs, distributed=distributed, **case.get("setup", {}))


def _be_rank(rank: int, case: dict[str, Any], meeting: str) -> Any:
    import numpy as np
    import torch

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.material import host_batches
    from memest.sharding.schedules import stages_of
    from memest.trace.model.adapters import base_of
    from memest.trace.parallel.pipeline_stage import causal_loss
    from support.tensor_ranks import optimizer_of_shards

    torch.manual_seed(0)
    twins = twins_of(case)
    setup, distributed = twins.setup, twins.setup.distributed
    world = world_of(case)
    join_group("gloo", rank, world, meeting)
    own = stages_of(rank % distributed.pp, distributed.pp, distributed.stages_per_gpu)
    groups = _groups(rank, distributed, world)
    count = distributed.microbatches
    batches = list(host_batches(twins.plans, STEPS * setup.grad_accum * count))
    cuts = [_part(twins, number, groups["copies"]) for number in own]

    def run() -> None:
        if distributed.strategy.value != "none":
            mark("load 0 0")
        stages = [_stage(twins, *cut, groups) for cut in zip(own, cuts, strict=True)]
        schedule = _schedule(distributed, stages, count, causal_loss(base_of(twins.real)))
        parameters = [p for stage in stages for p in stage.submod.parameters()]
        make_optimizer = optimizer_of_shards if distributed.tp > 1 else make_optimizer_of(setup)
        optimizer = make_optimizer(torch.nn.ModuleList(stage.submod for stage in stages))
        losses: list[Any] = []
        _mark_work(stages, distributed, mark)
        for step in range(STEPS):
            for round_ in range(setup.grad_accum):
                _mark_work.step = step + 1
                mark(f"batch {step + 1} 0")
                ids = labels = None
                start = (step * setup.grad_accum + round_) * count
                mine = batches[start : start + count]
                whole = {
                    name: np.concatenate([np.asarray(b[name]) for b in mine])
                    for name in ("input_ids", "labels")
                }
                if 0 in own:
                    ids = torch.as_tensor(whole["input_ids"]).clone()
                if distributed.pp * distributed.stages_per_gpu - 1 in own:
                    labels = torch.as_tensor(whole["labels"]).clone()
                with _region(setup):
                    schedule.step(
                        *([] if ids is None else [ids]), target=labels,
                        losses=None if labels is None else losses,
                        return_outputs=distributed.pp_return_outputs,
                    )  # fmt: skip
            mark(f"optimizer {step + 1} 0")
            optimizer.step()
            mark(f"zero_grad {step + 1} 0")
            for parameter in parameters:
                parameter.grad = None if setup.zero_grad != "zero" else parameter.grad.zero_()
        mark("end")

    return measure_rank(run, rank < distributed.pp)


def _groups(rank: int, distributed: Any, world: int) -> dict[str, Any]:
    """The group of a process's pipeline, and that of the copies of its stages."""
    import torch.distributed as dist

    if distributed.strategy.value == "fsdp" and distributed.tp > 1:
        return {"pipeline": None, "copies": _grid(rank, distributed)}
    if distributed.strategy.value == "fsdp" or distributed.tp > 1:
        return {"pipeline": None, "copies": _mesh(dist.new_group(backend="fake"))}
    out = {}
    for name, ranks_of in (
        (
            "pipeline",
            [range(first, first + distributed.pp) for first in range(0, world, distributed.pp)],
        ),
        ("copies", [range(first, world, distributed.pp) for first in range(distributed.pp)]),
    ):
        for ranks in ranks_of:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                out[name] = group
    return out


def _mesh(group: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return {name: DeviceMesh.from_group(group, "cpu") for name in ("dp", "tp")}


def _grid(rank: int, distributed: Any) -> Any:
    """Shards of what is shared: two fake groups, of as many ranks each as there are stages."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    assert distributed.tp == distributed.shard_ranks == distributed.pp
    groups = [dist.new_group(backend="fake") for _ in range(2)]
    ranks = torch.arange(distributed.pp * distributed.pp).view(distributed.pp, distributed.pp)
    return DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("dp", "tp"))


def _region(setup: Any) -> Any:
    from contextlib import nullcontext

    import torch

    if setup.precision == "fp32":
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _part(twins: Any, number: int, group: Any) -> Any:
    """The module of a stage, cut by hand."""
    import torch

    from memest.estimation.pipeline import parts_of
    from memest.trace.model.adapters import base_of
    from memest.trace.parallel.pipeline_stage import cut, layers_of, stage_module
    from support.tensor_ranks import shard_with_adapters

    model, distributed = copy.deepcopy(twins.real), twins.setup.distributed
    model = base_of(shard_with_adapters(model, group["tp"]) if distributed.tp > 1 else model)
    part = parts_of(distributed, layers_of(model))[number]
    cut_context = cut(model, part)
    cut_context.__enter__()

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.cut = cut_context  # it ends with its last reference

        def forward(self, inputs: Any) -> Any:
            return stage_module(self.model, part)(inputs)

    return Part()


def _stage(twins: Any, number: int, module: Any, groups: dict[str, Any]) -> Any:
    """A stage; its shapes are given, so that no step is spent on finding them."""
    import torch
    from torch.distributed.pipelining import PipelineStage

    distributed, config = twins.setup.distributed, twins.real.config
    count = distributed.pp * distributed.stages_per_gpu
    shape = next(plan.shape for plan in twins.plans if plan.name == "input_ids")
    ids = torch.empty(shape, dtype=torch.int64, device="meta")
    hidden = torch.empty(*shape, config.hidden_size, device="meta", requires_grad=True)
    logits = torch.empty(*shape, config.vocab_size, device="meta", requires_grad=True)
    return PipelineStage(
        _wrap(module, distributed, groups["copies"]), number, count, torch.device("cpu"),
        input_args=hidden if number else ids,
        output_args=logits if number == count - 1 else hidden,
        group=groups["pipeline"],
    )  # fmt: skip


def _wrap(part: Any, distributed: Any, group: Any) -> Any:
    """A stage under DDP; or its layers under FSDP2, and the rest with the stage."""
    import torch

    if distributed.strategy.value == "ddp":
        return torch.nn.parallel.DistributedDataParallel(
            part, process_group=group, bucket_cap_mb=distributed.ddp_bucket_cap_mb,
            gradient_as_bucket_view=distributed.ddp_gradient_as_bucket_view,
        )  # fmt: skip
    if distributed.strategy.value == "fsdp":
        reshards = distributed.fsdp == "full_shard"
        apply_fsdp2(part, group["dp"], part.model._no_split_modules, reshards=reshards)
    return part


def _schedule(distributed: Any, stages: Any, count: int, loss: Any) -> Any:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    from support.torch_schedules import THEIRS

    kind = THEIRS[distributed.pipeline_schedule]
    single = issubclass(kind, PipelineScheduleSingle)
    return kind(stages[0] if single else stages, count, loss_fn=loss)


def _mark_work(stages: Any, distributed: Any, mark: Any) -> None:
    """Marks before every piece of work."""
    for stage in stages:
        for name, word in (
            ("forward_one_chunk", "forward"), ("backward_one_chunk", "backward"),
            ("backward_weight_one_chunk", "backward"),
        ):  # fmt: skip
            setattr(stage, name, _after_mark(getattr(stage, name), word, mark))


def _after_mark(work: Any, word: str, mark: Any) -> Any:
    def call(number: int, *args: Any, **more: Any) -> Any:
        mark(f"{word} {_mark_work.step} {number + 1}")
        return work(number, *args, **more)

    return call
