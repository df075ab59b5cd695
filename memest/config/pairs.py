"""Pairs of options that exclude each other, or are not priced together: one table of them.

Rules that compute what they say stand in :mod:`memest.config.compatibility`.

Sources: ``ParallelismConfig``, ``_attach_context_parallel_hooks``, ``_prepare_deepspeed`` and
``DeepSpeedSequenceParallelConfig`` of accelerate 1.15; ``DistributedConfig`` and
``Trainer._prepare_context_parallel_inputs`` of transformers 5.23, whose
``enable_sequence_parallel`` is not wired up; the styles of ``torch.distributed.tensor.parallel``.
"""

from __future__ import annotations

import functools

from memest.config.kinds import (
    SDPA,
    Attention,
    Fsdp,
    LogProbs,
    Loop,
    Precision,
    Schedule,
    Strategy,
    ZeroGrad,
    ZeroGradAt,
)
from memest.config.method_pairs import METHOD_PAIRS
from memest.config.optimizers import facts_of
from memest.config.pair import Pair
from memest.config.quantization import Format
from memest.config.training_run import TrainingRun
from memest.errors import ConfigError

__all__ = ["refuse_pairs"]


def _another_adapter(s: TrainingRun) -> bool:
    return s.adapter is not None and s.adapter.method != "lora"


def _asks_for_modules(s: TrainingRun) -> bool:
    return facts_of(s.optimizer).by_module


def _is_4bit(s: TrainingRun) -> bool:
    return s.quantization is not None and s.quantization.format is Format.BNB_4BIT


def _before_peft(s: TrainingRun, minor: int) -> bool:
    return s.software.peft is not None and s.software.peft < (0, minor)


_STEPS_IN_BACKWARD = "an optimizer that steps in backward (--optim {s.optimizer})"
_BY_MODULE = "--optim {s.optimizer}, which asks which module owns a weight"
_FUSED_LOSS = "a fused loss ({s.fused_loss})"

