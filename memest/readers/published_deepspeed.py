"""DeepSpeed configurations that come with a tool, for runs that name one that is not here.

Source: ``examples/deepspeed`` of LLaMA-Factory, as of 2025: what decides memory. Of axolotl's files
of one name some releases offload and some do not, so there none is taken.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

__all__ = ["published"]

_ON_HOST = {"device": "cpu", "pin_memory": True}
_BUCKETS = {
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
_GATHERED = {
    "overlap_comm": False,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_LLAMA_FACTORY: dict[str, dict[str, Any]] = {
    "ds_z0_config.json": {"stage": 0, **_BUCKETS},
    "ds_z2_config.json": {"stage": 2, **_BUCKETS},
    "ds_z2_offload_config.json": {"stage": 2, "offload_optimizer": _ON_HOST, **_BUCKETS},
    "ds_z3_config.json": {"stage": 3, **_GATHERED},
    "ds_z3_offload_config.json": {
        "stage": 3,
        "offload_optimizer": _ON_HOST,
        "offload_param": _ON_HOST,
        **_GATHERED,
    },
}


def published(framework: str, path: str) -> dict[str, Any] | None:
    """The configuration of a tool's that a path names by its last part; None where it is none.

    Args:
        framework: whose run names it.
        path: as it is written there.
    """
    zero = _LLAMA_FACTORY.get(PurePath(path).name) if framework == "LLaMA-Factory" else None
    if zero is None:
        return None
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    automatic = dict.fromkeys((*names, "gradient_clipping"), "auto")
    return {
        **automatic,
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": dict(zero),
    }
