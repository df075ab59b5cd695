"""LLaMA-Factory's YAML or JSON: training arguments and more.

Source: LLaMA-Factory at August 2026: ``hparams/`` (fields and defaults), ``hparams/parser.py``
(what is changed after parsing), ``model/adapter.py`` (which parameters become float32),
``model/model_utils/quantization.py`` and ``checkpointing.py``.
"""

from __future__ import annotations

from memest.errors import ConfigError
from memest.readers.sheet import Sheet, names_of
from memest.readers.trainer_keys import MATTERS, REASONS
from memest.readers.training_arguments import (
    read_checkpointing,
    read_evaluation,
    read_model,
    read_precision,
    read_spread,
    trainer_defaults,
)

__all__ = ["read_llama_factory"]

_ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
_REASONS = {
    **REASONS,
    **dict.fromkeys(
        """template cutoff_len train_on_prompt mask_history tool_format default_system
        enable_thinking max_samples tokenized_path data_shared_file_system media_dir eval_dataset
        eval_on_each_dataset eval_num_beams preprocessing_batch_size split_special_tokens
        add_tokens add_special_tokens image_min_pixels video_fps video_maxlen
        audio_sampling_rate disable_shuffling""".split(),
        "data is prepared on the host",
    ),
    **dict.fromkeys(
        """create_new_adapter adapter_folder export_dir export_size export_device infer_backend
        infer_dtype offload_folder use_kv_cache print_param_status hf_hub_token ms_hub_token
        om_hub_token compute_accuracy ray_run_name ray_storage_path ray_num_workers
        resources_per_worker placement_strategy include_effective_tokens_per_second
        pref_beta pref_ftx temperature top_p top_k max_new_tokens""".split(),
        "not of a training step",
    ),
    "adapter_name_or_path": "adapters that are there already have the sizes named here",
    "trust_remote_code": "the model's own config says it",
    "pissa_init": "changes values only",
}
_MATTERS = {
    **MATTERS,
    "neat_packing": "masks between the samples of a row: priced are full rows without",
    "shift_attn": "shifted sparse attention",
    "mixture_of_depths": "mixture of depths",
    "use_unsloth_gc": "Unsloth's checkpointing moves activations to the host",
    "upcast_layernorm": "norms are float32",
    "upcast_lmhead_output": "logits are float32",
    "use_badam": "BAdam trains a block after the other",
    "use_llama_pro": "only expanded blocks train",
    "use_muon": "Muon of its own kind: name one with --optim",
    "use_kt": "KTransformers",
    "use_mca": "Megatron",
    "use_megatron_bridge": "Megatron",
    "fp8": "fp8",
    "rope_scaling": "the position tables",
    "resize_vocab": "a few rows of the embeddings",
    "ref_model": "a second model in memory",
    "reward_model": "a second model in memory",
    "image_max_pixels": "how large images become",
    "video_max_pixels": "how large videos become",
    "freeze_vision_tower": "the vision tower does not train; name it with --freeze",
    "moe_aux_loss_coef": "the loss of a mixture's router",
}
_STAGES = {
    "rm": "a reward model with its pairs", "ppo": "generation, and further models in memory",
    "dpo": "pairs of answers, and a reference model", "kto": "a reference model",
}  # fmt: skip


def read_llama_factory(sheet: Sheet) -> None:
    """Fill in a sheet of LLaMA-Factory's arguments.

    Raises:
        ConfigError: a value that LLaMA-Factory would refuse too.
    """
    read_model(sheet)
    trainer_defaults(sheet)
    sheet.default("precision", "fp32")
    read_precision(sheet)
    pure = bool(sheet.switch("pure_bf16"))
    _checkpointing(sheet)
    read_evaluation(sheet)
    read_spread(sheet)
    _length(sheet)
    _method(sheet, pure=pure)
    _optimizer(sheet)
    flash = sheet.scalar("flash_attn")
    if flash in _ATTENTION:
        sheet.say("attn_implementation", _ATTENTION[flash], "flash_attn")
    elif flash == "auto":
        sheet.ignore("flash_attn", "auto: transformers' own choice")
    elif flash is not None:
        sheet.miss("flash_attn", f"{flash}: priced as transformers' own choice")
    if sheet.switch("enable_liger_kernel"):
        sheet.say("use_liger_kernel", True, "enable_liger_kernel")
    sheet.offer_rest()
    sheet.ignore_rest(_REASONS, _MATTERS)