_PAIRS = (
    *METHOD_PAIRS,
    Pair(
        "cp",
        "--cp {s.distributed.cp} and --zero {s.distributed.zero}",
        lambda s: s.distributed.zero,
        "under DeepSpeed accelerate shares sequences by Ulysses (sp_size)",
        "Write --sp {s.distributed.cp} in place of --cp, or --fsdp full_shard in place of --zero.",
    ),
    Pair(
        "cp",
        "--cp {s.distributed.cp} and --fsdp-version 1",
        lambda s: s.distributed.flattens,
        "accelerate's ParallelismConfig takes version 2 alone",
        "Drop --fsdp-version.",
    ),
    Pair(
        "cp",
        "--cp {s.distributed.cp} and --attn-implementation {s.attn_implementation}",
        lambda s: s.attn_implementation not in SDPA,
        "ring attention stands behind scaled_dot_product_attention",
        "Write --attn-implementation sdpa.",
    ),
    Pair(
        "sp",
        "--sp {s.distributed.sp} and --cp {s.distributed.cp}",
        lambda s: s.distributed.cp > 1,
        "accelerate's ParallelismConfig shares sequences in one way, by Ulysses under DeepSpeed "
        "(--sp) or by ring attention under FSDP2 (--cp)",
        "Drop one of them.",
    ),
    Pair(
        "sp",
        "--sp {s.distributed.sp} and --attn-implementation eager",
        lambda s: s.attn_implementation is Attention.EAGER,
        "accelerate and DeepSpeed refuse it, because it would need a mask of the whole sequence",
        "Write --attn-implementation sdpa or flash_attention_2.",
    ),
    Pair(
        "pp",
        "--fsdp-version 1 and --pp {s.distributed.pp}",
        lambda s: s.distributed.flattens,
        "torch's PipelineStage reduces the gradients of fully_shard's modules and of DDP, and "
        "knows no other",
        "Use --fsdp-version 2.",
    ),
    Pair(
        "fused",
        "{s.fused_loss_flag} and --use-liger-kernel",
        lambda s: s.use_liger_kernel and s.fused_loss == "trl-fused",
        "TRL then applies Liger without its loss, which is not priced",
        "Drop one of them.",
    ),
    Pair(
        "fused",
        "{s.fused_loss_flag} and --use-liger-kernel",
        lambda s: s.use_liger_kernel,
        "Liger replaces the loss by its own",
        "Drop one of them.",
    ),
    Pair(
        "fused",
        "{s.fused_loss_flag} and --torch-compile",
        lambda s: s.torch_compile,
        "its kernels are compiled with the graph",
        "Drop one of them.",
    ),
    Pair(
        "fused",
        "{s.fused_loss_flag} and --eval-samples",
        lambda s: s.eval_samples is not None,
        "it makes no logits to keep",
        "Drop one of them.",
    ),
    Pair(
        "adapter",
        "--master-weights and adapters",
        lambda s: s.master_weights,
        "peft trains float32 adapters beside half-precision weights",
        "Drop --master-weights.",
    ),
    Pair(
        "lightning",
        "--zero-grad-at {s.zero_grad_at} and --loop lightning",
        lambda s: s.zero_grad_at is not ZeroGradAt.AFTER_STEP,
        "Lightning drops gradients before each step's first backward",
        "Drop --zero-grad-at.",
    ),
    Pair(
        "lightning",
        "--del-outputs and --loop lightning",
        lambda s: s.del_outputs,
        "what training_step names is gone before backward",
        "Drop --del-outputs.",
    ),
    Pair(
        "lightning",
        "a model on several GPUs other than by DDP",
        lambda s: (
            s.distributed.strategy not in (Strategy.NONE, Strategy.DDP)
            or s.distributed.shares_model
            or s.distributed.pp > 1
        ),
        "Lightning's strategies wrap and cast in ways of their own",
    ),
    Pair(
        "lightning",
        "--ddp-find-unused-parameters",
        lambda s: s.distributed.ddp_find_unused_parameters,
        "DDP wraps training_step, and copies what that returns",
    ),
    Pair(
        "lightning",
        "--max-grad-norm {s.max_grad_norm} with --fp16 and a fused optimizer",
        lambda s: s.precision is Precision.FP16 and s.max_grad_norm and "fused" in s.optimizer,
        "Lightning refuses to clip what a fused optimizer unscales itself",
        "Write --optim adamw_torch, or --bf16.",
    ),
    Pair("lightning", "--torch-compile", lambda s: s.torch_compile),
    Pair("lightning", _STEPS_IN_BACKWARD, lambda s: s.steps_in_backward),
    Pair(
        "lightning",
        "saving, resuming and host memory (--with, --host-memory)",
        lambda s: s.life is not None and s.life.is_asked,
    ),
    Pair("model", "--zero", lambda s: s.distributed.zero),
    Pair(
        "tp",
        "data parallelism ({s.distributed.data_ranks} copies of the model, without --fsdp)",
        lambda s: s.distributed.data_ranks > 1 and s.distributed.fsdp is Fsdp.NONE,
    ),
    Pair("pp at-load", "--fsdp-offload", lambda s: s.distributed.fsdp_offload),
    Pair(
        "ep",
        "--fsdp under --loop {s.loop}",
        lambda s: (
            s.distributed.fsdp is not Fsdp.NONE
            and s.distributed.pp == 1
            and s.loop is not Loop.PLAIN
        ),
    ),
    Pair("ep pp", "--fsdp-shard-size", lambda s: s.distributed.fsdp_shard_size is not None),
    Pair("pp", "--ddp-find-unused-parameters", lambda s: s.distributed.ddp_find_unused_parameters),
    Pair("ep pp", "--fsdp-wrap-ends", lambda s: s.distributed.fsdp_wrap_ends),
    Pair(
        "ep at-load",
        "--fsdp {s.distributed.fsdp}",
        lambda s: s.distributed.fsdp not in (Fsdp.NONE, Fsdp.FULL_SHARD),
    ),
    Pair("shared-model", "--fsdp-version 1", lambda s: s.distributed.fsdp_version == 1),
    Pair("ep at-load", "--fsdp-wrap", lambda s: s.distributed.fsdp_wrap),
    Pair("ep", "--fsdp-offload", lambda s: s.distributed.fsdp_offload),
    Pair("cp sp", "--tp {s.distributed.tp}", lambda s: s.distributed.tp > 1),
    Pair("tp-sequence", "--ep {s.distributed.ep}", lambda s: s.distributed.ep > 1),
    Pair("policy", "--cp {s.distributed.cp}", lambda s: s.distributed.cp > 1),
    Pair("policy", "--ep {s.distributed.ep}", lambda s: s.distributed.ep > 1),
    Pair("cp sp tp-sequence policy", "--pp {s.distributed.pp}", lambda s: s.distributed.pp > 1),
    Pair("ep", "--ep {s.distributed.ep}", lambda s: s.distributed.pp > 1),
    Pair("sp", "--ep {s.distributed.ep}", lambda s: s.distributed.ep > 1),
    Pair("several", _STEPS_IN_BACKWARD, lambda s: s.steps_in_backward),
    Pair("model", _BY_MODULE, _asks_for_modules),
    Pair(
        "shards",
        _BY_MODULE,
        lambda s: _asks_for_modules(s) and not facts_of(s.optimizer).block_states,
    ),
    Pair(
        "shared-model",
        "--optim {s.optimizer}, whose states are bitsandbytes'",
        lambda s: facts_of(s.optimizer).block_states,
    ),
    Pair(
        "pp",
        "--fp16 (gradient scaling, of which torch's schedules know nothing)",
        lambda s: s.precision is Precision.FP16,
    ),
    Pair("tp-sequence", "--fp16", lambda s: s.precision is Precision.FP16),
    # torch's _foreach_zero_ refuses sharded gradients beside whole ones
    Pair("shared-model", "--zero-grad zero", lambda s: s.zero_grad is ZeroGrad.ZERO),
    Pair("model sp", "an adapter other than LoRA", _another_adapter),
    Pair(
        "at-load",
        "an adapter under --loop {s.loop}",
        lambda s: s.adapter is not None,
        "peft puts it into a model that is sharded, where it stays whole on every GPU",
    ),
    Pair("ep tp-sequence", "an adapter", lambda s: s.adapter is not None),
    Pair(
        "policy",
        "an adapter",
        # verl's, under FSDP2, was checked
        lambda s: (
            s.adapter is not None
            and (s.log_probs is not LogProbs.VERL or s.distributed.fsdp_version == 1)
        ),
    ),
    Pair(
        "at-load",
        "--grad-accum {s.grad_accum} of the Trainer with --fsdp-shard-size",
        lambda s: s.loop is Loop.TRAINER and s.grad_accum > 1 and s.distributed.num_copies > 1,
        "what each copy has reduced waits for the last micro-batch (set_requires_all_reduce)",
    ),
    Pair(
        "policy",
        "--grad-accum {s.grad_accum} of the Trainer",
        lambda s: s.loop is Loop.TRAINER and s.grad_accum > 1,
        "gradients wait whole and in float32 for the last micro-batch",
    ),
    Pair("model policy", "a quantised base", lambda s: s.quantization is not None),
    Pair(
        "sp",
        "a quantised base that is not bitsandbytes' 4-bit one (--load-in-4bit)",
        lambda s: s.quantization is not None and s.quantization.format is not Format.BNB_4BIT,
    ),
    Pair(
        "ep",
        "an evaluation (--eval-batch, --with eval)",
        lambda s: s.eval_batch is not None,
    ),
    Pair("model", _STEPS_IN_BACKWARD, lambda s: s.steps_in_backward),
    Pair("cp sp tp-sequence", "--generate", lambda s: s.generation is not None),
    Pair("model cp sp", "--use-liger-kernel", lambda s: s.use_liger_kernel),
    Pair("cp sp tp-sequence", _FUSED_LOSS, lambda s: s.fused_loss),
    Pair("cp sp tp-sequence", "--torch-compile", lambda s: s.torch_compile),
    Pair(
        "model cp sp compile",
        "--neftune-noise-alpha",
        lambda s: s.neftune_noise_alpha is not None,
    ),
    Pair("cp sp tp-sequence", "--padding-free", lambda s: s.padding_free),
    Pair(
        "tp-sequence",
        "--freeze, which SequenceParallel undoes for norms,",
        lambda s: s.freeze,
    ),
    Pair(
        "sp tp-sequence",
        "a release of transformers before 5",
        lambda s: (s.software.transformers or (5, 0)) < (5, 0),
    ),
    # from 2.8 on collectives keep what they send until it is waited for
    Pair("tp-sequence", "a torch before 2.8", lambda s: (s.software.torch or (2, 8)) < (2, 8)),
    Pair(
        "cp sp tp-sequence",
        "a mixture of lengths (--lengths, --dataset)",
        lambda s: s.batching is not None,
    ),
    Pair("pp", "--padded", lambda s: s.padded),
    Pair("sp", "--padded, whose masks DeepSpeed drops,", lambda s: s.padded),
    Pair(
        "tp-sequence",
        "--padded, whose mask the model would make for a part of the tokens,",
        lambda s: s.padded,
    ),
    # the micro-batch that casts the weights is not the one that has the first gradients
    Pair(
        "pp",
        "--bf16 with --pp-schedule looped-bfs",
        lambda s: (
            s.precision is Precision.BF16 and s.distributed.pipeline_schedule is Schedule.LOOPED_BFS
        ),
    ),
    Pair(
        "peft",
        "--software peft={s.software.peft[0]}.{s.software.peft[1]} and a base of 4 bits",
        lambda s: _is_4bit(s) and _before_peft(s, 4) and (s.prepares_base or s.adapter),
        "peft has adapters on 4-bit layers, and prepares such a base, since 0.4",
        "Write peft=0.4 or later.",
    ),
    Pair(
        "peft",
        "--software peft={s.software.peft[0]}.{s.software.peft[1]} and a base of GPTQ",
        lambda s: (
            s.quantization is not None
            and s.quantization.format is Format.GPTQ
            and _before_peft(s, 5)
            and (s.prepares_base or s.adapter)
        ),
        "peft has adapters on layers of GPTQ since 0.5",
        "Write peft=0.5 or later.",
    ),
    Pair(
        "peft",
        "--software peft={s.software.peft[0]}.{s.software.peft[1]} and --bnb-4bit-quant-storage "
        "{s.quantization.quant_storage}",
        lambda s: (
            _is_4bit(s)
            and _before_peft(s, 10)
            and s.prepares_base
            and s.quantization is not None
            and s.quantization.quant_storage in ("float16", "bfloat16")
        ),
        "until 0.9 prepare_model_for_kbit_training made float32 of packed weights too, which are "
        "none after that",
        "Write peft=0.10 or later, or add --no-prepare-kbit.",
    ),
    Pair(
        "peft",
        "--software peft={s.software.peft[0]}.{s.software.peft[1]} and OSF",
        lambda s: s.adapter is not None and s.adapter.method == "osf" and _before_peft(s, 21),
        "until 0.20 it put whole weights together again in each forward and kept their halves, and "
        "what is priced is the installed peft's",
        "Write peft=0.21 or later.",
    ),
    Pair(
        "compile",
        "--num-gpus",
        lambda s: s.distributed.strategy is not Strategy.NONE,
        "graphs are split where wrappers of the model act",
    ),
    Pair(
        "compile",
        "--use-liger-kernel",
        lambda s: s.use_liger_kernel,
        "its Triton kernels are compiled with the graph",
    ),
    Pair(
        "compile",
        "An optimizer that steps in backward (--optim {s.optimizer})",
        lambda s: s.steps_in_backward,
        "the backward is one graph, and its gradients come out together",
    ),
    Pair(
        "compile",
        "A quantised base",
        lambda s: s.quantization is not None,
        "how its operators break the graph depends on bitsandbytes' build for the GPU",
    ),
    Pair(
        "compile",
        "--attn-implementation {s.attn_implementation}",
        lambda s: s.attn_implementation is Attention.FLASH_ATTENTION_2,
        "its package brings the operators; sdpa takes the same kernel from PyTorch",
    ),
    Pair(
        "compile",
        "--checkpointing selective",
        lambda s: s.checkpointing == "selective",
        "the compiler cuts the graph by the policy's marks",
    ),
    Pair(
        "selective",
        "--checkpointing selective and --use-reentrant",
        lambda s: s.use_reentrant,
        "torch's reentrant checkpoints take no policy",
        "Drop --use-reentrant.",
    ),
    Pair(
        "selective",
        "--zero {s.distributed.zero}",
        lambda s: s.partitions_parameters,
        "DeepSpeed gathers weights inside of what is recomputed",
    ),
)


@functools.cache
def _rows_of(groups: tuple[str, ...]) -> tuple[Pair, ...]:
    """The rows about an option; every setup asks for them."""
    return tuple(row for row in _PAIRS if not set(groups).isdisjoint(row.groups.split()))


def refuse_pairs(setup: TrainingRun, flag: str, *groups: str) -> None:
    """Refuse what does not go together with an option of a setup.

    Args:
        setup: the options.
        flag: the option, for messages.
        groups: names of the option in the table.

    Raises:
        ConfigError: such a pair of options.
    """
    for row in _rows_of(groups):
        if not row.applies(setup):
            continue
        label = row.label.format(s=setup)
        if row.remedy:
            remedy = row.remedy.format(s=setup)
            raise ConfigError(f"{label} exclude each other: {row.why.format(s=setup)}. {remedy}")
        why = f" ({row.why.format(s=setup)})" if row.why else ""
        raise ConfigError(
            f"{label} is not priced together with {flag} yet{why}, and memest does not guess: "
            "leave one of them out."
        )
