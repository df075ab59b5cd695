"""Building a model on the meta device: real modules, no weights.

``transformers`` is loaded here and nowhere below; remote code runs only when it was asked for.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memest.catalog.resolve import ModelSource
from memest.config.attention import check_flash_dtype
from memest.config.own_code import check_own_code
from memest.config.packages import TRANSFORMERS
from memest.config.quantization import Format
from memest.config.setup import Attention, Dtype, Precision, Setup, Task, read_casts
from memest.errors import (
    ConfigError,
    MemestError,
    ModelLoadError,
    closest,
)
from memest.trace.cuda.flash import provide_flash_attention
from memest.trace.cuda.known_values import attach
from memest.trace.model.adjust import adjust_config, keep_all_layers
from memest.trace.model.factories import call_factory, container, import_reference
from memest.trace.model.packed import packed_layers
from memest.trace.model.parts import parameters_of_parts
from memest.trace.model.quantization import companions, is_quantized, num_elements
from memest.trace.model.tasks import choose_head, task_of_class
from memest.trace.model.twins import twin_of

__all__ = [
    "BuiltModel",
    "build_model",
    "cast_weights",
    "count",
    "freeze",
    "from_factory",
    "move_to_meta",
    "of_module",
    "put_into_training",
]

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
    inputs: Any = None
    """Example inputs that came with the model, None if its config says what it takes."""
    loss: Any = None
    """The loss that came with the model, None for the usual ways."""
    wrapper: Any = None
    """What adapters were put around the model, None without any: it is what trains."""
    loading: Any = None
    """How its weights come to the device (``Loading`` of ``quantization.py``), None if they are
    copied there as they are."""

    @property
    def trained_model(self) -> Any:
        """What the training loop calls."""
        return self.model if self.wrapper is None else self.wrapper


def build_model(source: ModelSource, setup: Setup) -> BuiltModel:
    """Build the model of ``source`` on the meta device with the head that ``setup`` asks for.

    Raises:
        MissingDependencyError: transformers is not installed.
        ConfigError: the task does not exist for this model.
        ModelLoadError: the architecture is unknown to the installed transformers, or cannot be
            built from its config.
    """
    if source.kind == "factory":
        return from_factory(source, setup)
    try:
        import transformers
    except ImportError as error:
        raise TRANSFORMERS.missing() from error
    transformers.logging.set_verbosity_error()
    config = _config(source, transformers)
    if setup.num_labels is not None:
        config.num_labels = setup.num_labels
    head = choose_head(config, setup.task, source.id, transformers)
    dtype = _DTYPES.get(setup.loaded_dtype) or _config_dtype(config)
    notes = [*head.notes, *adjust_config(config, head.task, setup)]
    model = _instantiate(source, config, head.cls, dtype, setup)
    notes += keep_all_layers(model)
    move_to_meta(model)
    model.train()
    attention = getattr(model.config, "_attn_implementation", None) or "eager"
    return BuiltModel(
        model=model,
        config=model.config,
        task=head.task,
        dtype=dtype,
        attention=str(attention),
        notes=tuple(notes),
    )


def _config(source: ModelSource, transformers: Any) -> Any:
    # transformers completes nested settings in place; the source is what others go by
    values = copy.deepcopy(source.config or {})
    model_type = values.get("model_type")
    if source.trust_remote_code and values.get("auto_map"):
        check_own_code(f"{source.id} (--trust-remote-code)")
        try:
            return transformers.AutoConfig.from_pretrained(
                source.path or source.id, trust_remote_code=True
            )
        except Exception as error:
            raise ModelLoadError(
                f"{source.id}: its own code cannot be loaded: {type(error).__name__}: "
                f"{_first_line(error)}"
            ) from error
    config_classes = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if model_type not in config_classes:
        near = closest(str(model_type), list(config_classes.keys()))
        hint = f" Nearest: {', '.join(near)}." if near else ""
        raise ModelLoadError(
            f"{source.id}: model_type {model_type!r} is not an architecture of the installed "
            f"transformers {transformers.__version__}.{hint} A newer transformers may know it; "
            "models with code of their own need --trust-remote-code."
        )
    values.pop("quantization_config", None)
    _check_changes(source, config_classes[model_type], values)
    try:
        return config_classes[model_type].from_dict(values)
    except Exception as error:
        raise ModelLoadError(
            f"{source.id}: its config is not a valid {model_type} config: {error}"
        ) from error


def _check_changes(source: ModelSource, kind: Any, values: dict[str, Any]) -> None:
    """A name that the configuration does not have would be taken and do nothing.

    Raises:
        ConfigError: there is such a name among the user's changes.
    """
    if not source.changes:
        return
    unchanged_values = {name: value for name, value in values.items() if name not in source.changes}
    try:
        config = kind.from_dict(unchanged_values)
    except Exception:  # noqa: BLE001 - what cannot be built without a name needs that name
        return
    for name in source.changes:
        if not hasattr(config, name):
            near = closest(name, config.to_dict())
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{source.id}: the configuration of a {config.model_type} has no {name!r}.{hint}"
            )


def _config_dtype(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    if dtype is None:
        for part in ("text_config", "vision_config"):
            dtype = dtype or getattr(getattr(config, part, None), "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _instantiate(
    source: ModelSource, config: Any, cls: Any, dtype: torch.dtype, setup: Setup
) -> torch.nn.Module:
    implementation = setup.attn_implementation
    attention: str | None = None if implementation is Attention.AUTO else implementation.value
    kwargs: dict[str, Any] = {"dtype": dtype}
    if attention is not None:
        kwargs["attn_implementation"] = attention
    if implementation is Attention.FLASH_ATTENTION_2:
        check_flash_dtype(str(dtype).removeprefix("torch."), setup)
    part = _part_for(config, cls)
    try:
        with _quiet_hub(), provide_flash_attention(), torch.device("meta"):
            if hasattr(cls, "_model_mapping"):
                # an auto class: the config brings code of its own
                model: torch.nn.Module = cls.from_config(part, trust_remote_code=True, **kwargs)
            else:
                model = cls._from_config(part, **kwargs)
    except MemestError:
        raise
    except (ValueError, ImportError) as error:
        if attention is not None and "attention" in str(error).lower():
            raise ConfigError(
                f"--attn-implementation {attention}: {cls.__name__} does not support it in the "
                f"installed transformers. Legal: {', '.join(_attentions(cls))}."
            ) from error
        raise _build_error(source, error) from error
    except Exception as error:
        raise _build_error(source, error) from error
    return model


def _attentions(cls: Any) -> list[str]:
    """What transformers offers for a class."""
    names = [Attention.EAGER.value]
    if getattr(cls, "_supports_sdpa", False):
        names.append(Attention.SDPA.value)
    if getattr(cls, "_supports_flash_attn", False):
        names.append(Attention.FLASH_ATTENTION_2.value)
    return names


def move_to_meta(model: torch.nn.Module) -> None:
    """Old constructors (``torch.FloatTensor(n)``) ignore the default device: move what they made.

    Buffers keep their values, as masks and indices may be asked for them.
    """
    meta_tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "cpu":
                empty = torch.empty_like(parameter, device="meta")
                twin = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = meta_tensors.setdefault(id(parameter), twin)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                copy = attach(torch.empty_like(buffer, device="meta"), buffer)
                module._buffers[name] = meta_tensors.setdefault(id(buffer), copy)


def _part_for(config: Any, cls: Any) -> Any:
    """The part of a composite config that the class is made for."""
    config_class = getattr(cls, "config_class", None)
    if config_class is None or isinstance(config, config_class):
        return config
    for name in ("thinker_config", "text_config", "vision_config"):
        part = getattr(config, name, None)
        if isinstance(part, config_class):
            return part
    return config


def _build_error(source: ModelSource, error: Exception) -> ModelLoadError:
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


def from_factory(
    source: ModelSource, setup: Setup, arguments: Mapping[str, Any] | None = None
) -> BuiltModel:
    """The model that ``package.module:name`` builds, or is, with the inputs and loss it brings.

    Raises:
        ConfigError: arguments that it does not take.
        ModelLoadError: its code fails, or makes no model.
    """
    reference = source.factory or ""
    model = call_factory(import_reference(reference), reference, arguments or {})
    inputs = loss = None
    if isinstance(model, tuple):
        model, inputs, loss = (*model, None, None)[:3] if model else (None, None, None)
    model = container(model)
    if not isinstance(model, torch.nn.Module):
        raise ModelLoadError(
            f"{source.factory!r} returned {type(model).__name__}, not a torch.nn.Module (or a "
            "dict of them), nor a tuple of one, its example inputs, and if need be its loss."
        )
    loading = None
    if any(t.device.type != "meta" for t in (*model.parameters(), *model.buffers())):
        model, loading = twin_of(model)  # an instance is the user's: it stays as it is
    return of_module(model, setup, inputs=inputs, loss=loss, loading=loading)


def of_module(
    model: torch.nn.Module,
    setup: Setup,
    *,
    inputs: Any = None,
    loss: Any = None,
    loading: Any = None,
) -> BuiltModel:
    """What there is to know of a module on meta that somebody else built."""
    if setup.dtype is not Dtype.AUTO:
        model = model.to(_DTYPES[setup.dtype])
    put_into_training(model)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    config = getattr(model, "config", None)
    config = config if hasattr(config, "model_type") else None
    task = Task.AUTO
    if config is not None:
        is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        task = task_of_class(type(model), encoder_decoder=is_encoder_decoder)
    _check_head(model, task, setup)
    return BuiltModel(
        model=model,
        config=config,
        task=task,
        dtype=dtype,
        attention=str(getattr(config, "_attn_implementation", "as the model's code does")),
        notes=tuple(keep_all_layers(model)),
        inputs=inputs,
        loss=loss,
        loading=loading,
    )


def _check_head(model: torch.nn.Module, own: Task, setup: Setup) -> None:
    """Options that say which head memest builds, where the model has its head already.

    Raises:
        ConfigError: one of them was given, and is not what the model has.
    """
    for flag, value, legal in (
        ("--num-labels", setup.num_labels, (None,)),
        ("--task", setup.task, (Task.AUTO, own)),
    ):
        if value not in legal:
            raise ConfigError(
                f"{flag} {value} is for models that memest builds by name; the "
                f"{type(model).__name__} has its head already: leave it out, and build the head "
                "that you mean."
            )


def put_into_training(model: torch.nn.Module) -> None:
    """Training mode; of several models those that are frozen whole stay in the mode they are in."""
    if not isinstance(model, torch.nn.ModuleDict):
        model.train()
        return
    model.training = True
    for part in model.values():
        if any(p.requires_grad for p in part.parameters()):
            part.train()


def freeze(model: torch.nn.Module, setup: Setup) -> None:
    """Stop the parameters that ``--freeze`` and ``--frozen-parts`` name from training.

    Adapters freeze first; parts of a model are left out by them already.

    Raises:
        ConfigError: a pattern that matches nothing.
    """
    if setup.adapter is None:
        for parameter in parameters_of_parts(model, setup.frozen_parts):
            parameter.requires_grad_(requires_grad=False)
    parameters = list(model.named_parameters())
    for pattern in setup.freeze:
        matches = [parameter for name, parameter in parameters if re.search(pattern, name)]
        for parameter in matches:
            parameter.requires_grad_(requires_grad=False)
        if not matches:
            names = [name for name, _ in parameters]
            near = closest(pattern, names) or names[:3]
            raise ConfigError(
                f"--freeze {pattern!r} matches no parameter. Names look like: {', '.join(near)}."
            )


def cast_weights(model: torch.nn.Module, setup: Setup) -> None:
    """Give weights that ``--cast-weights`` names their dtype, as scripts do after loading.

    Packed weights stay packed.

    Raises:
        ConfigError: a pattern that matches nothing.
    """
    if setup.method.makes_all_logits and setup.prepares_base:
        _cast_as_trl(model, setup)
    packed = {id(module.weight) for module in model.modules() if is_quantized(module)}
    # a tied weight by each of its names: gpt2's head is its wte
    parameters = [
        (name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.dtype.is_floating_point and id(parameter) not in packed
    ]
    for pattern, dtype in read_casts(setup.casts):
        matches = [
            parameter
            for name, parameter in parameters
            if (
                _trains_as_cast(name, parameter, dtype)
                if pattern == "trainable"
                else re.search(pattern.removeprefix("?"), name)
            )
        ]
        for parameter in matches:
            parameter.data = parameter.data.to(_DTYPES[dtype])
        if not matches and not pattern.startswith("?"):
            names = ", ".join(name for name, _ in parameters[:3])
            raise ConfigError(
                f"--cast-weights {pattern}={dtype} matches no weight. Names look like: {names}."
            )


def _trains_as_cast(name: str, parameter: torch.nn.Parameter, dtype: Dtype) -> bool:
    """Whether a weight is one of those that train, all of which get a dtype.

    Bfloat16 is TRL's, whose trainers leave out DoRA's magnitudes: it has no place for the small
    steps that these take (``sft_trainer.py`` and its neighbours of TRL 1.16).
    """
    return parameter.requires_grad and not (
        dtype is Dtype.BFLOAT16 and "lora_magnitude_vector" in name
    )


def _cast_as_trl(model: torch.nn.Module, setup: Setup) -> None:
    """``peft_module_casting_to_bf16``: of a 4-bit base with adapters, before it trains by bf16.

    peft's preparation has made head and embeddings float32. It is the trainer that calls both.

    Source: TRL 1.16 ``experimental/utils.py``, ``experimental/orpo`` and ``cpo``.
    """
    assert setup.quantization is not None
    is_4bit = setup.quantization.format is Format.BNB_4BIT
    if not is_4bit or setup.precision is not Precision.BF16:
        return
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.LayerNorm) or "norm" in name:
            module.to(torch.float32)
        elif any(part in name for part in ("lm_head", "embed_tokens", "wte", "wpe")):
            weight = getattr(module, "weight", None)
            if weight is not None and weight.dtype is torch.float32:
                module.to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Counts:
    """Elements and bytes of a model (tied weights once, buffers apart)."""

    parameters: int
    trainable: int
    buffers: int
    parameter_bytes: int


def count(model: torch.nn.Module) -> Counts:
    """Count exactly what the model holds."""
    parameters = list(model.parameters())
    buffers = list(model.buffers())
    companion_tensors = [t for module in model.modules() for t in companions(module)]
    packed_elements = 0
    for layer in packed_layers(model):
        words = list(layer.buffers())
        companion_tensors += words
        own = {id(word) for word in words}
        buffers = [buffer for buffer in buffers if id(buffer) not in own]
        packed_elements += layer.in_features * layer.out_features
        packed_elements += 0 if layer.bias is None else layer.bias.numel()
    return Counts(
        parameters=sum(num_elements(p) for p in parameters) + packed_elements,
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        buffers=sum(b.numel() for b in buffers),
        parameter_bytes=sum(t.nbytes for t in (*parameters, *companion_tensors)),
    )
