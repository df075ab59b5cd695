"""A model whose parameters DeepSpeed partitions: its linear layers, and the hooks of its modules.

``zero.Init`` puts a function of its own in place of ``F.linear`` (``zero_optimization``'s
``memory_efficient_linear``, on by default), for good: autograd is to save the parameter, whose
data may be given back in between, and not a view of the gathered data. What it computes, and in
which order, differs from the built-in one. A model that was whole when ``deepspeed.initialize`` got
it has that function from DeepSpeed 0.19.4 on (pull request 8189: ``Init`` with a ``module``).
Before, it keeps the built-in one and, with that, every weight that was gathered for the forward, as
a run without ``memory_efficient_linear`` does.
Hooks of modules stand in autograd's graph: gradients pass through them, and what they are added to
waits until they have. While a module runs, its parameters have data of their own, as gathered ones
have: so it shows whether autograd holds on to it.
A module's dictionary of parameters tells who is asked for one. What is read while its own module
does not run (a head's weight by a loss, an adapter's by peft for its dtype) is gathered then, and
from then on for the module that read it.
Source: ``LinearFunctionForZeroStage3`` (``deepspeed/runtime/zero/linear.py``),
``_register_deepspeed_module`` and ``ZeROOrderedDict`` (``parameter_offload.py``) of DeepSpeed
0.19.8.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from memest.config.setup import Setup
from memest.events import CueKind
from memest.trace.recorder import Recorder

__all__ = ["hooks_of_stage_3", "linear_of_stage_3"]


class _Linear(torch.autograd.Function):
    """Gradients of the input, of the weight, of the bias: in this order, each in one product."""

    @staticmethod
    def forward(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if rows.dim() == 2 and bias is not None:
            return torch.addmm(bias, rows, weight.t())
        out = rows.matmul(weight.t())
        if bias is not None:
            out += bias
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        rows, weight, *rest = inputs
        ctx.save_for_backward(rows, weight, rest[0] if rest else None)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        rows, weight, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_rows = grad_weight = grad_bias = None
        flat = gradient.dim() > 2
        if needs[0]:
            grad_rows = gradient.matmul(weight)
        if needs[1]:
            if flat:
                grad_weight = (
                    gradient.reshape(-1, gradient.shape[-1])
                    .t()
                    .matmul(rows.reshape(-1, rows.shape[-1]))
                )
            elif gradient.dim() == 1:
                grad_weight = gradient.unsqueeze(-1) * rows.unsqueeze(0)
            else:
                grad_weight = gradient.t().matmul(rows)
        if bias is not None and needs[2]:
            if flat:
                grad_bias = gradient.sum(list(range(gradient.dim() - 1)))
            else:
                grad_bias = gradient if gradient.dim() == 1 else gradient.sum(0)
        return grad_rows, grad_weight, grad_bias


def _linear(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    out: torch.Tensor = _Linear.apply(rows, weight, bias)
    return out


@contextmanager
def linear_of_stage_3(setup: Setup) -> Iterator[None]:
    """``F.linear`` as a run under ZeRO-3 has it, for the time of a trace."""
    if not setup.has_linear_of_stage_3:
        yield
        return
    with mock.patch.object(functional, "linear", _linear):
        yield


class _RunningModules:
    """The modules whose forward runs, and what they read of others' parameters.

    Args:
        recorder: told of it.
        numbers: of the weights, by ``id`` of the parameter.
    """

    def __init__(self, recorder: Recorder, numbers: Mapping[int, int]) -> None:
        self._recorder = recorder
        self._numbers = numbers
        self.stack: list[_ModuleHooks] = []

    def enter(self, hooks: _ModuleHooks) -> None:
        """A module's forward begins; a recomputation that was cut short left its modules behind."""
        if hooks.is_root and not self._recorder.in_backward:
            self.stack.clear()
        self.stack.append(hooks)

    def read(self, parameter: Any) -> None:
        """A module was asked for a parameter (``ZeROOrderedDict.__getitem__``).

        DeepSpeed's engine has it gathered in forwards of the module, whoever calls it (hooks of
        ``_create_module_forward_pre_hook``), and not when autograd recomputes.
        """
        weight = self._numbers.get(id(parameter))
        if weight is None or not self.stack or self._recorder.in_backward:
            return
        if not any(hooks.has(weight) for hooks in self.stack):
            self.stack[-1].register_external(weight, parameter)


class _Parameters(dict[str, Any]):
    """A module's parameters, which tell when they are asked for by name."""

    def __init__(self, own: Mapping[str, Any], running: _RunningModules) -> None:
        super().__init__(own)
        self._running = running

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self._running.read(parameter)
        return parameter

    def __reduce__(self) -> Any:
        """A copy of a module has nothing to tell."""
        return dict, (dict(self),)


