"""Every option of an estimate, in one table.

Most are declared where their values are kept, by the fields of a setup and of its parts; those
that are other words for a field, or no part of a setup, are written out here. The command line,
its help, the Python API and the readers of other people's spellings are made from
:data:`OPTIONS`. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memest.config.adapter import METHODS
from memest.config.data_loading import DataLoading
from memest.config.generation import Generation
from memest.config.lengths import Batching
from memest.config.life import Life
from memest.config.option import Panel, option, options_of
from memest.config.parallel_options import ParallelOptions
from memest.config.quantization import Quantization
from memest.config.rollouts import Rollouts
from memest.config.training_options import TrainingOptions

__all__ = ["FLAGS", "OPTIONS", "OWN_MODULE_NAMES", "PLACE", "take_parts"]


@dataclass
class _AdapterWords:
    """Words for what peft's configuration holds."""

    peft: str | None = option(
        None,
        f"Adapters are trained, the model is frozen: {', '.join(METHODS)}, or another method of "
        "the installed peft.",
        "--peft --peft-type METHOD",
        key="",
        short="Adapters are trained: lora, ia3, vera, ...",
    )
    lora_r: int | None = option(
        None,
        "Rank of the adapters; of a method that is not named, LoRA's.",
        "lora_rank",
        key="",
        short="Rank of the adapters.",
    )
    lora_alpha: float | None = option(None, "Scaling of the adapters; changes no size.", "ALPHA")
    lora_target_modules: tuple[str, ...] = option(
        (),
        "Modules that get adapters: names with commas between, a regular expression or all-linear; "
        "and-all-linear among names adds all linear layers to them (axolotl's lora_target_linear); "
        "left out, peft's own for the architecture. Repeatable.",
        "--lora-target-modules --target-modules NAMES lora_target",
        key="target_modules",
    )
    lora_dropout: float | None = option(None, "Dropout before the adapters.", "P")
    use_dora: bool = option(
        False, "DoRA: LoRA with a magnitude for each output.", "--use-dora --dora"
    )
    use_rslora: bool = option(
        False, "Rank-stabilised scaling; changes no size.", "--use-rslora --rslora"
    )
    modules_to_save: tuple[str, ...] = option(
        (), "Modules that train as a whole beside the adapters, in a copy. Repeatable.", "NAMES"
    )
    num_virtual_tokens: int | None = option(
        None, "Tokens of prompt_tuning, p_tuning and prefix_tuning."
    )
    peft_args: tuple[str, ...] = option(
        (),
        "A setting of the method as peft's configuration class calls it: n_frequency=500. "
        "Repeatable.",
        "--peft-arg NAME=VALUE",
        key="",
    )
    autocast_adapter_dtype: bool | None = option(
        None,
        "Whether half-precision adapters are made float32; left out, they are, as peft does.",
        key="",
    )


@dataclass
class _LengthWords:
    """Where lengths of samples are read."""

    lengths: str | None = option(
        None,
        "A file with the lengths of the samples in tokens: one a line, length,count as CSV, or "
        "JSON. The largest batch there can be decides; --max-length cuts.",
        "FILE",
    )
    dataset: str | None = option(
        None,
        "A dataset whose tokens are counted: jsonl, json, csv, parquet or txt; text needs "
        "--tokenizer.",
        "FILE",
    )
    tokenizer: str | None = option(
        None,
        "A tokenizer.json, or the folder of a model that holds one, for --dataset.",
        "PATH",
    )
    dataset_column: str | None = option(
        None,
        "The column of --dataset with the text or the token ids; left out, one of the usual names.",
        "NAME",
    )
    packing: str | None = option(
        None,
        "TRL's packing: every row is full. bfd (rows laid end to end, as padding-free), wrapped "
        "(plain rows) or none. Needs --seq-len.",
        "STRATEGY packing_strategy",
        field="padding_free",
    )


@dataclass
class _GenerationWords:
    """Words for a generation."""

    generate: int | None = option(
        None,
        "Tokens that are generated from prompts of --seq-len after the last step, --eval-batch of "
        "them at once, or --batch.",
        "--generate --max-new-tokens TOKENS generation_max_new_tokens",
        key="new_tokens",
    )
    predict_with_generate: bool = option(
        False, "The evaluation generates (Seq2SeqTrainer); an evaluation follows the last step."
    )
    generation_max_length: int | None = option(
        None,
        "Greatest length of what is generated, with --predict-with-generate; prompts of "
        "decoder-only models count. Default: 20, transformers' own.",
        "TOKENS",
    )


@dataclass
class _ShortForms:
    """Short words for a field of a setup, in front of its own."""

    bf16: bool = option(
        False,
        "bfloat16 autocast. The dtype of the weights is --dtype.",
        panel=Panel.PRECISION,
        short="",
        field="precision",
    )
    fp16: bool = option(
        False,
        "float16 autocast with a gradient scaler. The dtype of the weights is --dtype.",
        short="",
        field="precision",
    )
    qlora: bool = option(
        False,
        "QLoRA as people run it: a base of 4 bits in nf4 with quantised scales, which computes in "
        "bfloat16 (with --fp16: float16), LoRA, and the checkpointing that peft's preparation of "
        "the base switches on. Beside --fsdp-version 1 also what no such run is without: 4-bit "
        "weights stored in the dtype of the others, which are left in it, and shards cut in host "
        "memory. Every part can be named besides (--checkpointing none).",
        panel=Panel.QUANTIZATION,
        short="LoRA on a base of 4 bits (nf4), checkpointed.",
        field="quantization",
    )
    load_in_4bit: bool = option(
        False,
        "The base's linear layers in 4 bits, with bitsandbytes' own defaults: fp4, float32.",
        field="quantization",
    )
    load_in_8bit: bool = option(
        False, "The base's linear layers in 8 bits, LLM.int8().", field="quantization"
    )


