"""Adapters: the real peft puts them into a model on meta.

peft's own way of building without memory (``low_cpu_mem_usage``) leaves one thing out: adapters
that are on meta already are not cast to the dtype of the layer they sit on
(``BaseTunerLayer._move_adapter_to_device_of_base_layer``), which is where a real build gets its
half-precision adapters from. That is made up for here.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from memest.config.adapter import LINEAR_TOO, Adapter
from memest.config.packages import ADAPTERS
from memest.config.setup import Setup, Task
from memest.errors import ConfigError, MemestError, closest
from memest.trace.model.build import move_to_meta
from memest.trace.model.packed import register_packed_layers
from memest.trace.model.parts import modules_of_parts
from memest.trace.model.quantization import quiet

__all__ = [
    "adapter_inputs_in_fp32",
    "add_adapter",
    "base_of",
    "cast_parameters",
    "copy_kept_dtypes",
    "kept_dtype",
    "prefix_of",
    "weigh_ranks",
]

_TASK_TYPES = {
    Task.SEQUENCE_CLASSIFICATION: "SEQ_CLS",
    Task.TOKEN_CLASSIFICATION: "TOKEN_CLS",
    Task.QUESTION_ANSWERING: "QUESTION_ANS",
    Task.CAUSAL_LM: "CAUSAL_LM",
    Task.SEQ2SEQ_LM: "SEQ_2_SEQ_LM",
}
"""What peft calls the heads it knows; with the others it wraps a model as it is."""
_KEPT = "_memest_kept_dtype"
_TRANSFORMS = frozenset(("c3a", "fourierft"))
"""Methods whose forward is a Fourier transform: ``SpectralOps.cpp`` of torch takes the work area
that cuFFT asks for from the allocator."""


def add_adapter(
    model: torch.nn.Module, task: Task, setup: Setup, *, real: bool = False
) -> tuple[Any, tuple[str, ...]]:
    """Freeze a model and put the adapters of a setup into it.

    Args:
        model: on meta, or ``real``; it is changed.
        task: which head it has.
        setup: says which adapters.
        real: the model has its weights, and the adapters get theirs.

    Returns:
        What a training script gets from ``get_peft_model``, and what there is to say of it.

    Raises:
        MissingDependencyError: peft is not installed.
        ConfigError: the adapters cannot be put into this model.
    """
    adapter = setup.adapter
    assert adapter is not None
    try:
        with quiet():  # it loads bitsandbytes where that is installed
            import peft
    except ImportError as error:
        raise ADAPTERS.missing() from error
    config, notes = _config(adapter, task)
    _add_linear(config, model)
    notes += _unmatched(adapter, [name for name, _ in model.named_modules()])
    _leave_out(config, model, setup)
    register_packed_layers(config, model, adapter.method)
    # copies of quantised weights begin as an empty tensor, which must not be on the CPU
    on_meta: Any = nullcontext() if setup.quantization is None else torch.device("meta")
    try:
        with warnings.catch_warnings(), on_meta:
            warnings.simplefilter("ignore")
            peft_model = peft.get_peft_model(
                model,
                config,
                low_cpu_mem_usage=not real,
                autocast_adapter_dtype=adapter.autocast_adapter_dtype,
            )
    except MemestError:
        raise
    except Exception as error:
        if setup.quantization is not None and "can require gradients" in str(error):
            names = ", ".join(config.modules_to_save or ()) or "what adapters copy"
            raise ConfigError(
                f"peft trains {names} as a whole, which transformers quantises here, and quantised "
                f"weights cannot train: add --llm-int8-skip-modules {names.partition(',')[0]}."
            ) from error
        raise _refusal(adapter, model, error) from error
    if not real:
        move_to_meta(peft_model)
        if not adapter.autocast_adapter_dtype:
            _cast_to_base(peft_model)
        if setup.quantization is None:
            _freeze_ranks(peft_model, setup.software.peft)
    peft_model.train()
    active = peft_model.active_peft_config
    words = [f"adapters by peft: {_adapter_text(adapter, active)}", *notes]
    return peft_model, tuple(words)


def base_of(model: Any) -> Any:
    """The model inside peft's wrapper, else the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) and hasattr(model, "peft_config") else model


def prefix_of(model: Any) -> str:
    """What peft's wrapper puts before the names of a model's own modules."""
    if not hasattr(model, "peft_config"):
        return ""
    base = base_of(model)
    return next((f"{n}." for n, module in model.named_modules() if module is base and n), "")


