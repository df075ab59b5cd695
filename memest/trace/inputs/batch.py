"""The batch: which tensors a model trains on, with which shapes, made on the device.

Sizes come from the setup, else from the model's config; whatever was assumed is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from memest.config.setup import Precision, Setup, Task
from memest.errors import ConfigError, TraceError
from memest.profiles.sizing import SIZES, SizeAnswer
from memest.trace.inputs.audio import audio
from memest.trace.inputs.image import image
from memest.trace.inputs.multimodal import contrastive, media_and_text
from memest.trace.inputs.tensors import (
    BatchPlan,
    BatchSizes,
    TensorPlan,
    described,
    forward_parameters,
    realise,
    unmodelled,
)
from memest.trace.inputs.text import text
from memest.trace.losses.loss import loss_note
from memest.trace.model.build import BuiltModel

__all__ = [
    "BatchPlan",
    "BatchSizes",
    "PlannedBatch",
    "TensorPlan",
    "blaming_inputs",
    "nested",
    "plan_batch",
    "realise",
]

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
        if self.built_model.task is Task.SPEECH_SEQ2SEQ and setup.target_len is None:
            setup = replace(setup, seq_len=None)  # it is the target's

        def sizes_at(name: str, value: float) -> BatchSizes:
            changed: dict[str, Any] = {name: value}
            return plan_batch(self.built_model, replace(setup, **changed))[1]

        return SizeAnswer(batch_sizes, (*notes, *_ignored_size_notes(setup, sizes, sizes_at)))

    def unflatten(self, batch: Mapping[str, Any]) -> Any:
        """The batch as the model takes it."""
        return nested(batch)

    def caller(
        self, _: torch.nn.Module
    ) -> tuple[Callable[[Any, Any], Any] | None, Callable[[Any], list[Any]]]:
        """The model is called as ``model(**batch)``; the labels are the target."""
        call = _call_nested if _nests(self.built_model) else None
        return call, lambda batch: [v for name, v in batch.items() if name == "labels"]


def nested(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with its tensors ``labels.0.boxes`` in dicts, one for each sample.

    Example:
        >>> nested({"a": 1, "labels.0.boxes": 2, "labels.1.boxes": 3})
        {'a': 1, 'labels': [{'boxes': 2}, {'boxes': 3}]}
    """
    out: dict[str, Any] = {}
    for path, value in batch.items():
        name, *inner = path.split(".")
        if not inner:
            out[name] = value
            continue
        samples = out.setdefault(name, [])
        samples.extend({} for _ in range(int(inner[0]) + 1 - len(samples)))
        samples[int(inner[0])][inner[1]] = value
    return out


@contextmanager
def blaming_inputs(
    plan: Callable[[Setup], tuple[TensorPlan, ...]], plans: Iterable[TensorPlan], model: Any
) -> Iterator[None]:
    """A model's own code that fails may do so on what memest made for it: say what that was.

    Args:
        plan: what made the batch; a :class:`PlannedBatch` made it of the model's config.
        plans: the batch.
        model: that is fed.

    Raises:
        TraceError: as it is raised inside, with what the model was fed.
    """
    try:
        yield
    except TraceError as error:
        batch = getattr(plan, "__self__", None)
        if not error.why or batch is None:
            raise
        if not isinstance(batch, PlannedBatch):
            fed = described(plans)
            if type(model).__module__.startswith("transformers."):
                raise TraceError(
                    "--input (inputs=) is for modules of your own: memest knows what "
                    f"{type(model).__name__} takes, so leave it out. With {fed}: {error.why}"
                ) from error
            raise TraceError(
                f"{error.why} It was fed what --input (inputs=) names: {fed}. Check names, dtypes "
                "and dimensions against what forward takes. If the step runs with these on a real "
                "device, --debug shows the traceback."
            ) from error
        name = type(batch.built_model.model).__name__
        raise TraceError(
            f"{error.why} The inputs that memest makes for {name} may not suit it: "
            f"{described(plans)}. If so, give example inputs: --input "
            "'name:dtype[B,...]' for each, or inputs={...} of memest.estimate. If the step runs "
            "with these on a real device, try another --attn-implementation or --task; --debug "
            "shows the traceback."
        ) from error


def _nests(built_model: BuiltModel) -> bool:
    return type(built_model.model).__name__.endswith("ForObjectDetection")


def _call_nested(model: Any, batch: Mapping[str, Any]) -> Any:
    return model(**nested(batch))


def _ignored_size_notes(
    setup: Setup, sizes: BatchSizes, sizes_at: Callable[[str, float], BatchSizes]
) -> tuple[str, ...]:
    """What to say of sizes that were asked for and that this model's batch does not have.

    Args:
        setup: names them.
        sizes: that the batch has.
        sizes_at: what it would have with a size of another value.
    """

    def follows(name: str, value: float, taken: float) -> bool:
        """Whether the model takes another size where another is asked for."""
        for other in (value * 2, type(value)(value / 2)):
            with suppress(ConfigError, ValueError):
                if getattr(sizes_at(name, other), name) != taken:
                    return True
        return False

    notes = []
    for name in SIZES:
        value, batch_value = getattr(setup, name), getattr(sizes, name)
        flag = f"--{name.replace('_', '-')} {value:.15g}" if value is not None else ""
        if value is not None and batch_value is None:
            notes.append(f"{flag} has no effect on this model's inputs")
        elif value is not None and batch_value != value:
            if follows(name, value, batch_value):
                notes.append(f"{flag} is taken as {batch_value:.15g}, what this model makes of it")
            else:
                notes.append(f"{flag} has no effect: this model always takes {batch_value:.15g}")
    return tuple(notes)


def plan_batch(built_model: BuiltModel, setup: Setup) -> BatchPlan:
    """The tensors of one micro-batch for this model.

    Returns:
        Plans in the order a collator makes them, the sizes taken, and notes.

    Raises:
        ConfigError: a size the model cannot take, or a model of unknown inputs.
    """
    parameters = forward_parameters(built_model.model)
    takes_rows = built_model.task is Task.CAUSAL_LM and "position_ids" in parameters
    if setup.padding_free and not takes_rows:
        raise ConfigError(
            "--padding-free and --packing lay samples end to end, which "
            f"{type(built_model.model).__name__} for {built_model.task} does not train on: they "
            "are for causal language models that take position_ids. Drop them."
        )
    plans, sizes, notes = _plan(built_model, setup, parameters)
    notes = [*notes, *_unfed_notes(built_model, setup, parameters, plans)]
    if _needs_cast(built_model, setup):
        plans = tuple(_cast(plan, built_model.dtype) for plan in plans)
        name = str(built_model.dtype).removeprefix("torch.")
        notes.append(f"the model takes its input in the dtype of its weights: it is cast to {name}")
    note = loss_note(built_model)
    return plans, sizes, [*notes, note] if note else notes


_SENSES = (
    "pixel_values image_pixel_values image_patches image visual_embeds visual_feats",
    "input_features audio_input_features input_values",
    "entity_ids",
)
_TOWERS = ("vision_config", "image_config", "audio_config", "encoder_config")


def _unfed_notes(
    built_model: BuiltModel,
    setup: Setup,
    parameters: Mapping[str, Any],
    plans: tuple[TensorPlan, ...],
) -> list[str]:
    """What of a model does not run, as nothing is made for it.

    Raises:
        ConfigError: something that its forward must be given; a tower, where nobody asked for
            training without it.
    """
    model, fed = built_model.model, {plan.name.partition(".")[0] for plan in plans}
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if any(name not in fed for name in required):
        raise unmodelled(model)
    notes = []
    for words in _SENSES:
        names = [name for name in words.split() if name in parameters]
        reads_page = getattr(built_model.config, "visual_embed", True)  # LayoutLMv3 may do without
        if not names or fed.intersection(names) or not reads_page:
            continue
        alone = "without them" if fed.intersection(" ".join(_SENSES).split()) else "of text alone"
        notes.append(
            f"{', '.join(names)} of {type(model).__name__}: not fed, the step {alone} is priced; "
            "example inputs have the rest run (--input)"
        )
    is_asked_for = setup.task is not Task.AUTO or built_model.task is not Task.BASE
    if notes and not is_asked_for and any(hasattr(built_model.config, t) for t in _TOWERS):
        raise unmodelled(model)
    return notes


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
    reads_text = hasattr(built_model.config, "audio_config") or "input_ids" in parameters
    if built_model.task is Task.SPEECH_SEQ2SEQ and reads_text:
        return media_and_text(built_model, setup, parameters)
    main = getattr(built_model.model, "main_input_name", "input_ids")
    if main in _SOUND or built_model.task in _SPEECH or "speaker_embeddings" in parameters:
        return audio(built_model, setup, parameters)
    if "pixel_values" in parameters and "input_ids" not in parameters:
        return image(built_model, setup, parameters)
    if "input_ids" in parameters:
        return text(built_model, setup, parameters)
    raise unmodelled(built_model.model)
