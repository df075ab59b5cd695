"""Optimizers of other libraries: their own classes on meta, or their states as they make them.

GaLore, APOLLO and schedule-free are ordinary Python over torch's operators, so their own code is
traced. torchao compiles its step and optimi runs Triton kernels on a GPU, neither of which
runs on meta: their states are made here as their ``step`` makes them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from memest.config.optimizers import facts_of, typed_arguments
from memest.config.packages import library_of
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.trace.model.roles import Roles
from memest.trace.optimizers.stepping import StatesAlone
from memest.trace.recorder import Recorder

__all__ = ["OptimizerChain", "library_class", "low_rank_groups", "make_library"]

_HALF = (torch.float16, torch.bfloat16)
_RANK = 128


def library_class(optim: str) -> Any:
    """The class of the library behind an optimizer.

    Raises:
        MissingDependencyError: the library is not installed.
    """
    facts = facts_of(optim)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(import_module(facts.module), facts.kind)
    except ImportError as error:
        library = library_of(optim)
        assert library is not None
        raise library.missing() from error


def make_library(setup: Setup, groups: list[dict[str, Any]], recorder: Recorder) -> Any:
    """The optimizer of a library over groups of parameters, None where it is none of these.

    Args:
        setup: names the optimizer and its arguments.
        groups: as the library takes them.
        recorder: told what is assumed.
    """
    facts = facts_of(setup.optimizer)
    arguments = typed_arguments(setup.optimizer, setup.optim_args)
    if not facts.kind:
        return None
    options: dict[str, Any] = dict(facts.options)
    if "block_size" in facts.arguments:
        options["block_size"] = arguments.get("block_size", 256)
    if "kahan_sum" in arguments:
        options["kahan_sum"] = True  # the Trainer reads it with bool(): any text is true
    if facts.targets:
        recorder.note(
            f"{setup.optimizer.removesuffix('_layerwise')}: priced as in the steps that renew the "
            f"projections, every {arguments.get('update_proj_gap', 200)} of them."
        )
    if facts.note:
        recorder.note(facts.note)
    on_meta = all(p.device.type == "meta" for group in groups for p in group["params"])
    if on_meta and facts.kind in _STATES:
        return _STATES[facts.kind](groups, **options)
    kind = library_class(setup.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = kind(groups, lr=1e-4, **options)
    if hasattr(optimizer, "train"):
        optimizer.train()  # schedule-free: weights as training has them
    return _Apollo([optimizer]) if on_meta and facts.kind == "APOLLOAdamW" else optimizer


# -- groups ---------------------------------------------------------------------------------------


def low_rank_groups(
    named_weights: Sequence[tuple[str, Any]], setup: Setup, roles: Roles
) -> list[dict[str, Any]]:
    """What is projected, and the rest: ``_setup_low_rank_optimizer`` of transformers.

    Args:
        named_weights: name and tensor of all parameters that train.
        setup: names the targets and the arguments.
        roles: which weights are those of linear layers.

    Raises:
        ConfigError: no linear layer has such a name.
    """
    patterns = setup.optim_target_modules
    all_linear = isinstance(patterns, str) and patterns.replace("_", "-") == "all-linear"
    targets = {
        name
        for name in roles.linear
        if all_linear or is_target(patterns, name.removesuffix(".weight"))
    }
    if not targets:
        raise ConfigError(
            f"--optim-target-modules {patterns!r} names no linear layer of this model: legal are "
            "all-linear, or for example '.*(attn|mlp).*'. Linear layers of this model: "
            f"{', '.join(sorted(n.removesuffix('.weight') for n in roles.linear)[:4]) or 'none'}."
        )
    arguments = typed_arguments(setup.optimizer, setup.optim_args)
    options: dict[str, Any] = {
        "rank": arguments.get("rank", _RANK),
        "update_proj_gap": 1,  # every traced step renews the projections, as every so many do
        "scale": 1.0,  # a factor
        "proj_type": arguments.get("proj_type", "std"),
    }
    if "apollo" in setup.optimizer:
        options["proj"] = arguments.get("proj", "random")
        options["scale_type"] = arguments.get("scale_type", "channel")
    rest = [p for name, p in named_weights if name not in targets]
    projected_weights = [p for name, p in named_weights if name in targets]
    groups = [{"params": rest}, {"params": projected_weights, **options}]
    return [group for group in groups if group["params"]]


def is_target(patterns: str | tuple[str, ...], module: str) -> bool:
    """``check_target_module_exists`` of transformers."""
    if isinstance(patterns, str):
        return bool(re.fullmatch(patterns, module))
    return any(part in module or re.fullmatch(part, module) for part in patterns)


# -- optimizers -----------------------------------------------------------------------------------


class OptimizerChain:
    """Optimizers that share the work, one step after the other."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._optimizers = tuple(optimizers)

    @property
    def state(self) -> Mapping[Any, Any]:
        """The states of all."""
        return {key: value for one in self._optimizers for key, value in one.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for one in self._optimizers for group in one.param_groups]

    def step(self) -> None:
        """One update of everything."""
        for one in self._optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for one in self._optimizers:
            one.zero_grad(set_to_none=set_to_none)