class _ModuleHooks:
    """The hooks of one module.

    Args:
        recorder: told of the places.
        number: of the module.
        own: its parameters, by number of the weight.
        running: the modules whose forward runs.
        is_root: the module is the whole model.
    """

    def __init__(
        self,
        recorder: Recorder,
        number: int,
        own: dict[int, torch.nn.Parameter],
        running: _RunningModules,
        *,
        is_root: bool,
    ) -> None:
        self._recorder = recorder
        self._number = number
        self.is_root = is_root
        self._own_parameters = own
        self._external: dict[int, torch.nn.Parameter] = {}
        self._running = running
        self._original_data: dict[int, tuple[torch.Tensor, weakref.ref[Any]]] = {}
        self._holds: dict[int, list[object]] = {}
        self._pending_outputs = 0
        self._pending_inputs = 0
        self._at_outputs = _node(self._on_output_gradient)
        self._at_inputs = _node(self._on_input_gradient)

    def add(self, module: torch.nn.Module) -> list[Any]:
        """Register them, in the order in which DeepSpeed does."""
        return [
            module.register_forward_pre_hook(self._pre_forward),
            module.register_forward_hook(self._post_forward),
            module.register_forward_hook(self._wrap_outputs),
            module.register_forward_pre_hook(self._wrap_inputs),
        ]

    def _cue(self, kind: CueKind) -> None:
        self._recorder.cue(kind, self._number)

    def _pre_forward(self, module: Any, args: Any) -> None:
        del module, args
        self._running.enter(self)
        self._cue(CueKind.PRE_FORWARD)
        for weight, parameter in (*self._own_parameters.items(), *self._external.items()):
            self._move(weight, parameter)

    def _move(self, weight: int, parameter: torch.nn.Parameter) -> None:
        if weight not in self._original_data:
            self._original_data[weight] = parameter.data, _give_own_data(parameter)

    def has(self, weight: int) -> bool:
        """Whether a parameter is the module's own."""
        return weight in self._own_parameters

    def register_external(self, weight: int, parameter: torch.nn.Parameter) -> None:
        """The module reads another's parameter (``register_external_parameter``)."""
        self._recorder.cue(CueKind.READ, weight)
        self._external[weight] = parameter
        self._move(weight, parameter)

    def _post_forward(self, module: Any, args: Any, output: Any) -> None:
        del module, args, output
        self._running.stack.pop()
        self.restore()
        self._cue(CueKind.POST_FORWARD)

    def _wrap_outputs(self, module: Any, args: Any, output: Any) -> Any:
        del module, args

        def wrap(tensor: torch.Tensor) -> Any:
            self._pending_outputs += 1
            return self._at_outputs.apply(tensor)

        return _map_tensors(wrap, output)

    def _wrap_inputs(self, module: Any, args: Any) -> Any:
        del module
        self._pending_inputs = 0

        def wrap(tensor: torch.Tensor) -> Any:
            self._pending_inputs += tensor.requires_grad
            return self._at_inputs.apply(tensor)

        return _map_tensors(wrap, args)

    def _on_output_gradient(self) -> None:
        if self._pending_outputs > 0:
            self._pending_outputs -= 1
            self._cue(CueKind.PRE_BACKWARD)

    def _on_input_gradient(self) -> None:
        self._pending_inputs -= 1
        if self._pending_inputs == 0:
            self.restore()
            self._cue(CueKind.POST_BACKWARD)

    def restore(self) -> None:
        """The parameters are what they were."""
        for weight, (data, storage_ref) in self._original_data.items():
            parameter = self._own_parameters.get(weight)
            (self._external[weight] if parameter is None else parameter).data = data
            storage = storage_ref()
            if storage is not None:
                self._recorder.cue(CueKind.HELD, weight)
                hold = object()
                self._holds.setdefault(weight, []).append(hold)
                weakref.finalize(storage, self._let_go, weight, hold).atexit = False
        self._original_data.clear()

    def _let_go(self, weight: int, hold: object) -> None:
        holds = self._holds[weight]
        oldest = holds[0] is hold
        holds.remove(hold)
        self._recorder.cue(CueKind.LET_GO if oldest else CueKind.LET_GO_NEWEST, weight)


def _give_own_data(parameter: torch.nn.Parameter) -> weakref.ref[Any]:
    """Put a parameter on data of its own; tells as long as anybody has it."""
    with _disable_current_modes():
        fresh = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
    parameter.data = fresh
    return weakref.ref(fresh.untyped_storage())


def _node(on_gradient: Any) -> Any:
    """A function that passes its argument on, and tells when its gradient is there."""

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
            del ctx
            on_gradient()
            return gradients

    return Passing


def _map_tensors(function: Any, value: Any) -> Any:
    """Tensors of a structure put through a function, as ``apply_to_tensors_only`` does it."""
    if isinstance(value, (tuple, list)):
        items = [_map_tensors(function, item) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        for key in value:
            value[key] = _map_tensors(function, value[key])
        return value
    return function(value) if isinstance(value, torch.Tensor) else value


@contextmanager
def hooks_of_stage_3(models: Mapping[str, torch.nn.Module], recorder: Recorder) -> Iterator[None]:
    """DeepSpeed's hooks on every module, for the time of a trace.

    Args:
        models: each with an engine of its own, by what stands before the names of its modules.
        recorder: told of the places.
    """
    handles: list[Any] = []
    module_hooks: list[_ModuleHooks] = []
    dictionaries: list[tuple[torch.nn.Module, Any]] = []
    for prefix, model in models.items():
        numbers = {id(p): number for number, (_, p) in enumerate(model.named_parameters())}
        running = _RunningModules(recorder, numbers)
        for name, module in model.named_modules(prefix=prefix):
            own = {numbers[id(p)]: p for p in module.parameters(recurse=False)}
            number = recorder.hooked_number(name)
            hooks = _ModuleHooks(recorder, number, own, running, is_root=module is model)
            module_hooks.append(hooks)
            handles += hooks.add(module)
            dictionaries.append((module, module._parameters))
            module._parameters = _Parameters(module._parameters, running)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, original in dictionaries:
            original.clear()
            original.update(module._parameters)
            module._parameters = original
        # what a module read is given back before the one that it read it of
        for hooks in reversed(module_hooks):
            hooks.restore()
