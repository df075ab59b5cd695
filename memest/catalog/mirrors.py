"""Mirrors of models, and their copies in 4 bits: answered as the original, which is said.

Which names are mirrors is data (``aliases.csv``, each with its reason): a name that only looks
like one is not known. Source of Unsloth's names: ``models/mapper.py`` of unsloth 2026.10.9.
"""

from __future__ import annotations

import re
from typing import Any

from memest.catalog.models import MIRRORS, CatalogueEntry, alias_reason, as_said

__all__ = [
    "copy_in_4bit",
    "is_dynamic_copy",
    "is_named_quantised",
    "mirror_note",
    "original_of_copy",
]

_COPY, _DYNAMIC = "-bnb-4bit", "-unsloth-bnb-4bit"
_QUANTIZATION = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_skip_modules": None,
}
"""Of the config.json of unsloth/llama-3-8b-Instruct-bnb-4bit (revision fd5a4dc3), as LLaMA-Factory
logged it; the same in llm-foundry's ``scripts/eval/README.md`` (unsloth/llama-3-8b-bnb-4bit)."""


def is_named_quantised(name: str) -> bool:
    """Whether a name, of a repository or a folder, says that its weights are quantised already.

    Example:
        >>> is_named_quantised("unsloth/Llama-3.2-1B-bnb-4bit"), is_named_quantised("gpt2")
        (True, False)
    """
    return re.search(r"bnb|gptq|[48]-?bit|int[48]\b|nf4", name, re.IGNORECASE) is not None


def is_dynamic_copy(name: str) -> bool:
    """Whether a name is of Unsloth's dynamic copies, which leave some layers in 16 bits."""
    return name.strip().lower().endswith(_DYNAMIC)


def _is_copy(name: str) -> bool:
    return name.strip().lower().endswith(_COPY)


def original_of_copy(name: str) -> str:
    """A name without what says that it is a copy in 4 bits; other names as they are.

    Example:
        >>> original_of_copy("unsloth/Llama-3.2-1B-unsloth-bnb-4bit")
        'unsloth/Llama-3.2-1B'
    """
    if not _is_copy(name):
        return name
    return name[: -len(_DYNAMIC)] if is_dynamic_copy(name) else name[: -len(_COPY)]


def copy_in_4bit(name: str, entry: CatalogueEntry, config: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration under which an entry answers to a name.

    Args:
        name: as it was typed.
        entry: what the name leads to.
        config: of the entry.

    Returns:
        The entry's own, or that of its copy in 4 bits; None where only the copy's own config.json
        says which of its layers are in 4 bits.
    """
    if not _is_copy(name):
        return config
    has_other_parts = entry.auto_class != "AutoModelForCausalLM"
    if is_dynamic_copy(name) or has_other_parts:
        return None
    without_dtype = {key: value for key, value in config.items() if key != "dtype"}
    return {**without_dtype, "torch_dtype": "bfloat16", "quantization_config": dict(_QUANTIZATION)}


def mirror_note(name: str, entry: CatalogueEntry) -> str | None:
    """What is said where another model's name was typed; None where it is the same model."""
    reason = alias_reason(name)
    if reason.startswith(MIRRORS):
        return f"{name} is answered as {entry.id}: {reason}"
    typed, own = (each.rpartition("/")[2].lower() for each in (name, entry.id))
    if typed == own:
        return None
    if as_said(typed) == as_said(own):
        return f"{name!r} was taken as {entry.id}"
    return f"{name!r} has the architecture of {entry.id}, which was taken"
