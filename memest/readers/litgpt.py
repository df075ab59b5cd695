"""LitGPT's YAML: known by its keys, and refused with the nearest question.

LitGPT trains code of its own (``litgpt/model.py``, ``litgpt/lora.py``, logits in pieces,
checkpointing under FSDP alone), which memest does not run; transformers' model of the same sizes
is another question, which the refusal spells out.

Source: ``litgpt/finetune/lora.py``, ``litgpt/pretrain.py``, ``litgpt/args.py``, ``config_hub``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from memest.errors import ConfigError
from memest.readers.mapping import DocumentKeys

__all__ = ["LITGPT_COMMANDS", "refuse_litgpt"]

LITGPT_COMMANDS = (
    "finetune_lora",
    "finetune_full",
    "finetune_adapter",
    "finetune_adapter_v2",
    "finetune",
    "pretrain",
)
"""Its commands that train."""
_PRECISIONS = {
    "bf16-true": ("--dtype", "bfloat16"),
    "bf16-mixed": ("--bf16",),
    "16-mixed": ("--fp16",),
    "16-true": ("--dtype", "float16"),
}


def refuse_litgpt(keys: DocumentKeys) -> None:
    """Refuse a configuration of LitGPT.

    Raises:
        ConfigError: always; it says what memest can be asked.
    """
    source = "the launch command" if keys.source == "command" else keys.source
    raise ConfigError(
        f"{source} is a configuration of LitGPT, whose models are code of its own that memest "
        "does not run. transformers' model of the same sizes is another program with much the "
        f"same tensors: {shlex.join(_nearest(keys))}."
    )


def _nearest(keys: DocumentKeys) -> list[str]:
    """The command of the nearest question."""
    place = keys.document.get("checkpoint_dir") or keys.document.get("model_name") or "MODEL"
    words = ["memest", "estimate", str(place).removeprefix("checkpoints/")]
    section = keys.document.get("train")
    train = section if isinstance(section, Mapping) else {}
    for key, flag in (("micro_batch_size", "--batch"), ("max_seq_length", "--seq-len")):
        if isinstance(train.get(key), int):
            words += [flag, str(train[key])]
    words += ["--loop", "plain", *_PRECISIONS.get(str(keys.document.get("precision")), ())]
    rank = keys.document.get("lora_r")
    if isinstance(rank, int):
        words += ["--peft", "lora", "--lora-r", str(rank)]
    if str(keys.document.get("quantize") or "").startswith(("bnb.nf4", "bnb.fp4")):
        words.append("--load-in-4bit")
    devices = keys.document.get("devices")
    if isinstance(devices, int) and devices > 1:
        words += ["--num-gpus", str(devices), "--fsdp", "full_shard"]
    return words
