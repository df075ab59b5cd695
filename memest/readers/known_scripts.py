"""Scripts that many people train with by their names: what they do unasked, what they call things.

Sources: ``qlora.py`` of artidoro/qlora (dataclasses, ``get_accelerate_model``), ``finetune.py`` of
tloen/alpaca-lora (``train``, which Fire calls), ``train.py`` of AnswerDotAI/fsdp_qlora (``main``,
``fsdp_main``, of March to June 2024).
"""

from __future__ import annotations

from typing import Any

from memest.errors import not_legal

__all__ = ["complete_arguments"]

_QLORA: dict[str, Any] = {
    "bits": 4,
    "double_quant": True,
    "quant_type": "nf4",
    "lora_r": 64,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_modules": "all",
    "optim": "paged_adamw_32bit",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 16,
    "weight_decay": 0.0,
    "max_grad_norm": 0.3,
    "gradient_checkpointing": True,
    "source_max_len": 1024,
    "target_max_len": 256,
}
_ADAPTERS = ("bits", "double_quant", "quant_type", "lora_r", "lora_alpha", "lora_dropout")
_ALPACA: dict[str, Any] = {
    "load_in_8bit": True,
    "prepare_kbit": True,
    "fp16": True,
    "optim": "adamw_torch",
    "gradient_checkpointing": True,
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_modules": ["q_proj", "v_proj"],
}


_FSDP_QLORA: dict[str, Any] = {
    "loop": "plain",
    "fsdp": "full_shard",
    "fsdp_config": {"version": 1, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "fsdp_cpu_ram_efficient_loading": True,
    "optim": "adamw_torch",
    "weight_decay": 0.1,
    "max_grad_norm": 0.0,
    "gradient_checkpointing": True,
    "attn_implementation": "sdpa",
    "use_cache": False,
    "del_outputs": True,
}
_ITS_ADAPTERS: dict[str, Any] = {
    "peft": "lora",
    "lora_r": 64,
    "lora_alpha": 16,
    "lora_dropout": 0.1,
}
_ITS_MODULES = "k_proj,q_proj,v_proj,up_proj,down_proj,gate_proj"
_ITS_BASE: dict[str, Any] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,  # compress_statistics of bitsandbytes' Linear4bit
    "prepare_kbit": False,
}
_ITS_PRECISIONS = {
    "bf16": ("bfloat16", "fp32", "bfloat16"),
    "fp32": ("float32", "fp32", "float16"),
    "bf16_autocast": ("float32", "bf16", "bfloat16"),
    "bf16_buffers_autocast": ("bfloat16", "bf16", "bfloat16"),
    "fp16_autocast": ("float32", "fp16", "float16"),
}
"""Dtype of the weights, autocast, and the dtype that 4-bit layers compute in."""
_ITS_NAMES = {
    "context_length": ("seq_len", 512),
    "batch_size": ("per_device_train_batch_size", 1),
    "use_gradient_checkpointing": ("gradient_checkpointing", True),
    "reentrant_checkpointing": ("use_reentrant", False),
    "use_cpu_offload": ("fsdp_offload", True),
    "low_memory": ("fsdp_cpu_ram_efficient_loading", True),
    "model_name": ("model_name_or_path", "meta-llama/Llama-2-7b-hf"),
    "lora_rank": ("lora_r", 64),
}
"""What it calls options, and their defaults."""


def complete_arguments(stem: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What a known script does unasked, and how to call it; nothing for any other.

    Args:
        stem: the script's name.
        arguments: that it is given; those with names of its own are taken out.
    """
    if stem == "qlora":
        defaults = dict(_QLORA)
        # it finds all linear layers, whatever is named
        arguments.pop("lora_modules", None)
        if arguments.pop("full_finetune", False) is True:
            for key in (*_ADAPTERS, "lora_modules"):
                defaults.pop(key)
                arguments.pop(key, None)
        return defaults, "qlora.py"
    if stem == "finetune" and "base_model" in arguments:
        return _alpaca(arguments), "finetune.py"
    # its file has everybody's name, and each of its words alone is another script's too
    trains = arguments.get("train_type") if "context_length" in arguments else None
    if stem == "train" and trains in ("full", "lora", "qlora"):
        return _fsdp_qlora(arguments), "train.py of fsdp_qlora"
    return {}, ""


def _alpaca(arguments: dict[str, Any]) -> dict[str, Any]:
    micro = _whole(arguments.pop("micro_batch_size", 4), 4)
    total = _whole(arguments.pop("batch_size", 128), 128)
    document = {
        **_ALPACA,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": max(1, total // micro),
        "block_size": arguments.pop("cutoff_len", 256),
    }
    if (model := arguments.pop("base_model", None)) is not None:
        document["model_name_or_path"] = model
    if arguments.pop("val_set_size", 2000):
        document["eval_strategy"] = "steps"
    targets = arguments.get("lora_target_modules")
    if isinstance(targets, str):
        # Fire takes [q_proj,v_proj] for a list
        names = [name.strip(" '\"") for name in targets.strip("[]").split(",")]
        arguments["lora_target_modules"] = [name for name in names if name]
    return document


def _fsdp_qlora(arguments: dict[str, Any]) -> dict[str, Any]:
    document = dict(_FSDP_QLORA)
    trains = arguments.pop("train_type")
    precision = str(arguments.pop("precision", "bf16"))
    if precision not in _ITS_PRECISIONS:
        raise not_legal(f"--precision {precision}", precision, _ITS_PRECISIONS)
    weights, autocast, computes = _ITS_PRECISIONS[precision]
    document |= {"dtype": weights, "precision": autocast}
    for name, (option, default) in _ITS_NAMES.items():
        document[option] = arguments.pop(name, default)
    rank = document.pop("lora_r")
    if trains != "full":
        document |= {**_ITS_ADAPTERS, "lora_r": rank}
        if arguments.pop("lora_target_modules", "all") == "all":
            document["lora_target_modules"] = _ITS_MODULES
    if trains == "qlora":
        document |= {
            **_ITS_BASE,
            "bnb_4bit_compute_dtype": computes,
            "bnb_4bit_quant_storage": weights,
        }
    if (shards := arguments.pop("sharding_strategy", "full_shard")) == "ddp":
        document["fsdp"] = "no_shard"
    elif shards != "full_shard":
        document["fsdp"] = shards
    if arguments.pop("apply_gradient_clipping", False) is True:
        document["max_grad_norm"] = arguments.get("grad_norm", 0.3)
    arguments.pop("grad_norm", None)
    world = arguments.pop("world_size", -1)
    if isinstance(world, int) and world > 0:
        document["num_gpus"] = world
    return document


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default
