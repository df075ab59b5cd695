"""What becomes of gradients where a wrapper takes them away as they come.

The stream of one process keeps the gradients of a step: the first micro-step hands them over, later
ones add to them in place. Under a wrapper that takes them (a reduction, a shard) every micro-step
finds the parameter without one, so what later micro-steps compute is handed over too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memest.events import Weight
from memest.sharding.rewrite import Wrapper

__all__ = ["GradientWrapper"]


@dataclass(slots=True, kw_only=True)
class GradientWrapper(Wrapper):
    """A wrapper that takes gradients from their parameters.

    Attributes:
        weights: parameters of the model, as the stream has them.
        gradients: the storage of what each parameter has, by weight.
    """

    weights: Sequence[Weight]
    gradients: dict[int, int] = field(default_factory=dict)
    _natural: dict[int, int] = field(default_factory=dict)
    _taken: set[int] = field(default_factory=set)
    _dead: set[int] = field(default_factory=set)
    _coming: dict[int, int] = field(default_factory=dict)

    def frees(self, number: int) -> bool:
        """See :meth:`Wrapper.frees`."""
        if number not in self._natural:
            return True
        if number in self._taken:
            # zero_grad drops what there is in its place
            self._taken.discard(number)
            self.zeroed(self._natural.pop(number))
            return False
        # added in place by the stream; here it is what the parameter has
        self._dead.add(number)
        return False

    def zeroed(self, weight: int) -> None:
        """``zero_grad`` drops the gradient of a weight that was taken before."""

    def ready(self, weight: int) -> None:
        """The gradient of a weight is there."""

    def computed(self, weight: int, number: int) -> None:
        """A gradient comes; where nothing is there yet, the parameter takes it over."""
        if number >= 0 and weight not in self.gradients:
            self._coming[weight] = number
            self._natural[number] = weight

    def accumulated(self, weight: int, number: int) -> None:
        """It has been added. The stream has its sum; here it may be the first."""
        coming = self._coming.pop(weight, None)
        if weight not in self.gradients:
            known = number in self._taken or number in self._natural
            if number >= 0 and number != coming and not known:
                # it was copied: autograd could not hand over what it had computed
                if coming is not None:
                    self._give_back(coming)
                self._natural[number] = weight
                self.gradients[weight] = number
            elif coming is not None:
                self.gradients[weight] = coming
        if weight in self.gradients:
            self.ready(weight)

    def consume(self, weight: int) -> None:
        """The gradient of a weight goes."""
        number = self.gradients.pop(weight)
        self.to.free(number)
        if number in self._dead:
            self._dead.discard(number)
            self._natural.pop(number, None)
        elif number in self._natural:
            self._taken.add(number)

    def _give_back(self, number: int) -> None:
        """What was held for nothing."""
        del self._natural[number]
        if number in self._dead:
            self._dead.discard(number)
            self.to.free(number)
