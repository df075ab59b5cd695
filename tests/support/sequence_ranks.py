"""A real rank of sequence parallelism: torch's own styles by torchtitan's plan, on the CPU.

The process group is PyTorch's fake one, which moves no data, or gloo's with real processes.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from support.rank_processes import STEPS, Marks, join_group, measure_rank, real_ranks
from support.ranks import apply_fsdp2


def real_rank(case: dict[str, Any]) -> Any:
    """What the first rank of a case measured, a ``CpuRun``.

    Args:
        case: ``model``, fields of ``Distributed`` in ``spread``, options of ``Setup`` in ``setup``,
            and whether ``gloo`` connects real processes.
    """
    ranks = case["spread"]["num_gpus"] if case.get("gloo") else 1
    return real_ranks(_be_rank, case, range(ranks))[0]


def apply_sequence_parallel(model: Any, mesh: Any, *, shares_loss: bool) -> Any:
    """``apply_non_moe_tp`` of torchtitan, with the names that a model of transformers has."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    tied = model.lm_head.weight is model.model.embed_tokens.weight
    root = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    parallelize_module(model.model, mesh, root)
    head = ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1) if shares_loss else Replicate(),
        use_local_output=not shares_loss,
    )  # fmt: skip
    parallelize_module(model, mesh, {"lm_head": head})
    for layer in model.model.layers:
        plan: dict[str, Any] = {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        if hasattr(layer.self_attn, "q_norm"):
            for name in ("q_norm", "k_norm"):
                plan[f"self_attn.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        parallelize_module(layer, mesh, plan)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def with_positions(model: Any) -> Any:
    """The model as torchtitan calls it: with the positions of the whole sequence."""
    import torch

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: Any) -> Any:
            ids = batch["input_ids"]
            batch["position_ids"] = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
            return self.model(**batch)

    return Counting()


@contextlib.contextmanager
def keep_until_wait() -> Any:
    """NCCL's shelf (``TensorShelf``), which the fake process group lacks: what is sent stays."""
    from torch.distributed import _functional_collectives as collectives

    sent_tensors: dict[int, Any] = {}
    joined_tensors: list[Any] = []
    join, wait = collectives._chunk_or_narrow_cat, collectives.wait_tensor

    def joining(*args: Any, **kwargs: Any) -> Any:
        joined_tensors.append(join(*args, **kwargs))
        return joined_tensors[-1]

    def keeping(real: Any) -> Any:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            joined_tensors.clear()
            out = real(tensor, *args, **kwargs)
            # a gather joins what came of it, a scatter what goes into it
            scatters = real.__name__.startswith("reduce_scatter")
            if isinstance(out, collectives.AsyncCollectiveTensor):
                kept_tensor = joined_tensors[0] if scatters and joined_tensors else tensor
                sent_tensors[out.elem.untyped_storage()._cdata] = kept_tensor
            joined_tensors.clear()
            return out

        return call

    def wait_and_drop(tensor: Any) -> Any:
        out = wait(tensor)
        sent_tensors.pop(tensor.untyped_storage()._cdata, None)
        return out

    with contextlib.ExitStack() as stack:
        for name in ("all_gather_single", "reduce_scatter_single"):
            real = getattr(collectives, name)
            stack.enter_context(mock.patch.object(collectives, name, keeping(real)))
        stack.enter_context(mock.patch.object(collectives, "_chunk_or_narrow_cat", joining))
        stack.enter_context(mock.patch.object(collectives, "wait_tensor", wait_and_drop))
        yield


def as_torchtitan(model: Any, mesh: Any, distributed: Any, *, gloo: bool | None) -> Any:
    """The sharded model as it is called, and what is around it all the time."""
    from torch.distributed.tensor.parallel import loss_parallel

    apply_sequence_parallel(model, mesh, shares_loss=distributed.tp_loss_parallel)
    stack = contextlib.ExitStack()
    if not gloo:
        stack.enter_context(keep_until_wait())
    if distributed.tp_loss_parallel:
        stack.enter_context(loss_parallel())
    return with_positions(model), stack


def _be_rank(rank: int, case: dict[str, Any], meeting: str) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.loops import train
    from memest.calibration.running.material import host_batches
    from memest.trace.losses.loss import loss_for
    from support.tensor_ranks import optimizer_of_shards, twins_of

    torch.manual_seed(0)
    twins = twins_of(case)
    setup, distributed = twins.setup, twins.setup.distributed
    batches = host_batches(twins.plans, STEPS * setup.grad_accum)
    join_group("gloo" if case.get("gloo") else "fake", rank, distributed.num_gpus, meeting)
    shape = (distributed.data_ranks, distributed.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model, context = as_torchtitan(twins.real, mesh["tp"], distributed, gloo=case.get("gloo"))

    def run() -> None:
        mark("load 0 0")
        if distributed.fsdp != "none":
            apply_fsdp2(twins.real, mesh["dp"])
        train(
            model, setup, batches, optimizer_of_shards, loss_for(twins.built_model),
            torch.device("cpu"), Marks(),
        )  # fmt: skip

    with context:
        return measure_rank(run, rank == 0)
