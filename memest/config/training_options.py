"""What a training run looks like: every option of it is a field, declared here and nowhere else.

The command line, its help, Python's keywords, the readers of other tools' files, the explorer and
docs/options.md are made of these declarations (:mod:`memest.config.option_table`). What follows
from them is in :mod:`memest.config.training_run`. Checked, and with its values in their types, a
run is a :class:`memest.config.setup.Setup`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memest.config.adapter import Adapter
from memest.config.compilation import DEFAULT_CHUNKS, FUSED_LOSSES
from memest.config.data_loading import DataLoading
from memest.config.generation import Generation
from memest.config.kinds import (
    Attention,
    Dtype,
    LogProbs,
    Loop,
    Method,
    ModelPart,
    Precision,
    SdpaBackend,
    Task,
    ZeroGrad,
    ZeroGradAt,
)
from memest.config.lengths import Batching
from memest.config.life import Life
from memest.config.optimizers import OPTIMIZER_FACTS
from memest.config.option import Kind, Panel, legal_values, option
from memest.config.parallelism import ONE_GPU, Distributed
from memest.config.quantization import Quantization
from memest.config.rollouts import Rollouts
from memest.config.software import Software

__all__ = [
    "MAX_BATCH",
    "MAX_GRAD_ACCUM",
    "MAX_IMAGE_SIZE",
    "OPTIMIZERS",
    "SHARDS_AT_LOAD",
    "TrainingOptions",
]

MAX_BATCH = 1 << 20
MAX_SEQ_LEN = 1 << 24
MAX_IMAGE_SIZE = 1 << 14
MAX_GRAD_ACCUM = 1 << 16

SHARDS_AT_LOAD = (5, 23)
"""The first transformers whose Trainer takes models that it has sharded by --tp and FSDP2."""

OPTIMIZERS = {name: facts.about for name, facts in OPTIMIZER_FACTS.items()}
"""Optimizer names that are modelled, and what each one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What is asked of a training run on one GPU or several.

    Attributes:
        generation: a ``generate`` that follows the last step; None = none.
        rollouts: how the completions come about that a method learns from; None = it has none.
        data_loading: how batches are loaded on the host; None = not asked about.
        batching: how samples of different lengths become batches: it decides ``seq_len`` (that of
            the largest batch there can be) and ``padded``; None = all have ``seq_len``.
        life: what is asked about saving, resuming and host memory; None = nothing.
        distributed: how the run is spread over GPUs.
    """

    batch: int = option(
        8,
        "Samples of one micro-batch on one GPU.",
        "--batch -b --per-device-train-batch-size batch_size micro_batch_size "
        "train_micro_batch_size_per_gpu per_gpu_train_batch_size per_device_batch_size "
        "train_batch_size",
        panel=Panel.BATCH,
        short="",
        between=(1, MAX_BATCH),
    )
    seq_len: int | None = option(
        None,
        "Tokens of a sample; left out, 512 or what the model allows.",
        "--seq-len --max-length TOKENS max_seq_length max_seq_len sequence_len "
        "sequence_length seq_length cutoff_len",
        short="Tokens of a sample; left out, 512 or the model's.",
        between=(1, MAX_SEQ_LEN),
        traced=False,
    )
    target_len: int | None = option(
        None,
        "Tokens of the target of an encoder-decoder; left out, as --seq-len.",
        "TOKENS max_target_length target_length",
        between=(1, MAX_SEQ_LEN),
        traced=False,
    )
    image_size: int | None = option(
        None,
        "Side of an image; left out, the model's own.",
        "PIXELS",
        between=(1, MAX_IMAGE_SIZE),
        traced=False,
    )
    audio_seconds: float | None = option(
        None,
        "Length of a clip; left out, 5 s or the model's fixed window.",
        "SECONDS max_length_seconds",
        traced=False,
    )
    task: Task = option(
        Task.AUTO, f"Which head the model gets: {legal_values(Task)}.", "TASK", panel=Panel.MODEL
    )
    method: Method = option(
        Method.SUPERVISED,
        f"What is trained for: {legal_values(Method)}. All but the first are TRL's trainers: "
        "bf16 autocast and checkpointing are on unless --precision and --checkpointing say "
        "otherwise, weights float32 unless --dtype does (online-dpo: as saved), --batch counts "
        "pairs of answers (kto, grpo, rloo: answers; online-dpo: prompts, of two answers each), "
        "--seq-len the tokens of prompt and answer. sft is supervised with SFTTrainer's defaults: "
        "those, and its fused head (--fused-loss trl-fused).",
        "NAME",
        short="Trained for: supervised, dpo, kto, orpo, ...",
    )
    log_probs: LogProbs = option(
        LogProbs.FUSED,
        "Where dpo, ipo, kto, orpo, simpo and reward have the log-probabilities of answers from: "
        "fused (TRL 1.15 and later), logits of all tokens (TRL 1.6 to 1.13; kto from 1.9 on), "
        "those in float32 (LLaMA-Factory), torchtune (dpo), ms-swift (also of cpo and grpo) or "
        "verl (grpo and rloo, in its own loop under FSDP).",
        "NAME",
    )
    ref_dtype: Dtype = option(
        Dtype.AUTO,
        "Dtype of the reference model's weights; auto: that of the model that trains.",
        "DTYPE",
    )
    precompute_ref_log_probs: bool = option(
        False,
        "What the reference model says of all answers is computed before training begins: no "
        "second model stays in memory.",
        "--precompute-ref-log-probs precompute_ref_logps",
    )
    sync_ref_model: bool = option(
        False,
        "The reference model follows the one that trains (TRL's sync_ref_model): ZeRO-3 gathers "
        "all weights of both for it, nothing else takes memory for it.",
        traced=False,
    )
    num_labels: int | None = option(
        None, "Classes of a classification head; left out, the model's own.", between=(1, 1 << 24)
    )
    grad_accum: int = option(
        1,
        "Micro-batches of one optimizer step.",
        "--grad-accum --gradient-accumulation-steps",
        panel=Panel.BATCH,
        short="",
        between=(1, MAX_GRAD_ACCUM),
    )
    checkpointing: str = option(
        "none",
        "Recompute activations in backward: none, full, every_n:K, or selective, by operator as "
        "torchtitan does; without a value full.",
        "--checkpointing --gradient-checkpointing --activation-checkpointing MODE",
        kind=Kind.MODE,
        panel=Panel.RECOMPUTE,
        short="Recompute activations: full, selective, ...",
    )
    use_reentrant: bool | None = option(
        None, "Variant of checkpointing; left out, as the software does."
    )
    precision: Precision = option(
        Precision.FP32,
        f"Autocast in one word: {legal_values(Precision)}; fp32 is none.",
        "--precision --mixed-precision NAME",
        panel=Panel.PRECISION,
    )
    dtype: Dtype = option(
        Dtype.AUTO,
        f"Dtype of the weights: {legal_values(Dtype)}; auto is the config's own, as in "
        "from_pretrained, which took float32 before transformers 5.",
        "--dtype --torch-dtype DTYPE model_dtype weights_dtype",
        short="Dtype of the weights: float32, bfloat16, ...",
    )
    master_weights: bool = option(
        False,
        "Half-precision weights with an fp32 master copy (Apex O2, DeepSpeed, Megatron).",
        traced=False,
    )
    tf32: bool = option(
        False, "TensorFloat-32 matmuls: changes the speed, not the memory.", traced=False
    )
    optim: str = option(
        "auto",
        f"Optimizer: {', '.join(OPTIMIZERS)}; auto is the Trainer's own in the release that "
        "trains.",
        "NAME optimizer",
        panel=Panel.OPTIMIZER,
        short="Optimizer: adamw_torch, adamw_8bit, sgd, ...",
    )
    optim_args: str = option(
        "",
        "Arguments of the optimizer as the Trainer takes them: rank=64,update_proj_gap=200.",
        "NAME=VALUE,...",
        traced=False,
    )
    optim_target_modules: str | tuple[str, ...] = option(
        (),
        "Linear layers that GaLore and APOLLO project: all-linear, a regular expression for "
        "module names, or a JSON list of parts of them.",
        "MODULES",
        traced=False,
    )
    optim_in_backward: bool = option(
        False,
        "Each parameter is updated as soon as its gradient is there, which is then dropped "
        "(torch's post-accumulate-grad hooks).",
        "optimizer_in_bwd optimizer_in_backward",
        traced=False,
    )
    weight_decay: float | None = option(
        None,
        "Decay of the weights, which costs SGD, Adam and their like a copy of the gradients; left "
        "out, 0 under the Trainer and the optimizer's own default elsewhere.",
        "DECAY",
        traced=False,
    )
    max_grad_norm: float | None = option(
        None,
        "Gradient clipping, 0 for none; left out, 1.0 under the Trainer and none elsewhere.",
        "NORM",
        traced=False,
    )
    eval_batch: int | None = option(
        None,
        "Samples of a batch of the Trainer's evaluation; given, one follows the last step.",
        "--eval-batch --per-device-eval-batch-size eval_batch_size per_device_eval_batch_size",
        panel=Panel.BATCH,
        between=(1, MAX_BATCH),
        traced=False,
    )
    eval_samples: int | None = option(
        None,
        "Samples whose predictions an evaluation keeps (compute_metrics is given); left out, the "
        "loss alone is kept.",
        between=(1, 1 << 30),
        traced=False,
    )
    eval_accumulation_steps: int | None = option(
        None,
        "Evaluation batches after which predictions move to the host; left out, all of them pile "
        "up on the GPU.",
        between=(1, 1 << 30),
        traced=False,
    )
    generation: Generation | None = field(default=None, metadata={"traced": False})
    rollouts: Rollouts | None = None
    data_loading: DataLoading | None = field(default=None, metadata={"traced": False})
    zero_grad: ZeroGrad = option(
        ZeroGrad.AUTO,
        f"{legal_values(ZeroGrad)}: after the step gradients are dropped (none) or kept as zeros "
        "(zero); auto follows torch's version.",
        "NAME",
        panel=Panel.OPTIMIZER,
    )
    zero_grad_at: ZeroGradAt = option(
        ZeroGradAt.AFTER_STEP,
        f"Where a script calls zero_grad: {legal_values(ZeroGradAt)}; until then old gradients "
        "live.",
        "PLACE",
    )
    del_outputs: bool = option(
        False,
        "A script lets go of outputs and loss before its next batch (del outputs, loss); else they "
        "live until the next forward has made new ones.",
    )
    attn_implementation: Attention = option(
        Attention.AUTO,
        f"Attention as transformers names it: {legal_values(Attention)}.",
        "NAME attn_impl attention_implementation",
        panel=Panel.KERNELS,
        short="Attention: eager, sdpa or flash_attention_2.",
    )
    channels_last: bool = option(
        False,
        "Weights and images lie with their channels last, as model.to(memory_format="
        "torch.channels_last) and the same of the batch lay them: convolutions need no copies.",
    )
    sdpa_backend: SdpaBackend = option(
        SdpaBackend.AUTO,
        f"Kernel behind sdpa: {legal_values(SdpaBackend)}; auto is PyTorch's own choice.",
        "NAME",
    )
    use_liger_kernel: bool = option(
        False,
        "Liger's kernels are applied to the model, as the Trainer does: fused norms, rotary "
        "embedding, MLP, and a loss that never holds all logits.",
        short="Liger's kernels, and a loss without all logits.",
    )
    fused_loss: str = option(
        "",
        f"Loss in place of the model's head and cross-entropy: none, {', '.join(FUSED_LOSSES)}. "
        f"torchtune's work in {DEFAULT_CHUNKS} pieces, or in N: torchtune-linear:N.",
        "NAME",
    )
    neftune_noise_alpha: float | None = option(
        None,
        "NEFTune, as the Trainer has it: noise is added to the embeddings while training. How much "
        "changes no size.",
        "ALPHA",
    )
    torch_compile: bool = option(
        False,
        "The model is compiled by TorchInductor, as the Trainer has it done: what backward keeps "
        "is the compiler's choice, and fused operators leave no results between them.",
    )
    torch_compile_mode: str = option(
        "", "Mode of torch.compile, which it switches on; priced is default.", "MODE"
    )
    torch_compile_backend: str = option(
        "", "Backend of torch.compile, which it switches on; priced is inductor.", "NAME"
    )
    freeze: tuple[str, ...] = option(
        (),
        "Regular expression; parameters whose name it matches do not train. Repeatable.",
        "PATTERN",
        panel=Panel.MODEL,
    )
    frozen_parts: tuple[str, ...] = option(
        (),
        f"Part of a multimodal model that does not train, or that adapters leave out: "
        f"{legal_values(ModelPart)}; a model of one part has none. Repeatable.",
        "PART",
        panel=Panel.MODEL,
    )
    cast_weights: tuple[str, ...] = option(
        (),
        "Weights that get another dtype after loading: trainable=float32, those that train "
        "(trainable=bfloat16: but for DoRA's magnitudes, as TRL's trainers have it); "
        "PATTERN=bfloat16, those whose name a regular expression matches, ?PATTERN=bfloat16 if "
        "there are any. Repeatable.",
        "NAMES=DTYPE",
        panel=Panel.MODEL,
    )
    adapter: Adapter | None = option(
        None,
        "Adapters as peft's adapter_config.json has them; the options below change its values.",
        "--peft-config FILE adapter_config",
        panel=Panel.ADAPTERS,
    )
    quantization: Quantization | None = option(
        None,
        "transformers' quantization_config as JSON or a file; the options below change its values.",
        "--quantization-config JSON",
        panel=Panel.QUANTIZATION,
        names_file=True,
    )
    prepare_kbit: bool | None = None
    """``prepare`` of a quantisation that the checkpoint brings, until that is known."""
    padded: bool = option(
        False, "The batches hold padding, so attention masks cannot be dropped.", panel=Panel.BATCH
    )
    padding_free: bool = option(
        False,
        "Samples of a batch are laid end to end in one row without padding "
        "(DataCollatorWithFlattening, TRL's padding_free).",
        panel=Panel.LENGTHS,
    )
    batching: Batching | None = field(default=None, metadata={"traced": False})
    life: Life | None = field(default=None, metadata={"traced": False})
    use_cache: bool | None = option(
        None,
        "Whether the model returns its key/value cache in training; left out, as the loop does.",
        panel=Panel.MODEL,
    )
    alloc_conf: str = option(
        "",
        "Value of PYTORCH_CUDA_ALLOC_CONF.",
        "CONF pytorch_cuda_alloc_conf pytorch_alloc_conf",
        panel=Panel.SOFTWARE,
        traced=False,
    )
    loop: Loop = option(Loop.TRAINER, f"Whose training loop runs: {legal_values(Loop)}.", "NAME")
    software: Software = option(
        Software(),
        "Versions that will train where they are not the installed ones: "
        "torch=1.10,transformers=4.18; or a month, as in 2022-01, whose releases are meant.",
        "VERSIONS",
    )
    trace_whole: bool = option(
        False,
        "Trace every layer, in place of working out what alike layers do from a few of them "
        "(the answer is the same; a check).",
        panel=Panel.SOFTWARE,
    )
    unpriced: tuple[str, ...] = option(
        (),
        "Something the run does besides that may take memory and is not in the figures, in words: "
        "the verdict cannot be that it fits. Repeatable; readers of configurations fill it in.",
        "WORDS",
        traced=False,
    )
    overpriced: tuple[str, ...] = option(
        (),
        "Something that is in the figures and that the run does not take, in words: the verdict "
        "cannot be that it does not fit. Repeatable; readers of configurations fill it in.",
        "WORDS",
        traced=False,
    )
    num_steps: int = option(3, "Optimizer steps to simulate.", "--steps", between=(1, 1000))
    distributed: Distributed = ONE_GPU
