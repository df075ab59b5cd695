"""How large the images of a model become that takes them at any size. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from memest.config.positions import DEFAULT_SEQ_LEN

__all__ = [
    "FREE_SIZE",
    "LEAST_TEXT",
    "ImageSize",
    "length_around",
    "patches_in_rows",
    "taken_unasked",
]

FREE_SIZE = 448
"""Pixels of a side where nobody names them: about a quarter of a megapixel is common."""
_IN_ROWS = frozenset(
    """qwen2_vl qwen2_5_vl qwen2_5_omni qwen2_5_omni_thinker qwen3_vl qwen3_vl_moe qwen3_5
    qwen3_5_moe qwen3_omni_moe qwen3_omni_moe_thinker glm4v glm4v_moe""".split()
)
_PATCH, _MERGE = 14, 2
"""Of Qwen2-VL and GLM-4.1V; later configurations name theirs."""
_ROOM_FOR_TEXT = 128
LEAST_TEXT = 8
"""Tokens that a sample has beside those of its image, at the least."""


def patches_in_rows(model_type: str) -> bool:
    """Whether a model takes the patches of a batch in one row, images of any size."""
    return model_type in _IN_ROWS


def length_around(placeholders: int) -> int:
    """Tokens of a sample that are taken where nobody names them: an image's, and text around."""
    return max(DEFAULT_SEQ_LEN, 64 * math.ceil((placeholders + _ROOM_FOR_TEXT) / 64))


class ImageSize:
    """What a cap in pixels is, in units of one token of an image.

    Args:
        config: the model's configuration, as ``config.json`` has it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        part = config.get("thinker_config") or config
        vision = part.get("vision_config") or {}
        patch = vision.get("patch_size") or vision.get("spatial_patch_size") or _PATCH
        self.unit: int = patch * (vision.get("spatial_merge_size") or _MERGE)

    def up_to(self, most_pixels: int, length: int | None) -> int:
        """The side of a square that holds as many tokens as an image within a cap may have.

        Processors scale an image down until its sides, in whole units, have no more pixels than
        the cap: a long one may come nearer to it than a square, which is rounded up for that.

        Args:
            most_pixels: the cap.
            length: tokens of a sample, None where they are open; an image has no more.

        Source: ``smart_resize`` of transformers 5.23 ``image_processing_qwen2_vl.py``.
        """
        tokens = max(1, most_pixels // self.unit**2)
        side = math.isqrt(tokens - 1) + 1
        if length is not None:
            side = min(side, max(1, math.isqrt(max(0, length - LEAST_TEXT))))
        return side * self.unit

    def tokens(self, side: int) -> int:
        """Tokens of an image, by the pixels of its side."""
        return max(1, round(side / self.unit)) ** 2


def taken_unasked(config: Mapping[str, Any]) -> str:
    """The size of images that is taken where nobody names one; "" where the model has its own.

    Args:
        config: the model's configuration, as ``config.json`` has it.
    """
    kind = str(config.get("model_type"))
    if patches_in_rows(kind) or kind == "mistral3":
        return f"{FREE_SIZE} x {FREE_SIZE} pixels are taken"
    return "one tile of the vision tower's size is taken" if kind == "llama4" else ""
