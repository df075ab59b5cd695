"""Building a model on the meta device: real modules, no weights.

``transformers`` is loaded here and nowhere below; remote code runs only when it was asked for.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memest.errors import ConfigError, MissingDependencyError, ModelLoadError, closest
from memest.models.resolve import ModelSource
from memest.setup import Attention, Dtype, Setup, Task

__all__ = ["BuiltModel", "build_model", "count"]

_TASK_CLASSES = {
    Task.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    Task.QUESTION_ANSWERING: "AutoModelForQuestionAnswering",
    Task.MULTIPLE_CHOICE: "AutoModelForMultipleChoice",
    Task.MASKED_LM: "AutoModelForMaskedLM",
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.SEQ2SEQ_LM: "AutoModelForSeq2SeqLM",
    Task.IMAGE_CLASSIFICATION: "AutoModelForImageClassification",
    Task.IMAGE_SEGMENTATION: "AutoModelForSemanticSegmentation",
    Task.MASKED_IMAGE_MODELING: "AutoModelForMaskedImageModeling",
    Task.AUDIO_CLASSIFICATION: "AutoModelForAudioClassification",
    Task.CTC: "AutoModelForCTC",
    Task.SPEECH_SEQ2SEQ: "AutoModelForSpeechSeq2Seq",
    Task.IMAGE_TEXT_TO_TEXT: "AutoModelForImageTextToText",
    Task.BASE: "AutoModel",
}
# For --task auto: what people train, tried in this order, by what the config can be
_AUTO_ORDER = (
    Task.SPEECH_SEQ2SEQ,
    Task.IMAGE_TEXT_TO_TEXT,
    Task.SEQ2SEQ_LM,
    Task.CAUSAL_LM,
    Task.IMAGE_CLASSIFICATION,
    Task.IMAGE_SEGMENTATION,
    Task.CTC,
    Task.AUDIO_CLASSIFICATION,
    Task.SEQUENCE_CLASSIFICATION,
    Task.MASKED_LM,
    Task.BASE,
)
_DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.FLOAT16: torch.float16,
    Dtype.BFLOAT16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A model on meta and what was decided on the way."""

    model: torch.nn.Module
    config: Any
    task: Task
    dtype: torch.dtype
    attention: str
    notes: tuple[str, ...]


def build_model(source: ModelSource, setup: Setup) -> BuiltModel:
    """Build the model of ``source`` on the meta device with the head that ``setup`` asks for.

    Raises:
        MissingDependencyError: transformers is not installed.
        ConfigError: the task does not exist for this model.
        ModelLoadError: the architecture is unknown to the installed transformers, or cannot be
            built from its config.
    """
    if source.kind == "factory":
        return _from_factory(source, setup)
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            "Tracing a model by name needs torch and transformers: pip install 'memest[torch]'."
        ) from error
    transformers.logging.set_verbosity_error()
    config = _config(source, transformers)
    if setup.num_labels is not None:
        config.num_labels = setup.num_labels
    task = _task(config, setup.task, transformers, source)
    dtype = _DTYPES.get(setup.dtype) or _config_dtype(config)
    model, attention, notes = _instantiate(source, config, task, dtype, setup, transformers)
    model.train()
    _freeze(model, setup)
    return BuiltModel(
        model=model, config=config, task=task, dtype=dtype, attention=attention, notes=notes
    )


def _config(source: ModelSource, transformers: Any) -> Any:
    values = dict(source.config or {})
    model_type = values.get("model_type")
    if source.trust_remote_code and values.get("auto_map"):
        return transformers.AutoConfig.from_pretrained(
            source.path or source.id, trust_remote_code=True
        )
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if model_type not in known:
        near = closest(str(model_type), list(known.keys()))
        hint = f" Nearest: {', '.join(near)}." if near else ""
        raise ModelLoadError(
            f"{source.id}: model_type {model_type!r} is not an architecture of the installed "
            f"transformers {transformers.__version__}.{hint} A newer transformers may know it; "
            "models with code of their own need --trust-remote-code."
        )
    values.pop("quantization_config", None)
    try:
        return known[model_type].from_dict(values)
    except Exception as error:
        raise ModelLoadError(
            f"{source.id}: its config is not a valid {model_type} config: {error}"
        ) from error


