"""Parts of multimodal models by the names of their modules: towers, projectors, language model.

Sources: ``get_encoder`` of transformers 5.23, ``model/model_arch.py`` of ms-swift 4.6.0 and
``model/model_utils/visual.py`` of LLaMA-Factory (August 2026), whose switches freeze these parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from memest.config.kinds import ModelPart
from memest.errors import ConfigError

__all__ = ["modules_of_parts", "parameters_of_parts"]

_TOWERS = """visual vision_tower vision_model vision_encoder vision_backbone image_tower vit vpm
    audio_tower audio_encoder audio_model speech_encoder apm sam_model image_encoder vision"""
_PROJECTORS = """multi_modal_projector mm_projector multimodal_projector merger merger_list
    deepstack_merger_list connector aligner resampler projector image_projector vision_projector
    audio_projector embed_vision embed_audio vision_projection vision_proj img_projection
    audio_projection mlp1 mlp_AR vision2text_model speech_projector vision_adapter"""


def _named(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|\.)(?:{'|'.join(words.split())})(?:\.|$)")


_TOWER, _PROJECTOR = _named(_TOWERS), _named(_PROJECTORS)


def _part_of(name: str) -> ModelPart:
    """Which part a name lies in; a projector may lie inside a tower.

    Example:
        >>> _part_of("model.visual.merger.mlp.0"), _part_of("model.visual.blocks.0.attn.qkv")
        (<ModelPart.PROJECTOR: 'projector'>, <ModelPart.VISION: 'vision'>)
    """
    if _PROJECTOR.search(name):
        return ModelPart.PROJECTOR
    return ModelPart.VISION if _TOWER.search(name) else ModelPart.LANGUAGE


def _names_in(names: Iterable[str], parts: Iterable[str]) -> list[str]:
    """Names inside parts; none where the model has no tower, and so no parts."""
    part_by_name = {name: _part_of(name) for name in names}
    wanted = set(parts) if ModelPart.VISION in part_by_name.values() else set()
    return [name for name, part in part_by_name.items() if part in wanted]


def _check(model: torch.nn.Module, parts: Iterable[str]) -> None:
    """Refuse a model that has a tower under no name that is known.

    Raises:
        ConfigError: it has one by its config.
    """
    config = getattr(model, "config", None)
    kinds = ("vision_config", "audio_config")
    towers = [name for name in kinds if getattr(config, name, None) is not None]
    names = [name for name, _ in model.named_parameters()]
    if towers and not any(_part_of(name) is ModelPart.VISION for name in names):
        raise ConfigError(
            f"--frozen-parts {','.join(parts)}: {type(model).__name__} has a {towers[0]}, and no "
            f"module of a name that memest knows for a tower. Name it with --freeze; names look "
            f"like: {', '.join(names[:3])}."
        )


def parameters_of_parts(model: torch.nn.Module, parts: tuple[str, ...]) -> list[torch.nn.Parameter]:
    """The parameters of parts of a model; none of a model of one part.

    Raises:
        ConfigError: the model has towers whose names are not known.
    """
    if parts:
        _check(model, parts)
    parameters = dict(model.named_parameters())
    return [parameters[name] for name in _names_in(parameters, parts)]


def modules_of_parts(model: torch.nn.Module, parts: tuple[str, ...]) -> list[str]:
    """The names of the modules of parts of a model; none of a model of one part.

    Raises:
        ConfigError: the model has towers whose names are not known.
    """
    if parts:
        _check(model, parts)
    return _names_in([name for name, _ in model.named_modules() if name], parts)
