"""What processes gather of each other: losses, predictions and labels of an evaluation.

Source: ``gather``, ``_gpu_gather`` and ``pad_across_processes`` of accelerate 1.15
(``utils/operations.py``), which ``Trainer.evaluation_loop`` calls for every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Gather"]


@dataclass(frozen=True, slots=True)
class Gather:
    """Gathers tensors of all processes, which have the same shapes here: those of the largest.

    Attributes:
        ranks: processes; None where none was launched beside this one, and nothing is copied. One
            that was launched as one of several gathers from itself.
    """

    ranks: int | None

    def __call__(self, value: Any) -> Any:
        """A tensor, or several in tuples, lists and mappings, gathered one after the other."""
        return value if self.ranks is None else _mapped(self._gathered, value)

    def pad(self, value: Any) -> None:
        """``pad_across_processes`` along the second dimension, where nothing is to be padded.

        The sizes of all processes are gathered, and compared on the host.
        """
        if self.ranks is not None and value is not None:
            _mapped(self._compared, value)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        ranks = self.ranks or 1
        if tensor.ndim == 0:
            tensor = tensor.clone()[None]
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        flat = torch.empty(ranks * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return flat.view(-1, *tensor.shape[1:])

    def _compared(self, tensor: torch.Tensor) -> None:
        if tensor.ndim > 1:
            size = torch.empty(tensor.ndim, dtype=torch.int64, device=tensor.device)
            self._gathered(size[None])


def _mapped(function: Any, value: Any) -> Any:
    """As ``recursively_apply``, which knows named tuples by their fields."""
    if isinstance(value, (tuple, list)):
        found = [_mapped(function, item) for item in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, dict):
        kind: Any = type(value)
        return kind({name: _mapped(function, item) for name, item in value.items()})
    return function(value)
