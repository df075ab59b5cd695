"""What a training script changes in a config before it builds the model.

Each change is what the model's documentation tells people to do, and is said in a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memest.config.positions import text_part
from memest.config.release_defaults import release_default
from memest.config.setup import Loop, Setup, Task
from memest.errors import ConfigError

__all__ = [
    "adjust_config",
    "end_token",
    "keep_all_layers",
    "separate_head",
    "set_checkpointing",
    "set_use_cache",
]

# letters, an apostrophe, a word boundary, padding and unknown: what CTC recipes end up with
_CTC_VOCABULARY = 32


def adjust_config(config: Any, task: Task, setup: Setup) -> list[str]:
    """Change ``config`` in place for this task and setup; returns notes."""
    notes: list[str] = []
    _padding_token(config, task, notes)
    _vocabulary(config, task, notes)
    _image_size(config, setup, notes)
    if getattr(config, "token_dropout", False) and getattr(config, "mask_token_id", 0) is None:
        # ESM-2's alphabet; without it the embedding cannot tell masked residues
        config.mask_token_id = 32
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "pad_token_id", 0) is None:
        # labels are shifted right with it
        config.pad_token_id = end_token(config) or 0
    if hasattr(config, "vision_config") and getattr(config, "image_token_id", 0) is None:
        # the placeholder is the last entry of the vocabulary (BLIP-2)
        config.image_token_id = text_part(config).vocab_size - 1
    _rotary_share(config)
    return notes


def end_token(config: Any) -> int | None:
    """The end-of-sequence token, the first of several; None where the vocabulary does not have it.

    SigLIP's config keeps CLIP's (49407) beside 32,000 words, and a config whose vocabulary somebody
    made smaller keeps the token it had; a real embedding fails on either.
    """
    end = getattr(config, "eos_token_id", None)
    end = end[0] if isinstance(end, (list, tuple)) and end else end
    if not isinstance(end, int) or end < 0:
        return None
    words = getattr(config, "vocab_size", None)
    return end if not words or end < words else None


def _rotary_share(config: Any) -> None:
    """Flat configs of the first multimodal releases name the text's rotary settings at the top."""
    text = text_part(config)
    rope, flat = getattr(text, "rope_parameters", None), getattr(config, "rope_scaling", None)
    if text is config or not isinstance(rope, dict) or not isinstance(flat, dict):
        return
    for name in ("partial_rotary_factor", "mrope_section"):
        if name in flat:
            rope.setdefault(name, flat[name])


def _padding_token(config: Any, task: Task, notes: list[str]) -> None:
    """Decoders that classify need to know where a row ends."""
    text = text_part(config)
    if task is not Task.SEQUENCE_CLASSIFICATION or getattr(text, "pad_token_id", 0) is not None:
        return
    end = end_token(text)
    text.pad_token_id = config.pad_token_id = end or 0
    pads = "token 0" if end is None else "its end-of-sequence token"
    notes.append(f"the model has no padding token; {pads} pads")


def _vocabulary(config: Any, task: Task, notes: list[str]) -> None:
    if task is Task.CTC and getattr(config, "vocab_size", 0) is None:
        config.vocab_size = _CTC_VOCABULARY
        notes.append(
            f"the config has no vocabulary; the CTC head is built for {_CTC_VOCABULARY} characters"
        )


def keep_all_layers(model: torch.nn.Module) -> list[str]:
    """Drop no layer at random; returns notes.

    Layers dropped at random make steps differ; the one that drops none needs most. Modules keep the
    probability themselves, or ask the configuration of their part for it whenever they run.
    """
    owners: dict[int, Any] = {}
    for module in model.modules():
        owners[id(module)] = module
        config = getattr(module, "config", None)
        if hasattr(config, "model_type"):
            owners.update((id(part), part) for part in _parts_of(config))
    drops_layers = False
    for owner in owners.values():
        for name, value in list(vars(owner).items()):
            if name.endswith("layerdrop") and isinstance(value, (int, float)) and value > 0:
                setattr(owner, name, 0.0)
                drops_layers = True
    if drops_layers:
        return ["layers are dropped at random (layerdrop); a step that keeps all is shown"]
    return []


def _parts_of(config: Any) -> Iterator[Any]:
    """A configuration and those of its parts."""
    yield config
    for part in vars(config).values():
        if hasattr(part, "model_type"):
            yield from _parts_of(part)


