"""From the options of adapters and quantised bases to the two values of a setup. Torch-free."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from memest.adapter import read_adapter
from memest.errors import ConfigError
from memest.option_table import OPTIONS
from memest.quantization import Format, Quantization, read_quantization
from memest.setup import Setup

__all__ = ["merge_adapter", "merge_quantization"]

_SETTINGS = {
    "lora_alpha": "lora_alpha",
    "lora_target_modules": "target_modules",
    "lora_dropout": "lora_dropout",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
    "modules_to_save": "modules_to_save",
    "num_virtual_tokens": "num_virtual_tokens",
}
_BNB = {
    "bnb_4bit_quant_type": "quant_type",
    "bnb_4bit_compute_dtype": "compute_dtype",
    "bnb_4bit_use_double_quant": "double_quant",
    "bnb_4bit_quant_storage": "quant_storage",
    "llm_int8_threshold": "threshold",
    "llm_int8_skip_modules": "skip_modules",
    "prepare_kbit": "prepare",
}
_LORA_ONLY = ("lora_alpha", "lora_dropout", "use_dora", "use_rslora")
_RANKS = {"adalora": "init_r"}
_WITHOUT_RANK = ("ia3", "ln_tuning", "prompt_tuning", "p_tuning", "prefix_tuning")
_4BIT_ONLY = tuple(name for name in _BNB if name.startswith("bnb_4bit"))
_PATTERN = re.compile(r"[*+?\[\](){}|^$\\]")
_FLAGS = {option.name: option.flags[0] for option in OPTIONS}


def merge_adapter(given: dict[str, Any], base: Setup | None) -> None:
    """Replace the options of adapters by the value they stand for, ``given["adapter"]``.

    Args:
        given: options by name; those of adapters are taken out.
        base: the setup that they change.

    Raises:
        ConfigError: an option that the method does not have, or a wrong value.
    """
    names = ("peft", "lora_r", "autocast_adapter_dtype", *_SETTINGS)
    parts = {name: given.pop(name) for name in names if name in given}
    asked = given.pop("adapter", None)
    # a switch that is off says nothing where there is nothing to switch
    named = {name: v for name, v in parts.items() if v is not False or name.startswith("auto")}
    if asked is None and base is not None and base.adapter is not None:
        asked, named = base.adapter, parts
    if asked is None and not named:
        return
    if asked is not None:
        first = read_adapter(asked).to_dict()
    else:
        method = named.get("peft") or _implied(named)
        first = {"peft_type": "LORA" if method is None else str(method)}
        if method is None:
            raise ConfigError(
                f"{_FLAGS[next(iter(named))]} says nothing without adapters: add --lora-r 16, or "
                "--peft with a method."
            )
    if "peft" in named and asked is not None:
        wanted = str(named["peft"]).strip().lower().replace("-", "_")
        if wanted.upper() != first["peft_type"]:
            raise ConfigError(
                f"--peft {named['peft']} and the adapters given ({first['peft_type']}) contradict "
                "each other: drop one."
            )
    first |= _settings(named, str(first["peft_type"]))
    given["adapter"] = read_adapter(first, option="--peft")


def _implied(named: Mapping[str, Any]) -> str | None:
    """LoRA is what everybody means who names none."""
    meant = ("lora_r", "lora_target_modules", *_LORA_ONLY)
    return "lora" if any(name in named for name in meant) else None


def _settings(named: Mapping[str, Any], peft_type: str) -> dict[str, Any]:
    method = peft_type.lower().replace("-", "_")
    method = "lora" if method == "dora" else method
    out: dict[str, Any] = {}
    if peft_type.lower() == "dora":
        out |= {"peft_type": "LORA", "use_dora": True}
    for name in _LORA_ONLY:
        if named.get(name) and method not in ("lora", "adalora"):
            raise ConfigError(f"{_FLAGS[name]} is an option of LoRA, not of {method}: drop it.")
    if "lora_r" in named:
        if method in _WITHOUT_RANK:
            raise ConfigError(f"--lora-r is a rank, and {method} has none: drop it.")
        out[_RANKS.get(method, "r")] = named["lora_r"]
    if "num_virtual_tokens" in named and not method.endswith(
        ("prompt_tuning", "p_tuning", "prefix_tuning", "prompt", "prefix")
    ):
        raise ConfigError(
            f"--num-virtual-tokens is an option of prompts, not of {method}: drop it."
        )
    for name, key in _SETTINGS.items():
        if name not in named:
            continue
        value = named[name]
        if name == "lora_target_modules":
            value = _targets(_names(value))
        elif name == "modules_to_save":
            value = _names(value)
        out[key] = value
    if "autocast_adapter_dtype" in named:
        out["autocast_adapter_dtype"] = named["autocast_adapter_dtype"]
    return out


def _names(values: Iterable[str]) -> list[str]:
    """Names that may stand in one word, with commas between."""
    texts = [values] if isinstance(values, str) else list(values)
    if len(texts) == 1 and _PATTERN.search(texts[0]):
        return texts
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def _targets(names: list[str]) -> str | list[str]:
    """A list of names, or one regular expression for the whole path, as peft takes them."""
    if len(names) == 1 and (names[0] == "all-linear" or _PATTERN.search(names[0])):
        return names[0]
    return names


def merge_quantization(given: dict[str, Any], base: Setup | None) -> None:
    """Replace the options of quantised bases by the value they stand for.

    Args:
        given: options by name; those of quantisation are taken out, ``quantization`` is put in.
        base: the setup that they change.

    Raises:
        ConfigError: contradictions, options without a quantised base, wrong values.
    """
    four, eight = given.pop("load_in_4bit", None), given.pop("load_in_8bit", None)
    parts = {name: given.pop(name) for name in _BNB if name in given}
    asked = given.pop("quantization", None)
    if four and eight:
        raise ConfigError("--load-in-4bit and --load-in-8bit exclude each other: drop one.")
    wanted = Format.BNB_4BIT if four else Format.BNB_8BIT if eight else None
    now = None if asked is None else read_quantization(asked)
    if now is None and base is not None:
        now = base.quantization
        if False in (four, eight) and now is not None and not wanted:
            off = Format.BNB_4BIT if four is False else Format.BNB_8BIT
            now = None if now.format is off else now
            given["quantization"] = now
    if wanted is not None:
        kept = now is not None and (asked is not None or now.format.packed)
        if kept and now is not None and now.format is not wanted:
            raise ConfigError(
                f"--load-in-{4 if four else 8}bit and --quantization-config contradict each other: "
                "drop one."
            )
        now = (
            Quantization(format=wanted) if now is None else dataclasses.replace(now, format=wanted)
        )
    if now is None:
        said = [name for name, value in parts.items() if value is not False]
        if said and four is None and eight is None:
            raise ConfigError(
                f"{_FLAGS[said[0]]} says nothing without a quantised base: add --load-in-4bit or "
                "--load-in-8bit."
            )
        return
    if now.format.packed:
        # a switch that is off says nothing where there is nothing to switch
        said = [n for n, v in parts.items() if v is not False and n != "prepare_kbit"]
        parts = {name: value for name, value in parts.items() if name == "prepare_kbit"}
        if said:
            raise ConfigError(
                f"{_FLAGS[said[0]]} is an option of bitsandbytes, and the base is quantised by "
                f"{now.format.value.upper()}: drop it."
            )
    changes = {_BNB[name]: value for name, value in parts.items()}
    if "skip_modules" in changes:
        changes["skip_modules"] = tuple(_names(changes["skip_modules"]))
    if now.format is not Format.BNB_4BIT:
        for name in _4BIT_ONLY:
            if parts.get(name):
                raise ConfigError(
                    f"{_FLAGS[name]} is an option of 4-bit bases: add --load-in-4bit."
                )
    given["quantization"] = dataclasses.replace(now, **changes)
