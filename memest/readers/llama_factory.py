"""LLaMA-Factory's YAML or JSON: training arguments and more.

Source: LLaMA-Factory at August 2026: ``hparams/`` (fields and defaults), ``hparams/parser.py``
(what is changed after parsing), ``model/adapter.py`` (which parameters become float32),
``model/model_utils/quantization.py`` and ``checkpointing.py``.
"""

from __future__ import annotations

from memest.errors import ConfigError, not_legal
from memest.readers.mapping import DocumentKeys, Key, KeyTable, by_key
from memest.readers.training_arguments import (
    IGNORED_KEYS,
    METHODS,
    MODELS,
    TRAINER,
    UNMODELLED_KEYS,
    read_checkpointing,
    read_evaluation,
    read_liger,
    read_loading,
    read_precision,
    read_sharding,
)
from memest.readers.values import PIXELS, Bounded, Either, Saving, names_of

__all__ = ["LLAMA_FACTORY"]

_ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}
_IGNORED_KEYS = {
    **IGNORED_KEYS,
    **by_key(
        {
            "data is prepared on the host": """template cutoff_len train_on_prompt mask_history
                tool_format default_system enable_thinking max_samples tokenized_path
                data_shared_file_system media_dir eval_dataset eval_on_each_dataset eval_num_beams
                preprocessing_batch_size split_special_tokens add_tokens add_special_tokens
                image_min_pixels video_fps video_maxlen audio_sampling_rate disable_shuffling
                val_size""",
            "not of a training step": """create_new_adapter adapter_folder export_dir export_size
                export_device infer_backend infer_dtype offload_folder use_kv_cache
                print_param_status hf_hub_token ms_hub_token om_hub_token compute_accuracy
                ray_run_name ray_storage_path ray_num_workers resources_per_worker
                placement_strategy include_effective_tokens_per_second temperature top_p top_k
                max_new_tokens""",
            "a number of the loss": """pref_loss pref_beta pref_ftx pref_bco_weight simpo_gamma
                dpo_label_smoothing ld_alpha kto_chosen_weight kto_rejected_weight""",
            "with ref_model": "ref_model_adapters ref_model_quantization_bit",
            "adapters that are there already have the sizes named here": "adapter_name_or_path",
            "the model's own config says it": "trust_remote_code",
            "changes values only": "pissa_init",
        }
    ),
}
_UNMODELLED_KEYS = {
    **UNMODELLED_KEYS,
    "neat_packing": "a mask of all pairs of a row's tokens: priced are full rows without",
    "shift_attn": Either("shifted sparse attention"),
    "mixture_of_depths": Either("mixture of depths"),
    "use_unsloth_gc": Saving("Unsloth's checkpointing moves activations to the host"),
    "upcast_layernorm": "norms are float32",
    "upcast_lmhead_output": "logits are float32",
    "use_badam": Saving("BAdam trains a block after the other"),
    "use_llama_pro": Saving("only expanded blocks train"),
    "use_muon": Saving("Muon of its own kind: name one with --optim"),
    "use_kt": Either("KTransformers"),
    "use_mca": Either("Megatron"),
    "use_megatron_bridge": Either("Megatron"),
    "fp8": Either("fp8"),
    "rope_scaling": Bounded("the position tables"),
    "resize_vocab": Bounded("a few rows of the embeddings"),
    "ref_model": "a second model in memory",
    "reward_model": "a second model in memory",
    "video_max_pixels": "videos besides: one image a sample is priced; --image-size says it",
    "moe_aux_loss_coef": "the loss of a mixture's router",
}
_STAGES = {"kto": "kto", "rm": "reward"}
"""Methods by ``stage``, beside dpo."""
_LEGAL_STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
_LEGAL_LOSSES = ("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo")
_LOSSES = {"orpo": "orpo", "simpo": "simpo", "ipo": "ipo"}
"""Methods by ``pref_loss`` at stage dpo; the others differ in numbers of a pair."""
_ASKING = ("dpo", "ipo", "kto")
"""Methods that ask a reference."""


