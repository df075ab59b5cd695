"""TRL: ``SFTConfig`` with ``ModelConfig``, as ``trl sft --config run.yaml`` reads them.

Source: TRL at July 2026: ``trainer/base_config.py``, ``trainer/sft_config.py``,
``trainer/model_config.py``, ``trainer/utils.py`` (``get_quantization_config``,
``get_peft_config``, ``create_model_from_path``), ``trainer/sft_trainer.py``; of losses: the same
files of TRL 1.4 to 1.16.
"""

from __future__ import annotations

import re

from memest.installed import release
from memest.readers.findings import Level
from memest.readers.sheet import Place, Sheet
from memest.readers.training_arguments import (
    read_adapters,
    read_checkpointing,
    read_evaluation,
    read_lengths,
    read_model,
    read_packing,
    read_rest,
    read_spread,
    trainer_defaults,
)

__all__ = ["read_trl"]

_PRESENT = (1, 16)
_METHODS = {
    "dpo": "the DPO loss: pairs of answers, and a reference model",
    "kto": "the KTO loss, and a reference model",
    "reward": "the reward model's pairs",
    "grpo": "generation and the GRPO loss",
    "rloo": "generation and the RLOO loss",
    "orpo": "the ORPO loss over pairs",
}


def read_trl(sheet: Sheet, *, method: str = "sft") -> None:
    """Fill in a sheet of TRL's arguments.

    Args:
        sheet: of the arguments.
        method: of TRL's command line.

    Raises:
        ConfigError: a value that cannot be.
    """
    read_model(sheet)
    trainer_defaults(sheet)
    sheet.default("dtype", "float32", "models are loaded so unless dtype is named")
    sheet.default("checkpointing", "full")
    _precision(sheet)
    read_checkpointing(sheet)
    read_evaluation(sheet)
    _length(sheet)
    _loss(sheet)
    quantised = _quantization(sheet)
    use_peft = bool(sheet.switch("use_peft"))
    if use_peft:
        sheet.say("peft", "lora", "use_peft")
        for option, value in (("lora_r", 16), ("lora_alpha", 32), ("lora_dropout", 0.05)):
            sheet.default(option, value)
        if quantised:
            sheet.miss_default(
                "SFTTrainer", "adapters beside a quantised base are bfloat16; float32 is priced"
            )
    elif "use_peft" in sheet.document:
        sheet.ignore("use_peft", "off")
    read_adapters(sheet, on=use_peft)
    read_spread(sheet)
    read_lengths(sheet)
    read_packing(sheet)
    if method != "sft":
        what = _METHODS.get(method, f"what is special of trl {method}")
        sheet.miss_default(f"trl {method}", f"{what}; priced is supervised fine-tuning")
    read_rest(sheet)


def _precision(sheet: Sheet) -> None:
    """``bf16`` is on unless ``fp16`` is, or it is switched off."""
    bf16, fp16 = sheet.switch("bf16"), sheet.switch("fp16")
    if fp16 and not bf16:
        sheet.say("precision", "fp16", "fp16")
    elif bf16:
        sheet.say("precision", "bf16", "bf16")
    elif bf16 is False:
        sheet.say_at("precision", "fp32", Place(sheet.place("bf16").origin, Level.DEFAULT))
    else:
        # in force like a word of the file: it overrides what accelerate says
        sheet.say_at("precision", "bf16", Place(f"default of {sheet.framework}", Level.FILE))


def _length(sheet: Sheet) -> None:
    if "max_length" in sheet.document and sheet.document["max_length"] is None:
        sheet.take("max_length")
        sheet.miss("max_length", "samples are not cut: 512 tokens are taken; --seq-len says it")
    elif not any(sheet.has(key) for key in ("max_length", "max_seq_length")):
        sheet.default("seq_len", 1024)


def _loss(sheet: Sheet) -> None:
    """The loss of the release of TRL that is installed, else of the present one.

    From 1.15 on, ``nll``, ``dft`` and ``chunked_nll`` all go through a fused head; before,
    ``chunked_nll`` was a loss of its own, which 1.6 made the default.
    """
    loss = sheet.scalar("loss_type")
    if str(sheet.document.get("use_liger_kernel", "")).lower() in ("true", "1", "yes"):
        if loss is not None:
            sheet.ignore("loss_type", "Liger's loss is priced in its place")
        sheet.miss_default(
            "SFTTrainer", "TRL 1.15 and later keep their own fused head beside Liger"
        )
        return
    installed = release("trl") or ""
    version = tuple(int(part) for part in re.findall(r"\d+", installed)[:2]) or _PRESENT
    if version >= (1, 15):
        fused, what = "trl-fused", "1.15 and later"
    elif loss == "chunked_nll" or (loss is None and version >= (1, 6)):
        fused, what = "trl-chunked", "1.4 to 1.14"
    elif loss == "dft":
        sheet.miss("loss_type", "the loss dft: priced as nll, with all logits")
        return
    else:
        if loss is not None:
            sheet.ignore("loss_type", f"{loss} of TRL {installed} makes all logits")
        return
    if loss is None:
        # in force like a word of the file: what excludes it is told
        sheet.say_at(
            "fused_loss", fused,
            Place(f"default of {sheet.framework} (SFTTrainer of TRL {what})", Level.FILE),
        )  # fmt: skip
    else:
        sheet.say("fused_loss", fused, "loss_type")
        if loss == "dft":
            sheet.miss("loss_type", "the weights of dft, one number a token: priced as nll")


def _quantization(sheet: Sheet) -> bool:
    four, eight = sheet.switch("load_in_4bit"), sheet.switch("load_in_8bit")
    nested, kind = sheet.scalar("use_bnb_nested_quant"), sheet.scalar("bnb_4bit_quant_type")
    storage = sheet.scalar("bnb_4bit_quant_storage")
    if eight:
        sheet.say("load_in_8bit", True, "load_in_8bit")
    if four:
        sheet.say("load_in_4bit", True, "load_in_4bit")
        if kind is None:
            sheet.default("bnb_4bit_quant_type", "nf4")
        else:
            sheet.say("bnb_4bit_quant_type", kind, "bnb_4bit_quant_type")
        sheet.default(
            "bnb_4bit_compute_dtype", sheet.said("dtype"), "get_quantization_config takes dtype"
        )
        if nested:
            sheet.say("bnb_4bit_use_double_quant", True, "use_bnb_nested_quant")
        if storage is not None:
            sheet.say("bnb_4bit_quant_storage", storage, "bnb_4bit_quant_storage")
    if four or eight:
        sheet.default("prepare_kbit", False, "SFTTrainer does not prepare it")
        return True
    for key in ("load_in_4bit", "load_in_8bit", "use_bnb_nested_quant", "bnb_4bit_quant_type",
                "bnb_4bit_quant_storage"):  # fmt: skip
        if key in sheet.document:
            sheet.ignore(key, "no quantised base")
    return False
