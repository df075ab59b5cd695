"""The batch of a model of two senses: one image (or clip) and its text for each sample.

What a processor does is reduced to what memory depends on: the shapes of the pixels, and how many
placeholder tokens one image takes in the text. Each family has one function for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memest.config.images import FREE_SIZE, LEAST_TEXT, length_around, patches_in_rows
from memest.config.positions import DEFAULT_SEQ_LEN, max_positions
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.trace.inputs.audio import FRAME_RATE, WINDOW_SECONDS, seconds_of
from memest.trace.inputs.image import image_size_of, side_of
from memest.trace.inputs.tensors import (
    WORD,
    BatchPlan,
    BatchSizes,
    TensorPlan,
    attention_mask,
    floats,
    labels,
    pixels,
    target_length,
    tokens,
    unmodelled,
)
from memest.trace.inputs.text import seq_len_of
from memest.trace.model.build import BuiltModel

__all__ = ["contrastive", "media_and_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """What one image or clip of each sample comes to.

    Attributes:
        plans: its tensors, for the whole batch.
        placeholders: tokens it takes in the text.
        image_size: pixels of a side.
        seconds: length of the clip.
        notes: what was assumed.
    """

    plans: tuple[TensorPlan, ...]
    placeholders: int
    image_size: int | None = None
    seconds: float | None = None
    notes: Sequence[str] = ()


# -- text around it --------------------------------------------------------------------------------


def media_and_text(
    built_model: BuiltModel, setup: Setup, parameters: Mapping[str, Any]
) -> BatchPlan:
    """One image or clip for each sample, its placeholders in the text, labels for every token."""
    config, batch = built_model.config, setup.batch
    if not any(name in parameters for name in ("pixel_values", "input_features")):
        raise unmodelled(built_model.model)
    make = _FAMILIES.get(config.model_type)
    if patches_in_rows(config.model_type):
        make = _row_of_patches
    elif make is None:
        make = _audio_clip if hasattr(config, "audio_config") else _fixed_grid
    media = make(built_model, setup)
    length, notes = _length(built_model, setup, media)
    ids = (batch, length)
    plans = [
        TensorPlan(name="input_ids", shape=ids, value=_with_placeholders(ids, config, media)),
        attention_mask(ids, padded=setup.padded),
    ]
    plans += [
        TensorPlan(name=name, shape=ids, value=_token_types(ids, media))
        for name in ("token_type_ids", "mm_token_type_ids")
        if name in parameters
    ]
    plans += media.plans
    target = None
    if _text_is_seq2seq(config):
        target, more_notes = target_length(
            config.text_config, setup, length, reason="like the source"
        )
        notes += more_notes
    plans.append(labels((batch, target or length)))
    notes = [*notes, *media.notes, _of_a_sample(media, length)]
    sizes = BatchSizes(
        seq_len=length,
        target_len=target,
        image_size=media.image_size,
        audio_seconds=media.seconds,
    )
    return tuple(plans), sizes, notes


def _of_a_sample(media: Media, length: int) -> str:
    """How many images or clips a sample has, and what they take of its tokens."""
    size = f"image of {media.image_size} x {media.image_size}"
    what = size if media.seconds is None else f"clip of {media.seconds:g} s"
    if media.placeholders > 1:
        return f"1 {what} a sample: {media.placeholders} of its {length} tokens"
    return f"1 {what} a sample, beside its {length} tokens"


def _text_is_seq2seq(config: Any) -> bool:
    part = getattr(config, "text_config", None)
    return bool(getattr(part, "is_encoder_decoder", False))


def _length(built_model: BuiltModel, setup: Setup, media: Media) -> tuple[int, list[str]]:
    """The text's length in all, placeholders included."""
    least = media.placeholders + LEAST_TEXT if media.placeholders else 1
    limit = max_positions(built_model.config)
    what, option = ("image", "--image-size") if media.image_size else ("clip", "--audio-seconds")
    if limit and least > limit:
        raise ConfigError(
            f"One {what} takes {media.placeholders} tokens of the text, of which the model has "
            f"positions for {limit}: ask for a smaller {what} ({option})."
        )
    if setup.seq_len is None and not media.placeholders:
        return seq_len_of(built_model, setup)
    if setup.seq_len is None:
        length = length_around(media.placeholders)
        length = min(length, limit) if limit else length
        note = f"sequence length {length}, placeholders included (--seq-len sets it)"
        return length, [note]
    length, notes = seq_len_of(built_model, setup)
    if length < least:
        raise ConfigError(
            f"--seq-len {length} has no room: one {what} takes {media.placeholders} tokens of the "
            f"text. Use --seq-len {least} or more, or a smaller {what}."
        )
    return length, notes


