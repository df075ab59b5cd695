"""The options of adapters and of quantised bases."""

from __future__ import annotations

from typing import Any

from memest.adapter import METHODS
from memest.option import Kind, Option, Panel

__all__ = ["FINETUNING"]


def _part(
    name: str, flags: str, help_text: str, panel: Panel, kind: Kind = Kind.TEXT,
    field: str = "adapter", **more: Any,
) -> Option:  # fmt: skip
    """An option that sets a part of a field of Setup."""
    return Option(
        name=name, flags=tuple(flags.split()), help=help_text, panel=panel, kind=kind, field=field,
        **more,
    )  # fmt: skip


FINETUNING: tuple[Option, ...] = (
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
)
