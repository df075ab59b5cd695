"""What does not go together in a setup, in words that say what to change."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from memest.distributed import Strategy
from memest.errors import ConfigError
from memest.kinds import Dtype, Loop, Precision
from memest.optimizer_names import facts_of, read_arguments
from memest.quantization import Format
from memest.refusals import refuse_beside

if TYPE_CHECKING:
    from memest.setup import Setup

__all__ = [
    "check_adapter", "check_built_dtype", "check_evaluation", "check_optimizer", "check_spread",
]  # fmt: skip


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
    pairs = (
        (setup.steps_in_backward, f"an optimizer that steps in backward (--optim {setup.optim})"),
        (
            shards and facts.by_module and not facts.block_states,
            f"--optim {setup.optim}, which asks which module owns a weight",
        ),
    )
    refuse_beside(several, pairs)
    _check_block_states(setup)
    check_sharded_base(setup)


def _check_block_states(setup: Setup) -> None:
    """Bitsandbytes' optimizers take ordinary tensors on the device, and nothing else.

    FSDP1 and DeepSpeed give them such: flat parameters, pieces of them, float32 partitions.

    Raises:
        ConfigError: the first update would stop.
    """
    spread = setup.distributed
    if not facts_of(setup.optim).block_states:
        return
    if spread.strategy is Strategy.FSDP and spread.fsdp_version == 2:
        raise ConfigError(
            f"--optim {setup.optim} and --fsdp {spread.fsdp} exclude each other: FSDP2's "
            "parameters are DTensors, for which bitsandbytes' kernels have no sharding strategy, "
            "so the first update stops. Use --fsdp-version 1 or --zero 2, whose optimizers have "
            "ordinary tensors, or --optim adamw_torch_8bit of torchao."
        )
    if spread.strategy is Strategy.FSDP and spread.fsdp_offload:
        raise ConfigError(
            f"--optim {setup.optim} is not priced together with --fsdp-offload, where it would "
            "update in host memory: leave one of them out."
        )
    if spread.offload_optimizer:
        raise ConfigError(
            f"--optim {setup.optim} is not priced together with --offload-optimizer: DeepSpeed "
            "offloads its own optimizers alone unless zero_force_ds_cpu_optimizer is off. Leave "
            "one of them out."
        )


def check_sharded_base(setup: Setup) -> None:
    """Quantised bases that the libraries cannot shard, or that are not modelled.

    Raises:
        ConfigError: such a pair, with whose reason it is.
    """
    base, spread = setup.quantization, setup.distributed
    shards = spread.zero == 3 or spread.strategy is Strategy.FSDP
    if base is None or not (shards or spread.zero):
        return
    several = f"--zero {spread.zero}" if spread.zero else f"--fsdp {spread.fsdp}"
    if shards and base.format is Format.BNB_8BIT:
        why = _WHOLE_BESIDE if spread.zero else _SCALES_ON_WEIGHT
        raise ConfigError(
            f"{several} and --load-in-8bit exclude each other: {why} Use "
            "--load-in-4bit, or --zero 2 or DDP, which leave frozen weights as they are."
        )
    if shards and base.format.packed:
        raise ConfigError(
            f"A {base.words} is not priced together with {several}: packed words and scales are "
            "buffers of their layers, which DeepSpeed and FSDP leave whole on every GPU, so next "
            "to nothing would be sharded. Take --zero 2 or DDP, which hold the same."
        )
    _check_storage(setup, several)
    if spread.zero:
        return
    if spread.fsdp_version == 1 and base.quant_storage == "uint8":
        half = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}.get(setup.precision)
        raise ConfigError(
            f"{several} of --fsdp-version 1 cannot flatten 4-bit weights that are stored as uint8 "
            '(torch: "Cannot flatten integer dtype tensors"). Add --bnb-4bit-quant-storage '
            f"{half or 'with the dtype of the other weights, for example bfloat16'}."
        )
    if setup.loop is Loop.PLAIN and base.quant_storage == "uint8":
        raise ConfigError(
            f"{several} with --loop plain cannot shard 4-bit weights that are stored as uint8: "
            "their state does not survive fully_shard. Add --bnb-4bit-quant-storage bfloat16."
        )


def check_built_dtype(setup: Setup) -> None:
    """Half weights under stage 3 of a run that does not compute in half precision.

    Not a rule of every setup: what is traced for half precision has half weights and none.
    Source: ``InsertPostInitMethodToModuleSubClasses._set_dtype`` of DeepSpeed 0.19.8.

    Raises:
        ConfigError: ``zero.Init`` would make other weights than were asked for.
    """
    if not setup.is_built_in_parts or setup.computes_in_half or not setup.dtype.is_half:
        return
    flag = "--bf16" if setup.dtype is Dtype.BFLOAT16 else "--fp16"
    raise ConfigError(
        f"--dtype {setup.dtype} and --zero 3 exclude each other without {flag}: zero.Init makes "
        f"float32 weights where DeepSpeed computes in float32. Add {flag}, or leave --dtype out."
    )


_SCALES_ON_WEIGHT = (
    "the scales of LLM.int8 hang on the weight object, which sharding replaces (Int8Params of "
    "bitsandbytes)."
)
_WHOLE_BESIDE = (
    "layers of LLM.int8 keep the int8 numbers beside the parameter (MatmulLtState of "
    "bitsandbytes), whole on every GPU, so partitions and what is gathered of them come on top of "
    "the whole."
)


def _check_storage(setup: Setup, several: str) -> None:
    """Packed bytes in a floating dtype are cast with the other weights, values and all.

    Source: ``MixedPrecisionPolicy`` of FSDP2; ``DeepSpeedEngine._cast_module_mixed_precision`` of
    DeepSpeed 0.19.8, which casts every parameter of a floating dtype.

    Raises:
        ConfigError: the storage has another dtype than the run computes in.
    """
    base = setup.quantization
    half = {Precision.BF16: "bfloat16", Precision.FP16: "float16"}.get(setup.precision)
    if base is None or base.format is not Format.BNB_4BIT or not setup.computes_in_half:
        return
    if base.quant_storage in ("uint8", half):
        return
    does = f"DeepSpeed would cast every floating parameter to {half}, the packed bytes too"
    if setup.distributed.strategy is Strategy.FSDP:
        does = f"FSDP would cast the packed bytes to {half} before it gathers them"
    raise ConfigError(
        f"--bnb-4bit-quant-storage {base.quant_storage} and --{setup.precision} exclude each "
        f"other under {several}: {does}. Use --bnb-4bit-quant-storage {half}."
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
    if setup.eval_batch is not None and setup.distributed.pp > 1:
        raise ConfigError(
            f"--eval-batch {setup.eval_batch} and --pp {setup.distributed.pp} exclude each other: "
            "it is for the Trainer's evaluation, and neither the Trainer nor accelerate has "
            "pipelines. Scripts that run torch's schedules evaluate in ways of their own, which "
            "memest does not know: leave one of them out."
        )
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
