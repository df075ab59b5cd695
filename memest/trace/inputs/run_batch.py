"""The batch that a run feeds its model: as the model takes it, and as a run changes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from memest.config.setup import Setup
from memest.trace.inputs.completions import batch_of_completions
from memest.trace.inputs.pairs import batch_of_pairs
from memest.trace.inputs.tensors import TensorPlan
from memest.trace.legacy.transformers import masks_as_before
from memest.trace.parallel.sequence_parallel import drop_attention_mask

__all__ = ["plan_run_batch"]


def plan_run_batch(
    plan: Callable[[Setup], tuple[TensorPlan, ...]], model: torch.nn.Module, setup: Setup
) -> tuple[TensorPlan, ...]:
    """The tensors of one micro-batch.

    Args:
        plan: of a batch of as many samples as a setup has.
        model: that reads them.
        setup: the run.
    """
    if setup.method.generates:
        return batch_of_completions(plan(setup), setup)
    if not setup.method.is_supervised:
        return batch_of_pairs(plan, setup)
    plans = drop_attention_mask(plan(setup), setup.distributed)
    if setup.channels_last:
        plans = tuple(replace(each, channels_last=len(each.shape) == 4) for each in plans)
    return masks_as_before(plans, model, setup)
