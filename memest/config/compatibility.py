"""What does not go together in a setup, in words that say what to change.

Here are the rules that compute something; pairs that are refused as they are stand in
:mod:`memest.config.pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from memest.config.generation import check_generation
from memest.config.kinds import (
    SDPA,
    Dtype,
    Loop,
    Precision,
    SdpaBackend,
    Strategy,
    ZeroGradAt,
)
from memest.config.optimizers import check_since, facts_of, typed_arguments
from memest.config.option import check_pattern
from memest.config.pairs import refuse_pairs
from memest.config.parallel_compatibility import check_parallel
from memest.config.quantization import Format
from memest.config.training_run import TrainingRun
from memest.errors import ConfigError

__all__ = [
    "FP16_REFUSAL",
    "check",
    "check_built_dtype",
    "check_scaled",
    "check_stored",
    "reader_of_head",
]

FP16_REFUSAL = (
    "--fp16 with float16 weights cannot train: the gradient scaler refuses fp16 gradients. Use "
    "--dtype float32 (autocast), or --master-weights without --fp16 for half weights with fp32 "
    "copies."
)
_STORED_REFUSAL = (
    "--fp16 with float16 weights cannot train: {} is stored in float16, from_pretrained of "
    "transformers 5 loads weights in the dtype of the checkpoint where none is named, and the "
    "gradient scaler refuses fp16 gradients. Use --dtype float32 (in a script dtype=torch.float32 "
    "in the call of from_pretrained, in a configuration dtype: float32): autocast computes in fp16 "
    "all the same."
)


def check(setup: TrainingRun) -> None:
    """Refuse what does not go together, is not priced together, or does not run.

    Raises:
        ConfigError: such options.
    """
    for rule in (
        _check_loop,
        _check_optimizer,
        _check_evaluation,
        _check_base,
        check_parallel,
        _check_wrapped,
        _check_losses,
        _check_method,
        _check_precision,
    ):
        rule(setup)
    if setup.generation is not None:
        check_generation(setup.distributed)
    if setup.torch_compile:
        refuse_pairs(setup, "--torch-compile", "compile")
    if setup.checkpointing == "selective":
        refuse_pairs(setup, "--checkpointing selective", "selective")


def _check_loop(setup: TrainingRun) -> None:
    """What a script alone can do."""
    if setup.loop is Loop.LIGHTNING:
        refuse_pairs(setup, "--loop lightning", "lightning")
    if setup.loop is not Loop.TRAINER:
        return
    if setup.zero_grad_at is not ZeroGradAt.AFTER_STEP:
        raise ConfigError(
            f"--zero-grad-at {setup.zero_grad_at} is a matter of scripts: the Trainer drops "
            "gradients after the step. Add --loop plain or --loop accelerate."
        )
    if setup.del_outputs:
        raise ConfigError(
            "--del-outputs is a matter of scripts: the Trainer's outputs are gone before its "
            "backward. Add --loop plain or --loop accelerate, or leave it out."
        )


def _check_optimizer(setup: TrainingRun) -> None:
    """What belongs to the optimizer must be what it takes."""
    decay = setup.weight_decay
    if decay is not None and not 0 <= decay < math.inf:
        raise ConfigError(
            f"--weight-decay {decay} is out of range: it must be a finite number, 0 or more."
        )
    typed_arguments(setup.optimizer, setup.optim_args)
    check_since(setup.optimizer, setup.software.torch, in_backward=setup.steps_in_backward)
    if setup.steps_in_backward:
        _in_backward(setup)
    targets, needs_targets = setup.optim_target_modules, facts_of(setup.optimizer).targets
    if needs_targets and not targets:
        raise ConfigError(
            f"--optim {setup.optimizer} needs to know which linear layers it projects: add "
            "--optim-target-modules all-linear, or a regular expression for their names."
        )
    if targets and not needs_targets:
        raise ConfigError(
            f"--optim-target-modules has no meaning with --optim {setup.optimizer}: it belongs to "
            "GaLore and APOLLO."
        )
    for pattern in [targets] if isinstance(targets, str) else targets:
        check_pattern("--optim-target-modules", pattern)


def _in_backward(setup: TrainingRun) -> None:
    """What does not go together with an optimizer that steps in backward."""
    name = f"--optim {setup.optimizer}"
    if setup.optim_in_backward:
        if setup.optimizer == "none" or facts_of(setup.optimizer).layerwise:
            raise ConfigError(
                f"--optim-in-backward has no meaning with {name}: "
                + ("there is no optimizer." if setup.optimizer == "none" else "it does so anyway.")
            )
        if facts_of(setup.optimizer).targets or setup.optimizer == "muon":
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


def _check_evaluation(setup: TrainingRun) -> None:
    """An evaluation is the Trainer's, and there must be one for what is said of it."""
    for name in ("eval_samples", "eval_accumulation_steps"):
        if getattr(setup, name) is not None and setup.eval_batch is None:
            flag = f"--{name.replace('_', '-')} {getattr(setup, name)}"
            raise ConfigError(f"{flag} says something of an evaluation: add --eval-batch 8.")
    if setup.eval_batch is not None and setup.distributed.pp > 1:
        raise ConfigError(
            f"An evaluation (--eval-batch, --with eval) and --pp {setup.distributed.pp} exclude "
            "each other: it is the Trainer's, and neither the Trainer nor accelerate has "
            "pipelines. Scripts that run torch's schedules evaluate in ways of their own, which "
            "memest does not know: leave one of them out."
        )
    if setup.eval_batch is not None and setup.loop is not Loop.TRAINER:
        raise ConfigError(
            f"An evaluation (--eval-batch, --with eval) is the Trainer's, and --loop {setup.loop} "
            "evaluates as its script does, which memest does not know: leave one of them out."
        )


