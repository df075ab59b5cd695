"""The optimizers, as the training loops make them: real ones on meta parameters.

Where CUDA's choice differs from meta's (foreach, fused) it is asked for explicitly; the patched
device lists of ``cuda_ops`` let it through.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memest.errors import ConfigError
from memest.events import Category, Weight
from memest.setup import Loop, Setup
from memest.trace.recorder import Recorder

__all__ = [
    "Named",
    "check_trainable",
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
_IMPLEMENTATIONS = {"_fused": "fused", "_foreach": "foreach", "_loop": "loop"}
_HALF = (torch.float16, torch.bfloat16)
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter, its path, and whether the Trainer lets it decay."""

    name: str
    parameter: Any
    decays: bool


def named_parameters(model: torch.nn.Module) -> list[Named]:
    """All parameters of a model, tied ones once."""
    exempt = _without_decay(model)
    return [Named(n, p, n not in exempt) for n, p in model.named_parameters()]


def weights_of(model: torch.nn.Module) -> tuple[Weight, ...]:
    """What :func:`optimizer_of` needs to know of the parameters, as data."""
    return tuple(
        Weight(
            name=named.name,
            shape=tuple(named.parameter.shape),
            stride=named.parameter.stride(),
            dtype=str(named.parameter.dtype).removeprefix("torch."),
            trains=named.parameter.requires_grad,
            decays=named.decays,
            has_grad=named.parameter.grad is not None,
        )
        for named in named_parameters(model)
    )


def make_optimizer(
    model: torch.nn.Module, setup: Setup, recorder: Recorder, torch_version: tuple[int, int]
) -> Any:
    """The optimizer of this setup over the parameters of a model that train; None for ``none``.

    Args:
        model: parameters on the device.
        setup: names the optimizer.
        recorder: told of master copies.
        torch_version: foreach is CUDA's default from 2.0 on.
    """
    return optimizer_of(named_parameters(model), setup, recorder, torch_version)


def optimizer_of(
    parameters: Sequence[Named], setup: Setup, recorder: Recorder, torch_version: tuple[int, int]
) -> Any:
    """:func:`make_optimizer` for a list of parameters."""
    if setup.optim == "none":
        return None
    check_trainable([n.parameter.requires_grad for n in parameters], setup)
    trainable = [n for n in parameters if n.parameter.requires_grad]
    if setup.master_weights:
        if not any(n.parameter.dtype in _HALF for n in trainable):
            found = str(trainable[0].parameter.dtype).removeprefix("torch.")
            raise ConfigError(
                f"--master-weights needs half-precision weights, and these are {found}: add "
                "--dtype bfloat16 or --dtype float16."
            )
        return MasterWeights(
            [n.parameter for n in trainable],
            lambda copies: _plain(setup.optim, [{"params": copies}], torch_version),
            recorder,
        )
    groups: list[dict[str, Any]]
    if setup.loop is Loop.TRAINER:
        groups = [
            {"params": [n.parameter for n in trainable if n.decays], "weight_decay": 0.0},
            {"params": [n.parameter for n in trainable if not n.decays], "weight_decay": 0.0},
        ]
        groups = [g for g in groups if g["params"]]
    else:
        groups = [{"params": [n.parameter for n in trainable]}]
    return _plain(setup.optim, groups, torch_version)


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


def _plain(name: str, groups: list[dict[str, Any]], torch_version: tuple[int, int]) -> Any:
    if name == "adamw_hf":
        return AdamWOfTransformers(groups, lr=1e-4)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=1e-4, scale_parameter=False, relative_step=False)
    implementation = "default"
    for suffix, meaning in _IMPLEMENTATIONS.items():
        if name.endswith(suffix):
            name, implementation = name.removesuffix(suffix), meaning
    if implementation == "default":
        # foreach is CUDA's default from 2.0 on, but never that of Adafactor, which is there to save
        loops = torch_version < (2, 0) or name == "adafactor_torch"
        implementation = "loop" if loops else "foreach"
    kwargs: dict[str, Any] = {"lr": 1e-4}
    if name == "sgd_momentum":
        kwargs["momentum"] = 0.9
    kwargs["foreach"] = implementation == "foreach"
    if implementation == "fused":
        del kwargs["foreach"]
        kwargs["fused"] = True
    return getattr(torch.optim, _TORCH[name])(groups, **kwargs)


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
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                exp_avg.mul_(0.9).add_(parameter.grad, alpha=0.1)
                exp_avg_sq.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
                denominator = exp_avg_sq.sqrt().add_(group["eps"])
                parameter.addcdiv_(exp_avg, denominator, value=-group["lr"])


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
