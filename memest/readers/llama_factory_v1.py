"""LLaMA-Factory v1: the YAML or JSON of ``USE_V1=1 llamafactory-cli sft``.

Source: LLaMA-Factory at August 2026, ``src/llamafactory/v1``: ``config/`` (fields and defaults),
``core/model_engine.py`` (what is float32), ``core/base_trainer.py`` (the loop and its loss),
``plugins/model_plugins/`` (``peft``, ``quantization``, ``kernels``),
``plugins/trainer_plugins/distributed/fsdp2.py``.
"""

from __future__ import annotations

from memest.errors import ConfigError
from memest.readers.mapping import DocumentKeys, Key, KeyTable, by_key, read_table
from memest.readers.sharding import read_deepspeed_value
from memest.readers.training_arguments import IGNORED_KEYS, METHODS, set_adapter_value
from memest.readers.values import Either, Saving, StepSize, names_of

__all__ = ["read_llama_factory_v1"]

_METHODS = {"dpo": "dpo", "rm": "reward"}
_LORA = KeyTable(
    options={
        "r": Key("lora_r", "whole", 8),
        "lora_alpha": Key("lora_alpha", "scalar", 16),
        "lora_dropout": Key("lora_dropout", "scalar", 0.05),
        "use_dora": Key("use_dora", "enabled"),
        "use_rslora": Key("use_rslora", "enabled"),
    },
    ignored_keys=by_key(
        {
            "adapters that are there already have the sizes named here": "adapter_name_or_path",
            "not of a training step": """export_dir export_size export_hub_model_id infer_dtype
                export_legacy_format use_dora use_rslora modules_to_save""",
        }
    ),
)
_COUNTS = {
    "cp_size": Saving("sequences are split over GPUs; whole ones are priced"),
    "mp_replicate_size": "shards are copied: --fsdp-shard-size says it",
}
_QUANTIZATION = {
    "quantization_type": Key("bnb_4bit_quant_type", "scalar", "nf4"),
    "double_quantization": Key("bnb_4bit_use_double_quant", "switch", default=True),
}


def read_llama_factory_v1(keys: DocumentKeys, *, method: str | None = None) -> None:
    """Read the arguments of LLaMA-Factory v1.

    Args:
        keys: of the arguments.
        method: of its command line: ``sft``, ``dpo`` or ``rm``; None for a file alone.

    Raises:
        ConfigError: a value that cannot be.
    """
    read_table(keys, _TABLE)
    if method in _METHODS:
        remark = METHODS[_METHODS[method]]
        keys.miss_default(
            f"llamafactory-cli {method}", f"{remark}; priced is supervised fine-tuning"
        )
    keys.miss_default(
        "its loss",
        "a copy of all logits in float32 without the last token, beside the loss of the model",
    )


def _plugin(keys: DocumentKeys, key: str) -> tuple[str | None, DocumentKeys]:
    """The name of a plugin and its settings; where there is none, that is noted."""
    part = keys.part(key)
    name = part.text("name")
    if name is None and key in keys.document:
        keys.ignore(key, "off")
    return name, part


def _batch(keys: DocumentKeys) -> None:
    total = keys.whole("global_batch_size")
    keys.default("grad_accum", 1)
    if total is not None:
        keys.samples_per_step = StepSize(total, keys.where("global_batch_size"), is_exact=False)
        keys.ignore("global_batch_size", "counted with batch and GPUs")
    strategy = keys.text("batching_strategy")
    if strategy == "padding_free":
        keys.set("padding_free", True, "batching_strategy")
    elif strategy not in (None, "normal"):
        keys.miss("batching_strategy", Either(f"{strategy}: priced are batches of one size"))
    elif strategy is not None:
        keys.ignore("batching_strategy", "as it is priced")
    for key, remark in _COUNTS.items():
        count = keys.whole(key)
        if count is not None and count > 1:
            keys.miss(key, remark)
        elif key in keys.document:
            keys.ignore(key, "off")
    checkpointing = keys.switch("enable_activation_checkpointing")
    if checkpointing is None:
        keys.default("checkpointing", "full")
    else:
        kind = "full" if checkpointing else "none"
        keys.set("checkpointing", kind, "enable_activation_checkpointing")
    keys.default("use_reentrant", False)


def _model(keys: DocumentKeys) -> None:
    attention = keys.text("flash_attn")
    keys.default("attn_implementation", "sdpa")
    if attention is not None:
        keys.set("attn_implementation", attention, "flash_attn")
    kind = keys.text("model_class")
    if kind == "cls":
        keys.set("task", "token-classification", "model_class")
        keys.set("num_labels", 1, "model_class")
    elif kind == "other":
        keys.set("task", "base", "model_class")
    elif kind is not None:
        keys.ignore("model_class", "a causal language model")
    kernels, part = _plugin(keys, "kernel_config")
    if kernels is not None:
        why = f"{kernels}: kernels in the place of layers; all logits stay"
        keys.miss("kernel_config", Either(why))
        part.ignore_all("of kernels")
        keys.absorb(part)


