"""What optimizers that stand in for others' kernels have in common."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["updated_by"]


def updated_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that a step updates, those with a gradient, in order."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter
