"""The batch: which tensors a model trains on, with which shapes, made on the device.

Sizes come from the setup, else from the model's config; whatever was assumed is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from memest.config.setup import Precision, Setup, Task
from memest.errors import ConfigError
from memest.profiles.sizing import SIZES, SizeAnswer
from memest.trace.inputs.audio import audio
from memest.trace.inputs.image import image
from memest.trace.inputs.multimodal import contrastive, media_and_text
from memest.trace.inputs.tensors import (
    BatchPlan,
    BatchSizes,
    TensorPlan,
    forward_parameters,
    realise,
)
from memest.trace.inputs.text import text
from memest.trace.losses.loss import loss_note
from memest.trace.model.build import BuiltModel

__all__ = ["BatchPlan", "BatchSizes", "PlannedBatch", "TensorPlan", "plan_batch", "realise"]

_SPEECH = (Task.CTC, Task.AUDIO_CLASSIFICATION, Task.SPEECH_SEQ2SEQ)
# these do not cast their input to the dtype of their first layer: a script has to
_TAKES_ITS_OWN_DTYPE = frozenset(
    """whisper convnext convnextv2 hubert sam vit_mae wav2vec2 clap beit layoutlmv3 speecht5 swin
    swinv2 wavlm audio-spectrogram-transformer parakeet_ctc segformer moonshine""".split()
)
_SOUND = ("input_values", "input_features")


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The batch that a model's config says, as :class:`ExampleBatch` is what a user says.

    Attributes:
        built_model: the model.
        batch: None: it takes any number of samples.
    """

    built_model: BuiltModel
    batch: int | None = None

    def plan(self, setup: Setup) -> tuple[TensorPlan, ...]:
        """The tensors of a batch of this setup."""
        return plan_batch(self.built_model, setup)[0]

    def answer(self, setup: Setup) -> SizeAnswer:
        """The sizes that the batch takes of a setup, and what there is to say of them."""
        _, sizes, notes = plan_batch(self.built_model, setup)
        batch_sizes = {name: value for name in SIZES if (value := getattr(sizes, name)) is not None}
        return SizeAnswer(batch_sizes, (*notes, *_ignored_size_notes(setup, sizes)))

    def unflatten(self, batch: Mapping[str, Any]) -> Any:
        """The batch as the model takes it."""
        return dict(batch)

    def caller(self, _: torch.nn.Module) -> tuple[None, Callable[[Any], list[Any]]]:
        """The model is called as ``model(**batch)``; the labels are the target."""
        return None, lambda batch: [v for name, v in batch.items() if name == "labels"]


def _ignored_size_notes(setup: Setup, sizes: BatchSizes) -> tuple[str, ...]:
    """What to say of sizes that were asked for and that this model's batch does not have."""
    notes = []
    for name in SIZES:
        value, batch_value = getattr(setup, name), getattr(sizes, name)
        flag = f"--{name.replace('_', '-')} {value:g}" if value is not None else ""
        if value is not None and batch_value is None:
            notes.append(f"{flag} has no effect on this model's inputs")
        elif value is not None and batch_value != value:
            notes.append(f"{flag} has no effect: this model always takes {batch_value:g}")
    return tuple(notes)


def plan_batch(built_model: BuiltModel, setup: Setup) -> BatchPlan:
    """The tensors of one micro-batch for this model.

    Returns:
        Plans in the order a collator makes them, the sizes taken, and notes.

    Raises:
        ConfigError: a size the model cannot take, or a model of unknown inputs.
    """
    parameters = forward_parameters(built_model.model)
    plans, sizes, notes = _plan(built_model, setup, parameters)
    notes = list(notes)
    if _needs_cast(built_model, setup):
        plans = tuple(_cast(plan, built_model.dtype) for plan in plans)
        name = str(built_model.dtype).removeprefix("torch.")
        notes.append(f"the model takes its input in the dtype of its weights: it is cast to {name}")
    note = loss_note(built_model, {plan.name for plan in plans})
    return plans, sizes, [*notes, note] if note else notes


def _needs_cast(built_model: BuiltModel, setup: Setup) -> bool:
    half = built_model.dtype in (torch.float16, torch.bfloat16)
    casts_itself = built_model.config.model_type not in _TAKES_ITS_OWN_DTYPE
    return half and setup.precision is Precision.FP32 and not casts_itself


def _cast(plan: TensorPlan, dtype: torch.dtype) -> TensorPlan:
    if plan.dtype != torch.float32 or (plan.name == "labels" and len(plan.shape) < 3):
        return plan
    return replace(plan, dtype=dtype)


def _plan(built_model: BuiltModel, setup: Setup, parameters: Mapping[str, Any]) -> BatchPlan:
    if built_model.config is None or not hasattr(built_model.config, "model_type"):
        names = ", ".join(parameters) or "nothing by name"
        raise ConfigError(
            f"{type(built_model.model).__name__} has no transformers config, so its inputs are not "
            f"known; its forward takes {names}. Give example inputs: --input "
            "'x:float32[B,3,224,224]' (memest.estimate(module, inputs={...}, loss=lambda outputs, "
            "batch: ...) in Python), or let the factory return (module, inputs)."
        )
    if built_model.task is Task.CONTRASTIVE or "return_loss" in parameters:
        return contrastive(built_model, setup, parameters)
    if built_model.task is Task.IMAGE_TEXT_TO_TEXT:
        return media_and_text(built_model, setup, parameters)
    if built_model.task is Task.SPEECH_SEQ2SEQ and hasattr(built_model.config, "audio_config"):
        return media_and_text(built_model, setup, parameters)
    main = getattr(built_model.model, "main_input_name", "input_ids")
    if main in _SOUND or built_model.task in _SPEECH or "speaker_embeddings" in parameters:
        return audio(built_model, setup, parameters)
    if "pixel_values" in parameters and "input_ids" not in parameters:
        return image(built_model, setup, parameters)
    if "input_ids" in parameters:
        plans, sizes, notes = text(built_model, setup, parameters)
        fed = {plan.name for plan in plans}
        media = [n for n in (*_SOUND, "pixel_values") if n in parameters and n not in fed]
        left_out = f"{', '.join(media)} of {type(built_model.model).__name__}: not fed, the step "
        return plans, sizes, [*notes, *([f"{left_out}of text alone is priced"] if media else [])]
    raise ConfigError(
        f"The inputs of {type(built_model.model).__name__} ({', '.join(parameters)}) are not "
        "modelled. Let the factory return (module, inputs), or give example inputs from Python: "
        "memest.estimate(module, inputs={...}, "
        "loss=lambda outputs, batch: ...)."
    )