def _image_size(config: Any, setup: Setup, notes: list[str]) -> None:
    """A position table for another image size, as ``from_pretrained(..., image_size=…)`` makes."""
    size = setup.image_size
    if size is None:
        return
    for part in (config, getattr(config, "vision_config", None)):
        own = getattr(part, "image_size", None)
        if own is None or part is None or config.model_type in _ANY_SIZE:
            continue
        same = [size] * len(own) if isinstance(own, (list, tuple)) else size
        if same != own:
            part.image_size = same
            notes.append(f"the model is built for images of {size} x {size}")
            return


# their image_size is the size of a tile, a limit, or unused
_ANY_SIZE = frozenset(
    """llava_next llama4 mllama mistral3 gemma4 qwen2_vl qwen2_5_vl qwen2_5_omni qwen3_vl
    qwen3_vl_moe qwen3_5 qwen3_5_moe qwen3_omni_moe glm4v glm4v_moe convnext convnextv2 resnet
    mobilenet_v1 mobilenet_v2 segformer dinov2 dinov2_with_registers dinov3_vit mobilevit
    mobilevitv2 layoutlmv3""".split()
)


def separate_head(model: Any, values: dict[str, Any]) -> list[str]:
    """Give the head its own weight where the checkpoint has one.

    T5 v1.1, flan-T5, mT5, byT5 and their kin say ``tie_word_embeddings: false``; transformers 5
    ties them all the same when it builds from a config, while ``from_pretrained`` keeps the
    checkpoint's ``lm_head`` (flan-t5-base: 222.9 M built, 247.6 M trained). What other parts of a
    config say is theirs alone, but for classes that take a true from the text's part (LLaVA).

    Args:
        model: on meta.
        values: the configuration as written in its file.

    Returns:
        What was changed, in words.
    """
    owner = _owner_of_head(model)
    if owner is None or _written_for(owner.config, model.config, values) is not False:
        return []
    text = text_part(owner.config)
    if text is not owner.config and getattr(text, "tie_word_embeddings", False):
        return []
    head = owner.get_output_embeddings()
    trains = bool(head.weight.requires_grad)
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight), requires_grad=trains)
    return ["the head has a weight of its own, as in the checkpoint (tie_word_embeddings: false)"]


def _owner_of_head(model: Any) -> Any:
    """The innermost model whose head is tied to its embedding, None without a tied head."""
    owner = None
    for module in model.modules():
        try:
            head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            continue
        weight = getattr(head, "weight", None)
        if weight is not None and weight is getattr(embedding, "weight", None):
            owner = module
    return owner


def _written_for(part: Any, config: Any, values: dict[str, Any]) -> Any:
    """``tie_word_embeddings`` as the file has it for a part of a configuration, or for all."""
    if type(part) is type(config):
        # transformers 5 always writes what the whole says; before, its text part was asked
        says = {**(values.get("text_config") or {}), **values}
        return says.get("tie_word_embeddings")
    names = (name for name, value in vars(config).items() if type(value) is type(part))
    return (values.get(next(names, "")) or {}).get("tie_word_embeddings")


# -- switches of the model -------------------------------------------------------------------------


def set_use_cache(model: Any, setup: Setup) -> None:
    """The Trainer of transformers 5 switches the cache off; scripts keep the config's value."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "use_cache"):
        return
    if setup.use_cache is not None:
        config.use_cache = setup.use_cache
    elif (
        setup.loop is Loop.TRAINER and release_default("use_cache", setup.software).value == "false"
    ):
        config.use_cache = False


def set_checkpointing(model: Any, setup: Setup) -> None:
    """The model's own activation checkpointing, as its training script switches it on.

    transformers renamed ``gradient_checkpointing_enable`` in 5.x; the old name is used where the
    new one is missing.

    Raises:
        ConfigError: the model has no checkpointing of its own.
    """
    every = setup.checkpoint_every
    enabled = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    enable = _method(model, "enable")
    if not every:
        if enabled and (disable := _method(model, "disable")) is not None:
            disable()
        return
    if enable is None or not getattr(model, "supports_gradient_checkpointing", True):
        raise ConfigError(
            f"--checkpointing: {type(model).__name__} has no activation checkpointing of its own. "
            "Leave it out."
        )
    more = {"every_n_layers": every} if every > 1 else {}
    arguments: dict[str, Any] = {"use_reentrant": setup.recomputes_reentrantly}
    if setup.checkpointing == "selective":
        from memest.trace.model.selective import selective_arguments

        arguments = selective_arguments()
    try:
        enable(arguments, **more)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--checkpointing {setup.checkpointing}: {type(model).__name__} refuses it: {error}"
        ) from error


def _method(model: Any, verb: str) -> Any:
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        method = getattr(model, f"{name}_{verb}", None)
        if method is not None:
            return method
    return None