def _check_base(setup: TrainingRun) -> None:
    """What adapters and quantised bases exclude."""
    refuse_pairs(setup, "--software", "peft")
    if setup.adapter is not None:
        refuse_pairs(setup, "adapters", "adapter")
    if setup.quantization is None:
        return
    if setup.adapter is None and setup.loop is Loop.TRAINER and setup.optimizer != "none":
        raise ConfigError(
            "A quantised base is frozen, and the Trainer refuses to train it alone: add adapters, "
            "for example --lora-r 16."
        )
    if setup.master_weights:
        raise ConfigError(
            "--master-weights needs weights that train, and a quantised base is frozen."
        )


def _check_wrapped(setup: TrainingRun) -> None:
    """A model that DDP, FSDP or DeepSpeed wraps."""
    strategy = setup.distributed.strategy
    if strategy is Strategy.NONE:
        return
    _check_fully_shard(setup)
    flags = {Strategy.DDP: "--num-gpus", Strategy.FSDP: "--fsdp", Strategy.ZERO: "--zero"}
    shards = ["shards"] if strategy is not Strategy.DDP else []
    refuse_pairs(setup, flags[strategy], "several", *shards)
    _check_block_states(setup)
    _check_sharded_base(setup)


_FULLY_SHARD_SINCE = (2, 4)
"""The first torch with ``fully_shard`` of whole parameters, as a prototype (its release notes)."""


