"""The batch of a model of two towers: pairs of text and image, or of text and sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memest.setup import Setup
from memest.trace.build import BuiltModel
from memest.trace.inputs_audio import seconds_of
from memest.trace.inputs_image import image_size_of
from memest.trace.inputs_text import DEFAULT_SEQ_LEN, seq_len_of
from memest.trace.plans import (
    Planned,
    Sizes,
    TensorPlan,
    attention_mask,
    max_positions,
    pixels,
    tokens,
)

__all__ = ["contrastive"]


def contrastive(built: BuiltModel, setup: Setup, parameters: Mapping[str, Any]) -> Planned:
    """Pairs of text and image (or sound), and the model's own contrastive loss."""
    config, batch = built.config, setup.batch
    limit = max_positions(config.text_config)
    if setup.seq_len is not None:
        length, notes = seq_len_of(built, setup)
    else:
        length = min(limit or DEFAULT_SEQ_LEN, 77)
        notes = [f"texts of {length} tokens (--seq-len sets it)"]
    ids = (batch, length)
    plans = [TensorPlan(name="input_ids", shape=ids, value=tokens(ids, config.text_config))]
    if config.model_type != "siglip":
        # SigLIP was trained on padded texts without a mask, and its processor makes none
        plans.append(attention_mask(ids, padded=setup.padded))
    size = seconds = None
    if "pixel_values" in parameters:
        size, said = image_size_of(config, setup)
        plans.append(pixels(batch, 3, size, size))
    else:
        seconds, said = _sound(config, setup, plans)
    if "return_loss" in parameters:
        plans.append(TensorPlan(name="return_loss", dtype=torch.bool, constant=True))
    sizes = Sizes(seq_len=length, image_size=size, audio_seconds=seconds)
    return tuple(plans), sizes, [*notes, *said]


# CLAP: 10 s at 48 kHz with a hop of 480 samples
_CLAP_SECONDS = 10.0
_CLAP_FRAMES = 1001


def _sound(config: Any, setup: Setup, plans: list[TensorPlan]) -> tuple[float, list[str]]:
    seconds, notes = seconds_of(setup, window=_CLAP_SECONDS)
    fused = getattr(config.audio_config, "enable_fusion", False)
    bins = getattr(config.audio_config, "num_mel_bins", 64)
    shape = (setup.batch, 4 if fused else 1, _CLAP_FRAMES, bins)
    plans.append(TensorPlan(name="input_features", shape=shape, dtype=torch.float32))
    plans.append(TensorPlan(name="is_longer", shape=(setup.batch, 1), dtype=torch.bool, fill=0))
    return seconds, notes