def _placeholder_id(config: Any, media: Media) -> int | None:
    kind = "audio" if media.seconds is not None else "image"
    ids = (getattr(config, f"{kind}_token_{name}", None) for name in ("id", "index"))
    return next((value for value in ids if isinstance(value, int)), None)


def _with_placeholders(
    shape: tuple[int, int], config: Any, media: Media
) -> Callable[[], torch.Tensor]:
    placeholder = _placeholder_id(config, media)

    def make() -> torch.Tensor:
        ids = torch.full(shape, WORD, dtype=torch.int64)
        if placeholder is not None:
            ids[:, 1 : 1 + media.placeholders] = placeholder
        return ids

    return make


def _token_types(shape: tuple[int, int], media: Media) -> Callable[[], torch.Tensor]:
    """Which tokens stand for the image (or, for audio, clip)."""

    def make() -> torch.Tensor:
        token_types = torch.zeros(shape, dtype=torch.int64)
        token_types[:, 1 : 1 + media.placeholders] = 1
        return token_types

    return make


# -- images, family by family ----------------------------------------------------------------------


def _constant_plan(name: str, rows: list[Any]) -> TensorPlan:
    value = torch.tensor(rows, dtype=torch.int64)
    return TensorPlan(name=name, shape=tuple(value.shape), value=lambda: value)


def _fixed_grid(built_model: BuiltModel, setup: Setup) -> Media:
    """One square image at the vision tower's size (LLaVA, PaliGemma, Gemma 3, BLIP-2 …)."""
    config = built_model.config
    size, notes = image_size_of(config, setup)
    # BLIP reads the image by cross-attention, GIT puts it before the text itself: no placeholder
    tokens = 0 if config.model_type in ("blip", "git") else _fixed_tokens(built_model, size)
    plans = (pixels(setup.batch, 3, size, size),)
    return Media(plans=plans, placeholders=tokens, image_size=size, notes=notes)


