"""What does not go together in a setup, in words that say what to change."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from memest.distributed import Strategy
from memest.errors import ConfigError
from memest.kinds import Loop, Precision
from memest.optimizer_names import facts_of, read_arguments

if TYPE_CHECKING:
    from memest.setup import Setup

__all__ = ["check_adapter", "check_evaluation", "check_optimizer", "check_spread"]


def check_spread(setup: Setup) -> None:
    """What is not priced together with several GPUs is refused.

    Raises:
        ConfigError: such a pair of options.
    """
    strategy = setup.distributed.strategy
    if strategy is Strategy.NONE:
        return
    facts = facts_of(setup.optim)
    shards = strategy in (Strategy.FSDP, Strategy.ZERO)
    several = {Strategy.DDP: "--num-gpus", Strategy.FSDP: "--fsdp", Strategy.ZERO: "--zero"}[
        strategy
    ]
    for there, what in (
        (setup.eval_batch is not None, "--eval-batch"),
        (setup.steps_in_backward, f"an optimizer that steps in backward (--optim {setup.optim})"),
        (setup.use_liger_kernel, "--use-liger-kernel"),
        (shards and setup.quantization is not None, "a quantised base"),
        (
            shards and facts.by_module,
            f"--optim {setup.optim}, which asks which module owns a weight",
        ),
        (
            shards and facts.block_states,
            f"--optim {setup.optim}, whose states are bitsandbytes'",
        ),
    ):
        if there:
            raise ConfigError(
                f"{what} is not priced together with {several} yet, and memest does not guess: "
                "leave one of them out."
            )


def check_adapter(setup: Setup) -> None:
    """What adapters and quantised bases exclude.

    Raises:
        ConfigError: a combination that no run has.
    """
    if setup.adapter is not None and setup.master_weights:
        raise ConfigError(
            "--master-weights and adapters exclude each other: peft trains float32 adapters beside "
            "half-precision weights. Drop --master-weights."
        )
    if setup.quantization is None:
        return
    if setup.adapter is None and setup.loop is Loop.TRAINER and setup.optim != "none":
        raise ConfigError(
            "A quantised base is frozen, and the Trainer refuses to train it alone: add adapters, "
            "for example --lora-r 16."
        )
    if setup.master_weights:
        raise ConfigError(
            "--master-weights needs weights that train, and a quantised base is frozen."
        )


def check_optimizer(setup: Setup) -> None:
    """What belongs to the optimizer must be what it takes.

    Raises:
        ConfigError: an argument that it has not, or targets that it needs or cannot use.
    """
    decay = setup.weight_decay
    if decay is not None and not 0 <= decay < math.inf:
        raise ConfigError(
            f"--weight-decay {decay} is out of range: it must be a finite number, 0 or more."
        )
    read_arguments(setup.optim, setup.optim_args)
    if setup.steps_in_backward:
        _in_backward(setup)
    targets, needed = setup.optim_target_modules, facts_of(setup.optim).targets
    if needed and not targets:
        raise ConfigError(
            f"--optim {setup.optim} needs to know which linear layers it projects: add "
            "--optim-target-modules all-linear, or a regular expression for their names."
        )
    if targets and not needed:
        raise ConfigError(
            f"--optim-target-modules has no meaning with --optim {setup.optim}: it belongs to "
            "GaLore and APOLLO."
        )
    for pattern in [targets] if isinstance(targets, str) else targets:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"--optim-target-modules {pattern!r} is not a regular expression: {error}."
            ) from None


def check_evaluation(setup: Setup) -> None:
    """An evaluation is the Trainer's, and there must be one for what is said of it.

    Raises:
        ConfigError: it is not, or there is none.
    """
    for name in ("eval_samples", "eval_accumulation_steps"):
        if getattr(setup, name) is not None and setup.eval_batch is None:
            flag = f"--{name.replace('_', '-')} {getattr(setup, name)}"
            raise ConfigError(f"{flag} says something of an evaluation: add --eval-batch 8.")
    if setup.eval_batch is not None and setup.loop is not Loop.TRAINER:
        raise ConfigError(
            f"--eval-batch {setup.eval_batch} is for the Trainer's evaluation, and --loop "
            f"{setup.loop} evaluates as its script does, which memest does not know."
        )


def _in_backward(setup: Setup) -> None:
    """What does not go together with an optimizer that steps in backward.

    Raises:
        ConfigError: there is such an option.
    """
    name = f"--optim {setup.optim}"
    if setup.optim_in_backward:
        if setup.optim == "none" or facts_of(setup.optim).layerwise:
            raise ConfigError(
                f"--optim-in-backward has no meaning with {name}: "
                + ("there is no optimizer." if setup.optim == "none" else "it does so anyway.")
            )
        if facts_of(setup.optim).targets or setup.optim in ("muon", "adam_mini"):
            raise ConfigError(
                f"--optim-in-backward is for optimizers that see one parameter at a time, and "
                f"{name} is none: take galore_adamw_layerwise, apollo_adamw_layerwise, or adamw."
            )
        name += " --optim-in-backward"
    if setup.grad_accum > 1 and not setup.may_accumulate:
        raise ConfigError(
            f"{name} cannot accumulate: gradients are used and dropped in backward (the Trainer "
            f"refuses it too). Drop --grad-accum {setup.grad_accum}."
        )
    if setup.precision is Precision.FP16:
        raise ConfigError(
            f"{name} and --fp16 exclude each other: the gradient scaler finds no gradients left to "
            "unscale. Use --bf16."
        )
    if setup.master_weights:
        raise ConfigError(f"{name} updates the weights themselves: drop --master-weights.")
