"""The loss: the model's own where it has one, else one that is stated.

A model without a loss still needs one to be trained; which one hardly matters for memory, as long
as every output takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from memest.errors import ConfigError, TraceError
from memest.trace.inputs.tensors import forward_parameters
from memest.trace.model.build import BuiltModel
from memest.trace.model.factories import import_reference

__all__ = ["OwnLoss", "checked_loss", "loss_for", "loss_note", "resolve_loss"]

_LABELS = ("labels", "return_loss", "start_positions", "next_sentence_label")
_MEAN = "the sum of its outputs' means is minimised"
# their forward computes a loss from nothing but the inputs
_SELF_SUPERVISED = ("ForPreTraining", "ForMaskedImageModeling")


def loss_for(built_model: BuiltModel) -> Callable[[Any, Mapping[str, Any]], torch.Tensor]:
    """The function that takes (or makes) the loss from the outputs of this model."""
    return _ModelLoss(built_model) if _has_loss(built_model) else _mean_of_outputs


def loss_note(built_model: BuiltModel) -> str | None:
    """What to tell the user about the loss, None if it is (or may be) the model's own."""
    return None if _has_loss(built_model) else _mean_note(built_model, ())


def _mean_note(built_model: BuiltModel, given: Iterable[str]) -> str:
    """Why a model returns no loss: it has none, or it was not given what that is made of."""
    names = forward_parameters(built_model.model)
    # those of SAM's prompts are no labels of a loss
    labels = [n for n in names if "labels" in n and n not in given and not n.startswith("input_")]
    ungiven = f", which memest makes no {', '.join(labels)} for," if labels else ""
    return f"{type(built_model.model).__name__}{ungiven} returns no loss: {_MEAN}"


def _has_loss(built_model: BuiltModel) -> bool:
    names = forward_parameters(built_model.model)
    if any(name in names for name in _LABELS):
        return True
    if getattr(built_model.config, "model_type", None) is None:
        # an unknown model: asked when its outputs are there
        return True
    return type(built_model.model).__name__.endswith(_SELF_SUPERVISED)


class _ModelLoss:
    """The loss in a model's outputs; where there is none, the mean of them, which is said.

    Args:
        built_model: the model.

    Attributes:
        notes: what was decided on the way, for the user.
    """

    def __init__(self, built_model: BuiltModel) -> None:
        self._built_model = built_model
        self.notes: dict[str, None] = {}

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """The loss of one micro-batch."""
        loss = _find_loss(outputs)
        if loss is not None:
            return loss
        self.notes[_mean_note(self._built_model, batch)] = None
        return _mean_of_outputs(outputs, batch)


def _find_loss(outputs: Any) -> torch.Tensor | None:
    if isinstance(outputs, Mapping):
        tensor = outputs.get("loss")
    else:
        tensor = getattr(outputs, "loss", None)
        if tensor is None and isinstance(outputs, (tuple, list)) and outputs:
            tensor = outputs[0] if _is_scalar(outputs[0]) else None
        if tensor is None and _is_scalar(outputs):
            tensor = outputs
    if isinstance(tensor, torch.Tensor) and tensor.dim() > 0:
        # one value for each sample or device, as DataParallel returns it
        tensor = tensor.mean()
    return tensor


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _mean_of_outputs(outputs: Any, _batch: Mapping[str, Any]) -> torch.Tensor:
    """Every output that leads back to a parameter takes part: all parameters get gradients."""
    seen_ids: set[int] = set()
    total: torch.Tensor | None = None
    for tensor in _tensors(outputs):
        if tensor.requires_grad and tensor.is_floating_point() and id(tensor) not in seen_ids:
            seen_ids.add(id(tensor))
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


# -- a loss of the user's --------------------------------------------------------------------------


_FUNCTIONS = {
    "cross_entropy": "cross_entropy",
    "mse": "mse_loss",
    "l1": "l1_loss",
    "smooth_l1": "smooth_l1_loss",
    "huber": "huber_loss",
    "bce": "binary_cross_entropy",
    "bce_with_logits": "binary_cross_entropy_with_logits",
    "nll": "nll_loss",
    "kl_div": "kl_div",
}
_OUTPUTS = ("logits", "out", "sample", "prediction", "last_hidden_state")
"""Where outputs that are no tensor keep their main one (transformers, torchvision, diffusers)."""


