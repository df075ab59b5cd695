"""The batch: which tensors a model trains on, with which shapes, made on the device.

Sizes come from the setup, else from the model's config; whatever was assumed is said.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memest.errors import ConfigError
from memest.setup import Setup, Task
from memest.trace.build import BuiltModel
from memest.trace.known import attach

__all__ = ["Sizes", "TensorPlan", "plan_batch", "realise"]

DEFAULT_SEQ_LEN = 512
DEFAULT_AUDIO_SECONDS = 5.0
SAMPLE_RATE = 16_000
# families whose tokenizers return token_type_ids
_TOKEN_TYPES = frozenset(
    """bert electra albert mobilebert deberta deberta-v2 xlnet squeezebert layoutlm convbert
    funnel rembert big_bird fnet canine""".split()
)
# n_positions is there but positions are relative, or sinusoidal without a table
_UNBOUNDED = frozenset(
    "t5 mt5 umt5 longt5 xlnet bloom mpt mamba mamba2 falcon_mamba pix2struct xglm m2m_100 "
    "recurrent_gemma jamba zamba zamba2 nemotron_h".split()
)
_POSITION_OFFSET = frozenset(
    """roberta xlm-roberta xlm-roberta-xl camembert bertweet longformer mpnet data2vec-text
    roberta-prelayernorm esm layoutlmv3 luke xmod""".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """One tensor of the batch: known values are given by ``fill`` (a scalar) or ``value``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int | None = None
    value: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that were taken, for the report and the resolved setup."""

    seq_len: int | None = None
    target_len: int | None = None
    image_size: int | None = None
    audio_seconds: float | None = None


def plan_batch(built: BuiltModel, setup: Setup) -> tuple[tuple[TensorPlan, ...], Sizes, list[str]]:
    """The tensors of one micro-batch for this model.

    Returns:
        Plans in the order a collator makes them, the sizes taken, and notes.

    Raises:
        ConfigError: a size the model cannot take.
    """
    parameters = inspect.signature(built.model.forward).parameters
    main = getattr(built.model, "main_input_name", "input_ids")
    if built.task is Task.CONTRASTIVE:
        from memest.trace.inputs_multimodal import contrastive

        return contrastive(built, setup)
    if built.task is Task.IMAGE_TEXT_TO_TEXT:
        from memest.trace.inputs_multimodal import image_text

        return image_text(built, setup)
    if main == "pixel_values" or ("pixel_values" in parameters and "input_ids" not in parameters):
        return _image(built, setup)
    if main in ("input_values", "input_features") or built.task in (
        Task.CTC, Task.AUDIO_CLASSIFICATION, Task.SPEECH_SEQ2SEQ,
    ):  # fmt: skip
        from memest.trace.inputs_audio import audio

        return audio(built, setup)
    return _text(built, setup, parameters)


# -- text ------------------------------------------------------------------------------------------


def max_positions(config: Any) -> int | None:
    """How many tokens the position table holds, None where there is no bound."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text.model_type in _UNBOUNDED or config.model_type in _UNBOUNDED:
        return None
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value - 2 if text.model_type in _POSITION_OFFSET else value
    return None


def seq_len_of(built: BuiltModel, setup: Setup) -> tuple[int, list[str]]:
    """The sequence length: as asked, else 512 capped by the model."""
    limit = max_positions(built.config)
    if setup.seq_len is None:
        length = min(DEFAULT_SEQ_LEN, limit) if limit else DEFAULT_SEQ_LEN
        return length, [f"sequence length {length} (not given; --seq-len sets it)"]
    if limit and setup.seq_len > limit:
        raise ConfigError(
            f"--seq-len {setup.seq_len} is longer than the {limit} positions of this model. Use "
            f"--seq-len {limit} or less."
        )
    return setup.seq_len, []


def _text(
    built: BuiltModel, setup: Setup, parameters: Any
) -> tuple[tuple[TensorPlan, ...], Sizes, list[str]]:
    length, notes = seq_len_of(built, setup)
    batch = setup.batch
    ids: tuple[int, ...] = (batch, length)
    if built.task is Task.MULTIPLE_CHOICE:
        ids = (batch, 4, length)
        notes.append("4 choices for each sample")
    plans = [TensorPlan(name="input_ids", shape=ids, dtype=torch.int64, value=_tokens(ids, built))]
    kind = built.config.model_type
    if kind in _TOKEN_TYPES and "token_type_ids" in parameters:
        plans.append(TensorPlan(name="token_type_ids", shape=ids, dtype=torch.int64, fill=0))
    if "attention_mask" in parameters:
        plans.append(attention_mask(ids, padded=setup.padded))
    if kind in ("layoutlm", "layoutlmv3") and "bbox" in parameters:
        plans.append(TensorPlan(name="bbox", shape=(*ids, 4), dtype=torch.int64, fill=0))
    target = None
    if built.config.is_encoder_decoder and built.task in (Task.SEQ2SEQ_LM, Task.SPEECH_SEQ2SEQ):
        target = setup.target_len or length
        plans.append(labels((batch, target)))
        if setup.target_len is None:
            notes.append(f"target length {target}, like the source (--target-len sets it)")
    elif built.task is Task.QUESTION_ANSWERING:
        plans += [
            TensorPlan(name=n, shape=(batch,), dtype=torch.int64, fill=1)
            for n in ("start_positions", "end_positions")
        ]
    elif built.task in (Task.SEQUENCE_CLASSIFICATION, Task.MULTIPLE_CHOICE):
        plans.append(class_labels(built, batch))
    elif "labels" in parameters:
        plans.append(labels((batch, length)))
    if setup.padded:
        notes.append("batches are padded: masks reach the attention kernels")
    return tuple(plans), Sizes(seq_len=length, target_len=target), notes


