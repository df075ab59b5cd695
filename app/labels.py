"""What options are called on a page: words of people, not flags."""

from __future__ import annotations

import functools
import re

from memest.catalog.spec import list_gpus
from memest.config.option import Option
from memest.config.option_table import OPTIONS
from memest.report.words import short_name

__all__ = ["choice_words", "in_page_words", "label_of", "value_words"]

_LABELS = {
    "method": "Trained for",
    "batch": "Batch",
    "seq_len": "Length",
    "target_len": "Length of targets",
    "image_size": "Image side",
    "audio_seconds": "Seconds of sound",
    "grad_accum": "Accumulation",
    "optim": "Optimizer",
    "dtype": "Weights' dtype",
    "attn_implementation": "Attention",
    "sdpa_backend": "Kernel of SDPA",
    "num_gpus": "GPUs",
    "num_steps": "Steps simulated",
    "alloc_conf": "Allocator settings",
    "lora_r": "LoRA rank",
    "lora_alpha": "LoRA alpha",
    "lora_dropout": "LoRA dropout",
    "lora_target_modules": "LoRA's modules",
    "peft": "Kind of adapters",
    "adapter": "Adapters' configuration",
    "qlora": "QLoRA",
    "fsdp": "FSDP",
    "zero": "ZeRO stage",
    "zero_settings": "DeepSpeed's settings",
    "tp": "Tensor parallel",
    "cp": "Context parallel",
    "sp": "Sequence parallel (Ulysses)",
    "ep": "Expert parallel",
    "pp": "Pipeline stages",
    "tf32": "TF32",
    "gpu_memory": "Memory of the GPU",
    "device_context": "CUDA context",
    "eval_batch": "Batch of evaluation",
    "eval_samples": "Samples of evaluation",
    "num_labels": "Labels",
    "use_cache": "Cache of keys and values",
}
"""Where the flag alone says too little."""
_CHOICES = {
    "supervised": "Supervised",
    "dpo": "DPO",
    "ipo": "IPO",
    "kto": "KTO",
    "orpo": "ORPO",
    "cpo": "CPO",
    "simpo": "SimPO",
    "reward": "Reward",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "online-dpo": "Online DPO",
}
"""What is trained for, as people write it."""
_WORDS = {
    "lora": "LoRA",
    "dora": "DoRA",
    "rslora": "rsLoRA",
    "fsdp": "FSDP",
    "ddp": "DDP",
    "nccl": "NCCL",
    "cpu": "CPU",
    "ram": "RAM",
    "mb": "MB",
    "gpu": "GPU",
    "gpus": "GPUs",
    "bnb": "bitsandbytes",
    "llm": "LLM",
    "kbit": "k-bit training",
    "peft": "PEFT",
    "tp": "tensor parallel:",
    "cp": "context parallel:",
    "pp": "pipeline:",
    "sdpa": "SDPA",
    "kl": "KL",
    "liger": "Liger",
    "neftune": "NEFTune",
    "param": "parameters",
    "ref": "reference",
    "num": "number of",
    "eval": "evaluation",
    "len": "length",
    "args": "arguments",
    "optim": "optimizer",
}


def label_of(option: Option) -> str:
    """What an option is called."""
    label = _LABELS.get(option.name)
    if label is None:
        flag = option.flags[0].removeprefix("--").replace("-", " ")
        label = " ".join(_WORDS.get(word, word) for word in flag.split())
    return label[0].upper() + label[1:]


_FLAG = re.compile(r"(?<![\w`-])--[a-z][a-z0-9-]*")
_LISTS = {
    "`memest gpus`": "The field GPU",
    "`memest estimate --help all`": "All options",
    "All that are legal: memest estimate --help optimizer.": "The field Optimizer lists them all.",
}
"""Where a page has what a command lists."""


def in_page_words(text: object) -> str:
    """A sentence of the library with the page's names of inputs, of lists of them, and of cards.

    Example:
        >>> in_page_words("--seq-len 9 is too long: use --seq-len 8.")
        'Length 9 is too long: use Length 8.'
    """
    words = _FLAG.sub(lambda found: _labels_by_flag().get(found[0], found[0]), str(text))
    for command, place in _LISTS.items():
        words = words.replace(command, place)
    return _card_names().sub(lambda found: short_name(found[0]), words)


@functools.cache
def _card_names() -> re.Pattern[str]:
    names = sorted((spec.name for spec in list_gpus()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)))


@functools.cache
def _labels_by_flag() -> dict[str, str]:
    return {flag: label_of(option) for option in OPTIONS for flag in option.flags}


def choice_words(value: str) -> str:
    """What stands in a list for a value of an option."""
    return _CHOICES.get(value, value)


def value_words(value: object) -> str:
    """A value as a person writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
