"""Steps of one's own: ``step(model, batch) -> loss``, and those that do everything themselves.

A step that has a function ``optimizers(models)`` makes its own: it is called with them as a third
argument, calls backward and the optimizers itself, and is traced as it is (GANs, steps with two
backward passes, gradient penalties).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from memest.config.setup import Loop, Setup
from memest.errors import ConfigError
from memest.events import Category, CueKind, Phase, SeamKind
from memest.trace.loops import state_tensors, tag_gradients
from memest.trace.losses.loss import checked_loss
from memest.trace.model.factories import import_reference
from memest.trace.optimizers.torch import weights_of
from memest.trace.recorder import Recorder

__all__ = ["OWN_SETUP", "OwnStep", "check_own_step", "resolve_step", "run_own_steps"]


@dataclass(frozen=True, slots=True)
class OwnStep:
    """A user's step.

    Attributes:
        function: called with (model, batch), or (models, batch, optimizers).
        optimizers: makes the optimizers of a step that does everything itself; None otherwise.
        name: for messages.
        unflatten: puts a batch together as the user gave it.
    """

    function: Callable[..., Any]
    optimizers: Callable[[Any], Any] | None
    name: str
    unflatten: Callable[[Any], Any]

    def call(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """The loss of one micro-batch."""
        return self.function(model, self.unflatten(batch))

    def loss_of(self, outputs: Any, _batch: Any) -> torch.Tensor:
        """What the step returned is the loss."""
        if outputs is None:
            raise ConfigError(
                f"{self.name} returned nothing: a step returns the loss. One that calls backward "
                "and its optimizers itself has a function optimizers(models) that makes them."
            )
        return checked_loss(outputs, f"{self.name}(model, batch)")


def resolve_step(step: Any, unflatten: Callable[[Any], Any]) -> OwnStep:
    """A step that was given, or named ``package.module:name``; a class is made an instance of.

    Raises:
        ConfigError: it cannot be called.
    """
    name = step if isinstance(step, str) else getattr(step, "__name__", type(step).__name__)
    if isinstance(step, str):
        step = import_reference(step, "--step")
    if isinstance(step, type):
        step = step()
    if not callable(step):
        raise ConfigError(
            f"step_fn is a {type(step).__name__}: give a function, step(model, batch), which "
            "returns the loss."
        )
    optimizers = getattr(step, "optimizers", None)
    num_arguments = 2 if optimizers is None else 3
    _check_signature(step, str(name), num_arguments)
    if optimizers is not None and not callable(optimizers):
        raise ConfigError(
            f"{name}.optimizers is a {type(optimizers).__name__}: it must be a function of the "
            "models, because the optimizers of a trace are made on a copy of them."
        )
    return OwnStep(step, optimizers, str(name), unflatten)


def _check_signature(step: Any, name: str, num_arguments: int) -> None:
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(num_arguments))
    except TypeError:
        with_what = "(model, batch)" if num_arguments == 2 else "(models, batch, optimizers)"
        raise ConfigError(
            f"{name}{signature} cannot be called as a step, {name}{with_what}."
            + (
                " A third argument needs optimizers(models), a function of the step."
                if num_arguments == 2 and len(signature.parameters) == 3
                else ""
            )
        ) from None


def check_own_step(setup: Setup, step: OwnStep) -> None:
    """Refuse options that a step of one's own would ignore.

    Raises:
        ConfigError: there is such an option.
    """
    defaults = Setup()
    if step.optimizers is None:
        return
    for name, flag in (
        ("optim", "--optim"),
        ("grad_accum", "--grad-accum"),
        ("max_grad_norm", "--max-grad-norm"),
        ("zero_grad", "--zero-grad"),
        ("weight_decay", "--weight-decay"),
        ("master_weights", "--master-weights"),
        ("optim_args", "--optim-args"),
        ("optim_in_backward", "--optim-in-backward"),
        ("distributed", "--num-gpus"),
        ("precision", "--fp16 and --bf16"),
        ("use_liger_kernel", "--use-liger-kernel"),
    ):
        value = getattr(setup, name)
        if value != getattr(defaults, name) and not (name == "optim" and value == "none"):
            raise ConfigError(
                f"{flag}: {step.name} calls backward and its optimizers itself, so this is "
                "written in the step and not an option."
            )


OWN_SETUP: dict[str, Any] = {"optim": "none", "loop": Loop.PLAIN}
"""What a setup says of a step that does everything itself."""


def run_own_steps(run: Any, step: OwnStep) -> None:
    """Steps that do everything themselves, one batch each.

    Phases follow what the step calls: backward while autograd runs, optimizer while one of its
    optimizers steps, forward everywhere else.
    """
    recorder: Recorder = run.recorder
    assert step.optimizers is not None
    with ExitStack() as stack:
        optimizers = step.optimizers(run.model)
        optimizer_list = _optimizer_list(optimizers, step)
        names = ", ".join(type(one).__name__ for one in optimizer_list)
        recorder.note(f"optimizers are those of {step.name}: {names}; --optim says nothing here.")
        current_step = stack.enter_context(_phases(run, optimizer_list))
        batch = None
        for number in range(1, len(run.micro_steps) + 1):
            recorder.seam(SeamKind.STEP, number)
            recorder.seam(SeamKind.MICRO_STEP, number, 1)
            current_step[0] = number
            recorder.mark(Phase.BATCH, number, 1)
            batch = None
            batch = run.make_batch()
            recorder.mark(Phase.FORWARD, number, 1)
            step.function(run.model, step.unflatten(batch), optimizers)
            recorder.seam(SeamKind.UPDATE, number)
            recorder.seam(SeamKind.UPDATED, number)
            recorder.seam(SeamKind.END, number)
        recorder.forget()
    del batch


def _optimizer_list(optimizers: Any, step: OwnStep) -> list[torch.optim.Optimizer]:
    """The optimizers of whatever collects them.

    Raises:
        ConfigError: there is none among them.
    """
    if isinstance(optimizers, Mapping):
        optimizers = list(optimizers.values())
    optimizer_list = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for one in optimizer_list:
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(
                f"{step.name}.optimizers(models) returned a {type(one).__name__}: it must return a "
                "torch optimizer, or a dict or list of them."
            )
    return optimizer_list


@contextmanager
def _phases(run: Any, optimizers: list[torch.optim.Optimizer]) -> Iterator[list[int]]:
    """Mark backward and optimizer phases as the step comes to them."""
    recorder: Recorder = run.recorder
    current_step = [1]
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        recorder.mark(Phase.BACKWARD, current_step[0], 1)
        try:
            return original(*args, **kwargs)
        finally:
            recorder.cue(CueKind.DONE, 0)
            tag_gradients(run)
            recorder.mark(Phase.FORWARD, current_step[0], 1)
            run.weights = weights_of(run.model)

    def before_step(*_: Any) -> None:
        recorder.mark(Phase.OPTIMIZER, current_step[0], 1)

    def after_step(optimizer: Any, *_: Any) -> None:
        for tensor in state_tensors(optimizer):
            recorder.tag(tensor, Category.OPTIMIZER_STATES)
        recorder.mark(Phase.FORWARD, current_step[0], 1)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd, "backward", backward))
        for one in optimizers:
            for handle in (
                one.register_step_pre_hook(before_step),
                one.register_step_post_hook(after_step),
            ):
                stack.callback(handle.remove)
        yield current_step
