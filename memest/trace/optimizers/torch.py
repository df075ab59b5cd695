"""The optimizers, as the training loops make them: real ones on meta parameters.

Where CUDA's choice differs from meta's (foreach, fused) it is asked for explicitly; the patched
device lists of ``cuda_ops`` let it through.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memest.config.installed import bitsandbytes_version
from memest.config.optimizers import facts_of, typed_arguments
from memest.config.setup import Loop, Setup
from memest.errors import ConfigError
from memest.events import Category, Weight
from memest.trace.model.adapters import kept_dtype, prefix_of
from memest.trace.model.roles import Roles, roles_of
from memest.trace.optimizers.bitsandbytes import block_states, blocks_of, library_optimizer
from memest.trace.optimizers.in_backward import Stepper, stepper_for
from memest.trace.optimizers.libraries import OptimizerChain, low_rank_groups, make_library
from memest.trace.optimizers.stepping import updated_by
from memest.trace.recorder import Recorder, local

__all__ = [
    "NamedParameter",
    "check_trainable",
    "in_backward",
    "make_optimizer",
    "named_parameters",
    "optimizer_of",
    "weights_of",
]

_TORCH = {
    "adamw_torch": "AdamW",
    "adam": "Adam",
    "sgd": "SGD",
    "sgd_momentum": "SGD",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
    "adamax": "Adamax",
    "nadam": "NAdam",
    "radam": "RAdam",
    "adafactor_torch": "Adafactor",
}
_IMPLEMENTATIONS = {
    "_fused": {"fused": True},
    "_foreach": {"foreach": True},
    "_loop": {"foreach": False},
}
_KNOWS_BLOCKS = (4, 19)
"""Before, people handed bitsandbytes' optimizers to the Trainer, which then made no exceptions:
"Add support for bitsandbytes", transformers pull request 15622, is later than 4.18."""
_HALF = (torch.float16, torch.bfloat16)
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter, its path, and whether the Trainer lets it decay."""

    name: str
    parameter: Any
    decays: bool


def named_parameters(model: torch.nn.Module) -> list[NamedParameter]:
    """All parameters of a model, tied ones once."""
    exempt = _without_decay(model)
    return [NamedParameter(n, p, n not in exempt) for n, p in model.named_parameters()]


def weights_of(model: torch.nn.Module) -> tuple[Weight, ...]:
    """What :func:`optimizer_of` needs to know of the parameters, as data.

    Names are the model's own, as those of modules in a trace are.
    """
    prefix = prefix_of(model)
    return tuple(
        Weight(
            name=entry.name.removeprefix(prefix),
            shape=tuple(local(entry.parameter).shape),
            stride=local(entry.parameter).stride(),
            dtype=str(entry.parameter.dtype).removeprefix("torch."),
            trains=entry.parameter.requires_grad,
            decays=entry.decays,
            has_grad=entry.parameter.grad is not None,
            kept_dtype=kept_dtype(entry.parameter),
        )
        for entry in named_parameters(model)
    )


def make_optimizer(
    model: torch.nn.Module, setup: Setup, recorder: Recorder, torch_version: tuple[int, int]
) -> Any:
    """The optimizer of this setup over the parameters of a model that train; None for ``none``.

    One that steps in backward is hooked to the model: a :class:`Stepper`.

    Args:
        model: parameters on the device.
        setup: names the optimizer.
        recorder: told of master copies.
        torch_version: foreach is CUDA's default from 2.0 on.
    """
    if setup.steps_in_backward:
        return in_backward(model, setup, recorder, torch_version)
    return optimizer_of(
        named_parameters(model), setup, recorder, torch_version, lambda: roles_of(model)
    )


def optimizer_of(
    parameters: Sequence[NamedParameter],
    setup: Setup,
    recorder: Recorder,
    torch_version: tuple[int, int],
    roles: Callable[[], Roles],
) -> Any:
    """:func:`make_optimizer` for a list of parameters.

    Args:
        parameters: all of the model.
        setup: names the optimizer.
        recorder: told of master copies and of managed memory.
        torch_version: foreach is CUDA's default from 2.0 on.
        roles: of the parameters; asked only where the optimizer must know.
    """
    if setup.optimizer == "none":
        return None
    check_trainable([n.parameter.requires_grad for n in parameters], setup)
    trainable = [n for n in parameters if n.parameter.requires_grad]
    factory = _OptimizerFactory(setup, recorder, torch_version, roles)
    if not setup.master_weights:
        return factory.make(trainable)
    if not any(n.parameter.dtype in _HALF for n in trainable):
        dtype = str(trainable[0].parameter.dtype).removeprefix("torch.")
        raise ConfigError(
            f"--master-weights needs half-precision weights, and these are {dtype}: add "
            "--dtype bfloat16 or --dtype float16."
        )

    def make(copies: list[Any]) -> Any:
        pairs = zip(trainable, copies, strict=True)
        return factory.make([replace(n, parameter=copy) for n, copy in pairs])

    return MasterWeights([n.parameter for n in trainable], make, recorder)


