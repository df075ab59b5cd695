"""``TrainingArguments`` of transformers, in JSON, YAML or on a command line.

Defaults are those of transformers 5.23. The Trainer's JSON (``to_json_string``) names every field;
hand-written files name a few. What frameworks on top of the Trainer share is here too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from memest.errors import ConfigError
from memest.readers.documents import find_file, read_document
from memest.readers.findings import Level
from memest.readers.sharing import read_deepspeed_value, read_fsdp
from memest.readers.sheet import Place, Sheet, names_of
from memest.readers.trainer_keys import LOAD, MATTERS, REASONS, SIZES

__all__ = [
    "EVAL_BATCH", "read_adapters", "read_evaluation", "read_packing", "read_precision", "read_rest",
    "read_spread", "read_training_arguments", "trainer_defaults",
]  # fmt: skip

EVAL_BATCH = 8
_LORA = (
    "lora_r", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target",
    "target_modules", "lora_modules_to_save", "modules_to_save", "use_dora", "use_rslora",
    "lora_task_type", "lora_target_parameters",
)  # fmt: skip


def read_training_arguments(sheet: Sheet) -> None:
    """Fill in a sheet of training arguments.

    Raises:
        ConfigError: a value that cannot be.
    """
    read_model(sheet)
    trainer_defaults(sheet)
    sheet.default("precision", "fp32")
    sheet.default("checkpointing", "none")
    read_precision(sheet)
    read_checkpointing(sheet)
    read_evaluation(sheet)
    read_adapters(sheet, on=_asks_for_lora(sheet))
    read_spread(sheet)
    read_lengths(sheet)
    read_packing(sheet)
    read_rest(sheet)


def trainer_defaults(sheet: Sheet) -> None:
    """What transformers' Trainer does where nobody says otherwise, whatever is built on it."""
    sheet.default("loop", "trainer")
    sheet.default("batch", 8)
    sheet.default("grad_accum", 1)
    sheet.default("max_grad_norm", 1.0)
    sheet.default("optim", "adamw_torch_fused")


def _asks_for_lora(sheet: Sheet) -> bool:
    """Whether a script's own switch, or a rank, says that adapters are trained."""
    named = any(sheet.has(key) for key in ("lora_r", "lora_rank", "lora_target_modules"))
    for key in ("use_peft", "use_lora"):
        value = sheet.switch(key)
        if value is not None:
            named = value
            if value:
                sheet.say("peft", "lora", key)
            else:
                sheet.ignore(key, "off")
    return named


def read_model(sheet: Sheet) -> None:
    """The model, under the names that scripts give it."""
    for key in ("model_name_or_path", "model_name", "model_id", "pretrained_model_name_or_path"):
        value = sheet.scalar(key)
        if value is not None:
            sheet.say("model", str(value), key)
    init = sheet.take("model_init_kwargs")
    if isinstance(init, str):
        try:
            init = json.loads(init)
        except ValueError as error:
            raise ConfigError(
                f"{sheet.place('model_init_kwargs').origin} is not JSON: {error}."
            ) from None
    for key, value in (init if isinstance(init, Mapping) else {}).items():
        full = f"model_init_kwargs.{key}"
        if key in LOAD and value is not None:
            sheet.say("dtype" if key.endswith("dtype") else key, value, full)
        elif key == "quantization_config" and value is not None:
            sheet.say("quantization", value, full)
        else:
            sheet.ignore(full, "how the model is loaded")
    for key in ("dtype", "torch_dtype"):
        value = sheet.take(key)
        if value is not None:
            sheet.say("dtype", value, key)


def read_precision(sheet: Sheet) -> None:
    """``bf16`` and ``fp16``; off is not an order: accelerate's setting counts then.

    Source: ``TrainingArguments.__post_init__``: ``ACCELERATE_MIXED_PRECISION`` is kept unless one
    of them is on.

    Raises:
        ConfigError: both are on.
    """
    bf16, fp16 = sheet.switch("bf16"), sheet.switch("fp16")
    if bf16 and fp16:
        raise ConfigError(
            f"{sheet.place('bf16').origin} and {sheet.place('fp16').origin} exclude each other: "
            "autocast has one dtype."
        )
    for key, on in (("bf16", bf16), ("fp16", fp16)):
        if on:
            sheet.say("precision", key, key)
        elif on is False:
            sheet.ignore(key, "off")
    if (bf16 is False or fp16 is False) and not (bf16 or fp16):
        place = sheet.place("bf16" if bf16 is False else "fp16")
        sheet.say_at("precision", "fp32", Place(place.origin, Level.DEFAULT))


def read_checkpointing(sheet: Sheet) -> None:
    """Activation checkpointing, under its old and its new name."""
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        value = sheet.scalar(key)
        if value is None:
            continue
        if isinstance(value, bool) or str(value).lower() in ("true", "false"):
            value = "full" if str(value).lower() == "true" else "none"
        sheet.say("checkpointing", value, key)
    for key in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        value = sheet.take(key)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigError(f"{sheet.place(key).origin} is not JSON: {error}.") from None
        for name, setting in (value if isinstance(value, Mapping) else {}).items():
            full = f"{key}.{name}"
            if name == "use_reentrant" and setting is not None:
                sheet.say("use_reentrant", setting, full)
            elif name == "every_n_layers" and setting:
                if sheet.said("checkpointing") not in (None, "none"):
                    sheet.say("checkpointing", f"every_n:{setting}", full)
            else:
                sheet.miss(full, "of checkpointing")