def _checkpointing(sheet: Sheet) -> None:
    off = sheet.switch("disable_gradient_checkpointing")
    reentrant = sheet.switch("use_reentrant_gc")
    if off:
        sheet.say("checkpointing", "none", "disable_gradient_checkpointing")
    else:
        sheet.default("checkpointing", "full")
        if reentrant is None:
            sheet.default("use_reentrant", True)
        else:
            sheet.say("use_reentrant", reentrant, "use_reentrant_gc")
        if sheet.document.get("gradient_checkpointing") is False:
            # the model switches it on while it is loaded; the Trainer's word comes too late
            sheet.take("gradient_checkpointing")
            sheet.ignore("gradient_checkpointing", "disable_gradient_checkpointing is what counts")
    read_checkpointing(sheet)


def _length(sheet: Sheet) -> None:
    length = sheet.whole("cutoff_len")
    if length is None:
        sheet.default("seq_len", 2048)
    else:
        sheet.say("seq_len", length, "cutoff_len")
    packing, neat = sheet.switch("packing"), sheet.switch("neat_packing")
    if packing is None and not neat and sheet.document.get("stage") == "pt":
        sheet.default("packing", "wrapped", "on at stage pt")
    # rows of cutoff_len are filled one by one; they are never laid end to end
    for key, on in (("packing", packing), ("neat_packing", neat)):
        if on:
            sheet.say("packing", "wrapped", key)
        elif key in sheet.document:
            sheet.ignore(key, "off")
    if neat:
        sheet.miss("neat_packing", _MATTERS["neat_packing"])


def _method(sheet: Sheet, *, pure: bool) -> None:
    stage = sheet.scalar("stage")
    if stage in _STAGES:
        sheet.miss("stage", f"{stage}: {_STAGES[stage]}; priced is supervised fine-tuning")
    elif stage is not None:
        sheet.ignore("stage", "priced as it is")
    kind = sheet.scalar("finetuning_type")
    kind = "lora" if kind is None else str(kind)
    if kind not in ("lora", "full", "freeze", "oft"):
        raise ConfigError(
            f"{sheet.place('finetuning_type').origin} {kind!r} is not known. Legal: lora, full, "
            "freeze, oft."
        )
    bits = sheet.whole("quantization_bit")
    if bits is not None and kind not in ("lora", "oft"):
        raise ConfigError(
            f"{sheet.place('quantization_bit').origin}: a quantised base trains with LoRA or OFT "
            f"only, and finetuning_type is {kind}."
        )
    precision = sheet.said("precision")
    compute = {"bf16": "bfloat16", "fp16": "float16"}.get(str(precision))
    compute = "bfloat16" if pure else compute
    if kind in ("full", "freeze") and not pure and sheet.said("zero") != 3:
        sheet.default("dtype", "float32", "what trains is made float32; pure_bf16 prevents it")
    elif compute is not None:
        key = "pure_bf16" if pure else str(precision)
        sheet.say("dtype", compute, key)
    if kind == "freeze":
        sheet.miss(
            "finetuning_type", "freeze: which layers train depends on the model; all are priced as "
            "training: name those that do not with --freeze"
        )  # fmt: skip
    for key in ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"):
        sheet.take(key)
    _adapters(sheet, kind)
    _quantization(sheet, bits, compute)
    if kind == "lora":
        sheet.default("ddp_find_unused_parameters", False, "with LoRA")


