"""Every option of an estimate, declared once.

The command line, its help, the Python API and the readers of other people's spellings are all
made from :data:`OPTIONS`. Torch-free.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from memest.compilation import DEFAULT_CHUNKS, FUSED_LOSSES
from memest.data_loading_table import DATA_LOADING
from memest.finetune_table import FINETUNING
from memest.generation_table import GENERATION
from memest.lengths_table import LENGTHS
from memest.option import Kind, Option, Panel, legal
from memest.own_module_table import OWN_MODULE
from memest.setup import (
    OPTIMIZERS,
    Attention,
    Dtype,
    Loop,
    Precision,
    SdpaBackend,
    Setup,
    Task,
    ZeroGrad,
    ZeroGradAt,
)
from memest.several_gpus_table import SEVERAL_GPUS

__all__ = ["OPTIONS", "PLACE"]


def _setup(
    name: str, flags: str, help_text: str, panel: Panel, kind: Kind = Kind.TEXT, **more: Any
) -> Option:
    """An option that sets a field of Setup, with the field's default in its help."""
    default = next((f.default for f in dataclasses.fields(Setup) if f.name == name), None)
    shown = kind in (Kind.WHOLE, Kind.NUMBER, Kind.TEXT, Kind.MODE)
    if shown and default is not None and isinstance(default, (int, float, str)) and default != "":
        help_text += f" Default: {default}."
    values = {"field": name, "aliases": "", **more}
    values["aliases"] = tuple(values["aliases"].split())
    return Option(
        name=name, flags=tuple(flags.split()), help=help_text, panel=panel, kind=kind, **values
    )