def _checkpointing(keys: DocumentKeys) -> None:
    off = Key("checkpointing", "enabled", words={True: "none"})
    if keys.set_from("disable_gradient_checkpointing", off):
        keys.switch("use_reentrant_gc")
    else:
        keys.default("checkpointing", "full")
        keys.set_from("use_reentrant_gc", Key("use_reentrant", "switch", default=True))
        if keys.document.get("gradient_checkpointing") is False:
            # the model switches it on while it is loaded; the Trainer's word comes too late
            keys.take("gradient_checkpointing")
            keys.ignore("gradient_checkpointing", "disable_gradient_checkpointing is what counts")
    read_checkpointing(keys)


def _packing(keys: DocumentKeys) -> None:
    packing, neat = keys.switch("packing"), keys.switch("neat_packing")
    if packing is None and not neat and keys.document.get("stage") == "pt":
        keys.default("packing", "wrapped", "on at stage pt")
    # with FlashAttention samples are told apart by their positions, one row at a time; else rows of
    # cutoff_len are filled one by one, and never laid end to end
    one_row = str(keys.document.get("per_device_train_batch_size")) == "1"
    laid_out = bool(neat) and keys.document.get("flash_attn") == "fa2" and one_row
    for key, on in (("packing", packing), ("neat_packing", neat)):
        if on:
            keys.set("packing", "bfd" if laid_out else "wrapped", key)
        elif key in keys.document:
            keys.ignore(key, "off")
    if neat and not laid_out and keys.document.get("flash_attn") == "fa2":
        # MultiModalDataCollator stops on more than one row
        keys.miss("neat_packing", Bounded("takes batches of one row alone: priced are full rows"))
    elif neat and not laid_out:
        keys.miss("neat_packing", _UNMODELLED_KEYS["neat_packing"])


def _method(keys: DocumentKeys) -> None:
    stage = keys.scalar("stage")
    if stage is not None and stage not in _LEGAL_STAGES:
        raise not_legal(f"{keys.where('stage')} {stage!r}", stage, _LEGAL_STAGES)
    method = _STAGES.get(str(stage))
    if stage == "ppo":
        keys.miss("stage", f"ppo: {METHODS['ppo']}; priced is supervised fine-tuning")
    elif stage == "dpo":
        loss = keys.text("pref_loss") or "sigmoid"
        if loss not in _LEGAL_LOSSES:
            raise not_legal(f"{keys.where('pref_loss')} {loss!r}", loss, _LEGAL_LOSSES)
        method = _LOSSES.get(loss, "dpo")
        keys.set("method", method, "pref_loss" if loss in _LOSSES else "stage")
    elif method is not None:
        keys.set("method", method, "stage")
    elif stage is not None:
        keys.ignore("stage", "priced as it is")
    if method is not None:
        keys.set("log_probs", "float32", "stage")
    kind = keys.text("finetuning_type") or "lora"
    if kind not in ("lora", "full", "freeze", "oft"):
        raise ConfigError(
            f"{keys.where('finetuning_type')} {kind!r} is not known. Legal: lora, full, "
            "freeze, oft."
        )
    bits = keys.whole("quantization_bit")
    if bits is not None and kind not in ("lora", "oft"):
        raise ConfigError(
            f"{keys.where('quantization_bit')}: a quantised base trains with LoRA or OFT "
            f"only, and finetuning_type is {kind}."
        )
    pure, precision = bool(keys.switch("pure_bf16")), str(keys.value_of("precision"))
    compute = "bfloat16" if pure else {"bf16": "bfloat16", "fp16": "float16"}.get(precision)
    if kind in ("full", "freeze") and not pure and keys.value_of("zero") != 3:
        keys.default("dtype", "float32", "what trains is made float32; pure_bf16 prevents it")
        if method in _ASKING and compute is not None:
            keys.default("ref_dtype", compute, "what does not train is left as it was saved")
    elif compute is not None:
        keys.set("dtype", compute, "pure_bf16" if pure else precision)
    if method in _ASKING:
        _reference(keys, kind)
    if kind == "freeze":
        keys.miss(
            "finetuning_type",
            Saving(
                "freeze: which layers train depends on the model; all are priced as "
                "training: name those that do not with --freeze"
            ),
        )
    of_freeze = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
    keys.pass_over(
        of_freeze, f"finetuning_type is {kind}" if kind != "freeze" else "said of freeze"
    )
    _adapters(keys, kind)
    _freeze_parts(keys)
    _quantization(keys, bits, compute)
    if kind == "lora":
        keys.default("ddp_find_unused_parameters", False, "with LoRA")
    if kind in ("lora", "oft") and not pure and compute and not keys.value_of("zero"):
        keys.default(
            "cast_weights",
            ("trainable=float32",),
            "what trains is made float32; pure_bf16 prevents it",
        )
    if keys.value_of("predict_with_generate"):
        keys.miss(
            "predict_with_generate",
            "answers have up to max_new_tokens tokens (1,024 unless named): priced are 20",
        )