def _check_fully_shard(setup: TrainingRun) -> None:
    """FSDP2 under a torch that had FSDP1 alone."""
    distributed, torch = setup.distributed, setup.software.torch
    is_fsdp2 = distributed.strategy is Strategy.FSDP and distributed.fsdp_version == 2
    if is_fsdp2 and torch is not None and torch < _FULLY_SHARD_SINCE:
        raise ConfigError(
            f"--fsdp {distributed.fsdp} is FSDP2, and torch {torch[0]}.{torch[1]} had no "
            f"fully_shard yet (from {_FULLY_SHARD_SINCE[0]}.{_FULLY_SHARD_SINCE[1]} on): what ran "
            "then was FullyShardedDataParallel. Add --fsdp-version 1."
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


def _check_block_states(setup: TrainingRun) -> None:
    """Bitsandbytes' optimizers take ordinary tensors on the device, and nothing else.

    FSDP1 and DeepSpeed give them such: flat parameters, pieces of them, float32 partitions.
    """
    distributed = setup.distributed
    if not facts_of(setup.optimizer).block_states:
        return
    if distributed.strategy is Strategy.FSDP and distributed.fsdp_version == 2:
        raise ConfigError(
            f"--optim {setup.optimizer} and --fsdp {distributed.fsdp} exclude each other: FSDP2's "
            "parameters are DTensors, for which bitsandbytes' kernels have no sharding strategy, "
            "so the first update stops. Use --fsdp-version 1 or --zero 2, whose optimizers have "
            "ordinary tensors, or --optim adamw_torch_8bit of torchao."
        )
    if distributed.strategy is Strategy.FSDP and distributed.fsdp_offload:
        raise ConfigError(
            f"--optim {setup.optimizer} is not priced together with --fsdp-offload, where it would "
            "update in host memory: leave one of them out."
        )
    if distributed.offload_optimizer:
        raise ConfigError(
            f"--optim {setup.optimizer} is not priced together with --offload-optimizer: DeepSpeed "
            "offloads its own optimizers alone unless zero_force_ds_cpu_optimizer is off. Leave "
            "one of them out."
        )


def _check_sharded_base(setup: TrainingRun) -> None:
    """Quantised bases that the libraries cannot shard, or that are not modelled."""
    base, distributed = setup.quantization, setup.distributed
    shards = distributed.zero == 3 or distributed.strategy is Strategy.FSDP
    if base is None or not (shards or distributed.zero):
        return
    sharding_flag = (
        f"--zero {distributed.zero}" if distributed.zero else f"--fsdp {distributed.fsdp}"
    )
    if shards and base.format is Format.BNB_8BIT:
        why = _WHOLE_BESIDE if distributed.zero else _SCALES_ON_WEIGHT
        raise ConfigError(
            f"{sharding_flag} and --load-in-8bit exclude each other: {why} Use "
            "--load-in-4bit, or --zero 2 or DDP, which leave frozen weights as they are."
        )
    if shards and base.format.packed:
        raise ConfigError(
            f"A {base.words} is not priced together with {sharding_flag}: packed words and scales "
            "are buffers of their layers, which DeepSpeed and FSDP leave whole on every GPU, so "
            "next to nothing would be sharded. Take --zero 2 or DDP, which hold the same."
        )
    _check_storage(setup, sharding_flag)
    if distributed.zero:
        return
    if distributed.fsdp_version == 2 and distributed.fsdp_cpu_ram_efficient_loading:
        raise ConfigError(
            "--fsdp-cpu-ram-efficient-loading and a 4-bit base exclude each other under FSDP2, "
            "where accelerate loads it on every GPU: drop one of them, or add --fsdp-version 1."
        )
    if distributed.fsdp_version == 1 and base.quant_storage == "uint8":
        half = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}.get(setup.precision)
        raise ConfigError(
            f"{sharding_flag} of --fsdp-version 1 cannot flatten 4-bit weights that are stored as "
            'uint8 (torch: "Cannot flatten integer dtype tensors"). Add --bnb-4bit-quant-storage '
            f"{half or 'with the dtype of the other weights, for example bfloat16'}."
        )
    if setup.loop is Loop.PLAIN and base.quant_storage == "uint8":
        raise ConfigError(
            f"{sharding_flag} with --loop plain cannot shard 4-bit weights that are stored as "
            "uint8: their state does not survive fully_shard. Add --bnb-4bit-quant-storage "
            "bfloat16."
        )


def _check_storage(setup: TrainingRun, sharding_flag: str) -> None:
    """Packed bytes in a floating dtype are cast with the other weights, values and all.

    Source: ``MixedPrecisionPolicy`` of FSDP2; ``DeepSpeedEngine._cast_module_mixed_precision`` of
    DeepSpeed 0.19.8, which casts every parameter of a floating dtype.
    """
    base = setup.quantization
    half = {Precision.BF16: "bfloat16", Precision.FP16: "float16"}.get(setup.precision)
    if base is None or base.format is not Format.BNB_4BIT or not setup.computes_in_half:
        return
    if base.quant_storage in ("uint8", half):
        return
    effect = f"DeepSpeed would cast every floating parameter to {half}, the packed bytes too"
    if setup.distributed.strategy is Strategy.FSDP:
        effect = f"FSDP would cast the packed bytes to {half} before it gathers them"
    raise ConfigError(
        f"--bnb-4bit-quant-storage {base.quant_storage} and --{setup.precision} exclude each "
        f"other under {sharding_flag}: {effect}. Use --bnb-4bit-quant-storage {half}."
    )


