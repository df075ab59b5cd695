"""The batch of a model that sees images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memest.config.setup import Setup, Task
from memest.errors import ConfigError
from memest.trace.inputs.tensors import (
    BatchPlan,
    BatchSizes,
    TensorPlan,
    class_labels,
    floats,
    labels,
    pixels,
)
from memest.trace.model.build import BuiltModel

__all__ = ["image", "image_size_of", "side_of"]

_DEFAULT = 224
_DEFAULT_SEGMENTATION = 512


def image_size_of(config: Any, setup: Setup, default: int = _DEFAULT) -> tuple[int, list[str]]:
    """Pixels of a side: as asked, else the config's own, else a usual value.

    Raises:
        ConfigError: smaller than one patch.
    """
    vision = getattr(config, "vision_config", config)
    own = getattr(config, "image_size", None) or getattr(vision, "image_size", None)
    own = max(own) if isinstance(own, (list, tuple)) else own
    if setup.image_size is not None:
        patch = side_of(getattr(config, "patch_size", None) or getattr(vision, "patch_size", None))
        if patch and setup.image_size < patch:
            raise ConfigError(
                f"--image-size {setup.image_size} is smaller than one patch of this model. Use "
                f"--image-size {patch} or more."
            )
        return setup.image_size, []
    if isinstance(own, int):
        return own, [f"image size {own} x {own}, from the config"]
    size = f"{default} x {default}"
    return default, [f"image size {size} (the config names none; --image-size sets it)"]


def side_of(value: Any) -> int | None:
    """The side of a square that a configuration writes as a number or a pair; None for others."""
    value = max(value) if isinstance(value, (list, tuple)) and value else value
    return value if isinstance(value, int) else None


def image(built_model: BuiltModel, setup: Setup, parameters: Mapping[str, Any]) -> BatchPlan:
    """Pixels and the labels of the task."""
    config, batch = built_model.config, setup.batch
    size, notes = image_size_of(config, setup)
    if (
        built_model.task is Task.IMAGE_SEGMENTATION
        and setup.image_size is None
        and getattr(config, "image_size", None) in (None, _DEFAULT)
        and not hasattr(config, "vision_config")
    ):
        # the config of such a backbone still names the size of its pre-training
        size = _DEFAULT_SEGMENTATION
        notes = [f"image size {size} x {size} (--image-size sets it)"]
    channels = getattr(config, "num_channels", None) or 3
    plans = [pixels(batch, channels, size, size)]
    if "input_boxes" in parameters:
        plans.append(floats("input_boxes", batch, 1, 4))
        notes.append("one box prompt for each image")
    if "labels" in parameters:
        if built_model.task is Task.IMAGE_SEGMENTATION:
            plans.append(TensorPlan(name="labels", shape=(batch, size, size), fill=0))
        elif built_model.task is Task.IMAGE_CLASSIFICATION:
            plans.append(class_labels(built_model, batch))
        else:
            plans.append(labels((batch,)))
    patch = side_of(getattr(config, "patch_size", None))
    if built_model.task is Task.MASKED_IMAGE_MODELING and "bool_masked_pos" in parameters and patch:
        patches = (size // patch) ** 2
        plans.append(TensorPlan("bool_masked_pos", (batch, patches), torch.bool, fill=1))
    return tuple(plans), BatchSizes(image_size=size), notes