def _unmatched(adapter: Adapter, names: Sequence[str]) -> list[str]:
    """Names of modules that peft passes over in silence, as long as it finds another of a list."""
    notes = []
    for key in ("target_modules", "modules_to_save"):
        wanted = adapter.settings.get(key)
        notes += [
            f"{key} {each} of the adapters has no effect: no module is called so"
            for each in (wanted if isinstance(wanted, list) else ())
            if each != LINEAR_TOO and not any(f".{name}".endswith(f".{each}") for name in names)
        ]
    return notes


def _add_linear(config: Any, model: Any) -> None:
    """:data:`LINEAR_TOO` among names as the names that it stands for.

    Source: ``find_all_linear_names`` of axolotl 0.19 (``loaders/adapter.py``): all classes that
    are called so, by the last part of their paths, without the head.
    """
    wanted = getattr(config, "target_modules", None)
    if not isinstance(wanted, set) or LINEAR_TOO not in wanted:
        return
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linear_names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if "Linear" in type(module).__name__ and module is not head
    }
    config.target_modules = (wanted - {LINEAR_TOO}) | linear_names


_ADALORA_STEPS = 10_000


def _config(adapter: Adapter, task: Task) -> tuple[Any, list[str]]:
    """The configuration object, and what of the settings it does not know.

    Raises:
        ConfigError: a setting that the method does not have, or refuses.
    """
    import peft

    kind: Any = peft.PeftType(adapter.method.upper())
    cls = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    settings = adapter.settings
    parameter_names = set(inspect.signature(cls).parameters)
    for name, value in list(settings.items()):
        if name not in parameter_names and not value:
            # of another release, and said to be off
            del settings[name]
        elif name not in parameter_names:
            near = closest(name, parameter_names)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{cls.__name__} of the installed peft {peft.__version__} has no {name!r}.{hint} "
                "Remove it, or install the peft that knows it."
            )
    notes = []
    if adapter.method == "adalora":
        # when ranks are given up, which is later than what is traced
        settings.setdefault("total_step", _ADALORA_STEPS)
    if "task_type" not in settings and "task_type" in parameter_names:
        settings["task_type"] = _TASK_TYPES.get(task)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = cls(**settings)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"--peft {adapter.method}: {cls.__name__} refuses it: {error}") from error
    if adapter.method in _TRANSFORMS:
        notes.append(
            "what cuFFT and products of conjugates take behind the adapters' operators is not "
            "counted"
        )
    if settings.get("init_lora_weights") not in (None, True, False, "gaussian"):
        # data-free starts of matrices are computed once, before the first step
        notes.append(
            f"the start of the adapters (init_lora_weights {settings['init_lora_weights']!r}) is "
            "computed before training and not part of the estimate"
        )
    return config, notes


def _leave_out(config: Any, model: torch.nn.Module, setup: Setup) -> None:
    """No adapters in parts of a model that a setup freezes.

    Raises:
        ConfigError: the installed peft, or the method, cannot leave modules out.
    """
    names = modules_of_parts(model, setup.frozen_parts)
    if not names:
        return
    if not hasattr(config, "exclude_modules"):
        raise ConfigError(
            f"--frozen-parts: {type(config).__name__} of the installed peft has no "
            "exclude_modules. Name the modules that get adapters with --lora-target-modules."
        )
    config.exclude_modules = "|".join(map(re.escape, names))


def _adapter_text(adapter: Adapter, config: Any) -> str:
    """The adapters with what peft decided itself, without what is a size of the run."""
    decided = ("target_modules", "modules_to_save", "num_virtual_tokens")
    names = decided if adapter.rank is not None else ("r", *decided)
    values = {name: getattr(config, name) for name in names if getattr(config, name, None)}
    settings = adapter.unsized.settings
    for name, value in values.items():
        settings[name] = sorted(value) if isinstance(value, (set, list)) else value
    return dataclasses.replace(adapter, config=json.dumps(settings, sort_keys=True)).words


