"""Every option of an estimate, in one table.

Most are declared where their values are kept, by the fields of a setup and of its parts; those
that are other words for a field, or no part of a setup, are written out here. The command line,
its help, the Python API and the readers of other people's spellings are made from
:data:`OPTIONS`. Torch-free.
"""

from __future__ import annotations

from memest.config.adapter import METHODS
from memest.config.data_loading import DataLoading
from memest.config.generation import Generation
from memest.config.lengths import Batching
from memest.config.option import Kind, Option, Panel, options_of
from memest.config.parallel_options import ParallelOptions
from memest.config.quantization import Quantization
from memest.config.training_options import TrainingOptions

__all__ = ["OPTIONS", "OWN_MODULE_NAMES", "PLACE"]

_ADAPTERS = (
    Option.of(
        "peft",
        f"Adapters are trained, the model is frozen: {', '.join(METHODS)}.",
        Panel.ADAPTERS,
        flags="--peft --peft-type",
        metavar="METHOD",
        field="adapter",
    ),
    Option.of(
        "lora_r",
        "Rank of the adapters; of a method that is not named, LoRA's.",
        Panel.ADAPTERS,
        Kind.WHOLE,
        aliases="lora_rank",
        field="adapter",
    ),
    Option.of(
        "lora_alpha",
        "Scaling of the adapters; changes no size.",
        Panel.ADAPTERS,
        Kind.NUMBER,
        metavar="ALPHA",
        field="adapter",
        key="lora_alpha",
    ),
    Option.of(
        "lora_target_modules",
        "Modules that get adapters: names with commas between, a regular expression or all-linear; "
        "left out, peft's own for the architecture. Repeatable.",
        Panel.ADAPTERS,
        Kind.LIST,
        flags="--lora-target-modules --target-modules",
        metavar="NAMES",
        aliases="lora_target",
        field="adapter",
        key="target_modules",
    ),
    Option.of(
        "lora_dropout",
        "Dropout before the adapters.",
        Panel.ADAPTERS,
        Kind.NUMBER,
        metavar="P",
        field="adapter",
        key="lora_dropout",
    ),
    Option.of(
        "use_dora",
        "DoRA: LoRA with a magnitude for each output.",
        Panel.ADAPTERS,
        Kind.SWITCH,
        flags="--use-dora --dora",
        field="adapter",
        key="use_dora",
    ),
    Option.of(
        "use_rslora",
        "Rank-stabilised scaling; changes no size.",
        Panel.ADAPTERS,
        Kind.SWITCH,
        flags="--use-rslora --rslora",
        field="adapter",
        key="use_rslora",
    ),
    Option.of(
        "modules_to_save",
        "Modules that train as a whole beside the adapters, in a copy. Repeatable.",
        Panel.ADAPTERS,
        Kind.LIST,
        metavar="NAMES",
        field="adapter",
        key="modules_to_save",
    ),
    Option.of(
        "num_virtual_tokens",
        "Tokens of prompt_tuning, p_tuning and prefix_tuning.",
        Panel.ADAPTERS,
        Kind.WHOLE,
        field="adapter",
        key="num_virtual_tokens",
    ),
    Option.of(
        "autocast_adapter_dtype",
        "Whether half-precision adapters are made float32; left out, they are, as peft does.",
        Panel.ADAPTERS,
        Kind.EITHER,
        field="adapter",
    ),
)

_LENGTHS = (
    Option.of(
        "lengths",
        "A file with the lengths of the samples in tokens: one a line, length,count as CSV, or "
        "JSON. The largest batch there can be decides; --max-length cuts.",
        Panel.LENGTHS,
        metavar="FILE",
        names_file=True,
        field="batching",
    ),
    Option.of(
        "dataset",
        "A dataset whose tokens are counted: jsonl, json, csv, parquet or txt; text needs "
        "--tokenizer.",
        Panel.LENGTHS,
        metavar="FILE",
        names_file=True,
        field="batching",
    ),
    Option.of(
        "tokenizer",
        "A tokenizer.json, or the folder of a model that holds one, for --dataset.",
        Panel.LENGTHS,
        metavar="PATH",
        names_file=True,
        field="batching",
    ),
    Option.of(
        "dataset_column",
        "The column of --dataset with the text or the token ids; left out, one of the usual names.",
        Panel.LENGTHS,
        metavar="NAME",
        field="batching",
    ),
    Option.of(
        "packing",
        "TRL's packing: every row is full. bfd (rows laid end to end, as padding-free), wrapped "
        "(plain rows) or none. Needs --seq-len.",
        Panel.LENGTHS,
        metavar="STRATEGY",
        aliases="packing_strategy",
        field="padding_free",
    ),
)

_GENERATION = (
    Option.of(
        "generate",
        "Tokens that are generated from prompts of --seq-len after the last step, --eval-batch of "
        "them at once, or --batch.",
        Panel.GENERATION,
        Kind.WHOLE,
        flags="--generate --max-new-tokens",
        metavar="TOKENS",
        aliases="generation_max_new_tokens",
        field="generation",
        key="new_tokens",
    ),
    Option.of(
        "predict_with_generate",
        "The evaluation generates (Seq2SeqTrainer); an evaluation follows the last step.",
        Panel.GENERATION,
        Kind.SWITCH,
        field="generation",
    ),
    Option.of(
        "generation_max_length",
        "Greatest length of what is generated, with --predict-with-generate; prompts of "
        "decoder-only models count. Default: 20, transformers' own.",
        Panel.GENERATION,
        Kind.WHOLE,
        metavar="TOKENS",
        field="generation",
    ),
)