def _tokens(shape: tuple[int, ...], built: BuiltModel) -> Callable[[], torch.Tensor]:
    """Token ids: plain words, the end-of-sequence token last (some heads look for it)."""
    end = getattr(built.config, "eos_token_id", None)
    end = end[0] if isinstance(end, (list, tuple)) else end

    def make() -> torch.Tensor:
        tokens = torch.full(shape, 5, dtype=torch.int64)
        if isinstance(end, int):
            tokens[..., -1] = end
        return tokens

    return make


def attention_mask(shape: tuple[int, ...], *, padded: bool) -> TensorPlan:
    """All ones, or with the last column of every row but the first padded."""

    def make() -> torch.Tensor:
        mask = torch.ones(shape, dtype=torch.int64)
        mask[1:, ..., -1] = 0
        if shape[0] == 1:
            mask[..., -1] = 0
        return mask

    if padded:
        return TensorPlan(name="attention_mask", shape=shape, dtype=torch.int64, value=make)
    return TensorPlan(name="attention_mask", shape=shape, dtype=torch.int64, fill=1)


def labels(shape: tuple[int, ...]) -> TensorPlan:
    """Token labels, none of them ignored."""
    return TensorPlan(name="labels", shape=shape, dtype=torch.int64, fill=5)


def class_labels(built: BuiltModel, batch: int) -> TensorPlan:
    """One class for each sample, or whatever the config's problem type asks for."""
    kind = getattr(built.config, "problem_type", None)
    if kind == "multi_label_classification":
        shape = (batch, built.config.num_labels)
        return TensorPlan(name="labels", shape=shape, dtype=torch.float32)
    if kind == "regression" or getattr(built.config, "num_labels", 2) == 1:
        return TensorPlan(name="labels", shape=(batch,), dtype=torch.float32)
    return TensorPlan(name="labels", shape=(batch,), dtype=torch.int64, fill=0)


# -- images ----------------------------------------------------------------------------------------


def image_size_of(config: Any, setup: Setup) -> tuple[int, list[str]]:
    """Pixels of a side: as asked, else the config's own, else 224."""
    own = getattr(config, "image_size", None)
    if own is None and hasattr(config, "vision_config"):
        own = getattr(config.vision_config, "image_size", None)
    own = max(own) if isinstance(own, (list, tuple)) else own
    if setup.image_size is not None:
        return setup.image_size, []
    if isinstance(own, int):
        return own, [f"image size {own} x {own}, from the config"]
    return 224, ["image size 224 x 224 (the config names none; --image-size sets it)"]


def _image(
    built: BuiltModel, setup: Setup
) -> tuple[tuple[TensorPlan, ...], Sizes, list[str]]:
    config = built.config
    size, notes = image_size_of(config, setup)
    if built.task is Task.IMAGE_SEGMENTATION and setup.image_size is None and (
        getattr(config, "image_size", None) in (None, 224)
    ):
        size, notes = 512, ["image size 512 x 512 (--image-size sets it)"]
    channels = getattr(config, "num_channels", 3)
    plans = [
        TensorPlan(
            name="pixel_values", shape=(setup.batch, channels, size, size), dtype=torch.float32
        )
    ]
    parameters = inspect.signature(built.model.forward).parameters
    if "labels" in parameters:
        if built.task is Task.IMAGE_SEGMENTATION:
            plans.append(labels((setup.batch, size, size)))
        else:
            plans.append(class_labels(built, setup.batch))
    if built.task is Task.MASKED_IMAGE_MODELING and "bool_masked_pos" in parameters:
        patches = (size // config.patch_size) ** 2
        plans.append(
            TensorPlan(
                name="bool_masked_pos", shape=(setup.batch, patches), dtype=torch.bool, fill=1
            )
        )
    return tuple(plans), Sizes(image_size=size), notes


# -- on the device -----------------------------------------------------------------------------------


def realise(plans: tuple[TensorPlan, ...], device: str = "meta") -> dict[str, torch.Tensor]:
    """Make the planned tensors on the device (each is one allocation, as a copy to the GPU is)."""
    out = {}
    for plan in plans:
        tensor = torch.empty(plan.shape, dtype=plan.dtype, device=device)
        if device == "meta":
            if plan.value is not None:
                attach(tensor, plan.value())
            elif plan.fill is not None:
                attach(tensor, torch.tensor(plan.fill, dtype=plan.dtype).expand(plan.shape))
        elif plan.value is not None:
            tensor.copy_(plan.value())
        elif plan.fill is not None:
            tensor.fill_(plan.fill)
        else:
            tensor.normal_()
        out[plan.name] = tensor
    return out
