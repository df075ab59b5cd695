"""The gradients of a ZeRO group while it is updated: flat, and in float32."""

from __future__ import annotations

from dataclasses import dataclass, field

from memest.events import Category
from memest.hidden.call import DTYPE_BYTES
from memest.sharding.rewrite import Rewriter
from memest.sharding.zero_groups import Group, SubGroup

__all__ = ["MASTER_BYTES", "GroupUpdate"]

MASTER_BYTES = 4
"""Master weights and their gradients are float32 (``master_weights_and_grads_dtype``)."""


@dataclass(slots=True)
class GroupUpdate:
    """What lives from the beginning of a group's update to the next group's.

    Source: DeepSpeed 0.19.8: ``step`` of ``stage_1_and_2.py`` and
    ``_prepare_fp32_grad_for_sub_group`` of ``stage3.py``; both flatten with
    ``flatten_dense_tensors``, which gives back one tensor alone as it is.

    Attributes:
        to: the stream that is written.
    """

    to: Rewriter
    _alive: list[int] = field(default_factory=list)

    def begin(self, group: Group | SubGroup, tensors: int, dtype: str) -> None:
        """The gradients of a group, after those of the group before it have gone.

        Args:
            group: whose turn it is.
            tensors: gradients that are made flat; of one alone there is no copy.
            dtype: of the gradients.
        """
        self.end()
        size, flat = group.partition_elements, None
        if tensors != 1:
            flat = self.to.alloc(
                size * DTYPE_BYTES[dtype], Category.GRADIENTS, "zero: flat gradients"
            )
        if dtype != "float32":
            self._alive.append(
                self.to.alloc(size * MASTER_BYTES, Category.GRADIENTS, "zero: gradients in float32")
            )
            if flat is not None:
                self.to.free(flat)
        elif flat is not None:
            self._alive.append(flat)

    def end(self) -> None:
        """The update of the last group is done."""
        while self._alive:
            self.to.free(self._alive.pop())
