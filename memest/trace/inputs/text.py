"""The batch of a model that reads text (and, for documents, where on the page it stands)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memest.config.positions import (
    DEFAULT_SEQ_LEN,
    assumed_length,
    check_text_length,
    length_limit,
    more_positions,
)
from memest.config.setup import Setup, Task
from memest.trace.inputs.tensors import (
    WORD,
    BatchPlan,
    BatchSizes,
    TensorPlan,
    attention_mask,
    class_labels,
    labels,
    pixels,
    target_length,
    tokens,
)
from memest.trace.model.build import BuiltModel

__all__ = ["seq_len_of", "text"]

NUM_CHOICES = 4
# families whose tokenizers return token_type_ids
_TOKEN_TYPES = frozenset(
    """bert electra albert mobilebert deberta deberta-v2 xlnet squeezebert layoutlm convbert
    funnel rembert big_bird fnet canine nomic_bert""".split()
)
_DOCUMENT_IMAGE = 224


def seq_len_of(built_model: BuiltModel, setup: Setup) -> tuple[int, list[str]]:
    """The sequence length: as asked, else 512 capped by the model.

    Raises:
        ConfigError: longer than the position table.
    """
    limit, what = length_limit(built_model.config, setup)
    if setup.seq_len is None:
        length = min(DEFAULT_SEQ_LEN, limit) if limit else DEFAULT_SEQ_LEN
        return length, [assumed_length(length)]
    more = more_positions(built_model.config, setup)
    check_text_length(setup, limit, what, more)
    return setup.seq_len, []


def text(built_model: BuiltModel, setup: Setup, parameters: Mapping[str, Any]) -> BatchPlan:
    """Token ids, masks and the labels of the task."""
    length, notes = seq_len_of(built_model, setup)
    batch, config = setup.batch, built_model.config
    ids: tuple[int, ...] = (batch, length)
    if built_model.task is Task.MULTIPLE_CHOICE:
        ids = (batch, NUM_CHOICES, length)
        notes.append(f"{NUM_CHOICES} choices for each sample")
    if setup.padding_free:
        return _end_to_end(built_model, setup, length, notes)
    plans = [TensorPlan(name="input_ids", shape=ids, value=tokens(ids, config))]
    kind = config.model_type
    if kind in _TOKEN_TYPES and "token_type_ids" in parameters:
        plans.append(TensorPlan(name="token_type_ids", shape=ids, fill=0))
    if "attention_mask" in parameters:
        plans.append(attention_mask(ids, padded=setup.padded))
    if "bbox" in parameters:
        plans.append(TensorPlan(name="bbox", shape=(*ids, 4), fill=0))
    image_size = _page(built_model, setup, parameters, plans, notes)
    target = None
    if config.is_encoder_decoder and built_model.task is Task.SEQ2SEQ_LM:
        target, more_notes = target_length(config, setup, length, reason="like the source")
        notes += more_notes
        plans.append(labels((batch, target)))
    elif built_model.task is Task.BASE and "decoder_input_ids" in parameters:
        target, more_notes = target_length(config, setup, length, reason="like the source")
        notes += more_notes
        plans.append(TensorPlan(name="decoder_input_ids", shape=(batch, target), fill=WORD))
    elif built_model.task is Task.QUESTION_ANSWERING:
        plans += [
            TensorPlan(name=name, shape=(batch,), fill=1)
            for name in ("start_positions", "end_positions")
        ]
    elif built_model.task in (Task.SEQUENCE_CLASSIFICATION, Task.MULTIPLE_CHOICE):
        plans.append(class_labels(built_model, batch))
    elif built_model.task is Task.TOKEN_CLASSIFICATION:
        plans.append(TensorPlan(name="labels", shape=(batch, length), fill=0))
    elif "labels" in parameters:
        plans.append(labels((batch, length)))
    if setup.padded:
        drops = setup.distributed.cp > 1
        what = "are made and dropped" if drops else "reach the attention kernels"
        notes.append(f"batches are padded: masks {what}")
    sizes = BatchSizes(seq_len=length, target_len=target, image_size=image_size)
    return tuple(plans), sizes, notes


def _end_to_end(built_model: BuiltModel, setup: Setup, length: int, notes: list[str]) -> BatchPlan:
    """``DataCollatorWithFlattening``: one row, positions that start anew with every sample.

    No mask: kernels for sequences of any length find their ends in the positions, and other
    attention gets a mask of blocks from them.
    """
    ids = (1, setup.batch * length)
    samples = setup.batch

    def positions() -> torch.Tensor:
        return torch.arange(length).repeat(samples)[None]

    plans = (
        TensorPlan(name="input_ids", shape=ids, value=tokens(ids, built_model.config)),
        labels(ids),
        TensorPlan(name="position_ids", shape=ids, value=positions),
    )
    notes.append(f"padding-free: one row of {ids[1]:,} tokens, {samples} samples end to end")
    if "flash" not in built_model.attention:
        notes.append(
            "without a kernel for sequences end to end, attention gets a mask of blocks over the "
            "whole row; --attn-implementation flash_attention_2 needs none"
        )
    return plans, BatchSizes(seq_len=length), notes


def _page(
    built_model: BuiltModel,
    setup: Setup,
    parameters: Mapping[str, Any],
    plans: list[TensorPlan],
    notes: list[str],
) -> int | None:
    """Document models look at the page too."""
    config = built_model.config
    if "pixel_values" not in parameters or not getattr(config, "visual_embed", False):
        return None
    size = setup.image_size or getattr(config, "input_size", None) or _DOCUMENT_IMAGE
    plans.append(pixels(setup.batch, getattr(config, "num_channels", 3), size, size))
    notes.append(f"one page image of {size} x {size} pixels for each sample")
    return int(size)
