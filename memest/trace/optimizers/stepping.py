"""What optimizers that stand in for others' kernels have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = ["States", "StatesAlone", "updated_by"]

States = Callable[[torch.Tensor], dict[str, Any]]
"""Makes the states of a parameter, in the library's order."""


def updated_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that a step updates, those with a gradient, in order."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter


class StatesAlone(torch.optim.Optimizer):
    """An optimizer whose kernels do not run on meta: its states, as its first step makes them.

    Args:
        groups: parameters.
        states: of one parameter.
        launches: kernels that update one parameter in place, without any temporary.
        packs: whether strides that are not those of a dense tensor make a copy that stays.
    """

    def __init__(
        self, groups: Iterable[Any], states: States, *, launches: int = 1, packs: bool = False
    ) -> None:
        super().__init__(groups, {"lr": 1e-4})
        self._states = states
        self._launches = launches
        self._packs = packs

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for parameter in updated_by(self):
            if self._packs:
                parameter.data = parameter.data.contiguous()
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.contiguous()
            if not self.state[parameter]:
                self.state[parameter].update(self._states(parameter))
            for _ in range(self._launches):
                parameter.mul_(1.0)
