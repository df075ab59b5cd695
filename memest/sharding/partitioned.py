"""Parameters that are never whole at once: what the load phase brings is built anew, cut.

The stream of one process loads whole parameters. A wrapper that partitions them leaves these
storages out, waits until every parameter has its place, and constructs its own shards then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memest.events import Category, Phase
from memest.sharding.gradients import GradientWrapper

__all__ = ["PartitionedWrapper"]


@dataclass(slots=True, kw_only=True)
class PartitionedWrapper(GradientWrapper):
    """A wrapper that keeps parts of parameters in place of the parameters."""

    _placed: dict[int, int] = field(default_factory=dict)
    _left_out: list[int] = field(default_factory=list)

    def allocates(self, number: int) -> bool:
        """See :meth:`Wrapper.allocates`."""
        if self.to.phase is Phase.LOAD and self.to.category(number) is Category.PARAMETERS:
            self._left_out.append(number)
            return False
        return True

    def module_of(self, weight: int) -> int:
        """Number of the module whose parameter a weight is, once it has its place."""
        return self.to.out.modules[self._placed[weight]]

    def copy_unplaced(self) -> None:
        """What was left out and is nobody's parameter after all is taken over as it is."""
        placed = set(self._placed.values())
        for number in self._left_out:
            if number not in placed:
                self.to.copy(number)