def in_backward(
    model: torch.nn.Module, setup: Setup, recorder: Recorder, torch_version: tuple[int, int]
) -> Stepper:
    """The optimizer of this setup, hooked to a model that is on its device.

    Raises:
        ConfigError: nothing trains.
    """
    parameters = named_parameters(model)
    check_trainable([n.parameter.requires_grad for n in parameters], setup)
    factory = _OptimizerFactory(
        setup, recorder, torch_version, functools.cache(lambda: roles_of(model))
    )
    trainable = [n for n in parameters if n.parameter.requires_grad]
    return stepper_for(model, setup, recorder, lambda one: factory.make([one]), trainable)


@dataclass(frozen=True, slots=True)
class _OptimizerFactory:
    """Makes the optimizer of a setup over whatever it updates: the weights, or fp32 copies.

    Attributes: as the arguments of :func:`optimizer_of`.
    """

    setup: Setup
    recorder: Recorder
    torch_version: tuple[int, int]
    roles: Callable[[], Roles]

    def make(self, trainable: Sequence[NamedParameter]) -> Any:
        """The optimizer over these parameters."""
        setup, facts = self.setup, facts_of(self.setup.optimizer)
        named_weights = [(n.name, n.parameter) for n in trainable]
        if facts.targets:
            groups = low_rank_groups(named_weights, setup, self.roles())
            return make_library(setup, groups, self.recorder)
        if setup.optimizer == "muon":
            return self._muon(named_weights)
        groups = self._groups(trainable)
        if facts.block_states:
            return self._blocks(named_weights, groups)
        return make_library(setup, groups, self.recorder) or self._plain(groups)

    def _groups(self, trainable: Sequence[NamedParameter]) -> list[dict[str, Any]]:
        """What decays and what does not, as the Trainer divides it; a script has one group."""
        decay = self.setup.weight_decay
        if self.setup.loop is not Loop.TRAINER:
            more = {} if decay is None else {"weight_decay": decay}
            return [{"params": [n.parameter for n in trainable], **more}]
        groups = [
            {"params": [n.parameter for n in trainable if n.decays], "weight_decay": decay or 0.0},
            {"params": [n.parameter for n in trainable if not n.decays], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def _blocks(
        self, named_weights: Sequence[tuple[str, Any]], groups: list[dict[str, Any]]
    ) -> Any:
        """bitsandbytes: its states on meta, the library itself on a real device."""
        setup, blocks = self.setup, blocks_of(self.setup.optimizer)
        fp32_ids: frozenset[int] = frozenset()
        keeps_embeddings = (setup.software.transformers or _KNOWS_BLOCKS) >= _KNOWS_BLOCKS
        if blocks.bits == 8 and setup.loop is Loop.TRAINER and keeps_embeddings:
            embeddings = self.roles().embeddings
            embedding_weights = [p for name, p in named_weights if name in embeddings]
            fp32_ids = frozenset(map(id, embedding_weights))
            if embedding_weights:
                self.recorder.note(
                    f"{setup.optimizer}: the Trainer keeps the states of embeddings in fp32, those "
                    f"of {sum(p.numel() for p in embedding_weights):,} parameters here."
                )
        if any(p.device.type != "meta" for _, p in named_weights):
            return library_optimizer(groups, blocks, fp32_ids)
        version = bitsandbytes_version(setup.software)
        return block_states(groups, blocks, fp32_ids, self.recorder, version)

    def _muon(self, named_weights: Sequence[tuple[str, Any]]) -> Any:
        """Muon for the hidden matrices, AdamW for the rest.

        Source: documentation of ``torch.optim.Muon``: "an optimizer for 2D parameters of neural
        network hidden layers. Other parameters, such as bias, and embedding, should be optimized
        by a standard method such as AdamW"; the output head counts as the embedding that it often
        is.
        """
        roles = self.roles()
        not_hidden = roles.embeddings | roles.head
        matrices: list[Any] = []
        rest: list[Any] = []
        for name, parameter in named_weights:
            (matrices if parameter.dim() == 2 and name not in not_hidden else rest).append(
                parameter
            )
        optimizers: list[Any] = []
        if matrices:
            optimizers.append(torch.optim.Muon(matrices, lr=1e-4, **self._arguments()))
        if rest:
            optimizers.append(torch.optim.AdamW(rest, lr=1e-4, foreach=True))
        return OptimizerChain(optimizers)

    def _plain(self, groups: list[dict[str, Any]]) -> Any:
        """Torch's own optimizers, and those of transformers."""
        name = self.setup.optimizer
        if name == "adamw_hf":
            return AdamWOfTransformers(groups, lr=1e-4)
        if name == "adafactor":
            from transformers.optimization import Adafactor

            return Adafactor(groups, lr=1e-4, scale_parameter=False, relative_step=False)
        # foreach is CUDA's default from 2.0 on, but never that of Adafactor, which is there to save
        one_by_one = self.torch_version < (2, 0) or name == "adafactor_torch"
        implementation = {"foreach": not one_by_one}
        for suffix, choice in _IMPLEMENTATIONS.items():
            if name.endswith(suffix):
                name, implementation = name.removesuffix(suffix), choice
        momentum = {"momentum": 0.9} if name == "sgd_momentum" else {}
        kwargs = {"lr": 1e-4, **momentum, **self._arguments(), **implementation}
        try:
            return getattr(torch.optim, _TORCH[name])(groups, **kwargs)
        except ValueError as error:
            raise ConfigError(
                f"--optim-args {self.setup.optim_args!r}: torch.optim.{_TORCH[name]} refuses it: "
                f"{error}."
            ) from error

    def _arguments(self) -> dict[str, Any]:
        """What ``--optim-args`` says, as torch's classes take it."""
        return typed_arguments(self.setup.optimizer, self.setup.optim_args)


def check_trainable(trains: Sequence[bool], setup: Setup) -> None:
    """Something must be left to train.

    Raises:
        ConfigError: every parameter is frozen.
    """
    if any(trains):
        return
    raise ConfigError(
        "No parameter trains: --freeze matches them all. Freeze less."
        if setup.freeze
        else "No parameter trains: prepare_model_for_kbit_training freezes a quantised base. Add "
        "adapters, for example --lora-r 16."
        if setup.quantization is not None
        else "No parameter of the model trains: it has none, or all of them are frozen."
    )


def _without_decay(model: torch.nn.Module) -> set[str]:
    """``Trainer.get_decay_parameter_names`` turned round: biases and normalisations."""
    norms = [n for n, m in model.named_modules() if isinstance(m, torch.nn.LayerNorm)]
    names = [n for n, _ in model.named_parameters()]
    return {n for n in names if n.rpartition(".")[0] in norms or _NO_DECAY.search(n)}


class AdamWOfTransformers(torch.optim.Optimizer):
    """The AdamW that transformers carried until 4.x: one parameter after the other.

    The denominator of one parameter stays bound until the next one has made its own.
    Source: transformers 4.18 ``optimization.py``, class AdamW.
    """

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for parameter in updated_by(self):
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
            exp_avg.mul_(0.9).add_(parameter.grad, alpha=0.1)
            exp_avg_sq.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            denominator = exp_avg_sq.sqrt().add_(self.defaults["eps"])
            parameter.addcdiv_(exp_avg, denominator, value=-self.defaults["lr"])


class MasterWeights:
    """Half weights and gradients, fp32 master copies and fp32 states (Apex O2, Megatron).

    The step casts all half gradients to fp32, updates the copies, and writes them back. Parameters
    that are fp32 anyway are their own master. Source:
    ``apex/amp/_process_optimizer.py`` (master gradients are made when gradients are unscaled) and
    Megatron-LM ``Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads``.
    """

    def __init__(self, parameters: list[Any], make: Any, recorder: Recorder) -> None:
        self.parameters = parameters
        self.masters = []
        for parameter in parameters:
            master = parameter
            if parameter.dtype in _HALF:
                master = torch.nn.Parameter(parameter.detach().float())
                recorder.tag(master, Category.MASTER_WEIGHTS)
            self.masters.append(master)
        self.inner = make(self.masters)

    @property
    def state(self) -> Any:
        """The inner optimizer's states."""
        return self.inner.state

    @property
    def param_groups(self) -> Any:
        """The inner optimizer's groups."""
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """One update of the copies, written back to the half weights."""
        copies = [
            (parameter, master)
            for parameter, master in zip(self.parameters, self.masters, strict=True)
            if parameter is not master
        ]
        for parameter, master in copies:
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
        self.inner.step()
        for parameter, master in copies:
            parameter.copy_(master)
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the half gradients."""
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