def _refusal(adapter: Adapter, model: torch.nn.Module, error: Exception) -> ConfigError:
    """Why peft does not put the adapters into this model."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    names = _linear_names(model)
    called = f"its linear ones are called {', '.join(names) or 'none'}."
    flag, ways = "--lora-target-modules", []
    if own := _language_names(model, names):
        ways.append(f"{flag} {','.join(own)} (of its language model alone)")
    asked = str(adapter.settings.get("target_modules")).lower()
    has_head = hasattr(model, "get_output_embeddings")
    if has_head and adapter.method != "ia3" and asked != "all-linear":
        ways.append(f"{flag} all-linear (all but its head)")
    what = f"Add {' or '.join(ways)};" if ways else f"Name modules with {flag};"
    return ConfigError(
        f"--peft {adapter.method}: peft refuses {type(model).__name__}: {text}. {what} {called}"
    )


def _linear_names(model: torch.nn.Module) -> list[str]:
    """What linear layers are called, each name once; numbers are places in a list."""
    linear = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)
    layer_names = (
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, linear) or type(module).__name__ == "Conv1D"
    )
    return [name for name in dict.fromkeys(layer_names) if not name.isdigit()]


def _language_names(model: Any, names: Iterable[str]) -> list[str]:
    """Those that a model of several senses has in its language model and nowhere else."""
    towers = {*getattr(getattr(model, "config", None), "sub_configs", ())} - {"text_config"}
    get_decoder = getattr(model, "get_decoder", None)
    language_model = get_decoder() if towers and callable(get_decoder) else None
    if language_model is None or language_model is model:
        return []
    inside = {id(module) for module in language_model.modules()}
    elsewhere = {
        name.rpartition(".")[2] for name, each in model.named_modules() if id(each) not in inside
    }
    return [name for name in names if name not in elsewhere]


def _freeze_ranks(model: Any, release: tuple[int, int] | None) -> None:
    """AdaLoRA's ``ranknum`` does not train, unless peft moved it to another device or dtype.

    That makes a new parameter of it (``ParameterDict.__setitem__``), as of everything on meta; a
    base that is on the GPU before it is wrapped, as quantised ones are, has it so, and one in half
    precision. Until 0.20 peft froze what is not called ``lora_`` after that.
    """
    for module in model.modules():
        ranks = getattr(module, "ranknum", None)
        if not isinstance(ranks, torch.nn.ParameterDict):
            continue
        is_moved = module.get_base_layer().weight.dtype != torch.float32
        if not is_moved or (release is not None and release <= (0, 20)):
            ranks.requires_grad_(requires_grad=False)


def weigh_ranks(model: Any) -> None:
    """AdaLoRA's importances, three numbers for each that trains, as a step of a script renews them.

    peft asks a script to call ``update_and_allocate`` between a step of the optimizer and
    ``zero_grad``; the Trainers do not. Which ranks it then gives up depends on values and takes
    next to nothing, so that half is left out.
    """
    allocator = getattr(getattr(model, "base_model", None), "rankallocator", None)
    if allocator is not None:
        allocator.update_ipt(model.base_model.model)


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Make every floating parameter one of ``dtype``; buffers stay as they are.

    Source: ``DeepSpeedEngine._cast_module_mixed_precision`` of DeepSpeed 0.19.8; what
    ``fully_shard`` gathers under a ``MixedPrecisionPolicy`` has the same dtypes, and its shards
    keep their own.
    """
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            setattr(parameter, _KEPT, parameter.dtype)
            parameter.data = parameter.data.to(dtype)


def copy_kept_dtypes(model: Any, twin: Any) -> None:
    """Tell a copy of a model, parameter by parameter, what :func:`cast_parameters` found."""
    kept = {name: getattr(p, _KEPT, None) for name, p in model.named_parameters()}
    for name, parameter in twin.named_parameters():
        if kept.get(name) is not None:
            setattr(parameter, _KEPT, kept[name])


def kept_dtype(parameter: torch.Tensor) -> str:
    """The dtype that :func:`cast_parameters` found, by torch's name; empty where it was not."""
    return str(getattr(parameter, _KEPT, "")).removeprefix("torch.")


@contextmanager
def adapter_inputs_in_fp32(model: torch.nn.Module, when: str) -> Iterator[None]:
    """Adapters in half precision are taken for float32 ones by peft, which casts their inputs.

    Args:
        model: with adapters.
        when: ``always``, in the ``first`` forward of the model, or never.
    """
    if not when:
        yield
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    name = "_cast_input_dtype"
    original: Any = getattr(BaseTunerLayer, name)
    full = True

    def cast(layer: Any, x: Any, dtype: torch.dtype) -> Any:
        return original(layer, x, torch.float32 if full else dtype)

    def after_forward(*_: Any) -> None:
        nonlocal full
        full = when == "always"

    with model.register_forward_hook(after_forward), mock.patch.object(BaseTunerLayer, name, cast):
        yield


def _cast_to_base(model: Any) -> None:
    """The dtype of adapters on a real device: that of their layer, where it is a floating one."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        weight = getattr(module.get_base_layer(), "weight", None)
        if weight is None or not (weight.dtype.is_floating_point or weight.dtype.is_complex):
            continue
        names = set(module.adapter_layer_names)
        for name, child in module.named_children():
            if name in names:
                child.to(weight.dtype)
