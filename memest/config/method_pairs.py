"""What a method of preferences does not go with, or is not priced together with.

Sources: TRL 1.16 ``trainer/`` and ``experimental/``; verl 0.9.1 ``workers/engine/fsdp``; what
DeepSpeed, FSDP and vLLM do with it is in the rows.
"""

from __future__ import annotations

from memest.config.kinds import Dtype, Fsdp, LogProbs, Loop, Method, Strategy, Task
from memest.config.pair import Pair
from memest.config.quantization import Format
from memest.config.rollouts import Engine

__all__ = ["METHOD_PAIRS"]


def _has_losses_of(log_probs: LogProbs, method: Method) -> bool:
    """Whether a trainer has a method's log-probabilities from there."""
    if log_probs is LogProbs.TORCHTUNE:
        return method is Method.DPO
    if log_probs is LogProbs.VERL:
        return method in (Method.GRPO, Method.RLOO)
    if log_probs is LogProbs.SWIFT:
        return method not in (Method.RLOO, Method.ONLINE_DPO)
    if log_probs is LogProbs.FUSED:
        return True
    return not method.generates and (method is not Method.CPO or log_probs is LogProbs.LOGITS)


METHOD_PAIRS = (
    Pair(
        "method supervised",
        "--precompute-ref-log-probs and --method {s.method}",
        lambda s: s.precompute_ref_log_probs and not s.method.has_reference,
        "{s.method} has no reference model",
        "Leave it out, or write --method dpo, ipo or kto.",
    ),
    Pair(
        "method supervised",
        "--sync-ref-model and a run without a reference model of its own",
        lambda s: s.sync_ref_model and not s.has_reference_model,
        "TRL stops there: with adapters, --precompute-ref-log-probs or --kl-beta 0 it keeps none",
        "Drop --sync-ref-model.",
    ),
    Pair(
        "method supervised",
        "--ref-dtype {s.ref_dtype} and a run without a reference model of its own",
        lambda s: s.ref_dtype is not Dtype.AUTO and not s.has_reference_model,
        "there is none with adapters, --precompute-ref-log-probs or --kl-beta 0, nor with methods "
        "but dpo, ipo, kto, grpo, rloo and online-dpo",
        "Drop --ref-dtype.",
    ),
    Pair(
        "method",
        "--sync-ref-model and --method {s.method}",
        lambda s: s.sync_ref_model and s.method.writes_pairs,
        "its trainer has no such option",
        "Drop --sync-ref-model.",
    ),
    Pair(
        "method",
        "--sync-ref-model and --fsdp shard_grad_op",
        lambda s: (
            s.sync_ref_model
            and s.distributed.strategy is Strategy.FSDP
            and s.distributed.fsdp is Fsdp.SHARD_GRAD_OP
        ),
        "the reference's weights stay gathered and the model's do not, and torch stops at adding "
        "one to the other",
        "Write --fsdp full_shard, or drop --sync-ref-model.",
    ),
    Pair(
        "supervised",
        "--log-probs {s.log_probs} and --method {s.method}",
        lambda s: s.log_probs is not LogProbs.FUSED,
        "a supervised step has one loss",
        "Leave it out, or write --method dpo, ipo, orpo or simpo.",
    ),
    Pair(
        "method",
        "--log-probs {s.log_probs}",
        lambda s: not _has_losses_of(s.log_probs, s.method),
        "no trainer that was read has it so",
    ),
    Pair(
        "method",
        "--method {s.method} and --loop {s.loop}",
        lambda s: s.loop is not Loop.TRAINER and not s.log_probs.has_own_loop,
        "what is priced is TRL's trainer",
        "Drop --loop.",
    ),
    Pair(
        "method",
        "--log-probs torchtune and --loop {s.loop}",
        lambda s: s.log_probs is LogProbs.TORCHTUNE and s.loop is not Loop.PLAIN,
        "torchtune's recipes have a loop of their own, without autocast",
        "Write --loop plain --no-bf16 beside it.",
    ),
    Pair(
        "method",
        "--method {s.method} and a model of images and text",
        lambda s: s.task is Task.IMAGE_TEXT_TO_TEXT,
        "TRL trains some, and of its steps the tokens alone are modelled, not the pixels beside "
        "prompts and completions",
        "Leave --method out, for steps on images and answers; or ask about the text alone: --task "
        "causal-lm, where the family has that head, else a text model of that size. `memest help "
        "images` says more.",
    ),
    Pair(
        "method",
        "--log-probs verl and --loop {s.loop}",
        lambda s: s.log_probs is LogProbs.VERL and s.loop is not Loop.PLAIN,
        "its actor is sharded by FSDP in a loop of its own",
        "Write --loop plain --fsdp full_shard --fsdp-mixed-precision --bf16 --dtype float32 "
        "--max-grad-norm 1 beside it.",
    ),
    Pair(
        "method",
        "--scored-at-once and --log-probs {s.log_probs}",
        lambda s: (
            s.rollouts is not None
            and s.rollouts.scored_at_once is not None
            and s.log_probs is not LogProbs.VERL
        ),
        "TRL and ms-swift score in micro-batches of the step",
        "Drop --scored-at-once.",
    ),
    Pair(
        "method",
        "--critic and --log-probs {s.log_probs}",
        lambda s: (
            s.rollouts is not None and bool(s.rollouts.critic) and s.log_probs is not LogProbs.VERL
        ),
        "TRL trains no model of values beside the one that writes; verl's PPO is priced",
        "Write --log-probs verl --loop plain --fsdp full_shard --fsdp-mixed-precision --bf16 "
        "--dtype float32 --max-grad-norm 1 --engine vllm --engine-sleeps beside it.",
    ),
    Pair(
        "method",
        "--critic and what is around the steps (--with, --host)",
        lambda s: (
            s.rollouts is not None
            and bool(s.rollouts.critic)
            and s.life is not None
            and s.life.is_asked
        ),
        "saving, loading and host memory are told of one model",
        "Ask about the actor alone, without --critic.",
    ),
    Pair(
        "method",
        "--log-probs verl and --engine model",
        lambda s: s.log_probs is LogProbs.VERL and s.writes_completions,
        "verl has an engine write completions",
        "Write --engine vllm --engine-sleeps, or --engine server.",
    ),
    Pair(
        "method",
        "--method {s.method} and a model for {s.task}",
        lambda s: s.task not in (Task.AUTO, s.task_of_method),
        "TRL trains causal language models, and of them reward models with one label",
        "Leave --method out, or ask about a causal language model (drop --task where it is named).",
    ),
    Pair(
        "method",
        "--method {s.method} and --num-labels {s.num_labels}",
        lambda s: s.method is Method.REWARD and s.num_labels not in (None, 1),
        "TRL refuses reward models of more than one label",
        "Drop --num-labels.",
    ),
    Pair(
        "method",
        "--method {s.method} and --fused-loss {s.fused_loss}",
        lambda s: s.fused_loss,
        "each method has a loss of its own",
        "Drop --fused-loss.",
    ),
    Pair(
        "method",
        "--method {s.method} and --kl-beta, --steps-per-generation or --precompute-ref-log-probs",
        lambda s: (
            s.method.writes_pairs
            and s.rollouts is not None
            and (
                s.rollouts.kl_beta is not None
                or s.rollouts.steps_per_generation is not None
                or s.precompute_ref_log_probs
            )
        ),
        "every micro-batch has completions of its own, and the reference is always asked of them",
        "Leave them out.",
    ),
    Pair(
        "method",
        "--fsdp and --zero 3",
        lambda s: (
            s.method.writes_pairs
            and (s.distributed.strategy is Strategy.FSDP or s.distributed.zero == 3)
        ),
        "TRL's create_reference_model refuses ZeRO-3, and what FSDP gathers for writing, model and "
        "reference was not checked; DDP and --zero 2 are priced",
    ),
    Pair(
        "method",
        "--zero {s.distributed.zero} with --grad-accum and completions by the model itself",
        lambda s: (
            s.method.writes_pairs
            and s.distributed.zero
            and s.grad_accum > 1
            and s.writes_completions
        ),
        "they are written beside the gradients that DeepSpeed keeps of earlier micro-steps",
    ),
    Pair(
        "method",
        "--fsdp {s.distributed.fsdp} with adapters and completions by the model itself",
        lambda s: (
            s.distributed.strategy is Strategy.FSDP
            and s.writes_completions
            and s.adapter is not None
        ),
        "generate goes around peft's model, which gathers the final norm, and torch stops",
        "Write --engine vllm or server, or --zero 3.",
    ),
    Pair(
        "method",
        "--zero 3 with adapters on a quantised base and --engine {s.rollouts.engine}",
        lambda s: (
            s.distributed.zero == 3
            and s.method.generates
            and not s.writes_completions
            and s.adapter is not None
            and s.quantization is not None
        ),
        "TRL gathers the base and merges adapters into what is quantised, which was not checked; "
        "--engine model and --zero 2 are priced",
    ),
    Pair(
        "method",
        "--fsdp {s.distributed.fsdp} with adapters on a quantised base",
        lambda s: (
            s.distributed.strategy is Strategy.FSDP
            and s.method.generates
            and s.adapter is not None
            and s.quantization is not None
        ),
        "TRL merges shards of adapters into what is quantised, which was not checked; --zero 2 is "
        "priced",
    ),
    Pair(
        "method",
        "--fsdp-version 1",
        lambda s: (
            s.distributed.flattens
            and (s.method.has_reference or s.method.generates)
            and s.log_probs is not LogProbs.VERL
        ),
        "units are gathered for two models, or twice for one; --fsdp-version 2 is priced",
    ),
    Pair(
        "method",
        "--precompute-ref-log-probs with adapters and --fsdp {s.distributed.fsdp}",
        lambda s: (
            s.distributed.strategy is Strategy.FSDP
            and s.precompute_ref_log_probs
            and s.adapter is not None
        ),
        "TRL asks the model while it lies in host memory, with batches on the GPU, and torch stops",
        "Drop --precompute-ref-log-probs.",
    ),
    Pair(
        "method",
        "--precompute-ref-log-probs under FSDP",
        lambda s: s.distributed.strategy is Strategy.FSDP and s.precompute_ref_log_probs,
        "TRL has a reference all the same, asks it before the training begins, gathered whole, and "
        "lets go of it then; without the option the reference stays, which is an upper bound",
    ),
    Pair(
        "method",
        "--precompute-ref-log-probs under --zero 3",
        lambda s: s.distributed.zero == 3 and s.precompute_ref_log_probs,
        "TRL asks the model by a second engine around it, whose hooks stay and gather beside those "
        "of the one that trains; --zero 2 is priced",
    ),
    Pair(
        "method",
        "--log-probs {s.log_probs} under FSDP",
        lambda s: (
            s.distributed.strategy is Strategy.FSDP
            and s.has_reference_model
            and s.log_probs is not LogProbs.FUSED
        ),
        "axolotl wraps the reference layer by layer, LLaMA-Factory 0.9 not at all, and as axolotl "
        "since; priced is TRL 1.16",
    ),
    Pair(
        "method",
        "--log-probs {s.log_probs} under FSDP or --zero 3",
        lambda s: (
            s.log_probs not in (LogProbs.FUSED, LogProbs.VERL)
            and s.method.generates
            and (s.distributed.strategy is Strategy.FSDP or s.distributed.zero == 3)
        ),
        "what ms-swift gathers to score completions and for who writes them was not checked; DDP "
        "and --zero 2 are priced",
    ),
    Pair(
        "method",
        "--log-probs {s.log_probs} with all weights under FSDP or ZeRO",
        lambda s: (
            s.values_tokens
            and s.adapter is None
            and s.distributed.strategy in (Strategy.FSDP, Strategy.ZERO)
        ),
        "no gradient reaches LLaMA-Factory's head beside the values, which was not checked there; "
        "--lora-r 16 and DDP are priced",
    ),
    Pair(
        "method",
        "--cp, --sp, --tp, --ep and --pp",
        lambda s: (
            s.distributed.shares_model
            or max(s.distributed.cp, s.distributed.sp, s.distributed.pp) > 1
        ),
    ),
    Pair(
        "method",
        "a quantised base",
        lambda s: s.quantization is not None and s.method.writes_pairs,
        "TRL then makes norms and head of other dtypes",
    ),
    Pair(
        "method",
        "--engine vllm and a base of 8 bits",
        lambda s: (
            s.rollouts is not None
            and s.rollouts.engine is Engine.VLLM
            and s.quantization is not None
            and s.quantization.format is Format.BNB_8BIT
        ),
        "vLLM does not quantise to 8 bits when it loads, and TRL refuses it",
        "Use --load-in-4bit, or --engine model.",
    ),
    Pair("method", "--use-liger-kernel", lambda s: s.use_liger_kernel),
    Pair("method", "--torch-compile", lambda s: s.torch_compile),
    Pair("method", "an evaluation (--eval-batch, --with eval)", lambda s: s.eval_batch is not None),
    Pair("method", "--generate", lambda s: s.generation is not None),
    Pair(
        "method",
        "a mixture of lengths (--lengths, --dataset)",
        lambda s: s.batching is not None,
        "--seq-len with the longest, and --padded, price the largest batch",
    ),
    Pair(
        "method",
        "--padding-free",
        lambda s: s.padding_free,
        "of TRL 1.16 SFTTrainer alone has it: DPOTrainer says that it is gone for now and pads, "
        "the others have no such option. Without it that is what is priced",
        "Drop --padding-free.",
    ),
    Pair("method", "--neftune-noise-alpha", lambda s: s.neftune_noise_alpha is not None),
    Pair(
        "method",
        "--log-probs torchtune and the training of all weights",
        lambda s: s.log_probs is LogProbs.TORCHTUNE and s.adapter is None and not s.unpriced,
        "torchtune trains all weights by DPO in full_dpo_distributed alone, whose reference is "
        "sharded layer by layer, which is not priced",
        "Add --lora-r 16, or leave --log-probs out.",
    ),
)
"""Rows of the table of :mod:`memest.config.pairs`."""
