"""Tensor parallelism as transformers does it, on one rank that talks to nobody.

``from_pretrained(..., tp_plan="auto")`` resolves the model's plan and shards it
(``apply_tensor_parallelism``): parameters become DTensors, and the forwards of sharded layers take
and give local tensors. The same functions shard the model on meta here, on a mesh of PyTorch's fake
process group, so shapes of shards, copies and results of collectives are the library's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memest.errors import ConfigError
from memest.trace.recorder import Handler, Recorder

__all__ = ["collective_handlers", "on_ranks", "quiet_shapes", "shard_model"]


@contextmanager
def on_ranks(ranks: int) -> Iterator[Any]:
    """A mesh of so many ranks, of which this process is the first; the others are made up.

    Raises:
        ConfigError: the process is one of a distributed run already.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError(
            "--tp traces with a process group of its own, and this process has one already "
            "(torch.distributed is initialised): ask in another process."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def shard_model(model: Any, mesh: Any, ranks: int) -> None:
    """Shard a model on meta by its own plan.

    Raises:
        ConfigError: it has no plan, or one that does not go by so many ranks.
    """
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if not getattr(model, "tp_plan", None):
        raise ConfigError(
            f"--tp cannot shard {type(model).__name__}: transformers has no plan for it "
            "(base_model_tp_plan of its configuration), as it has for decoders such as llama, "
            "mistral, qwen3, gemma3, mixtral or gpt_neox. Leave --tp out; --fsdp full_shard shards "
            "any model."
        )
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count % ranks:
            legal = [n for n in range(1, count + 1) if count % n == 0]
            raise ConfigError(
                f"--tp {ranks} does not divide the {count} heads of this model ({name}). Legal: "
                f"{', '.join(map(str, legal))}."
            )
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is table.weight
    if tied:
        # from_pretrained ties weights once they are loaded, which is after the sharding
        head.weight = torch.nn.Parameter(torch.empty_like(table.weight))
    try:
        plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=ranks))
        apply_tensor_parallelism(model, mesh, plan)
    except (ValueError, RuntimeError) as error:
        said = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
        raise ConfigError(
            f"--tp {ranks}: transformers refuses it for this model: {said}."
        ) from error
    if tied:
        head.weight = table.weight


@contextmanager
def quiet_shapes() -> Iterator[None]:
    """What runs on shapes alone is the host's arithmetic: no mode watches it.

    DTensor finds the shapes of results with fake tensors (``_propagate_tensor_meta_non_cached``),
    and transformers finds strides with empty tensors on meta (``_from_local_last_dim_shard``).
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    name, other = "_propagate_tensor_meta_non_cached", "_from_local_last_dim_shard"
    real, shaped = getattr(ShardingPropagator, name), getattr(TensorParallelLayer, other)
    setattr(ShardingPropagator, name, _unwatched(real))
    setattr(TensorParallelLayer, other, staticmethod(_unwatched(shaped)))
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, real)
        setattr(TensorParallelLayer, other, staticmethod(shaped))


def _unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils._python_dispatch import _disable_current_modes

    def quiet(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return quiet


def collective_handlers() -> dict[Any, Handler]:
    """Waiting for a collective, and wrapping what is waited for, make no tensor.

    The meta kernels of these operators return new ones.
    """
    functional = torch.ops._c10d_functional

    def same(_recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> Any:
        return args[0]

    return {functional._wrap_tensor_autograd.default: same, functional.wait_tensor.default: same}