def _reference(keys: DocumentKeys, kind: str) -> None:
    """``create_ref_model``: with LoRA the model, its adapters off, else one of its own."""
    if kind == "oft":
        keys.miss("finetuning_type", "oft: a reference model of its own, which is not priced")
    named = keys.document.get("ref_model")
    if named is not None and named == keys.value_of("model") and kind == "full":
        keys.take("ref_model")
        keys.ignore("ref_model", "the model itself, as without it")


_PARTS = {
    "freeze_vision_tower": ("vision", True),
    "freeze_multi_modal_projector": ("projector", True),
    "freeze_language_model": ("language", False),
}


def _freeze_parts(keys: DocumentKeys) -> None:
    """Parts that do not train; a projector gets no adapters, whether it is frozen or not.

    Source: ``get_forbidden_modules`` and ``patch_target_modules`` of ``model_utils/visual.py``,
    ``find_all_linear_modules`` of ``model_utils/misc.py``.
    """
    parts = []
    for key, (part, is_frozen) in _PARTS.items():
        value = keys.switch(key)
        is_left_out = part == "projector" and keys.value_of("lora_target_modules") == (
            "all-linear",
        )
        if is_left_out or (is_frozen if value is None else value):
            parts.append(part)
        if value is not None:
            keys.ignore(key, "counted with the parts of the model that do not train")
    if parts:
        keys.default("frozen_parts", tuple(parts), "where the model is multimodal")


_LORA = {
    "lora_rank": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target": "lora_target_modules",
    "additional_target": "modules_to_save",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
}
_OFT = ("oft_rank", "oft_block_size", "oft_target", "module_dropout")


def _adapters(keys: DocumentKeys, kind: str) -> None:
    values = {key: keys.take(key) for key in (*_LORA, *_OFT)}
    if kind not in ("lora", "oft"):
        keys.pass_over(values, f"finetuning_type is {kind}")
        return
    if kind == "oft":
        keys.set("peft", "oft", "finetuning_type")
        if values["oft_rank"]:
            keys.set("lora_r", values["oft_rank"], "oft_rank")
        return
    if keys.has("finetuning_type"):
        keys.set("peft", "lora", "finetuning_type")
    else:
        keys.default("peft", "lora")
    rank = values["lora_rank"]
    keys.default("lora_r", 8)
    keys.default("lora_alpha", 2 * rank if isinstance(rank, int) else 16, "twice the rank")
    keys.default("lora_dropout", 0.0)
    keys.default("lora_target_modules", ("all-linear",))
    for key, option in _LORA.items():
        value = values[key]
        if option in ("lora_target_modules", "modules_to_save"):
            if value is not None:
                names = names_of(value, keys.where(key), split=True)
                keys.set(option, ("all-linear",) if names == ("all",) else names, key)
        elif value not in (None, False):
            keys.set(option, value, key)


def _quantization(keys: DocumentKeys, bits: int | None, compute: str | None) -> None:
    method = keys.scalar("quantization_method")
    if bits != 4:
        keys.pass_over(("quantization_type", "double_quantization"), "no 4-bit base")
    keys.default("prepare_kbit", False, "it does not call peft's preparation")
    if bits is None:
        return
    if method is not None:
        keys.ignore("quantization_method", "with quantization_bit")
    if method not in (None, "bnb", "bitsandbytes"):
        keys.miss("quantization_method", Either(f"{method}: priced as bitsandbytes'"))
    if bits not in (4, 8):
        raise ConfigError(f"{keys.where('quantization_bit')} {bits} is not modelled. Legal: 4, 8.")
    keys.set(f"load_in_{bits}bit", True, "quantization_bit")
    if bits == 4:
        keys.set_from("quantization_type", Key("bnb_4bit_quant_type", "scalar", "nf4"))
        keys.set_from("double_quantization", Key("bnb_4bit_use_double_quant", "switch", True))
        if compute is not None:
            keys.default("bnb_4bit_compute_dtype", compute, "as the run computes")
            keys.default("bnb_4bit_quant_storage", compute, "as the run computes")


def _optimizer(keys: DocumentKeys) -> None:
    for name, scale in (("galore", 2.0), ("apollo", 32.0)):
        names = [key for key in keys.document if key.startswith(f"{name}_")]
        switch = f"use_{name}"
        on = keys.switch(switch)
        values = {key.removeprefix(f"{name}_"): keys.take(key) for key in names}
        if not on:
            for key in names:
                keys.ignore(key, f"{switch} is off")
            continue
        layerwise = "_layerwise" if values.get("layerwise") else ""
        base = _BASE_OPTIMIZERS.get(str(keys.scalar("optim") or "adamw_torch"))
        if base is None or (name == "apollo" and base != "adamw"):
            raise ConfigError(
                f"{keys.where('optim')} {keys.document['optim']!r} does not go with {switch}. "
                "Legal: adamw_torch" + (", adamw_8bit, adafactor." if name == "galore" else ".")
            )
        keys.set("optim", f"{name}_{base}{layerwise}", switch)
        rank, gap = values.get("rank", 16), values.get("update_interval", 200)
        arguments = f"rank={rank},update_proj_gap={gap},scale={values.get('scale', scale)}"
        keys.set("optim_args", arguments, switch)
        target = values.get("target") or "all"
        targets = names_of(target, keys.where(f"{name}_target"), split=True)
        keys.set("optim_target_modules", "all-linear" if targets == ("all",) else targets, switch)
    keys.set_from("use_adam_mini", Key("optim", "enabled", words={True: "adam_mini"}))


_BASE_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "adafactor": "adafactor",
}
"""What ``optim`` makes of GaLore (``_create_galore_optimizer``); APOLLO takes the first alone."""


def _attention(keys: DocumentKeys) -> None:
    flash = keys.scalar("flash_attn")
    if flash in _ATTENTION:
        keys.set("attn_implementation", _ATTENTION[flash], "flash_attn")
    elif flash == "auto":
        keys.ignore("flash_attn", "auto: transformers' own choice")
    elif flash is not None:
        keys.miss("flash_attn", Either(f"{flash}: priced as transformers' own choice"))


LLAMA_FACTORY = KeyTable(
    defaults={**TRAINER, "precision": "fp32"},
    options={
        **MODELS,
        "cutoff_len": Key("seq_len", "whole", 2048),
        "enable_liger_kernel": Key("use_liger_kernel", "enabled"),
        "image_max_pixels": Key(PIXELS, "whole", 768 * 768, why="image_max_pixels"),
    },
    readers=(
        read_loading,
        read_liger,
        read_precision,
        _checkpointing,
        read_evaluation,
        read_sharding,
        _packing,
        _method,
        _optimizer,
        _attention,
    ),
    own_names=True,
    ignored_keys=_IGNORED_KEYS,
    unmodelled_keys=_UNMODELLED_KEYS,
)
"""What becomes of the keys of its configuration."""