_SHORT_FORMS = (
    Option.of(
        "bf16",
        "bfloat16 autocast. The dtype of the weights is --dtype.",
        Panel.PRECISION,
        Kind.SWITCH,
        field="precision",
    ),
    Option.of(
        "fp16",
        "float16 autocast with a gradient scaler. The dtype of the weights is --dtype.",
        Panel.PRECISION,
        Kind.SWITCH,
        field="precision",
    ),
    Option.of(
        "load_in_4bit",
        "The base's linear layers in 4 bits (QLoRA).",
        Panel.QUANTIZATION,
        Kind.SWITCH,
        field="quantization",
    ),
    Option.of(
        "load_in_8bit",
        "The base's linear layers in 8 bits, LLM.int8().",
        Panel.QUANTIZATION,
        Kind.SWITCH,
        field="quantization",
    ),
)
"""Short words for a field of a setup, in front of its own."""

_OTHER_WORDS = (
    Option.of(
        "eval_strategy",
        "As the Trainer takes it: no, steps or epoch; an evaluation of batches of 8 unless "
        "--eval-batch says otherwise.",
        Panel.BATCH,
        metavar="NAME",
        aliases="evaluation_strategy",
        field="eval_batch",
    ),
    Option.of(
        "prediction_loss_only",
        "The evaluation keeps the loss alone, whatever --eval-samples says.",
        Panel.BATCH,
        Kind.SWITCH,
        field="eval_samples",
    ),
    Option.of(
        "gradient_checkpointing_kwargs",
        "The Trainer's JSON, for example '{\"use_reentrant\": false}'.",
        Panel.RECOMPUTE,
        flags="--checkpointing-kwargs --gradient-checkpointing-kwargs",
        metavar="JSON",
        aliases="activation_checkpointing_kwargs",
        field="use_reentrant",
    ),
    Option.of(
        "expandable_segments",
        "Short for --alloc-conf expandable_segments:True.",
        Panel.SOFTWARE,
        Kind.SWITCH,
        field="alloc_conf",
    ),
)
"""Other words for a field of a setup."""

_ARGUMENTS = (
    Option.of(
        "trust_remote_code",
        "Run code that the model's repository brings along.",
        Panel.MODEL,
        Kind.SWITCH,
    ),
    Option.of(
        "inputs",
        "A tensor of the batch of your own module: x:float32[B,3,224,224]. B is --batch, S is "
        "--seq-len, other names are bound by --dim. Repeatable.",
        Panel.OWN_MODULE,
        Kind.LIST,
        flags="--input",
        metavar="SPEC",
    ),
    Option.of(
        "dims",
        "What a letter of --input is: H=224. Repeatable.",
        Panel.OWN_MODULE,
        Kind.LIST,
        flags="--dim",
        metavar="NAME=N",
    ),
    Option.of(
        "loss",
        "The loss where your module returns none: cross_entropy, mse, ... or "
        "package.module:function, called with (outputs, batch).",
        Panel.OWN_MODULE,
        metavar="LOSS",
    ),
    Option.of(
        "step_fn",
        "package.module:function, called as step(model, batch), which returns the loss: in "
        "place of forward and loss.",
        Panel.OWN_MODULE,
        flags="--step",
        metavar="STEP",
    ),
    Option.of(
        "model_args",
        "An argument of your factory or class: depth=12. Repeatable.",
        Panel.OWN_MODULE,
        Kind.LIST,
        flags="--model-arg",
        metavar="NAME=VALUE",
    ),
    Option.of(
        "gpu",
        "A GPU of `memest gpus`, or local (local:1) for one of this machine. Repeatable.",
        Panel.GPU,
        Kind.LIST,
        metavar="NAME",
    ),
    Option.of(
        "gpu_memory",
        "Memory PyTorch can have, for a GPU that is not in the list: 80GiB.",
        Panel.GPU,
        metavar="SIZE",
    ),
    Option.of(
        "device_context",
        "What nvidia-smi shows after torch.ones(1).cuda(), in place of the built-in table: 600MiB.",
        Panel.GPU,
        metavar="SIZE",
    ),
    Option.of(
        "calibration",
        "Calibration that corrects the answer (`memest calibrate fit` makes one), or "
        "none. Left out: one that was measured on this GPU, or one like it, if there is any.",
        Panel.GPU,
        aliases="profile",
        metavar="FILE",
        names_file=True,
    ),
)
"""Arguments of an estimate, and no part of the training setup."""

_ALL = (
    *_SHORT_FORMS,
    *options_of(TrainingOptions),
    *_ADAPTERS,
    *options_of(Quantization, field="quantization", panel=Panel.QUANTIZATION),
    *_LENGTHS,
    *options_of(Batching, field="batching", panel=Panel.LENGTHS),
    *_GENERATION,
    *options_of(Generation, field="generation", panel=Panel.GENERATION),
    *_OTHER_WORDS,
    *options_of(DataLoading, field="data_loading", panel=Panel.BATCH, prefix="dataloader_"),
    *options_of(ParallelOptions, field="distributed", panel=Panel.DISTRIBUTED),
    *_ARGUMENTS,
)
OPTIONS = tuple(sorted(_ALL, key=lambda each: list(Panel).index(each.panel)))
"""Every option of an estimate, in the order of the help."""

OWN_MODULE_NAMES = frozenset(each.name for each in OPTIONS if each.panel is Panel.OWN_MODULE)
"""Options of modules of one's own: what they are fed, and what they are trained on."""

PLACE = tuple(each.name for each in OPTIONS if each.panel is Panel.GPU)
"""Options that say where a run is to fit."""