class _Apollo(OptimizerChain):
    """APOLLO draws its projections with a generator of the device, which meta has not."""

    def step(self) -> None:
        def stable_randn(
            shape: Any, seed: int, device: Any = None, dtype: Any = torch.float32
        ) -> Any:
            return torch.randn(shape, device=device, dtype=dtype)

        with mock.patch("apollo_torch.random_projector.stable_randn", stable_randn):
            super().step()


def _torchao_states(groups: Iterable[Any], *, bits: int, block_size: int) -> StatesAlone:
    """``AdamW8bit`` and ``AdamW4bit`` of torchao, on meta tensors.

    The step of one parameter is compiled; its states are exact, and that Inductor needs no memory
    of its own for it is assumed. The learning rate and the step counter live on the host.

    Source: torchao 0.18 ``optim/adam.py`` (``_new_buffer``: parameters of 4096 elements and more
    that whole blocks make up), ``optim/subclass_8bit.py``, ``optim/subclass_4bit.py``; each state
    has a map of its own.
    """

    def buffer(parameter: torch.Tensor) -> list[torch.Tensor]:
        count = parameter.numel()
        if count < 4096 or count % block_size:
            return [torch.zeros_like(parameter)]
        return [
            parameter.new_zeros(count * bits // 8, dtype=torch.uint8),
            parameter.new_zeros(count // block_size, dtype=torch.float32),
            parameter.new_zeros(1 << bits, dtype=torch.float32),
        ]

    def states(parameter: torch.Tensor) -> dict[str, Any]:
        return {"exp_avg": buffer(parameter), "exp_avg_sq": buffer(parameter)}

    return StatesAlone(groups, states)


def _optimi_states(groups: Iterable[Any], *, kahan_sum: bool | None = None) -> StatesAlone:
    """``StableAdamW`` of optimi with its Triton kernels, on meta tensors.

    Source: optimi 0.3 ``stableadamw.py`` (``_init_state``; Triton is its choice on a GPU): moments
    in the dtype of the parameter, a compensation for half weights, and single numbers. The kernels
    update in place.
    """

    def states(parameter: torch.Tensor) -> dict[str, Any]:
        compensates = kahan_sum is not False and parameter.dtype in _HALF
        return {
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
            "eps_sq": parameter.new_zeros(()),
            "kahan_comp": (
                torch.zeros_like(parameter)
                if compensates
                else parameter.new_zeros(1, dtype=torch.uint8)
            ),
            "mean_square": parameter.new_zeros(1, dtype=torch.float32),
        }

    return StatesAlone(groups, states, launches=2)  # the mean square, then the update


_STATES: dict[str, Callable[..., StatesAlone]] = {
    "AdamW8bit": partial(_torchao_states, bits=8),
    "AdamW4bit": partial(_torchao_states, bits=4),
    "StableAdamW": _optimi_states,
}