def _adapters(sheet: Sheet, kind: str) -> None:
    keys = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target",
            "use_dora", "use_rslora", "oft_rank", "oft_block_size", "oft_target",
            "module_dropout")  # fmt: skip
    values = {key: sheet.take(key) for key in keys}
    if kind not in ("lora", "oft"):
        for key in keys:
            if key in sheet.document:
                sheet.ignore(key, f"finetuning_type is {kind}")
        return
    if kind == "oft":
        sheet.say("peft", "oft", "finetuning_type")
        if values["oft_rank"]:
            sheet.say("lora_r", values["oft_rank"], "oft_rank")
        return
    if sheet.has("finetuning_type"):
        sheet.say("peft", "lora", "finetuning_type")
    else:
        sheet.default("peft", "lora")
    rank = values["lora_rank"]
    sheet.default("lora_r", 8)
    sheet.default("lora_alpha", 2 * rank if isinstance(rank, int) else 16, "twice the rank")
    sheet.default("lora_dropout", 0.0)
    sheet.default("lora_target_modules", ("all-linear",))
    for key, option in (
        ("lora_rank", "lora_r"), ("lora_alpha", "lora_alpha"), ("lora_dropout", "lora_dropout"),
        ("use_dora", "use_dora"), ("use_rslora", "use_rslora"),
    ):  # fmt: skip
        if values[key] not in (None, False):
            sheet.say(option, values[key], key)
    for key, option in (
        ("lora_target", "lora_target_modules"),
        ("additional_target", "modules_to_save"),
    ):
        value = values[key]
        if value is not None:
            names = names_of(value, sheet.place(key).origin, split=True)
            sheet.say(option, ("all-linear",) if names == ("all",) else names, key)


def _quantization(sheet: Sheet, bits: int | None, compute: str | None) -> None:
    method = sheet.scalar("quantization_method")
    kind, double = sheet.scalar("quantization_type"), sheet.switch("double_quantization")
    if bits is None:
        return
    if method not in (None, "bnb", "bitsandbytes"):
        sheet.miss("quantization_method", f"{method}: priced as bitsandbytes'")
    if bits not in (4, 8):
        raise ConfigError(
            f"{sheet.place('quantization_bit').origin} {bits} is not modelled. Legal: 4, 8."
        )
    sheet.say(f"load_in_{bits}bit", True, "quantization_bit")
    sheet.default("prepare_kbit", False, "it does not call peft's preparation")
    if bits == 8:
        return
    if kind is None:
        sheet.default("bnb_4bit_quant_type", "nf4")
    else:
        sheet.say("bnb_4bit_quant_type", kind, "quantization_type")
    if double is None:
        sheet.default("bnb_4bit_use_double_quant", True)
    else:
        sheet.say("bnb_4bit_use_double_quant", double, "double_quantization")
    if compute is not None:
        sheet.default("bnb_4bit_compute_dtype", compute, "as the run computes")
        sheet.default("bnb_4bit_quant_storage", compute, "as the run computes")


def _optimizer(sheet: Sheet) -> None:
    for name, scale in (("galore", 2.0), ("apollo", 32.0)):
        keys = [key for key in sheet.document if key.startswith(f"{name}_")]
        on = sheet.switch(f"use_{name}")
        values = {key.removeprefix(f"{name}_"): sheet.take(key) for key in keys}
        if not on:
            for key in keys:
                sheet.ignore(key, f"use_{name} is off")
            continue
        layerwise = "_layerwise" if values.get("layerwise") else ""
        sheet.say("optim", f"{name}_adamw{layerwise}", f"use_{name}")
        arguments = {
            "rank": values.get("rank", 16),
            "update_proj_gap": values.get("update_interval", 200),
            "scale": values.get("scale", scale),
        }
        text = ",".join(f"{key}={value}" for key, value in arguments.items())
        sheet.say("optim_args", text, f"use_{name}")
        target = values.get("target") or "all"
        names = names_of(target, sheet.place(f"{name}_target").origin, split=True)
        sheet.say(
            "optim_target_modules", "all-linear" if names == ("all",) else names, f"use_{name}"
        )
    if sheet.switch("use_adam_mini"):
        sheet.say("optim", "adam_mini", "use_adam_mini")
