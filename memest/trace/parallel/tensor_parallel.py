"""Tensor parallelism as transformers does it, on one rank that talks to nobody.

``from_pretrained(..., tp_plan="auto")`` resolves the model's plan and shards it
(``apply_tensor_parallelism``): parameters become DTensors, and the forwards of sharded layers take
and give local tensors. The same functions shard the model on meta here, on a mesh of PyTorch's fake
process group, so shapes of shards, copies and results of collectives are the library's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from memest.config.parallelism import Distributed, Fsdp, check_heads, no_plan
from memest.errors import ConfigError
from memest.trace.cues import OWN_UNITS
from memest.trace.parallel.expert_parallel import check_has_experts, own_units
from memest.trace.parallel.sequence_parallel import shard_sequences

__all__ = [
    "Meshes",
    "check_adapters",
    "config_of",
    "fake_group",
    "meshes_of",
    "on_ranks",
    "quiet_shapes",
    "shard_model",
]


@dataclass(frozen=True, slots=True)
class Meshes:
    """The ranks that share layers, and those that share experts.

    Attributes:
        tp: of the layers; one rank where they are whole.
        ep: of the experts; None where all have all of them.
        dense, expert: all ranks, by those that share layers and those that share experts; None
            where all have all experts.
    """

    tp: Any
    ep: Any = None
    dense: Any = None
    expert: Any = None


def meshes_of(distributed: Distributed, ranks: int) -> Meshes:
    """The meshes of a process group of so many ranks that is there."""
    from torch.distributed.device_mesh import init_device_mesh

    if distributed.ep == 1:
        return Meshes(init_device_mesh("cpu", (distributed.tp,), mesh_dim_names=("tp",)))
    shape = (ranks // distributed.tp, distributed.tp)
    dense = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp"))
    shape = (ranks // distributed.ep, distributed.ep)
    expert = init_device_mesh("cpu", shape, mesh_dim_names=("efsdp", "ep"))
    return Meshes(dense["tp"], expert["ep"], dense, expert)


@contextmanager
def fake_group(ranks: int, option: str, rank: int = 0) -> Iterator[None]:
    """A process group of so many ranks, of which this process is one; the others are made up.

    Args:
        ranks: how many.
        option: why there are several.
        rank: which of them this process is.

    Raises:
        ConfigError: the process is one of a distributed run already.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError(
            f"{option} traces with a process group of its own, and this process has one already "
            "(torch.distributed is initialised): ask in another process."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def on_ranks(distributed: Distributed) -> Iterator[Meshes]:
    """Meshes of the ranks of a run, of which this process is the first; the others are made up.

    Raises:
        ConfigError: the process is one of a distributed run already.
    """
    # FSDP's ranks come after the trace
    ranks = max(distributed.tp, distributed.ep)
    with fake_group(ranks, "--tp" if distributed.tp > 1 else "--ep"):
        yield meshes_of(distributed, ranks)


def shard_model(model: Any, meshes: Meshes, distributed: Distributed) -> None:
    """Shard a model on meta by its own plans, of layers and of experts.

    Raises:
        ConfigError: it has no plan, or one that does not go by so many ranks.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    ranks = distributed.tp
    if ranks > 1 and not getattr(model, "tp_plan", None):
        raise no_plan(type(model).__name__)
    text = model.config.get_text_config()
    check_heads(lambda name: getattr(text, name, None), ranks)
    if meshes.ep is not None:
        check_has_experts(model, distributed.ep)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is table.weight
    if tied:
        # from_pretrained ties weights once they are loaded, which is after the sharding
        head.weight = torch.nn.Parameter(torch.empty_like(table.weight))
    config = config_of(distributed)
    try:
        plan, ep_plan, fsdp_plan = model._resolve_parallel_plans(config)
        if distributed.tp_sequence_parallel:
            shard_sequences(model, meshes.tp, distributed)
        else:
            apply_tensor_parallelism(model, meshes.tp, plan)
        if meshes.ep is not None:
            apply_expert_parallelism(model, meshes.ep, meshes.tp, ep_plan)
    except ConfigError:
        raise
    except (ValueError, RuntimeError) as error:
        text = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
        flag = f"--tp {ranks}" if ranks > 1 else f"--ep {distributed.ep}"
        raise ConfigError(f"{flag}: transformers refuses it for this model: {text}.") from error
    if tied:
        head.weight = table.weight
    if fsdp_plan:
        setattr(model, OWN_UNITS, own_units(model, ep_plan, fsdp_plan))
    # where from_pretrained leaves them, and peft looks for them (get_tp_plan_and_mesh)
    model._device_mesh = meshes.tp
    model.config.distributed_config = config


def config_of(distributed: Distributed) -> Any:
    """What ``from_pretrained`` is given for such a run."""
    from transformers.distributed.configuration_utils import DistributedConfig

    copies = distributed.num_gpus // distributed.tp
    if distributed.fsdp is not Fsdp.NONE:
        copies = max(copies, 2)  # units are the same for any number of ranks that shard them
    elif distributed.ep == 1:
        return DistributedConfig(tp_size=distributed.tp)
    return DistributedConfig(tp_size=distributed.tp, fsdp_size=copies, ep_size=distributed.ep)


def check_adapters(model: Any, ranks: int) -> None:
    """Adapters on layers whose input is sharded do not run, where the library makes them so.

    peft (0.21) makes ``lora_A`` of such a layer as wide as a rank's part and says so in its
    ``in_features``, which transformers' ``RowwiseParallel`` takes for the whole width and divides.

    Raises:
        ConfigError: the model has such adapters.
    """
    wrong = set()
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is None or getattr(base, "_hf_tp_plan", None) != "rowwise":
            continue
        adapters = getattr(module, "lora_A", {}).values()
        if any(adapter.in_features != base.in_features for adapter in adapters):
            wrong.add(name.rpartition(".")[2])
    if wrong:
        raise ConfigError(
            f"--tp {ranks}: adapters on {', '.join(sorted(wrong))} stop in the first forward: the "
            "input of these layers is sharded, and the installed peft and transformers divide it "
            "twice there (in_features of lora_A). Take layers whose output is sharded, for example "
            "--lora-target-modules q_proj,k_proj,v_proj,gate_proj,up_proj."
        )


@contextmanager
def quiet_shapes() -> Iterator[None]:
    """What runs on shapes alone is the host's arithmetic: no mode watches it.

    DTensor finds the shapes of results with fake tensors (``_propagate_tensor_meta_non_cached``),
    and transformers finds strides with empty tensors on meta (``_from_local_last_dim_shard``).
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    name, other = "_propagate_tensor_meta_non_cached", "_from_local_last_dim_shard"
    shapes = _without_modes(getattr(ShardingPropagator, name))
    strides = staticmethod(_without_modes(getattr(TensorParallelLayer, other)))
    with (
        mock.patch.object(ShardingPropagator, name, shapes),
        mock.patch.object(TensorParallelLayer, other, strides),
    ):
        yield


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils._python_dispatch import _disable_current_modes

    def quiet(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return quiet