def check_built_dtype(setup: TrainingRun) -> None:
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


def check_stored(setup: TrainingRun, dtype: str, model: str) -> None:
    """:func:`check` for the dtype that the checkpoint has, which is loaded where none is named.

    Source: ``_get_dtype`` of transformers 5.23 (``modeling_utils.py``), where ``"auto"`` is the
    default: the ``dtype`` of the configuration.

    Args:
        setup: of the run.
        dtype: of all weights, as torch spells it.
        model: its name.

    Raises:
        ConfigError: the gradient scaler would refuse their gradients.
    """
    if (
        setup.loaded_dtype is Dtype.AUTO
        and dtype == Dtype.FLOAT16
        and setup.optimizer != "none"
        and _is_scaled_in_half(setup)
    ):
        raise ConfigError(_STORED_REFUSAL.format(model))


def check_scaled(setup: TrainingRun, dtypes: Iterable[str]) -> None:
    """Gradients that the gradient scaler of ``--fp16`` has no kernel for.

    Source: ``_amp_non_finite_check_and_unscale_cuda_`` of torch 2.13
    (``ATen/native/cuda/AmpKernels.cu``), which takes float32, float64 and float16.

    Args:
        setup: of the run.
        dtypes: of the weights that get gradients.

    Raises:
        ConfigError: one of them is bfloat16.
    """
    scales = setup.precision is Precision.FP16 and setup.optimizer != "none"
    if scales and not setup.computes_in_half and "bfloat16" in dtypes:
        raise ConfigError(
            "--fp16 with bfloat16 weights that train stops at the first update: the gradient "
            "scaler has no kernel for their gradients (torch: "
            "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'). "
            "Add --dtype float32 (what a configuration says is taken unless another is named), or "
            "use --bf16."
        )


def reader_of_head(setup: TrainingRun) -> str:
    """The option whose loss reads the head's weight; "" for none.

    torchtune's losses call the head, piece by piece.
    """
    if setup.use_liger_kernel:
        return "--use-liger-kernel"
    if setup.fused_loss and not setup.fused_loss.startswith("torchtune"):
        return setup.fused_loss_flag
    if setup.scores_by_fused_head:
        return f"--method {setup.method}"
    return ""


def _check_losses(setup: TrainingRun) -> None:
    """Losses that multiply by the head's weight and leave the head uncalled.

    Liger's loss, TRL's and cut cross-entropy read ``lm_head.weight`` in the forward of the whole
    model. Hooks that gather parameters are the modules' own, so it matters whose hooks gather the
    head's.

    Sources: ``_find_final_norm`` of accelerate 1.15, torchtune's
    ``recipes/full_finetune_distributed.py`` at April 2026. ZeRO-3 gathers what is read
    (``ZeROOrderedDict`` of DeepSpeed, ``runtime/zero/parameter_offload.py``).
    """
    distributed, fused_loss = setup.distributed, setup.fused_loss
    if fused_loss:
        refuse_pairs(setup, "--fused-loss", "fused")
    reader = reader_of_head(setup)
    flag = reader or setup.fused_loss_flag
    if not (reader or fused_loss):
        return
    if distributed.zero == 3 and not reader:
        raise ConfigError(
            f"{flag} and --zero 3 are not priced together: torchtune's recipes shard by FSDP2 and "
            "have no DeepSpeed. Leave one of them out: without --fused-loss all logits are priced, "
            "and the losses of TRL, --fused-loss trl-fused, go with --zero 3."
        )
    if fused_loss and (distributed.pp > 1 or distributed.shares_model):
        sharing_flag = "--pp" if distributed.pp > 1 else "--tp" if distributed.tp > 1 else "--ep"
        raise ConfigError(
            f"{flag} is not priced together with {sharing_flag}, whose ranks have parts of the "
            "model, and memest does not guess: leave one of them out."
        )
    if distributed.strategy is not Strategy.FSDP:
        return
    if fused_loss and not reader:
        raise ConfigError(
            f"{flag} and --fsdp {distributed.fsdp} are not priced together yet: "
            "torchtune's recipes compute the loss behind the model's forward, where FSDP's hooks "
            "are past. Leave one of them out: without --fused-loss all logits are priced."
        )
    adapts = setup.adapter is not None and distributed.fsdp_version == 2
    if adapts and setup.loop is not Loop.PLAIN and not setup.head_is_gathered_by_loss:
        consequence = "the loss has a DTensor of shards, which is not priced"
        if setup.use_liger_kernel:
            consequence = "Liger multiplies by shards, and torch stops (mixed Tensor and DTensor)"
        elif fused_loss.startswith("trl"):
            consequence = "whether TRL gathers it depends on its release (1.13 does, 1.5 does not)"
        raise ConfigError(
            f"{flag} does not go with an adapter under FSDP2 of accelerate and the Trainer: "
            "accelerate does not find the final norm of a model with adapters and makes the head "
            f"a unit of its own, which is not gathered where nobody calls it; {consequence}. Use "
            f"--fsdp-version 1, --zero 2, or leave {flag.partition(' ')[0]} out."
        )


