"""What optimizers that stand in for others' kernels have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["StatesAlone", "updated_by"]


def updated_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that a step updates, those with a gradient, in order."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter


class StatesAlone(torch.optim.Optimizer):
    """An optimizer whose kernels do not run on meta: its states, as its first step makes them.

    Attributes:
        launches: kernels that update one parameter in place, without any temporary.
    """

    launches = 1

    def __init__(self, groups: Iterable[Any]) -> None:
        super().__init__(groups, {"lr": 1e-4})

    def make_states(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Put the states of a parameter into an empty ``state``, in the library's order."""
        raise NotImplementedError

    def prepare(self, parameter: torch.Tensor) -> None:
        """What a step does to a parameter first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for parameter in updated_by(self):
            self.prepare(parameter)
            if not self.state[parameter]:
                self.make_states(parameter, self.state[parameter])
            for _ in range(self.launches):
                parameter.mul_(1.0)