def read_evaluation(sheet: Sheet, *, batch: int = EVAL_BATCH) -> None:
    """Whether the Trainer evaluates, and with which batch."""
    strategy, older = sheet.scalar("eval_strategy"), sheet.scalar("evaluation_strategy")
    strategy = older if strategy is None else strategy
    key = "eval_strategy" if sheet.has("eval_strategy") else "evaluation_strategy"
    given = sheet.whole("per_device_eval_batch_size")
    text = str(strategy).lower().rpartition(".")[2]
    runs = strategy is not None and text not in ("no", "false", "none")
    generates = sheet.switch("predict_with_generate")
    after = [name for name in ("do_eval", "do_predict") if _is_on(sheet.document.get(name))]
    if generates and not runs and after:
        # the script's own call behind the training
        sheet.say("predict_with_generate", True, "predict_with_generate")
        _say_eval_batch(sheet, given, batch)
        return
    if generates and runs:
        sheet.say("predict_with_generate", True, "predict_with_generate")
    elif generates is not None:
        sheet.ignore("predict_with_generate", "no evaluation runs" if generates else "off")
    if not runs:
        for name in ("eval_strategy", "evaluation_strategy", "per_device_eval_batch_size",
                     "eval_accumulation_steps", "prediction_loss_only"):  # fmt: skip
            sheet.take(name)
            if name in sheet.document:
                sheet.ignore(name, "no evaluation runs")
        return
    if text not in ("steps", "epoch"):
        raise ConfigError(
            f"{sheet.place(key).origin} {strategy!r} is no strategy. Legal: no, steps, epoch."
        )
    _say_eval_batch(sheet, given, batch)
    sheet.ignore(key, f"{text}: an evaluation follows the last step")
    sheet.take("prediction_loss_only")


def _is_on(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes", "on")


def _say_eval_batch(sheet: Sheet, given: int | None, batch: int) -> None:
    if given is None:
        sheet.say_at("eval_batch", batch, Place(f"default of {sheet.framework}", Level.DEFAULT))
    else:
        sheet.say("eval_batch", given, "per_device_eval_batch_size")


def read_packing(sheet: Sheet) -> None:
    """TRL's ``packing`` is the switch, ``packing_strategy`` says how where it is on.

    Source: ``SFTConfig`` of TRL at July 2026: ``packing_strategy`` is "bfd" unless named.
    """
    on, strategy = sheet.switch("packing"), sheet.scalar("packing_strategy")
    if on:
        key = "packing" if strategy is None else "packing_strategy"
        sheet.say("packing", "bfd" if strategy is None else strategy, key)
        return
    for key in ("packing", "packing_strategy"):
        if key in sheet.document:
            sheet.ignore(key, "samples are not packed")


def read_adapters(sheet: Sheet, *, on: bool) -> None:
    """LoRA as TRL's ``ModelConfig`` and scripts spell it, where it is on."""
    renamed = {
        "lora_modules_to_save": "modules_to_save",
        "lora_rank": "lora_r",
        **dict.fromkeys(_TARGETS, "lora_target_modules"),
    }
    for key in _LORA:
        value = sheet.take(key)
        if key not in sheet.document:
            continue
        if not on:
            sheet.ignore(key, "no adapters are trained")
        elif key == "lora_task_type":
            sheet.ignore(key, "changes no size")
        elif key == "lora_target_parameters":
            if value:
                sheet.miss(key, MATTERS[key])
        elif value is not None and value != [] and value is not False:
            listed = key in ("modules_to_save", "lora_modules_to_save", *_TARGETS)
            sheet.say(
                renamed.get(key, key),
                names_of(value, sheet.place(key).origin) if listed else value,
                key,
            )


_TARGETS = ("lora_target_modules", "lora_target", "target_modules")


def read_spread(sheet: Sheet, *, fsdp_version: int = 2) -> None:
    """DeepSpeed and FSDP of training arguments."""
    read_deepspeed_value(sheet, "deepspeed", sheet.take("deepspeed"))
    value = sheet.take("fsdp")
    config = sheet.document.get("fsdp_config")
    if isinstance(config, str):
        sheet.take("fsdp_config")
        place = sheet.place("fsdp_config")
        path = find_file(config, beside=sheet.folder, origin=place.origin)
        part = Sheet(read_document(path, config), source=config, framework=sheet.framework)
    else:
        part = sheet.part("fsdp_config")
    off = value in (None, "", False, []) or str(value).lower() in ("false", "no", "none")
    if off:
        if "fsdp" in sheet.document:
            sheet.ignore("fsdp", "off")
        if part.document:
            sheet.ignore("fsdp_config", "fsdp is off")
        return
    read_fsdp(sheet, part, value, "fsdp", version=fsdp_version)


def read_lengths(sheet: Sheet) -> None:
    """How long samples are, which training arguments do not say themselves."""
    for key, option in SIZES.items():
        value = sheet.take(key)
        if value is not None:
            sheet.say(option, value, key)


def read_rest(sheet: Sheet) -> None:
    """Options under their own names, and what becomes of everything else."""
    sheet.offer_rest()
    sheet.ignore_rest(REASONS, MATTERS)
    if sheet.said("seq_len") is None and sheet.said("loop") == "trainer":
        sheet.miss_default(
            "length of samples", "nothing names it: 512 tokens are taken; --seq-len says it"
        )
