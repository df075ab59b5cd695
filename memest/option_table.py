"""Every option of an estimate, declared once.

The command line, its help, the Python API and the readers of other people's spellings are all
made from :data:`OPTIONS`. Torch-free.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from memest.adapter import METHODS
from memest.distributed import Distributed, Fsdp
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

__all__ = ["OPTIONS", "Kind", "Option", "Panel"]


class Kind(enum.StrEnum):
    """What an option takes."""

    WHOLE = "whole number"
    NUMBER = "number"
    TEXT = "text"
    SWITCH = "switch"
    """On when named; Python and the command line take True and False too."""
    EITHER = "switch with a negative form"
    """On, off, or left to the software."""
    MODE = "switch that may carry a value"
    LIST = "text, repeatable"


class Panel(enum.StrEnum):
    """Under which heading of the help an option stands."""

    MODEL = "Model"
    ADAPTERS = "Adapters (peft)"
    QUANTIZATION = "Quantised base (bitsandbytes)"
    BATCH = "Batch"
    PRECISION = "Precision"
    OPTIMIZER = "Optimizer"
    RECOMPUTE = "Activation checkpointing"
    KERNELS = "Attention"
    SOFTWARE = "Loop, software and allocator"
    GPU = "GPU"
    DISTRIBUTED = "Several GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: its keyword in Python.
        flags: spellings of the command line, the one that its help shows first.
        help: one or two sentences.
        panel: heading in the help.
        kind: what it takes.
        metavar: how the help calls the value.
        aliases: further keywords in Python; with dashes they work on the command line too.
        field: the field of :class:`memest.setup.Setup` it sets, empty for an argument of
            :func:`memest.estimate` itself.
        names_file: its value may be the path of a file.
    """

    name: str
    flags: tuple[str, ...]
    help: str
    panel: Panel
    kind: Kind = Kind.TEXT
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    field: str = ""
    names_file: bool = False

    @property
    def keywords(self) -> tuple[str, ...]:
        """Every name it has in Python."""
        spelt = (flag[2:].replace("-", "_") for flag in self.flags if flag.startswith("--"))
        return tuple(dict.fromkeys((self.name, *spelt, *self.aliases)))


def _legal(kind: type[enum.StrEnum]) -> str:
    return ", ".join(member.value for member in kind)


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


def _part(
    name: str, flags: str, help_text: str, panel: Panel, kind: Kind = Kind.TEXT,
    field: str = "adapter", **more: Any,
) -> Option:  # fmt: skip
    """An option that sets a part of a field of Setup."""
    return Option(
        name=name, flags=tuple(flags.split()), help=help_text, panel=panel, kind=kind, field=field,
        **more,
    )  # fmt: skip


def _spread(name: str, flags: str, help_text: str, kind: Kind = Kind.TEXT, **more: Any) -> Option:
    """An option that sets a field of Distributed, with the field's default in its help."""
    default = getattr(Distributed(), name, None)
    if kind in (Kind.WHOLE, Kind.NUMBER, Kind.TEXT) and default not in (None, (), ""):
        help_text += f" Default: {default}."
    values = {"aliases": "", **more}
    values["aliases"] = tuple(values["aliases"].split())
    return Option(
        name=name, flags=tuple(flags.split()), help=help_text, panel=Panel.DISTRIBUTED, kind=kind,
        field="distributed", **values,
    )  # fmt: skip


