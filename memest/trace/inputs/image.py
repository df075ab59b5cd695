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
    target_length,
)
from memest.trace.model.build import BuiltModel

__all__ = ["image", "image_size_of", "side_of"]

_DEFAULT = 224
_DEFAULT_SEGMENTATION = 512
# the short side of COCO's images, as DETR and its kin are trained; objects in one of them
_DEFAULT_DETECTION = 800
_OBJECTS = 7
_CAPTION = 128


def image_size_of(config: Any, setup: Setup, default: int = _DEFAULT) -> tuple[int, list[str]]:
    """Pixels of a side: as asked, else the config's own, else a usual value.

    Raises:
        ConfigError: smaller than one patch.
    """
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", config)
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
    name = type(built_model.model).__name__
    detects = name.endswith("ForObjectDetection")
    size, notes = image_size_of(config, setup, _DEFAULT_DETECTION if detects else _DEFAULT)
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
    frames = getattr(config, "num_frames", None)
    if isinstance(frames, int):
        plans = [pixels(batch, frames, channels, size, size)]
        notes.append(f"clips of {frames} frames, from the config")
    else:
        plans = [pixels(batch, channels, size, size)]
    if detects and "labels" in parameters:
        plans += _objects(setup, parameters, size)
        notes.append(f"{_OBJECTS} objects in each image")
        return tuple(plans), BatchSizes(image_size=size), notes
    if "decoder_input_ids" in parameters and "labels" in parameters:
        decoder = getattr(config, "decoder", config)
        target, more_notes = target_length(decoder, setup, _CAPTION, reason="a line or two")
        plans.append(labels((batch, target)))
        sizes = BatchSizes(image_size=size, target_len=target)
        return tuple(plans), sizes, [*notes, *more_notes]
    if "input_boxes" in parameters:
        plans.append(floats("input_boxes", batch, 1, 4))
        notes.append("one box prompt for each image")
    if "labels" in parameters:
        if built_model.task is Task.IMAGE_SEGMENTATION:
            plans.append(TensorPlan(name="labels", shape=(batch, size, size), fill=0))
        elif name.endswith("Classification"):
            plans.append(class_labels(built_model, batch))
        else:
            plans.append(labels((batch,)))
    patch = side_of(getattr(config, "patch_size", None))
    if built_model.task is Task.MASKED_IMAGE_MODELING and "bool_masked_pos" in parameters and patch:
        patches = (size // patch) ** 2
        plans.append(TensorPlan("bool_masked_pos", (batch, patches), torch.bool, fill=1))
    return tuple(plans), BatchSizes(image_size=size), notes


def _objects(setup: Setup, parameters: Mapping[str, Any], size: int) -> list[TensorPlan]:
    """What DETR's image processor makes of annotations, put together by :func:`nested`."""
    batch = setup.batch
    plans = []
    if "pixel_mask" in parameters:
        plans.append(TensorPlan("pixel_mask", (batch, size, size), fill=1))
    for number in range(batch):
        plans.append(TensorPlan(f"labels.{number}.class_labels", (_OBJECTS,), fill=0))
        boxes = TensorPlan(f"labels.{number}.boxes", (_OBJECTS, 4), torch.float32, fill=1)
        plans.append(boxes)  # numbers that are corners in their order
    return plans