@dataclass
class _OtherWords:
    """Other words for a field of a setup."""

    eval_strategy: str | None = option(
        None,
        "As the Trainer takes it: no, steps or epoch; an evaluation of batches of 8 unless "
        "--eval-batch says otherwise.",
        "NAME evaluation_strategy",
        panel=Panel.BATCH,
        field="eval_batch",
    )
    prediction_loss_only: bool = option(
        False,
        "The evaluation keeps the loss alone, whatever --eval-samples says.",
        field="eval_samples",
    )
    gradient_checkpointing_kwargs: str | None = option(
        None,
        "The Trainer's JSON, for example '{\"use_reentrant\": false}'.",
        "--checkpointing-kwargs --gradient-checkpointing-kwargs JSON "
        "activation_checkpointing_kwargs",
        panel=Panel.RECOMPUTE,
        field="use_reentrant",
    )
    expandable_segments: bool = option(
        False,
        "Short for --alloc-conf expandable_segments:True.",
        panel=Panel.SOFTWARE,
        field="alloc_conf",
    )


@dataclass
class _Arguments:
    """Arguments of an estimate, and no part of the training setup."""

    trust_remote_code: bool = option(
        False, "Run code that the model's repository brings along.", panel=Panel.MODEL
    )
    inputs: tuple[str, ...] = option(
        (),
        "A tensor of the batch of your own module: x:float32[B,3,224,224]. B is --batch, S is "
        "--seq-len, other names are bound by --dim. Repeatable.",
        "--input SPEC",
        panel=Panel.OWN_MODULE,
    )
    dims: tuple[str, ...] = option(
        (), "What a letter of --input is: H=224. Repeatable.", "--dim NAME=N"
    )
    loss: str | None = option(
        None,
        "The loss where your module returns none: cross_entropy, mse, ... or "
        "package.module:function, called with (outputs, batch).",
        "LOSS",
    )
    step_fn: str | None = option(
        None,
        "package.module:function, called as step(model, batch), which returns the loss: in "
        "place of forward and loss.",
        "--step STEP",
    )
    model_args: tuple[str, ...] = option(
        (), "An argument of your factory or class: depth=12. Repeatable.", "--model-arg NAME=VALUE"
    )
    gpu: tuple[str, ...] = option(
        (),
        "A GPU of `memest gpus` (8xh100: eight), or local (local:1) for one of this machine. "
        "Repeatable.",
        "NAME",
        panel=Panel.GPU,
        short="A GPU of `memest gpus`, or local. Repeatable.",
    )
    gpu_memory: str | None = option(
        None,
        "Memory PyTorch can have, for a GPU that is not in the list: 80GiB.",
        "SIZE",
        short="Memory of a GPU that is not in the list: 80GiB.",
    )
    device_context: str | None = option(
        None,
        "What nvidia-smi shows after torch.ones(1).cuda(), in place of the built-in table: 600MiB.",
        "SIZE",
    )
    calibration: str | None = option(
        None,
        "Calibration that corrects the answer (`memest calibrate fit` makes one), or "
        "none. Left out: one that was measured on this GPU, or one like it, if there is any.",
        "FILE profile",
    )


_ALL = (
    *options_of(_ShortForms, field="", parts=False),
    *options_of(TrainingOptions),
    *options_of(_AdapterWords, field="adapter", panel=Panel.ADAPTERS),
    *options_of(Quantization, field="quantization", panel=Panel.QUANTIZATION),
    *options_of(_LengthWords, field="batching", parts=False, panel=Panel.LENGTHS),
    *options_of(Batching, field="batching", panel=Panel.LENGTHS),
    *options_of(_GenerationWords, field="generation", parts=False, panel=Panel.GENERATION),
    *options_of(Generation, field="generation", panel=Panel.GENERATION),
    *options_of(Rollouts, field="rollouts", panel=Panel.ROLLOUTS),
    *options_of(_OtherWords, field="", parts=False),
    *options_of(DataLoading, field="data_loading", panel=Panel.BATCH, prefix="dataloader_"),
    *options_of(Life, field="life", panel=Panel.LIFE),
    *options_of(ParallelOptions, field="distributed", panel=Panel.DISTRIBUTED),
    *options_of(_Arguments, field="", parts=False),
)
OPTIONS = tuple(sorted(_ALL, key=lambda each: list(Panel).index(each.panel)))
"""Every option of an estimate, in the order of the help."""

OWN_MODULE_NAMES = frozenset(each.name for each in OPTIONS if each.panel is Panel.OWN_MODULE)
"""Options of modules of one's own: what they are fed, and what they are trained on."""

PLACE = tuple(each.name for each in OPTIONS if each.panel is Panel.GPU)
"""Options that say where a run is to fit."""

FLAGS = {each.key or each.name: each.flags[0] for each in OPTIONS}
"""The flag of an option, by the part of a field's value that it says, or by its own name."""


def take_parts(values: dict[str, Any], field: str) -> dict[str, Any]:
    """What the options of a field say of its value, by the parts of that value.

    Args:
        values: options by name; those of the field are taken out.
        field: of a setup.
    """
    return {
        option.key: values.pop(option.name)
        for option in OPTIONS
        if option.field == field and option.key and option.name in values
    }