def _check_method(setup: TrainingRun) -> None:
    """What TRL's other trainers do not do, or nobody compared.

    Sources: ``DPOTrainer.__init__``, ``KTOTrainer.__init__``, ``RewardTrainer.__init__`` of TRL
    1.16, ``prepare_fsdp`` and ``prepare_deepspeed`` of its ``models/utils.py``.
    """
    group = "supervised" if setup.method.is_supervised else "method"
    refuse_pairs(setup, f"--method {setup.method}", group)


def _is_scaled_in_half(setup: TrainingRun) -> bool:
    """Whether the gradient scaler meets gradients of half weights as they are loaded."""
    return (
        setup.precision is Precision.FP16
        and (setup.adapter is None or not setup.adapter.autocast_adapter_dtype)
        and (not setup.master_weights and setup.loop is not Loop.PLAIN)
        and "trainable=float32" not in setup.cast_weights
        and not setup.distributed.in_half
        and not setup.trains_in_full
    )


def _check_precision(setup: TrainingRun) -> None:
    """Dtypes, and kernels that are asked for by name."""
    if setup.max_grad_norm is not None and not 0 <= setup.max_grad_norm < math.inf:
        raise ConfigError(
            f"--max-grad-norm {setup.max_grad_norm} is out of range: it must be a finite "
            "number, 0 or more."
        )
    if setup.dtype is Dtype.FLOAT16 and _is_scaled_in_half(setup):
        raise ConfigError(FP16_REFUSAL)
    shares_weights = setup.distributed.shares_model or setup.distributed.pp > 1
    if setup.cast_weights and (
        shares_weights
        or setup.distributed.strategy in (Strategy.FSDP, Strategy.ZERO)
        or setup.master_weights
    ):
        raise ConfigError(
            "--cast-weights is not priced beside --fsdp, --zero, --tp, --ep, --pp or "
            "--master-weights, which settle the dtype of weights themselves: leave it out."
        )
    if setup.master_weights and setup.precision is not Precision.FP32:
        raise ConfigError(
            f"--master-weights and --{setup.precision} exclude each other: master weights "
            "belong to half-precision weights without autocast. Drop one of them."
        )
    if setup.master_weights and setup.loaded_dtype is Dtype.FLOAT32:
        raise ConfigError(
            "--master-weights needs half-precision weights: add --dtype bfloat16 or --dtype "
            "float16."
        )
    if setup.sdpa_backend is not SdpaBackend.AUTO and setup.attn_implementation not in SDPA:
        raise ConfigError(
            f"--sdpa-backend {setup.sdpa_backend} has no meaning with --attn-implementation "
            f"{setup.attn_implementation}: use --attn-implementation sdpa."
        )
