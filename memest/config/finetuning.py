"""Options of adapters and of quantised bases, put together to the values of a setup. Torch-free."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from memest.config.adapter import VIRTUAL_TOKENS, method_of, read_adapter
from memest.config.inputs import arguments_of
from memest.config.kinds import Fsdp, Loop
from memest.config.option import OFF_WORDS
from memest.config.option_table import FLAGS, take_parts
from memest.config.parallelism import ONE_GPU
from memest.config.quantization import Format, Quantization, read_quantization
from memest.config.setup import Setup
from memest.errors import ConfigError

__all__ = ["expand_qlora", "merge_adapter", "merge_quantization"]

_LORA_ONLY = ("lora_alpha", "lora_dropout", "use_dora", "use_rslora")
_WITHOUT_RANK = ("ia3", "ln_tuning", "prompt_tuning", "p_tuning", "prefix_tuning")
_4BIT_ONLY = ("quant_type", "compute_dtype", "double_quant", "quant_storage")
_PATTERN = re.compile(r"[*+?\[\](){}|^$\\]")


def expand_qlora(values: dict[str, Any], base: Setup | None) -> None:
    """Replace ``qlora`` by what it is short for; parts that are named stay as they are.

    Args:
        values: options by name, changed in place.
        base: the setup that they change, where there is one.

    Raises:
        ConfigError: it is switched off, of several options.
    """
    is_asked = values.pop("qlora", None)
    if is_asked is False and base is not None and base.quantization is not None:
        raise ConfigError(
            "--qlora is short for several options: say which are off, load_in_4bit=false for one."
        )
    if not is_asked:
        return
    precision = values.get("precision", None if base is None else base.precision)
    half = "float16" if precision == "fp16" else "bfloat16"
    values.setdefault("load_in_4bit", True)
    values.setdefault("bnb_4bit_quant_type", "nf4")
    values.setdefault("bnb_4bit_use_double_quant", True)
    values.setdefault("bnb_4bit_compute_dtype", half)
    for name, value in _sharded_base(values, base, half).items():
        values.setdefault(name, value)
    has_adapter = base is not None and base.adapter is not None
    if not has_adapter and not {"peft", "adapter", "lora_r", "lora_target_modules"} & set(values):
        values["peft"] = "lora"


def _sharded_base(values: Mapping[str, Any], base: Setup | None, half: str) -> dict[str, Any]:
    """What QLoRA has besides where FSDP shards its base, for there is no other such run.

    FSDP1 flattens the weights of a unit, which have to be of one floating dtype then; so does
    ``fully_shard`` in a script with the packed weights' state. Source: PEFT's page on FSDP
    (``docs/source/accelerate/fsdp.md``), ``train.py`` of AnswerDotAI/fsdp_qlora (``low_memory``).

    Args:
        values: options, merged but for the base.
        base: the setup that they change, where there is one.
        half: dtype that the 4-bit layers compute in.
    """
    spread = ONE_GPU if base is None else base.distributed
    fsdp = str(values.get("fsdp", spread.fsdp)).lower()
    loop = str(values.get("loop", Loop.TRAINER if base is None else base.loop)).lower()
    if fsdp in OFF_WORDS or fsdp in ("", Fsdp.NONE):
        return {}
    if str(values.get("fsdp_version", spread.fsdp_version)) == "1":
        return {
            "bnb_4bit_quant_storage": half,
            "dtype": half,
            "prepare_kbit": False,
            "fsdp_cpu_ram_efficient_loading": True,
            "checkpointing": "full",
        }
    return {"bnb_4bit_quant_storage": half} if loop == Loop.PLAIN else {}


def merge_adapter(values: dict[str, Any], base: Setup | None) -> None:
    """Put the options of adapters together to the value of ``adapter``.

    Args:
        values: options by name, changed in place.
        base: the setup that they change, where there is one.

    Raises:
        ConfigError: contradictions, wrong values, options without adapters or of other ones.
    """
    names = ("peft", "lora_r", "autocast_adapter_dtype", "peft_args")
    parts = {name: values.pop(name) for name in names if name in values}
    parts |= take_parts(values, "adapter")
    adapter = values.pop("adapter", None)
    cast = None if adapter is None else read_adapter(adapter).autocast_adapter_dtype
    if cast is not None:
        parts.setdefault("autocast_adapter_dtype", cast)
    # a switch that is off says nothing where there is nothing to switch
    given_parts = {
        name: v for name, v in parts.items() if v is not False or name.startswith("auto")
    }
    if adapter is None and base is not None and base.adapter is not None:
        adapter, given_parts = base.adapter, parts
    if adapter is None and not given_parts:
        return
    if adapter is not None:
        config = read_adapter(adapter).to_dict()
        peft_type = (
            str(given_parts.get("peft", config["peft_type"])).strip().upper().replace("-", "_")
        )
        if peft_type != config["peft_type"]:
            raise ConfigError(
                f"--peft {given_parts['peft']} and the adapters given ({config['peft_type']}) "
                "contradict each other: drop one."
            )
    else:
        # LoRA is what everybody means who names none
        means_lora = any(name in given_parts for name in ("lora_r", "target_modules", *_LORA_ONLY))
        method = given_parts.get("peft") or ("LORA" if means_lora else None)
        if method is None:
            raise ConfigError(
                f"{FLAGS[next(iter(given_parts))]} says nothing without adapters: add --lora-r "
                "16, or --peft with a method."
            )
        config = {"peft_type": str(method)}
    config |= _adapter_config(given_parts, str(config["peft_type"]))
    flags = {name: FLAGS[name] for name in given_parts if name in FLAGS}
    if "lora_r" in flags:
        flags |= dict.fromkeys(("r", "init_r"), flags["lora_r"])
    values["adapter"] = read_adapter(config, option="--peft", flags=flags)


def _adapter_config(parts: dict[str, Any], peft_type: str) -> dict[str, Any]:
    """What the options say, by the names of the method's configuration class."""
    dora, method = peft_type.lower() == "dora", method_of(peft_type, "--peft")
    for name in _LORA_ONLY:
        if parts.get(name) and method not in ("lora", "adalora"):
            raise ConfigError(f"{FLAGS[name]} is an option of LoRA, not of {method}: drop it.")
    apart = ("peft", "lora_r", "peft_args")
    out = {name: value for name, value in parts.items() if name not in apart}
    if dora:
        out = {"peft_type": "LORA", "use_dora": True, **out}
    if "lora_r" in parts:
        if method in _WITHOUT_RANK:
            raise ConfigError(f"--lora-r is a rank, and {method} has none: drop it.")
        out["init_r" if method == "adalora" else "r"] = parts["lora_r"]
    if "num_virtual_tokens" in parts and method not in VIRTUAL_TOKENS:
        raise ConfigError(
            f"--num-virtual-tokens is an option of prompts, not of {method}: drop it."
        )
    if "target_modules" in out:
        out["target_modules"] = _targets(_names(out["target_modules"]))
    if "modules_to_save" in out:
        out["modules_to_save"] = _names(out["modules_to_save"])
    for name, value in arguments_of(parts.get("peft_args"), "--peft-arg", "n_frequency=500"):
        if out.setdefault(name, value) != value:
            raise ConfigError(
                f"--peft-arg {name}={value} and {FLAGS.get(name, '--lora-r')} {out[name]} "
                "contradict each other: drop one."
            )
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