_SEVERAL_GPUS: tuple[Option, ...] = (
    _spread(
        "num_gpus",
        "--num-gpus --num-processes",
        "GPUs of the run, one process each: DDP, unless --fsdp or --zero says otherwise.",
        Kind.WHOLE,
        metavar="N",
        aliases="world_size nproc_per_node",
    ),
    _spread(
        "nccl_memory",
        "--nccl-memory",
        "What the communicator takes on each GPU; left out, a range: it depends on the links.",
        metavar="SIZE",
    ),
    _spread(
        "ddp_bucket_cap_mb",
        "--ddp-bucket-cap-mb",
        "Size of DDP's gradient buckets, MiB; left out, 25 and a first one of 1.",
        Kind.NUMBER,
        metavar="MIB",
        aliases="bucket_cap_mb",
    ),
    _spread(
        "ddp_find_unused_parameters",
        "--ddp-find-unused-parameters --no-ddp-find-unused-parameters",
        "DDP looks for parameters that were not used, and copies the outputs; left out, as the "
        "loop does: the Trainer, unless layers are recomputed.",
        Kind.EITHER,
        aliases="find_unused_parameters",
    ),
    _spread(
        "ddp_gradient_as_bucket_view",
        "--ddp-gradient-as-bucket-view",
        "Gradients are views of DDP's buckets.",
        Kind.SWITCH,
        aliases="gradient_as_bucket_view",
    ),
    _spread(
        "fsdp",
        "--fsdp",
        f"FSDP2 (fully_shard): {_legal(Fsdp)}; full_shard gives parameters back after each unit's "
        "forward, shard_grad_op keeps them until its backward.",
        metavar="MODE",
    ),
    _spread(
        "fsdp_wrap",
        "--fsdp-wrap --fsdp-transformer-layer-cls-to-wrap",
        "Class of the modules that become FSDP units; left out, those the model names as not to be "
        "split. Repeatable.",
        Kind.LIST,
        metavar="CLASS",
        aliases="transformer_layer_cls_to_wrap",
    ),
    _spread(
        "fsdp_shard_size",
        "--fsdp-shard-size",
        "GPUs that share one copy of the model, the copies being replicas (hybrid sharding); left "
        "out, all.",
        Kind.WHOLE,
        metavar="N",
    ),
    _spread(
        "fsdp_offload",
        "--fsdp-offload",
        "FSDP keeps shards, gradients and optimizer states in host memory.",
        Kind.SWITCH,
        aliases="fsdp_offload_params",
    ),
    _spread(
        "zero",
        "--zero --zero-stage",
        "Stage of DeepSpeed ZeRO, 1 or 2; 0 is no DeepSpeed.",
        Kind.WHOLE,
        metavar="STAGE",
    ),
    _spread(
        "offload_optimizer",
        "--offload-optimizer",
        "ZeRO keeps optimizer states and master weights in host memory.",
        Kind.SWITCH,
    ),
    _spread(
        "offload_param",
        "--offload-param",
        "ZeRO-3 keeps parameters in host memory. Not modelled yet: refused.",
        Kind.SWITCH,
    ),
    _spread(
        "zero_settings",
        "--deepspeed --deepspeed-config",
        "A DeepSpeed configuration, a file or the JSON itself: its stage, buckets and offloading; "
        "`auto` as the Trainer fills it in.",
        metavar="FILE",
        names_file=True,
        aliases="deepspeed_config_file",
    ),
)

