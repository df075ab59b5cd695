"""What a real run needs: the model with random weights, and batches of random data, on the host.

The model is the one that is traced, built from the same config by the same rules
(:mod:`memest.trace`), with memory instead of meta tensors. Weights are not drawn one by one, which
takes a minute for a billion of them: a block of random numbers is laid out again and again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from memest.calibration.device import LATEST_TORCH
from memest.calibration.measurement import release_of
from memest.catalog.resolve import resolve_model
from memest.config.packages import LIGHTNING
from memest.config.setup import Loop, Setup, Software, ZeroGrad
from memest.errors import ConfigError
from memest.trace.inputs.batch import TensorPlan, plan_batch, realise
from memest.trace.inputs.tensors import WORD
from memest.trace.losses.loss import loss_for
from memest.trace.model.adapters import add_adapter
from memest.trace.model.adjust import set_checkpointing, set_use_cache
from memest.trace.model.build import BuiltModel, build_model, cast_weights, freeze
from memest.trace.model.noise import add_noise
from memest.trace.optimizers.torch import make_optimizer
from memest.trace.recorder import Recorder

__all__ = ["Material", "host_batches", "make_material"]

_BLOCK = 1 << 22
_STD = 0.02  # as most configs initialise
_WORDS = 30_000
_RANDOM = tuple(
    f"{name}_"
    for name in (
        "uniform",
        "normal",
        "trunc_normal",
        "xavier_uniform",
        "xavier_normal",
        "kaiming_uniform",
        "kaiming_normal",
        "orthogonal",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Model and data of one run, in host memory.

    Attributes:
        model: in training mode, switches set as the setup says.
        batches: one for each micro-step.
        loss_of: takes the loss out of outputs and batch.
        optimizer_for: makes the optimizer for a model.
        parameters: elements, tied ones once.
        trainable: of them, those that train.
    """

    model: torch.nn.Module
    batches: Sequence[dict[str, Any]]
    loss_of: Callable[[Any, Any], torch.Tensor]
    optimizer_for: Callable[[torch.nn.Module], Any]
    parameters: int
    trainable: int


def make_material(model: str, setup: Setup) -> Material:
    """Build the model and the batches of a run.

    Args:
        model: anything ``memest estimate`` takes.
        setup: the run.

    Raises:
        MemestError: the model cannot be built, or not trained so.
    """
    _check(setup)
    source = resolve_model(model)
    if source.library is not None:
        raise ConfigError(f"{model} is a model of {source.library[0]}: cases are transformers'.")
    built_model = build_model(source, setup)
    plans, _, _ = plan_batch(built_model, setup)
    real: Any = _with_memory(built_model)
    if setup.adapter is not None:
        real, _ = add_adapter(real, built_model.task, setup, real=True)
    freeze(real, setup)
    cast_weights(real, setup)
    add_noise(real, setup)
    set_use_cache(real, setup)
    if setup.loop.value != "trainer" or setup.checkpoint_every > 1:
        set_checkpointing(real, setup)
    version = release_of(torch.__version__) or LATEST_TORCH
    batch = _with_words(host_batches(plans, 1)[0], built_model.config)
    return Material(
        model=real,
        # one batch again and again: every step is fed, and the host holds it once
        batches=[batch] * (setup.num_steps * setup.grad_accum),
        loss_of=loss_for(built_model),
        optimizer_for=lambda module: make_optimizer(module, setup, Recorder(), version),
        parameters=sum(p.numel() for p in real.parameters()),
        trainable=sum(p.numel() for p in real.parameters() if p.requires_grad),
    )


