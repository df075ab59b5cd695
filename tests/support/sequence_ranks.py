"""A real rank of sequence parallelism: torch's own styles by torchtitan's plan, on the CPU.

The process group is PyTorch's fake one, which moves no data, or gloo's with real processes.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from support.rank_processes import STEPS, Marks, join_group, real_ranks, watched
from support.ranks import fully_sharded


def real_rank(case: dict[str, Any]) -> Any:
    """What the first rank of a case measured, a ``CpuRun``.

    Args:
        case: ``model``, fields of ``Distributed`` in ``spread``, options of ``Setup`` in ``setup``,
            and whether ``gloo`` connects real processes.
    """
    ranks = case["spread"]["num_gpus"] if case.get("gloo") else 1
    return real_ranks(_be_rank, case, range(ranks))[0]


def sharded(model: Any, mesh: Any, *, shares_loss: bool) -> Any:
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
def kept_until_waited() -> Any:
    """NCCL's shelf (``TensorShelf``), which the fake process group lacks: what is sent stays."""
    from torch.distributed import _functional_collectives as collectives

    sent: dict[int, Any] = {}
    joined: list[Any] = []
    join, wait = collectives._chunk_or_narrow_cat, collectives.wait_tensor

    def joining(*args: Any, **kwargs: Any) -> Any:
        joined.append(join(*args, **kwargs))
        return joined[-1]

    def keeping(real: Any) -> Any:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            joined.clear()
            out = real(tensor, *args, **kwargs)
            # a gather joins what came of it, a scatter what goes into it
            scatters = real.__name__.startswith("reduce_scatter")
            if isinstance(out, collectives.AsyncCollectiveTensor):
                kept = joined[0] if scatters and joined else tensor
                sent[out.elem.untyped_storage()._cdata] = kept
            joined.clear()
            return out

        return call

    def waited(tensor: Any) -> Any:
        out = wait(tensor)
        sent.pop(tensor.untyped_storage()._cdata, None)
        return out

    with contextlib.ExitStack() as stack:
        for name in ("all_gather_single", "reduce_scatter_single"):
            real = getattr(collectives, name)
            stack.enter_context(mock.patch.object(collectives, name, keeping(real)))
        stack.enter_context(mock.patch.object(collectives, "_chunk_or_narrow_cat", joining))
        stack.enter_context(mock.patch.object(collectives, "wait_tensor", waited))
        yield


def _be_rank(rank: int, case: dict[str, Any], meeting: str) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    from memest.calibration.running.cpu_memory import mark
    from memest.calibration.running.loops import train
    from memest.calibration.running.material import host_batches
    from memest.trace.losses.loss import loss_for
    from support.tensor_ranks import optimizer_of_shards, twins_of

    torch.manual_seed(0)
    twins = twins_of(case)
    setup, spread = twins.setup, twins.setup.distributed
    batches = host_batches(twins.plans, STEPS * setup.grad_accum)
    join_group("gloo" if case.get("gloo") else "fake", rank, spread.num_gpus, meeting)
    shape = (spread.data_ranks, spread.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = sharded(twins.real, mesh["tp"], shares_loss=spread.tp_loss_parallel)

    def run() -> None:
        mark("load 0 0")
        whole = model if spread.fsdp == "none" else fully_sharded(model, mesh["dp"])
        train(
            with_positions(whole), setup, batches, optimizer_of_shards, loss_for(twins.built),
            torch.device("cpu"), Marks(),
        )  # fmt: skip

    shelf = contextlib.nullcontext() if case.get("gloo") else kept_until_waited()
    shares = loss_parallel() if spread.tp_loss_parallel else contextlib.nullcontext()
    with shelf, shares:
        return watched(run, rank == 0)
