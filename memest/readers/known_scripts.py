"""Scripts that many people train with by their names: what they do unasked, what they call things.

Sources: ``qlora.py`` of artidoro/qlora (dataclasses, ``get_accelerate_model``), ``finetune.py`` of
tloen/alpaca-lora (``train``, which Fire calls).
"""

from __future__ import annotations

from typing import Any

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


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default