def _training(keys: DocumentKeys) -> None:
    """Full training makes the model float32, adapters leave it as the checkpoint has it."""
    name, part = _plugin(keys, "peft_config")
    if name is None:
        keys.default("dtype", "float32", "all that trains")
    elif name == "freeze":
        keys.default("dtype", "float32", "what trains is made float32")
        keys.miss(
            "peft_config",
            Saving("freeze: which layers train depends on the model; all are priced as training"),
        )
        part.ignore_all("counted with freeze")
    elif name == "lora":
        keys.set("peft", "lora", "peft_config")
        _lora(part)
    else:
        raise ConfigError(f"{part.where('name')} {name!r} is not known. Legal: lora, freeze.")
    keys.absorb(part)
    keys.default("prepare_kbit", False, "it does not call peft's preparation")
    method, part = _plugin(keys, "quant_config")
    if method is not None:
        _quantize(part, method)
        keys.absorb(part)


def _lora(part: DocumentKeys) -> None:
    targets = names_of(
        part.take("target_modules") or "all", part.where("target_modules"), split=True
    )
    targets = ("all-linear",) if targets == ("all",) else targets
    if part.has("target_modules"):
        set_adapter_value(part, "lora_target_modules", targets, "target_modules")
    else:
        part.default("lora_target_modules", targets)
    saved = part.take("modules_to_save")
    if saved:
        set_adapter_value(part, "modules_to_save", saved, "modules_to_save")
    elif "modules_to_save" in part.document:
        part.ignore("modules_to_save", "off")
    read_table(part, _LORA)


def _quantize(part: DocumentKeys, name: str) -> None:
    bits = part.whole("quantization_bit")
    compute = part.text("compute_dtype")
    if name == "auto" and bits is None:
        part.ignore_all("auto without a number of bits: no quantised base")
        return
    bits = 4 if bits is None else bits
    if name not in ("bnb", "auto") or bits not in (4, 8):
        part.miss("name", Either(f"{name} of {bits} bits: priced is the base as it is"))
        part.ignore_all("counted with the name")
        return
    part.set(f"load_in_{bits}bit", True, "quantization_bit")
    if bits == 4:
        for key, row in _QUANTIZATION.items():
            part.set_from(key, row)
        for option in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"):
            if compute is None:
                part.default(option, "float16")
            else:
                part.set(option, compute, "compute_dtype")
    part.ignore_all("of 4 bits alone")


_FSDP2 = KeyTable(
    options={"offload_params": Key("fsdp_offload", "enabled")},
    rest="how weights are loaded",
)


def _sharding(keys: DocumentKeys) -> None:
    """Autocast there is none; what FSDP2 computes in is bfloat16 unless that is switched off."""
    half = keys.switch("bf16")
    name, part = _plugin(keys, "dist_config")
    keys.default("loop", "plain")
    if name == "fsdp2":
        reshard = part.switch("reshard_after_forward")
        mode = "shard_grad_op" if reshard is False else "full_shard"
        keys.set("fsdp", mode, "dist_config")
        read_table(part, _FSDP2)
        keys.absorb(part)
        if half is not False:
            # FSDP's own mixed precision, which a setup has for loops that are not plain scripts
            keys.default("precision", "bf16", "FSDP2's policy")
            keys.default("loop", "accelerate", "FSDP2 with a policy of its own")
        if keys.value_of("peft"):
            keys.miss("dist_config", Either("adapters are FSDP units of their own"))
    elif name == "deepspeed":
        file = part.text("config_file")
        if file is not None:
            read_deepspeed_value(keys, "config_file", file)
        keys.default("loop", "accelerate", "DeepSpeed through accelerate")
        part.ignore_all("of DeepSpeed")
        keys.absorb(part)
    elif name is not None:
        keys.miss("dist_config", Either(f"{name}: priced without"))
        part.ignore_all(f"of {name}")
        keys.absorb(part)
    else:
        keys.default("precision", "fp32", "without FSDP2 nothing is cast")
    if "bf16" in keys.document:
        keys.ignore("bf16", "acts through FSDP2 alone")
    optimizer, part = _plugin(keys, "optim_config")
    if optimizer is not None:
        why = f"{optimizer}: torch's AdamW is priced; --optim names another"
        keys.miss("optim_config", Either(why))
        part.ignore_all("of the optimizer")
        keys.absorb(part)


_TABLE = KeyTable(
    defaults={"batch": 1, "max_grad_norm": 1.0, "optim": "adamw_torch", "weight_decay": 0.01},
    options={
        "model": Key("model", "text", "Qwen/Qwen3-4B-Instruct-2507"),
        "micro_batch_size": Key("batch", "whole"),
        "cutoff_len": Key("seq_len", "whole", 2048),
        "max_grad_norm": Key("max_grad_norm", "scalar"),
    },
    readers=(_batch, _model, _training, _sharding),
    ignored_keys={
        **IGNORED_KEYS,
        **by_key(
            {
                "data is prepared on the host": """train_dataset eval_dataset batching_workers
                    custom_chat_template""",
                "not of a training step": """sample_backend max_new_tokens save_epochs
                    save_ckpt_as_hf dist_timeout init_config lr_scheduler_config trust_remote_code
                    cp_mode dp_size""",
                "of the loss, which is not priced": """pref_loss pref_beta pref_ftx simpo_gamma
                    dpo_label_smoothing ld_alpha""",
            }
        ),
    },
    unmodelled_keys={
        "mp_shard_size": "shards over fewer GPUs: --fsdp-shard-size says it",
    },
)
"""What becomes of the keys of its configuration."""
