"""Optimizers that step in backward: a gradient is used and dropped as soon as it is there.

Three ways: LOMO and AdaLomo (hooks of the library, which see the parameter before), the Trainer's
layerwise optimizers, and torch's recipe of one optimizer for each parameter, stepped by a hook that
runs after its gradient was accumulated. The hooks are the real ones; what differs on meta is said
where it is done.

Source: ``lomo_optim/lomo.py`` and ``adalomo.py`` 0.1.1, ``Accelerator.lomo_backward``,
``_setup_low_rank_optimizer`` of transformers, and torch's tutorial "How to save memory by fusing
the optimizer step into the backward pass".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import torch

from memest.config.setup import Setup
from memest.events import Category
from memest.trace.optimizers.libraries import library_class
from memest.trace.recorder import Recorder

__all__ = ["Stepper", "stepper_for"]


class Stepper:
    """What a loop needs of an optimizer that steps in backward; its own ``step`` does nothing.

    Args:
        states: gives the states of all parameters, by parameter or by kind.
        backward: of a loss, updates included.
        handles: of the hooks on the model.

    Attributes:
        param_groups: empty, as the dummy of the Trainer has nothing to clip or to scale.
    """

    def __init__(
        self,
        states: Callable[[], dict[Any, Any]],
        backward: Callable[[torch.Tensor], None],
        handles: list[Any],
    ) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self._states = states
        self.backward = backward
        self._handles = handles

    @property
    def state(self) -> dict[Any, Any]:
        """States, by parameter; AdaLomo's by kind."""
        return self._states()

    def step(self, closure: Any = None) -> None:
        """Nothing: everything was done in backward."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the gradients are gone."""

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _optimizer_per_parameter(
    optimizers: dict[Any, Any], updating: Callable[[], AbstractContextManager[Any]]
) -> Stepper:
    """One optimizer for each parameter, stepped when its gradient has been accumulated."""

    def hook(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            with updating():
                optimizers[parameter].step()
                optimizers[parameter].zero_grad()

    def states() -> dict[Any, Any]:
        return {p: s for one in optimizers.values() for p, s in one.state.items()}

    handles = [p.register_post_accumulate_grad_hook(hook) for p in optimizers]
    return Stepper(states, torch.Tensor.backward, handles)


def _lomo(
    model: torch.nn.Module, setup: Setup, updating: Callable[[], AbstractContextManager[Any]]
) -> Stepper:
    """LOMO or AdaLomo of the library over a model.

    AdaLomo puts its states on ``cuda`` by name: they go where the model is.

    Raises:
        MissingDependencyError: lomo-optim is not installed.
    """
    kind: Any = library_class(setup.optimizer)
    handles: list[Any] = []
    device = next(model.parameters()).device

    class WatchedOptimizer(kind):
        def fuse_update(self) -> Any:
            update = super().fuse_update()

            def update_watched(gradient: Any) -> Any:
                with updating():
                    return update(gradient)

            return update_watched

    register = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
        handles.append(register(tensor, hook))
        return handles[-1]

    def move(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor.to(device)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.Tensor, "register_hook", register_hook))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", move))
        optimizer = WatchedOptimizer(model, lr=1e-4)

    def states() -> dict[Any, Any]:
        names = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")
        return {name: dict(getattr(optimizer, name, {})) for name in names}

    def backward(loss: torch.Tensor) -> None:
        """Backward, then the update of the parameter whose gradient came last."""
        optimizer.fused_backward(loss, 1e-4)

    return Stepper(states, backward, handles)


def stepper_for(
    model: torch.nn.Module,
    setup: Setup,
    recorder: Recorder,
    make: Callable[[Any], Any],
    parameters: Sequence[Any],
) -> Stepper:
    """The optimizer of a setup that steps in backward, hooked to a model.

    Args:
        model: on its device.
        setup: names the optimizer.
        recorder: told when gradients are there and when updates run.
        make: makes the optimizer of one named parameter.
        parameters: parameters that train.
    """
    owners = {id(n.parameter): n.name.rpartition(".")[0] for n in parameters}

    def tag_gradient(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            recorder.tag(parameter.grad, Category.GRADIENTS, owners[id(parameter)])

    # tags come before the updates, which drop the gradients
    tags = [n.parameter.register_post_accumulate_grad_hook(tag_gradient) for n in parameters]
    if setup.optimizer in ("lomo", "adalomo"):
        stepper = _lomo(model, setup, recorder.updating)
    else:
        stepper = _optimizer_per_parameter(
            {n.parameter: make(n) for n in parameters}, recorder.updating
        )
    stepper._handles[:0] = tags
    return stepper