def checked_loss(value: Any, what: str) -> torch.Tensor:
    """A loss, which must be something to train on.

    Raises:
        ConfigError: it is not one number that leads back to parameters.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad:
        return value
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        kind = f"tensor of shape {tuple(value.shape)}"
        kind += "" if value.requires_grad else " that leads back to no parameter"
    raise ConfigError(
        f"{what} returned a {kind}: it must return one number, a tensor that leads back to the "
        "parameters."
    )


def resolve_loss(loss: Any) -> Any:
    """The function of a loss that is named ``package.module:function``, else what was given.

    Raises:
        ConfigError: it is no function.
    """
    if isinstance(loss, str) and ":" in loss:
        loss = import_reference(loss, "--loss")
        if isinstance(loss, type):
            loss = loss()
    if not callable(loss) and not isinstance(loss, str):
        raise ConfigError(
            f"loss is a {type(loss).__name__}: give a function, loss=lambda outputs, batch: ..., "
            f"or a name: {', '.join(_FUNCTIONS)}."
        )
    return loss


class OwnLoss:
    """``loss(outputs, batch)`` of a user, on a batch in the user's form.

    Args:
        loss: function, name, or None where outputs carry it.
        unflatten: puts a batch together as the user gave it.
        unused_inputs: what of a batch the model was not called with, the target among it.
        default_loss: takes the loss out of outputs that carry it; the mean of the outputs
            elsewhere.

    Attributes:
        notes: what was decided on the way, for the user.
    """

    def __init__(
        self,
        loss: Any,
        unflatten: Callable[[Any], Any],
        unused_inputs: Callable[[Any], list[Any]],
        default_loss: Callable[[Any, Any], torch.Tensor],
    ) -> None:
        self._loss = loss
        self._unflatten = unflatten
        self._unused_inputs = unused_inputs
        self._default_loss = default_loss
        self.notes: dict[str, None] = {}

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """The loss of one micro-batch."""
        if callable(self._loss):
            return checked_loss(self._loss(outputs, self._unflatten(batch)), "loss(outputs, batch)")
        if isinstance(self._loss, str):
            return self._named_loss(self._loss, outputs, self._unused_inputs(batch))
        if _find_loss(outputs) is not None:
            return self._default_loss(outputs, batch)
        targets = self._unused_inputs(batch)
        if targets and _main_output(outputs) is not None:
            name = "cross_entropy" if not targets[0].is_floating_point() else "mse"
            self._say(
                f"the model returns no loss and is not called with the last input: taken as target "
                f"of {name} (--loss sets it)"
            )
            return self._named_loss(name, outputs, targets)
        self._say("the model returns no loss: the sum of its outputs' means is minimised")
        return self._default_loss(outputs, batch)

    def _say(self, text: str) -> None:
        self.notes[text] = None

    def _named_loss(self, name: str, outputs: Any, targets: list[Any]) -> torch.Tensor:
        output = _main_output(outputs)
        if output is None:
            raise ConfigError(
                f"--loss {name}: the model returned a {type(outputs).__name__} without a tensor "
                "that trains: give --loss package.module:function, called with (outputs, batch)."
            )
        if name in ("mean", "sum"):
            return checked_loss(getattr(output.float(), name)(), f"--loss {name}")
        if len(targets) != 1 or not isinstance(targets[0], torch.Tensor):
            raise ConfigError(
                f"--loss {name} compares the output {_tensor_text(output)} with one target, and "
                f"the batch has {len(targets)} tensors that the model is not called with: name it "
                f"with --input, for example {_example_option(name, output)}."
            )
        target = targets[0]
        if name == "cross_entropy" and _is_per_token(output, target):
            # a language model's way: one row for each token
            output, target = output.reshape(-1, output.shape[-1]), target.reshape(-1)
        try:
            value = getattr(torch.nn.functional, _FUNCTIONS[name])(output, target)
        except (RuntimeError, ValueError, IndexError) as error:
            text = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
            raise ConfigError(
                f"--loss {name} does not go with the output {_tensor_text(output)} and the target "
                f"{_tensor_text(target)}: {text}."
            ) from error
        return checked_loss(value, f"--loss {name}")


def _is_per_token(output: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether classes are the last extent of an output of three or more, as language models do."""
    long = output.dim() > 2 and not target.is_floating_point()
    return (
        long
        and output.shape[:-1] == target.shape
        and (output.shape[0], *output.shape[2:]) != target.shape
    )


def _tensor_text(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}[{','.join(map(str, tensor.shape))}]"


def _example_option(name: str, output: torch.Tensor) -> str:
    inner = ",".join(("B", *map(str, output.shape[1:])))
    if name in ("cross_entropy", "nll"):
        return "--input 'y:int64[B]'" if output.dim() == 2 else "--input 'y:int64[B,S]'"
    return f"--input 'y:float32[{inner}]'"


def _main_output(outputs: Any) -> torch.Tensor | None:
    """The main tensor of outputs: the first that leads back to parameters."""
    if isinstance(outputs, torch.Tensor):
        return outputs if outputs.requires_grad else None
    if isinstance(outputs, Mapping):
        main_outputs = [outputs[name] for name in _OUTPUTS if name in outputs]
        items = [*main_outputs, *outputs.values()]
    elif isinstance(outputs, (tuple, list)):
        items = list(outputs)
    else:
        items = [getattr(outputs, name, None) for name in _OUTPUTS]
    return (
        next((t for item in items if (t := _main_output(item)) is not None), None)
        if items and any(item is not None for item in items)
        else None
    )
