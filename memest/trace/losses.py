"""The loss: the model's own where it has one, else one that is stated.

A model without a loss still needs one to be trained; which one hardly matters for memory, as long
as every output takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from memest.errors import TraceError
from memest.trace.build import BuiltModel
from memest.trace.plans import forward_parameters

__all__ = ["carries_loss", "loss_for", "loss_note"]

_LABELS = ("labels", "return_loss", "start_positions", "next_sentence_label")
# their forward computes a loss from nothing but the inputs
_SELF_SUPERVISED = ("ForPreTraining", "ForMaskedImageModeling")


def loss_for(built: BuiltModel) -> Callable[[Any, Mapping[str, Any]], torch.Tensor]:
    """The function that takes (or makes) the loss from the outputs of this model."""
    return _own_loss if _has_loss(built) else _mean_of_outputs


def loss_note(built: BuiltModel) -> str | None:
    """What to tell the user about the loss, None if it is the model's own."""
    if _has_loss(built):
        return None
    return (
        f"{type(built.model).__name__} returns no loss: the sum of its outputs' means is minimised"
    )


def _has_loss(built: BuiltModel) -> bool:
    names = forward_parameters(built.model)
    if any(name in names for name in _LABELS):
        return True
    if getattr(built.config, "model_type", None) is None:
        # an unknown model: asked when its outputs are there
        return True
    return type(built.model).__name__.endswith(_SELF_SUPERVISED)


def _own_loss(outputs: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    loss = _find(outputs)
    return _mean_of_outputs(outputs, batch) if loss is None else loss


def carries_loss(outputs: Any) -> bool:
    """Whether outputs have a loss in one of the usual places."""
    return _find(outputs) is not None


def _find(outputs: Any) -> torch.Tensor | None:
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    else:
        found = getattr(outputs, "loss", None)
        if found is None and isinstance(outputs, (tuple, list)) and outputs:
            found = outputs[0] if _scalar(outputs[0]) else None
        if found is None and _scalar(outputs):
            found = outputs
    if isinstance(found, torch.Tensor) and found.dim() > 0:
        # one value for each sample or device, as DataParallel returns it
        found = found.mean()
    return found


def _scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _mean_of_outputs(outputs: Any, _batch: Mapping[str, Any]) -> torch.Tensor:
    """Every output that leads back to a parameter takes part: all parameters get gradients."""
    seen: set[int] = set()
    total: torch.Tensor | None = None
    for tensor in _tensors(outputs):
        if tensor.requires_grad and tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            mean = tensor.mean(dtype=torch.float32)
            total = mean if total is None else total + mean
    if total is None:
        raise TraceError(
            f"No output of the model ({type(outputs).__name__}) leads back to a parameter, so "
            "there is nothing to train. Give a loss: memest.estimate(module, inputs={...}, "
            "loss=lambda outputs, batch: ...)."
        )
    return total


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