def _config_dtype(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    if dtype is None:
        for part in ("text_config", "vision_config"):
            dtype = dtype or getattr(getattr(config, part, None), "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _mapping(task: Task, transformers: Any) -> Any:
    return getattr(transformers, _TASK_CLASSES[task])._model_mapping


def _task(config: Any, task: Task, transformers: Any, source: ModelSource) -> Task:
    kind = type(config)
    if task is not Task.AUTO:
        if task in _TASK_CLASSES and kind in _mapping(task, transformers):
            return task
        if task is Task.CONTRASTIVE and _architecture(config, transformers) is not None:
            return task
        legal = [t.value for t in _TASK_CLASSES if kind in _mapping(t, transformers)]
        raise ConfigError(
            f"--task {task} does not exist for {source.id} ({config.model_type}). "
            f"Legal: {', '.join(legal)}."
        )
    architecture = ((config.architectures or [""])[0]) or ""
    for candidate in _by_architecture(config, architecture):
        if kind in _mapping(candidate, transformers):
            return candidate
    if _is_contrastive(config):
        return Task.CONTRASTIVE
    for candidate in _AUTO_ORDER:
        if kind in _mapping(candidate, transformers):
            return candidate
    return Task.BASE


def _is_contrastive(config: Any) -> bool:
    return all(hasattr(config, p) for p in ("text_config", "vision_config")) or all(
        hasattr(config, p) for p in ("text_config", "audio_config")
    )


def _by_architecture(config: Any, architecture: str) -> Iterator[Task]:
    """The task that the checkpoint's own class points to, as people train it."""
    if architecture.endswith("ForCTC"):
        yield Task.CTC
    if architecture.endswith(("ForAudioClassification",)) or (
        config.model_type == "audio-spectrogram-transformer"
    ):
        yield Task.AUDIO_CLASSIFICATION
    if "SemanticSegmentation" in architecture or config.model_type == "segformer":
        if "ImageClassification" not in architecture:
            yield Task.IMAGE_SEGMENTATION
    if getattr(config, "is_encoder_decoder", False):
        yield from (Task.SPEECH_SEQ2SEQ, Task.SEQ2SEQ_LM)
        return
    if _is_contrastive(config):
        if "ConditionalGeneration" in architecture or "CausalLM" in architecture:
            yield from (Task.IMAGE_TEXT_TO_TEXT, Task.CAUSAL_LM)
        return
    if "CausalLM" in architecture or "LMHeadModel" in architecture or (
        "ForConditionalGeneration" in architecture
    ):
        yield from (Task.IMAGE_TEXT_TO_TEXT, Task.CAUSAL_LM)
    masked = any(
        word in architecture
        for word in ("MaskedLM", "PreTraining", "SequenceClassification", "Model")
    )
    if masked and getattr(config, "vocab_size", 0) and not getattr(config, "is_decoder", False):
        if "CausalLM" not in architecture and "LMHead" not in architecture and not (
            _is_decoder_only(config)
        ):
            yield Task.SEQUENCE_CLASSIFICATION


def _is_decoder_only(config: Any) -> bool:
    """Whether the family has no masked-LM head: a decoder whose base class was saved."""
    import transformers

    return type(config) not in _mapping(Task.MASKED_LM, transformers) and (
        type(config) in _mapping(Task.CAUSAL_LM, transformers)
    )


def _architecture(config: Any, transformers: Any) -> Any:
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    mapping = transformers.AutoModel._model_mapping
    return mapping[type(config)] if type(config) in mapping else None


def _instantiate(
    source: ModelSource, config: Any, task: Task, dtype: torch.dtype, setup: Setup,
    transformers: Any,
) -> tuple[torch.nn.Module, str, tuple[str, ...]]:  # fmt: skip
    wanted = setup.attn_implementation
    attention: str | None = None if wanted is Attention.AUTO else wanted.value
    kwargs: dict[str, Any] = {"dtype": dtype}
    if attention is not None:
        kwargs["attn_implementation"] = attention
    if source.trust_remote_code:
        kwargs["trust_remote_code"] = True
    notes: list[str] = []
    try:
        with _quiet_hub(), torch.device("meta"):
            if task is Task.CONTRASTIVE:
                cls = _architecture(config, transformers)
                model = cls._from_config(config, **kwargs)
            else:
                model = getattr(transformers, _TASK_CLASSES[task]).from_config(config, **kwargs)
    except MissingDependencyError:
        raise
    except (ValueError, ImportError) as error:
        if attention is not None and "attention" in str(error).lower():
            raise ConfigError(
                f"--attn-implementation {attention} is not available for {source.id}: "
                f"{_first_line(error)} Use --attn-implementation eager or leave it out."
            ) from error
        raise _cannot_build(source, error) from error
    except Exception as error:
        raise _cannot_build(source, error) from error
    chosen = getattr(model.config, "_attn_implementation", None) or "eager"
    return model, str(chosen), tuple(notes)


def _cannot_build(source: ModelSource, error: Exception) -> ModelLoadError:
    return ModelLoadError(
        f"{source.id} cannot be built from its config: {type(error).__name__}: "
        f"{_first_line(error)} Another --task or a newer transformers may help."
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") + "." if text else type(error).__name__


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Building from a config must never fetch anything."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def _from_factory(source: ModelSource, setup: Setup) -> BuiltModel:
    module_name, _, attribute = (source.factory or "").partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(
            f"{source.factory!r} cannot be imported: {_first_line(error)} Write "
            "package.module:factory with the package on PYTHONPATH."
        ) from error
    try:
        with torch.device("meta"):
            model = factory() if callable(factory) else factory
    except Exception as error:
        raise ModelLoadError(
            f"{source.factory!r} raised {type(error).__name__} while building: {_first_line(error)}"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise ModelLoadError(
            f"{source.factory!r} returned {type(model).__name__}, not a torch.nn.Module."
        )
    if setup.dtype is not Dtype.AUTO:
        model = model.to(_DTYPES[setup.dtype])
    model.train()
    _freeze(model, setup)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return BuiltModel(
        model=model, config=getattr(model, "config", None), task=setup.task, dtype=dtype,
        attention="as the model's code does", notes=(),
    )  # fmt: skip


def _freeze(model: torch.nn.Module, setup: Setup) -> None:
    import re

    for pattern in setup.freeze:
        matched = False
        for name, parameter in model.named_parameters():
            if re.search(pattern, name):
                parameter.requires_grad_(requires_grad=False)
                matched = True
        if not matched:
            names = [name for name, _ in model.named_parameters()]
            near = closest(pattern, names) or names[:3]
            raise ConfigError(
                f"--freeze {pattern!r} matches no parameter. Names look like: {', '.join(near)}."
            )


@dataclass(frozen=True, slots=True)
class Counts:
    """Elements and bytes of a model (tied weights once, buffers apart)."""

    parameters: int
    trainable: int
    buffers: int
    parameter_bytes: int
    buffer_bytes: int


def count(model: torch.nn.Module) -> Counts:
    """Count exactly what the model holds."""
    parameters = list(model.parameters())
    buffers = list(model.buffers())
    return Counts(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        buffers=sum(b.numel() for b in buffers),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        buffer_bytes=sum(b.numel() * b.element_size() for b in buffers),
    )