OPTIONS: tuple[Option, ...] = (
    _setup(
        "task",
        "--task",
        f"Which head the model gets: {_legal(Task)}.",
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
    _part(
        "peft",
        "--peft --peft-type",
        f"Adapters are trained, the model is frozen: {', '.join(METHODS)}.",
        Panel.ADAPTERS,
        metavar="METHOD",
    ),
    _part(
        "adapter",
        "--peft-config",
        "Adapters as peft's adapter_config.json has them; the options below change its values.",
        Panel.ADAPTERS,
        metavar="FILE",
        aliases=("adapter_config",),
        names_file=True,
    ),
    _part(
        "lora_r",
        "--lora-r",
        "Rank of the adapters; of a method that is not named, LoRA's.",
        Panel.ADAPTERS,
        Kind.WHOLE,
        metavar="N",
        aliases=("lora_rank",),
    ),
    _part(
        "lora_alpha",
        "--lora-alpha",
        "Scaling of the adapters; changes no size.",
        Panel.ADAPTERS,
        Kind.NUMBER,
        metavar="ALPHA",
    ),
    _part(
        "lora_target_modules",
        "--lora-target-modules --target-modules",
        "Modules that get adapters: names with commas between, a regular expression or all-linear; "
        "left out, peft's own for the architecture. Repeatable.",
        Panel.ADAPTERS,
        Kind.LIST,
        metavar="NAMES",
        aliases=("lora_target",),
    ),
    _part(
        "lora_dropout",
        "--lora-dropout",
        "Dropout before the adapters.",
        Panel.ADAPTERS,
        Kind.NUMBER,
        metavar="P",
    ),
    _part(
        "use_dora",
        "--use-dora --dora",
        "DoRA: LoRA with a magnitude for each output.",
        Panel.ADAPTERS,
        Kind.SWITCH,
    ),
    _part(
        "use_rslora",
        "--use-rslora --rslora",
        "Rank-stabilised scaling; changes no size.",
        Panel.ADAPTERS,
        Kind.SWITCH,
    ),
    _part(
        "modules_to_save",
        "--modules-to-save",
        "Modules that train as a whole beside the adapters, in a copy. Repeatable.",
        Panel.ADAPTERS,
        Kind.LIST,
        metavar="NAMES",
    ),
    _part(
        "num_virtual_tokens",
        "--num-virtual-tokens",
        "Tokens of prompt_tuning, p_tuning and prefix_tuning.",
        Panel.ADAPTERS,
        Kind.WHOLE,
        metavar="N",
    ),
    _part(
        "autocast_adapter_dtype",
        "--autocast-adapter-dtype --no-autocast-adapter-dtype",
        "Whether half-precision adapters are made float32; left out, they are, as peft does.",
        Panel.ADAPTERS,
        Kind.EITHER,
    ),
    _part(
        "load_in_4bit",
        "--load-in-4bit",
        "The base's linear layers in 4 bits (QLoRA).",
        Panel.QUANTIZATION,
        Kind.SWITCH,
        field="quantization",
    ),
    _part(
        "load_in_8bit",
        "--load-in-8bit",
        "The base's linear layers in 8 bits, LLM.int8().",
        Panel.QUANTIZATION,
        Kind.SWITCH,
        field="quantization",
    ),
    _part(
        "quantization",
        "--quantization-config",
        "transformers' quantization_config as JSON or a file; the options below change its values.",
        Panel.QUANTIZATION,
        metavar="JSON",
        field="quantization",
        names_file=True,
    ),
    _part(
        "bnb_4bit_quant_type",
        "--bnb-4bit-quant-type",
        "Kind of 4-bit numbers: nf4 or fp4. Default: fp4.",
        Panel.QUANTIZATION,
        metavar="TYPE",
        aliases=("quant_type",),
        field="quantization",
    ),
    _part(
        "bnb_4bit_compute_dtype",
        "--bnb-4bit-compute-dtype",
        "Dtype of the matmuls of 4-bit layers. Default: float32.",
        Panel.QUANTIZATION,
        metavar="DTYPE",
        field="quantization",
    ),
    _part(
        "bnb_4bit_use_double_quant",
        "--bnb-4bit-use-double-quant --double-quant",
        "The scales of the blocks are quantised too.",
        Panel.QUANTIZATION,
        Kind.SWITCH,
        aliases=("use_bnb_nested_quant", "use_nested_quant", "double_quantization"),
        field="quantization",
    ),
    _part(
        "bnb_4bit_quant_storage",
        "--bnb-4bit-quant-storage",
        "Dtype of the tensor that holds 4-bit weights. Default: uint8.",
        Panel.QUANTIZATION,
        metavar="DTYPE",
        field="quantization",
    ),
    _part(
        "llm_int8_threshold",
        "--llm-int8-threshold",
        "Values above it are outliers, multiplied in half precision; 0 looks for none. Default: 6.",
        Panel.QUANTIZATION,
        Kind.NUMBER,
        metavar="VALUE",
        field="quantization",
    ),
    _part(
        "llm_int8_skip_modules",
        "--llm-int8-skip-modules",
        "Modules that are not quantised, in place of the output embedding. Repeatable.",
        Panel.QUANTIZATION,
        Kind.LIST,
        metavar="NAMES",
        field="quantization",
    ),
    _part(
        "prepare_kbit",
        "--prepare-kbit --no-prepare-kbit",
        "Whether peft.prepare_model_for_kbit_training is called: it makes float32 of what is not "
        "quantised; left out, it is wherever adapters are trained.",
        Panel.QUANTIZATION,
        Kind.EITHER,
        field="quantization",
    ),
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
        f"Autocast in one word: {_legal(Precision)}; fp32 is none.",
        Panel.PRECISION,
        metavar="NAME",
    ),
    _setup(
        "dtype",
        "--dtype --torch-dtype",
        f"Dtype of the weights: {_legal(Dtype)}; auto is the config's own, as in from_pretrained.",
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
        f"{_legal(ZeroGrad)}: after the step gradients are dropped (none) or kept as zeros (zero); "
        "auto follows torch's version.",
        Panel.OPTIMIZER,
        metavar="NAME",
    ),
    _setup(
        "zero_grad_at",
        "--zero-grad-at",
        f"Where a script calls zero_grad: {_legal(ZeroGradAt)}; until then old gradients live.",
        Panel.OPTIMIZER,
        metavar="PLACE",
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
        f"Attention as transformers names it: {_legal(Attention)}.",
        Panel.KERNELS,
        metavar="NAME",
        aliases="attn_impl attention_implementation",
    ),
    _setup(
        "sdpa_backend",
        "--sdpa-backend",
        f"Kernel behind sdpa: {_legal(SdpaBackend)}; auto is PyTorch's own choice.",
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
        "loop",
        "--loop",
        f"Whose training loop runs: {_legal(Loop)}.",
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
    *_SEVERAL_GPUS,
)
"""Every option of an estimate, in the order of the help."""