def merge_quantization(values: dict[str, Any], base: Setup | None) -> None:
    """Put the options of a quantised base together to the value of ``quantization``.

    Args:
        values: options by name, changed in place.
        base: the setup that they change, where there is one.

    Raises:
        ConfigError: contradictions, options without a quantised base or of another format.
    """
    four, eight = values.pop("load_in_4bit", None), values.pop("load_in_8bit", None)
    config = values.pop("quantization", None)
    parts = take_parts(values, "quantization")
    # a switch that is off says nothing where there is nothing to switch
    given_names = [name for name, value in parts.items() if value is not False]
    if four and eight:
        raise ConfigError("--load-in-4bit and --load-in-8bit exclude each other: drop one.")
    requested_format = Format.BNB_4BIT if four else Format.BNB_8BIT if eight else None
    quantization = None if config is None else read_quantization(config)
    if quantization is None and base is not None:
        quantization = base.quantization
        if False in (four, eight) and quantization is not None and not requested_format:
            dropped_format = Format.BNB_4BIT if four is False else Format.BNB_8BIT
            quantization = None if quantization.format is dropped_format else quantization
            values["quantization"] = quantization
    if requested_format is not None and quantization is None:
        quantization = Quantization(format=requested_format)
    elif requested_format is not None and quantization is not None:
        if (
            config is not None or quantization.format.packed
        ) and quantization.format is not requested_format:
            raise ConfigError(
                f"--load-in-{4 if four else 8}bit and --quantization-config contradict each other: "
                "drop one."
            )
        quantization = dataclasses.replace(quantization, format=requested_format)
    if quantization is None:
        if parts.get("prepare") is not None:  # of a checkpoint that may be quantised already
            values["prepare_kbit"] = parts["prepare"]
        given_names = [name for name in given_names if name != "prepare"]
        if given_names and four is None and eight is None:
            raise ConfigError(
                f"{FLAGS[given_names[0]]} says nothing without a quantised base: add "
                "--load-in-4bit or --load-in-8bit."
            )
        return
    if quantization.format.packed:
        parts = {name: value for name, value in parts.items() if name == "prepare"}
        if others := [name for name in given_names if name != "prepare"]:
            raise ConfigError(
                f"{FLAGS[others[0]]} is an option of bitsandbytes, and the base is quantised by "
                f"{quantization.format.value.upper()}: drop it."
            )
    if quantization.format is not Format.BNB_4BIT:
        for name in _4BIT_ONLY:
            if parts.get(name):
                raise ConfigError(f"{FLAGS[name]} is an option of 4-bit bases: add --load-in-4bit.")
    if "skip_modules" in parts:
        parts["skip_modules"] = tuple(_names(parts["skip_modules"]))
    values["quantization"] = dataclasses.replace(quantization, **parts)