def _fixed_tokens(built_model: BuiltModel, size: int) -> int:
    config = built_model.config
    for name in ("mm_tokens_per_image", "num_query_tokens"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value:
            return value
    # InternVL puts neighbouring patches together
    grid = int((size // _patch(built_model)) ** 2 * getattr(config, "downsample_ratio", 1.0) ** 2)
    keeps_class_token = getattr(config, "vision_feature_select_strategy", "default") == "full"
    has_class = getattr(config.vision_config, "model_type", "").startswith("clip")
    return grid + 1 if keeps_class_token and has_class else grid


def _patch(built_model: BuiltModel) -> int:
    patch = side_of(getattr(built_model.config.vision_config, "patch_size", None))
    if patch is None:  # one for each stage (Florence 2), or none (Pix2Struct)
        raise unmodelled(built_model.model)
    return patch


def _tiles_and_thumbnail(built_model: BuiltModel, setup: Setup) -> Media:
    """LLaVA-NeXT: the image in tiles of the tower's size, and once as a whole."""
    config = built_model.config
    tile = config.vision_config.image_size
    side = tile // _patch(built_model)
    size = setup.image_size or 2 * tile
    height, width = min(
        (tuple(point) for point in config.image_grid_pinpoints),
        key=lambda point: (abs(point[0] - size) + abs(point[1] - size), point),
    )
    rows, columns = height // tile, width // tile
    # a square image scaled into a wider grid is cut back to its own shape
    fitted_side = min(rows, columns) * side
    placeholders = side**2 + fitted_side * (fitted_side + 1)
    note = (
        f"images of {min(height, width)} x {min(height, width)}: {rows} x {columns} tiles and a "
        "thumbnail (--image-size sets it)"
    )
    return Media(
        plans=(
            pixels(setup.batch, rows * columns + 1, 3, tile, tile),
            _constant_plan("image_sizes", [[min(height, width)] * 2] * setup.batch),
        ),
        placeholders=placeholders,
        image_size=min(height, width),
        notes=(note,),
    )


def _tiles(built_model: BuiltModel, setup: Setup) -> Media:
    """Llama 4: tiles of the tower's size, shuffled to fewer tokens; a thumbnail beside several."""
    vision = built_model.config.vision_config
    tile = vision.image_size
    size = setup.image_size or tile
    count = math.ceil(size / tile) ** 2
    count += 1 if count > 1 else 0
    each = int((tile // vision.patch_size) ** 2 * vision.pixel_shuffle_ratio**2)
    return Media(
        plans=(pixels(setup.batch * count, 3, tile, tile),),
        placeholders=count * each,
        image_size=size,
        notes=(f"images of {size} x {size}: {count} tile(s) of {tile} x {tile}",),
    )


def _split_tiles(built_model: BuiltModel, setup: Setup) -> Media:
    """Idefics 3 and SmolVLM: tiles of the tower's size, four by four, and the image as a whole."""
    config = built_model.config
    tile = config.vision_config.image_size
    side = math.ceil((setup.image_size or 4 * tile) / tile)
    count = side**2 + 1 if side > 1 else 1
    each = (tile // config.vision_config.patch_size) ** 2 // config.scale_factor**2
    shape = (setup.batch, count, 3, tile, tile)
    # it looks for images that are all zeros, which pad a sample with fewer
    images = TensorPlan("pixel_values", shape, torch.float32, fill=1)
    mask = TensorPlan("pixel_attention_mask", (setup.batch, count, tile, tile), fill=1)
    note = (
        f"images of {side * tile} x {side * tile}: {side} x {side} tiles"
        f"{' and a thumbnail' if side > 1 else ''} (--image-size sets it)"
    )
    return Media(
        plans=(images, mask),
        placeholders=count * each,
        image_size=side * tile,
        notes=(note,),
    )


def _padded_tiles(built_model: BuiltModel, setup: Setup) -> Media:
    """Llama 3.2 vision: always padded to four tiles, read by cross-attention."""
    vision = built_model.config.vision_config
    tile, count = vision.image_size, vision.max_num_tiles
    if setup.image_size is not None and setup.image_size > 2 * tile:
        raise ConfigError(
            f"--image-size {setup.image_size} is larger than the {count} tiles of this model. Use "
            f"--image-size {2 * tile} or less."
        )
    batch = setup.batch
    length = setup.seq_len or DEFAULT_SEQ_LEN
    return Media(
        plans=(
            pixels(batch, 1, count, 3, tile, tile),
            _constant_plan("aspect_ratio_ids", [[1]] * batch),
            _constant_plan("aspect_ratio_mask", [[[1] + [0] * (count - 1)]] * batch),
            TensorPlan(name="cross_attention_mask", shape=(batch, length, 1, count), fill=1),
        ),
        placeholders=1,
        image_size=setup.image_size or tile,
        notes=(f"images are padded to {count} tiles of {tile} x {tile}",),
    )


def _round_size(setup: Setup, unit: int) -> tuple[int, tuple[str, ...]]:
    """A side that is a multiple of ``unit``, and what was assumed."""
    requested_size = setup.image_size or FREE_SIZE
    size = max(unit, round(requested_size / unit) * unit)
    if setup.image_size is None:
        return size, (f"images of {size} x {size} (any size goes; --image-size sets it)",)
    return size, (() if size == requested_size else (f"images are resized to {size} x {size}",))


def _row_of_patches(built_model: BuiltModel, setup: Setup) -> Media:
    """Qwen-VL and GLM-V: all patches of the batch in one row, with their grid."""
    config = getattr(built_model.config, "thinker_config", built_model.config)
    vision = config.vision_config
    merge = vision.spatial_merge_size
    size, notes = _round_size(setup, vision.patch_size * merge)
    side = size // vision.patch_size
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    return Media(
        plans=(
            pixels(setup.batch * side**2, width),
            _constant_plan("image_grid_thw", [[1, side, side]] * setup.batch),
        ),
        placeholders=(side // merge) ** 2,
        image_size=size,
        notes=notes,
    )


def _merged_patches(built_model: BuiltModel, setup: Setup) -> Media:
    """Pixtral's tower: any size, patches merged two by two."""
    config = built_model.config
    unit = config.vision_config.patch_size * config.spatial_merge_size
    size, notes = _round_size(setup, unit)
    largest = config.vision_config.image_size
    if size > largest:
        raise ConfigError(
            f"--image-size {size} is larger than the {largest} pixels of this model's vision "
            f"tower. Use --image-size {largest} or less."
        )
    return Media(
        plans=(
            pixels(setup.batch, 3, size, size),
            _constant_plan("image_sizes", [[size, size]] * setup.batch),
        ),
        placeholders=(size // unit) ** 2,
        image_size=size,
        notes=notes,
    )


_GEMMA4_SOFT_TOKENS = 280


def _padded_patches(built_model: BuiltModel, setup: Setup) -> Media:
    """Gemma 4: a fixed budget of patches; what a square image leaves of it is padding."""
    vision = built_model.config.vision_config
    pool = vision.pooling_kernel_size
    budget = _GEMMA4_SOFT_TOKENS * pool**2
    side = math.isqrt(budget) // pool * pool
    rows = torch.arange(side * side)
    positions = torch.full((budget, 2), -1, dtype=torch.int64)
    positions[: side * side] = torch.stack((rows % side, rows // side), dim=-1)
    shape = (setup.batch, budget, 2)
    tokens = (side // pool) ** 2
    return Media(
        plans=(
            pixels(setup.batch, budget, 3 * vision.patch_size**2),
            TensorPlan("image_position_ids", shape, value=lambda: positions.expand(shape)),
        ),
        placeholders=tokens,
        image_size=side * vision.patch_size,
        notes=(f"square images, {tokens} tokens of a budget of {_GEMMA4_SOFT_TOKENS}",),
    )


# -- sound -----------------------------------------------------------------------------------------


def _audio_clip(built_model: BuiltModel, setup: Setup) -> Media:
    """Whisper's encoder before a language model: 30 s windows."""
    config, batch = built_model.config, setup.batch
    bins = config.audio_config.num_mel_bins
    frames = round(WINDOW_SECONDS * FRAME_RATE)
    features = floats("input_features", batch, bins, frames)
    if config.model_type != "qwen2_audio":
        seconds, notes = seconds_of(setup, window=WINDOW_SECONDS)
        return Media(plans=(features,), placeholders=frames // 8, seconds=seconds, notes=notes)
    seconds, notes = seconds_of(setup)
    used = min(frames, round(seconds * FRAME_RATE))
    mask = torch.zeros((batch, frames), dtype=torch.int64)
    mask[:, :used] = 1
    plans = features, TensorPlan("feature_attention_mask", (batch, frames), value=lambda: mask)
    tokens = ((used - 1) // 2 + 1 - 2) // 2 + 1
    return Media(plans=plans, placeholders=tokens, seconds=seconds, notes=notes)


def _blocks_of_frames(built_model: BuiltModel, setup: Setup) -> Media:
    """Granite Speech: two mel frames side by side, and a few tokens for each block of them."""
    config, batch = built_model.config, setup.batch
    seconds, notes = seconds_of(setup)
    frames = (round(seconds * FRAME_RATE) + 1) // 2
    tokens = math.ceil(frames / config.window_size) * (config.window_size // config.downsample_rate)
    mask = TensorPlan("input_features_mask", (batch, tokens), torch.bool, fill=1)
    features = floats("input_features", batch, frames, config.encoder_config.input_dim)
    return Media(plans=(features, mask), placeholders=tokens, seconds=seconds, notes=notes)


_FAMILIES: dict[str, Callable[[BuiltModel, Setup], Media]] = {
    "llava_next": _tiles_and_thumbnail,
    "llama4": _tiles,
    "mllama": _padded_tiles,
    "mistral3": _merged_patches,
    "gemma4": _padded_patches,
    "granite_speech": _blocks_of_frames,
    "idefics3": _split_tiles,
    "smolvlm": _split_tiles,
}


# -- two towers: pairs of text and image, or of text and sound -------------------------------------


def contrastive(built_model: BuiltModel, setup: Setup, parameters: Mapping[str, Any]) -> BatchPlan:
    """Pairs of text and image (or sound), and the model's own contrastive loss."""
    config, batch = built_model.config, setup.batch
    limit = max_positions(config.text_config)
    if setup.seq_len is not None:
        length, notes = seq_len_of(built_model, setup)
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
        size, more_notes = image_size_of(config, setup)
        plans.append(pixels(batch, 3, size, size))
    else:
        seconds, more_notes = _sound(config, setup, plans)
    if "return_loss" in parameters:
        plans.append(TensorPlan(name="return_loss", dtype=torch.bool, constant=True))
    sizes = BatchSizes(seq_len=length, image_size=size, audio_seconds=seconds)
    return tuple(plans), sizes, [*notes, *more_notes]


# CLAP: 10 s at 48 kHz with a hop of 480 samples
_CLAP_SECONDS = 10.0
_CLAP_FRAMES = 1001


def _sound(config: Any, setup: Setup, plans: list[TensorPlan]) -> tuple[float, list[str]]:
    seconds, notes = seconds_of(setup, window=_CLAP_SECONDS)
    fused = getattr(config.audio_config, "enable_fusion", False)
    bins = getattr(config.audio_config, "num_mel_bins", 64)
    channels = 4 if fused else 1
    plans.append(floats("input_features", setup.batch, channels, _CLAP_FRAMES, bins))
    plans.append(TensorPlan("is_longer", (setup.batch, 1), torch.bool, fill=0))
    return seconds, notes