def _check(setup: Setup) -> None:
    """Refuse what a real run here would not do: it would be measured as what it is not.

    Raises:
        ConfigError: there is such an option.
    """
    if setup.loop is Loop.LIGHTNING:
        LIGHTNING.check()
    trainer = setup.loop is Loop.TRAINER
    problems = {
        "--master-weights": setup.master_weights and setup.loop is not Loop.PLAIN,
        "--optim none": setup.optimizer == "none" and trainer,
        "--zero-grad zero": setup.zero_grad is ZeroGrad.ZERO and trainer,
    }
    for option, is_set in problems.items():
        if is_set:
            raise ConfigError(f"{option} is not what the {setup.loop} loop does: use --loop plain.")
    if setup.quantization is not None:
        raise ConfigError(
            "--load-in-4bit and --load-in-8bit are for predictions: a case builds its weights at "
            "random, and quantised ones come from a checkpoint."
        )
    for is_set, flag in (
        (setup.use_liger_kernel, "--use-liger-kernel"),
        (setup.torch_compile, "--torch-compile"),
        (setup.channels_last, "--channels-last"),
        (bool(setup.fused_loss), "--fused-loss"),
    ):
        if is_set:
            raise ConfigError(f"{flag}: cases run without it. Leave it out.")
    if setup.eval_batch is not None:
        raise ConfigError("--eval-batch: cases train and do not evaluate. Leave it out.")
    if setup.software != Software():
        raise ConfigError(
            "--software is for predictions: a case runs with the software that is installed."
        )


def _with_memory(built_model: BuiltModel) -> torch.nn.Module:
    """The model of the trace once more, with weights."""
    if built_model.config is None:
        raise ConfigError(
            f"{type(built_model.model).__name__} comes from a factory of its own, without a "
            "config: cases are models of transformers."
        )
    with _no_random_draws():
        real: Any = type(built_model.model)._from_config(
            built_model.config,
            dtype=built_model.dtype,
            attn_implementation=getattr(built_model.config, "_attn_implementation", None),
        )
    real.train()
    _fill(real)
    return real


@contextlib.contextmanager
def _no_random_draws() -> Iterator[None]:
    """Constructors that draw random numbers leave the memory as it is; constants are set."""

    def skip_init(tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    owners = [torch.nn.init, sys.modules.get("transformers.initialization")]
    with contextlib.ExitStack() as stack:
        for owner in owners:
            for name in _RANDOM:
                if owner is not None and hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, skip_init))
        yield


@torch.no_grad()
def _fill(model: torch.nn.Module) -> None:
    """Random numbers for all matrices; vectors (norms, biases) have their constants."""
    generator = torch.Generator().manual_seed(0)
    block = torch.empty(_BLOCK).normal_(0.0, _STD, generator=generator)
    halves: dict[torch.dtype, torch.Tensor] = {}
    for parameter in model.parameters():
        if parameter.dim() < 2 or not parameter.is_floating_point():
            _settle(parameter)
            continue
        source = halves.setdefault(parameter.dtype, block.to(parameter.dtype))
        flat = parameter.view(-1)
        for start in range(0, flat.numel(), _BLOCK):
            part = flat[start : start + _BLOCK]
            part.copy_(source[: part.numel()])


def _settle(parameter: torch.Tensor) -> None:
    """Memory that no constructor wrote to may hold anything: take zero for what is no number."""
    if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
        parameter.zero_()


def host_batches(plans: tuple[TensorPlan, ...], count: int) -> list[dict[str, Any]]:
    """The planned batch, ``count`` times, in memory that PyTorch did not allocate."""
    out = []
    for _ in range(count):
        batch = realise(plans, device="cpu")
        out.append({name: _host(value) for name, value in batch.items()})
    return out


def _with_words(batch: dict[str, Any], config: Any) -> dict[str, Any]:
    """Other words in place of the one that plans use: look-ups depend on how many there are."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    highest = min(int(getattr(text, "vocab_size", None) or 0), _WORDS)
    special = {
        v
        for k, v in config.to_dict().items()
        if k.endswith(("_token_id", "_token_index"))
        if isinstance(v, int)
    }
    words = torch.tensor([w for w in range(WORD, highest) if w not in special] or [WORD])
    generator = torch.Generator().manual_seed(0)
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.dtype is torch.int64 and value.dim() > 1:
            here = value == WORD
            picks = torch.randint(len(words), (int(here.sum()),), generator=generator)
            value[here] = words[picks]
    return batch


def _host(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype is torch.bfloat16:
        # numpy has no bfloat16: the same bytes as whole numbers
        return torch.from_numpy(np.array(value.view(torch.int16).numpy())).view(torch.bfloat16)
    return torch.from_numpy(np.array(value.numpy()))