OPTIONS: tuple[Option, ...] = (
    _setup(
        "task",
        "--task",
        f"Which head the model gets: {legal(Task)}.",
        Panel.MODEL,
        metavar="TASK",
    ),
    _setup(
        "num_labels",
        "--num-labels",
        "Classes of a classification head; left out, the model's own.",
        Panel.MODEL,
        Kind.WHOLE,
        metavar="N",
    ),
    _setup(
        "freeze",
        "--freeze",
        "Regular expression; parameters whose name it matches do not train. Repeatable.",
        Panel.MODEL,
        Kind.LIST,
        metavar="PATTERN",
    ),
    _setup(
        "use_cache",
        "--use-cache --no-use-cache",
        "Whether the model returns its key/value cache in training; left out, as the loop does.",
        Panel.MODEL,
        Kind.EITHER,
    ),
    Option(
        name="trust_remote_code",
        flags=("--trust-remote-code",),
        help="Run code that the model's repository brings along.",
        panel=Panel.MODEL,
        kind=Kind.SWITCH,
    ),
    *OWN_MODULE,
    *FINETUNING,
    _setup(
        "batch",
        "--batch -b --per-device-train-batch-size",
        "Samples of one micro-batch on one GPU.",
        Panel.BATCH,
        Kind.WHOLE,
        metavar="N",
        aliases="batch_size micro_batch_size train_micro_batch_size_per_gpu "
        "per_gpu_train_batch_size per_device_batch_size train_batch_size",
    ),
    _setup(
        "seq_len",
        "--seq-len --max-length",
        "Tokens of a sample; left out, 512 or what the model allows.",
        Panel.BATCH,
        Kind.WHOLE,
        metavar="TOKENS",
        aliases="max_seq_length max_seq_len sequence_len sequence_length seq_length cutoff_len",
    ),
    _setup(
        "target_len",
        "--target-len",
        "Tokens of the target of an encoder-decoder; left out, as --seq-len.",
        Panel.BATCH,
        Kind.WHOLE,
        metavar="TOKENS",
        aliases="max_target_length target_length",
    ),
    _setup(
        "image_size",
        "--image-size",
        "Side of an image; left out, the model's own.",
        Panel.BATCH,
        Kind.WHOLE,
        metavar="PIXELS",
    ),
    _setup(
        "audio_seconds",
        "--audio-seconds",
        "Length of a clip; left out, 5 s or the model's fixed window.",
        Panel.BATCH,
        Kind.NUMBER,
        metavar="SECONDS",
        aliases="max_length_seconds",
    ),
    _setup(
        "grad_accum",
        "--grad-accum --gradient-accumulation-steps",
        "Micro-batches of one optimizer step.",
        Panel.BATCH,
        Kind.WHOLE,
        metavar="N",
    ),
    _setup(
        "padded",
        "--padded",
        "The batches hold padding, so attention masks cannot be dropped.",
        Panel.BATCH,
        Kind.SWITCH,
    ),
    *LENGTHS,
    _setup(
        "eval_batch",
        "--eval-batch --per-device-eval-batch-size",
        "Samples of a batch of the Trainer's evaluation; given, one follows the last step.",
        Panel.BATCH,
        Kind.WHOLE,
        metavar="N",
        aliases="eval_batch_size per_device_eval_batch_size",
    ),
    Option(
        name="eval_strategy",
        flags=("--eval-strategy",),
        help="As the Trainer takes it: no, steps or epoch; an evaluation of batches of 8 unless "
        "--eval-batch says otherwise.",
        panel=Panel.BATCH,
        metavar="NAME",
        aliases=("evaluation_strategy",),
        field="eval_batch",
    ),
    *GENERATION,
    *DATA_LOADING,
    _setup(
        "eval_samples",
        "--eval-samples",
        "Samples whose predictions an evaluation keeps (compute_metrics is given); left out, the "
        "loss alone is kept.",
        Panel.BATCH,
        Kind.WHOLE,
        metavar="N",
    ),
    Option(
        name="prediction_loss_only",
        flags=("--prediction-loss-only",),
        help="The evaluation keeps the loss alone, whatever --eval-samples says.",
        panel=Panel.BATCH,
        kind=Kind.SWITCH,
        field="eval_samples",
    ),
    _setup(
        "eval_accumulation_steps",
        "--eval-accumulation-steps",
        "Evaluation batches after which predictions move to the host; left out, all of them pile "
        "up on the GPU.",
        Panel.BATCH,
        Kind.WHOLE,
        metavar="N",
    ),
    Option(
        name="bf16",
        flags=("--bf16",),
        help="bfloat16 autocast. The dtype of the weights is --dtype.",
        panel=Panel.PRECISION,
        kind=Kind.SWITCH,
        field="precision",
    ),
    Option(
        name="fp16",
        flags=("--fp16",),
        help="float16 autocast with a gradient scaler. The dtype of the weights is --dtype.",
        panel=Panel.PRECISION,
        kind=Kind.SWITCH,
        field="precision",
    ),
    _setup(
        "precision",
        "--precision --mixed-precision",
        f"Autocast in one word: {legal(Precision)}; fp32 is none.",
        Panel.PRECISION,
        metavar="NAME",
    ),
    _setup(
        "dtype",
        "--dtype --torch-dtype",
        f"Dtype of the weights: {legal(Dtype)}; auto is the config's own, as in from_pretrained.",
        Panel.PRECISION,
        metavar="DTYPE",
        aliases="model_dtype weights_dtype",
    ),
    _setup(
        "master_weights",
        "--master-weights",
        "Half-precision weights with an fp32 master copy (Apex O2, DeepSpeed, Megatron).",
        Panel.PRECISION,
        Kind.SWITCH,
    ),
    _setup(
        "tf32",
        "--tf32",
        "TensorFloat-32 matmuls: changes the speed, not the memory.",
        Panel.PRECISION,
        Kind.SWITCH,
    ),
    _setup(
        "optim",
        "--optim",
        f"Optimizer: {', '.join(OPTIMIZERS)}.",
        Panel.OPTIMIZER,
        metavar="NAME",
        aliases="optimizer",
    ),
    _setup(
        "optim_args",
        "--optim-args",
        "Arguments of the optimizer as the Trainer takes them: rank=64,update_proj_gap=200.",
        Panel.OPTIMIZER,
        metavar="NAME=VALUE,...",
    ),
    _setup(
        "optim_target_modules",
        "--optim-target-modules",
        "Linear layers that GaLore and APOLLO project: all-linear, a regular expression for "
        "module names, or a JSON list of parts of them.",
        Panel.OPTIMIZER,
        metavar="MODULES",
    ),
    _setup(
        "optim_in_backward",
        "--optim-in-backward",
        "Each parameter is updated as soon as its gradient is there, which is then dropped "
        "(torch's post-accumulate-grad hooks).",
        Panel.OPTIMIZER,
        Kind.SWITCH,
        aliases="optimizer_in_bwd optimizer_in_backward",
    ),
    _setup(
        "weight_decay",
        "--weight-decay",
        "Decay of the weights, which costs SGD, Adam and their like a copy of the gradients; left "
        "out, 0 under the Trainer and the optimizer's own default elsewhere.",
        Panel.OPTIMIZER,
        Kind.NUMBER,
        metavar="DECAY",
    ),
    _setup(
        "max_grad_norm",
        "--max-grad-norm",
        "Gradient clipping, 0 for none; left out, 1.0 under the Trainer and none elsewhere.",
        Panel.OPTIMIZER,
        Kind.NUMBER,
        metavar="NORM",
    ),
    _setup(
        "zero_grad",
        "--zero-grad",
        f"{legal(ZeroGrad)}: after the step gradients are dropped (none) or kept as zeros (zero); "
        "auto follows torch's version.",
        Panel.OPTIMIZER,
        metavar="NAME",
    ),
    _setup(
        "zero_grad_at",
        "--zero-grad-at",
        f"Where a script calls zero_grad: {legal(ZeroGradAt)}; until then old gradients live.",
        Panel.OPTIMIZER,
        metavar="PLACE",
    ),
    _setup(
        "del_outputs",
        "--del-outputs",
        "A script lets go of outputs and loss before its next batch (del outputs, loss); else they "
        "live until the next forward has made new ones.",
        Panel.OPTIMIZER,
        Kind.SWITCH,
    ),
    _setup(
        "checkpointing",
        "--checkpointing --gradient-checkpointing --activation-checkpointing",
        "Recompute activations in backward: none, full or every_n:K; without a value full.",
        Panel.RECOMPUTE,
        Kind.MODE,
        metavar="MODE",
    ),
    _setup(
        "use_reentrant",
        "--use-reentrant --no-use-reentrant",
        "Variant of checkpointing; left out, as the software does.",
        Panel.RECOMPUTE,
        Kind.EITHER,
    ),
    Option(
        name="gradient_checkpointing_kwargs",
        flags=("--checkpointing-kwargs", "--gradient-checkpointing-kwargs"),
        help="The Trainer's JSON, for example '{\"use_reentrant\": false}'.",
        panel=Panel.RECOMPUTE,
        metavar="JSON",
        aliases=("activation_checkpointing_kwargs",),
        field="use_reentrant",
    ),
    _setup(
        "attn_implementation",
        "--attn-implementation",
        f"Attention as transformers names it: {legal(Attention)}.",
        Panel.KERNELS,
        metavar="NAME",
        aliases="attn_impl attention_implementation",
    ),
    _setup(
        "sdpa_backend",
        "--sdpa-backend",
        f"Kernel behind sdpa: {legal(SdpaBackend)}; auto is PyTorch's own choice.",
        Panel.KERNELS,
        metavar="NAME",
    ),
    _setup(
        "use_liger_kernel",
        "--use-liger-kernel",
        "Liger's kernels are applied to the model, as the Trainer does: fused norms, rotary "
        "embedding, MLP, and a loss that never holds all logits.",
        Panel.KERNELS,
        Kind.SWITCH,
    ),
    _setup(
        "fused_loss",
        "--fused-loss",
        f"Loss in place of the model's head and cross-entropy: none, {', '.join(FUSED_LOSSES)}. "
        f"torchtune's work in {DEFAULT_CHUNKS} pieces, or in N: torchtune-linear:N.",
        Panel.KERNELS,
        metavar="NAME",
    ),
    _setup(
        "torch_compile",
        "--torch-compile",
        "The model is compiled by TorchInductor, as the Trainer has it done: what backward keeps "
        "is the compiler's choice, and fused operators leave no results between them.",
        Panel.KERNELS,
        Kind.SWITCH,
    ),
    _setup(
        "torch_compile_mode",
        "--torch-compile-mode",
        "Mode of torch.compile, which it switches on; priced is default.",
        Panel.KERNELS,
        metavar="MODE",
    ),
    _setup(
        "torch_compile_backend",
        "--torch-compile-backend",
        "Backend of torch.compile, which it switches on; priced is inductor.",
        Panel.KERNELS,
        metavar="NAME",
    ),
    _setup(
        "loop",
        "--loop",
        f"Whose training loop runs: {legal(Loop)}.",
        Panel.SOFTWARE,
        metavar="NAME",
    ),
    _setup(
        "software",
        "--software",
        "Versions that will train where they are not the installed ones: "
        "torch=1.10,transformers=4.18.",
        Panel.SOFTWARE,
        metavar="VERSIONS",
    ),
    _setup(
        "num_steps",
        "--steps",
        "Optimizer steps to simulate.",
        Panel.SOFTWARE,
        Kind.WHOLE,
        metavar="N",
    ),
    _setup(
        "alloc_conf",
        "--alloc-conf",
        "Value of PYTORCH_CUDA_ALLOC_CONF.",
        Panel.SOFTWARE,
        metavar="CONF",
        aliases="pytorch_cuda_alloc_conf pytorch_alloc_conf",
    ),
    Option(
        name="expandable_segments",
        flags=("--expandable-segments",),
        help="Short for --alloc-conf expandable_segments:True.",
        panel=Panel.SOFTWARE,
        kind=Kind.SWITCH,
        field="alloc_conf",
    ),
    Option(
        name="gpu",
        flags=("--gpu",),
        help="A GPU of `memest gpus`, or local (local:1) for one of this machine. Repeatable.",
        panel=Panel.GPU,
        kind=Kind.LIST,
        metavar="NAME",
    ),
    Option(
        name="gpu_memory",
        flags=("--gpu-memory",),
        help="Memory PyTorch can have, for a GPU that is not in the list: 80GiB.",
        panel=Panel.GPU,
        metavar="SIZE",
    ),
    Option(
        name="device_context",
        flags=("--device-context",),
        help="What nvidia-smi shows after torch.ones(1).cuda(), in place of the built-in table: "
        "600MiB.",
        panel=Panel.GPU,
        metavar="SIZE",
    ),
    Option(
        name="profile",
        flags=("--profile",),
        help="Calibration profile that corrects the answer (`memest calibrate fit` makes one), or "
        "none. Left out: one that was measured on this GPU, or one like it, if there is any.",
        panel=Panel.GPU,
        metavar="FILE",
        names_file=True,
    ),
    *SEVERAL_GPUS,
)
"""Every option of an estimate, in the order of the help."""

PLACE = tuple(option.name for option in OPTIONS if option.panel is Panel.GPU and not option.field)
"""Options that say where a run is to fit: arguments of an estimate and no part of its setup."""
