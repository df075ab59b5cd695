"""DeepSpeed configurations that come with a tool, for runs that name one that is not here.

Source: ``examples/deepspeed`` of LLaMA-Factory, as of 2025, and ``swift/config`` of ms-swift: what
decides memory. Of axolotl's files
of one name some releases offload and some do not, so there none is taken.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

__all__ = ["published", "zero_stages"]

_ON_HOST = {"device": "cpu", "pin_memory": True}
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


def zero_stages(bucket_elements: float, **more: Any) -> dict[str, dict[str, Any]]:
    """``zero_optimization`` of each stage, by the short names that tools give them.

    Args:
        bucket_elements: of the buckets below stage 3.
        more: what a tool has there besides.
    """
    buckets = {
        "allgather_partitions": True,
        "allgather_bucket_size": bucket_elements,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket_elements,
        "contiguous_gradients": True,
        **more,
    }
    states = {"offload_optimizer": _ON_HOST}
    return {
        **{f"z{stage}": {"stage": stage, **buckets} for stage in (0, 1, 2)},
        "z2_offload": {"stage": 2, **states, **buckets},
        "z3": {"stage": 3, **_GATHERED},
        "z3_offload": {"stage": 3, **states, "offload_param": _ON_HOST, **_GATHERED},
    }


_LLAMA_FACTORY = {
    f"ds_{name}_config.json": stage
    for name, stage in zero_stages(5e8, round_robin_gradients=True).items()
    if name != "z1"
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
