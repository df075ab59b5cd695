"""torchtitan's checkpointing by operator: what of a layer is kept and what is computed again.

Source: ``torchtitan/distributed/activation_checkpoint.py``: ``SelectiveAC`` of torchtitan 0.3 and
later, before that ``selective_ac_option = "op"``, whose lists of operators were shorter: matmuls
and attention kernels, which is the same for dense models without biases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["selective_arguments"]

aten = torch.ops.aten
_MATMULS = (aten.mm.default, aten.linear.default)
_ATTENTION = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_attention_math.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
# a scale of low precision, and the choice of a mixture's experts, which must not change
_VALUES = (aten.max.default, aten.topk.default)
_COLLECTIVES = ("reduce_scatter_tensor", "all_to_all_single")


def selective_arguments() -> dict[str, Any]:
    """Keywords of ``torch.utils.checkpoint`` for a layer that is recomputed operator by operator.

    A recompute runs to its end (``early_stop`` is off in torchtitan).
    """
    saved = _saved_operators()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_Policy(saved))

    return {"use_reentrant": False, "context_fn": contexts, "early_stop": False}


def _saved_operators() -> frozenset[Any]:
    from torch._functorch.partitioners import get_default_op_list

    packets = get_default_op_list().compute_intensive_ops
    functional = torch.ops._c10d_functional
    return frozenset(
        (
            *(packet.default for packet in packets),
            *(getattr(functional, name).default for name in _COLLECTIVES),
            *_MATMULS,
            *_ATTENTION,
            *_VALUES,
        )
    )


class _Policy:
    """Kept is what is dear to compute, of the matmuls of a layer the first, the third, ..."""

    def __init__(self, saved: frozenset[Any]) -> None:
        self._saved = saved
        self._matmuls = {False: 0, True: 0}

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in _MATMULS:
            self._matmuls[ctx.is_recompute] += 1
            if self._matmuls[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        if func in self._saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE
