"""Quantised bases: bitsandbytes' own classes on meta, put in by transformers' own rules.

``from_pretrained`` replaces linear layers by layers of bitsandbytes before a weight is loaded, and
quantises every weight as it arrives on the GPU. Both are done here with the same functions: which
layers stay as they are, what biases become and which tensors a quantised weight consists of is
decided by the installed libraries. Only the weights' values are missing, as everywhere.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any
from unittest import mock

import torch

from memest.config.packages import BITSANDBYTES, PREPARATION
from memest.config.quantization import Format, Quantization
from memest.config.release_defaults import release_default
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.trace.legacy.peft import prepare_int8

__all__ = [
    "Loading",
    "bitsandbytes",
    "code_tables",
    "companions",
    "is_quantized",
    "num_elements",
    "prepare_kbit",
    "quantize",
    "quantize_weight",
    "quiet",
    "restore_biases",
    "twins_on_meta",
]


@dataclass(slots=True)
class Loading:
    """How weights got to where they are, beside being copied.

    Attributes:
        dtype: in which weights arrive on the device.
        quantized: whether ``from_pretrained`` makes quantised weights.
        ready: the checkpoint holds them quantised: they need no work on arrival.
        cast_from: by ``id`` of a parameter, the dtype it was loaded in before
            ``prepare_model_for_kbit_training`` made it float32.
    """

    dtype: torch.dtype
    quantized: bool = False
    ready: bool = False
    cast_from: dict[int, torch.dtype] = field(default_factory=dict)


def bitsandbytes() -> Any:
    """The library.

    Raises:
        MissingDependencyError: it is not installed.
    """
    BITSANDBYTES.check()
    try:
        with quiet():
            import bitsandbytes
    except ImportError as error:
        raise BITSANDBYTES.missing() from error
    # every 8-bit product of a trace would tell that it casts its input
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return bitsandbytes


@contextmanager
def quiet() -> Iterator[None]:
    """Libraries while they are imported: neither warnings nor compilers.

    What they say of missing GPUs and kernels is not for our users. bitsandbytes has its CPU kernels
    compiled by decorators, which loads all of Inductor, a fifth of the time that torch takes: here
    they are compiled when they are called for the first time, which a trace never does.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with mock.patch.object(torch, "compile", partial(_compile_when_called, torch.compile)):
            yield
    finally:
        logging.disable(before)


def _compile_when_called(
    compiler: Callable[..., Any], function: Callable[..., Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """``torch.compile`` of a function, put off."""
    if function is None:
        return partial(_compile_when_called, compiler, **options)
    compiled = cache(partial(compiler, function, **options))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


def quantize(
    model: Any, dtype: torch.dtype, setup: Setup, *, ready: bool = False
) -> tuple[Loading, tuple[str, ...]]:
    """Quantise a model of transformers on meta, and prepare it for training.

    Args:
        model: on meta; it is changed.
        dtype: of its weights as they are loaded.
        setup: says how.
        ready: the checkpoint holds quantised weights.

    Returns:
        What happened on the way, for the load phase, and what there is to say of it.

    Raises:
        MissingDependencyError: bitsandbytes (or peft, to prepare it) is not installed.
        ConfigError: a model that transformers cannot quantise.
    """
    quantization = setup.quantization
    assert quantization is not None
    if not hasattr(model, "all_tied_weights_keys"):
        raise ConfigError(
            f"--load-in-4bit and --load-in-8bit are for models of transformers, and this is a "
            f"{type(model).__name__}: quantise its layers in the code that builds it."
        )
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ConfigError(f"Weights of {dtype} cannot be quantised: use --dtype bfloat16.")
    library = bitsandbytes()
    layers = _replace(model, dtype, quantization)
    with code_tables():
        for layer in layers:
            shape = (layer.out_features, layer.in_features)
            quantize_weight(layer, torch.empty(shape, dtype=dtype, device="meta"))
    if quantization.format is Format.BNB_4BIT:
        model.is_loaded_in_4bit = True
    else:
        model.is_loaded_in_8bit = True
    loading = Loading(dtype, quantized=True, ready=ready)
    kind = "Linear4bit" if quantization.format is Format.BNB_4BIT else "Linear8bitLt"
    notes = [f"{len(layers)} linear layers are {kind} of bitsandbytes {library.__version__}"]
    if quantization.compute_dtype == "float32" and quantization.format is Format.BNB_4BIT:
        notes.append(
            "4-bit layers compute in float32, transformers' default; QLoRA recipes say "
            "--bnb-4bit-compute-dtype bfloat16"
        )
    notes += prepare_kbit(model, loading, setup)
    if quantization.format is Format.BNB_8BIT and quantization.threshold:
        notes.append(
            f"no activation exceeds the outlier threshold of {quantization.threshold:g}: what "
            "stands out depends on values, and every such column adds a few bytes for each row"
        )
    return loading, tuple(notes)


def _replace(model: Any, dtype: torch.dtype, quantization: Quantization) -> list[Any]:
    """Layers of bitsandbytes for linear ones, as ``HfQuantizer.preprocess_model`` has them."""
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    is_4bit = quantization.format is Format.BNB_4BIT
    config = BitsAndBytesConfig(
        load_in_4bit=is_4bit,
        load_in_8bit=not is_4bit,
        llm_int8_threshold=quantization.threshold,
        bnb_4bit_compute_dtype=getattr(torch, quantization.compute_dtype),
        bnb_4bit_quant_type=quantization.quant_type,
        bnb_4bit_use_double_quant=quantization.double_quant,
        bnb_4bit_quant_storage=getattr(torch, quantization.quant_storage),
    )
    skip = quantization.skip_modules
    skip_names = HfQuantizer.get_modules_to_not_convert(
        model, None if skip is None else list(skip), getattr(model, "_keep_in_fp32_modules", None)
    )
    model.is_quantized = True
    model.quantization_method = config.quant_method
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        replace_with_bnb_linear(
            model, modules_to_not_convert=skip_names, quantization_config=config
        )
    finally:
        torch.set_default_dtype(before)
    layers = [module for module in model.modules() if is_quantized(module)]
    if not layers:
        raise ConfigError(
            f"--load-in-{4 if is_4bit else 8}bit finds no linear layer in {type(model).__name__} "
            f"to quantise; it leaves out {', '.join(sorted(skip_names)) or 'nothing'}."
        )
    for layer in layers:
        layer.train(model.training)
    return layers


def is_quantized(module: torch.nn.Module) -> bool:
    """Whether a module is a layer of bitsandbytes; adapters only pass its weight on."""
    weight = module._parameters.get("weight")
    return type(weight).__name__ in ("Params4bit", "Int8Params")


def quantize_weight(layer: Any, arrived_weight: torch.Tensor) -> None:
    """Quantise a weight that arrived on the device, as transformers' ``convert`` does it.

    LLM.int8 goes over the host: the weight that arrived waits until its float16 copy is quantised.
    """
    original = arrived_weight
    attributes = {k: v for k, v in vars(layer.weight).items() if k not in ("CB", "SCB")}
    attributes = {**attributes, "bnb_quantized": False, "quant_state": None}
    kind = type(layer.weight)
    if kind.__name__ == "Int8Params":
        arrived_weight = arrived_weight.to(torch.float16, copy=True)
    else:
        del original
    weight = kind(arrived_weight, requires_grad=False, **attributes)
    del arrived_weight
    weight._quantize("meta")
    if kind.__name__ == "Params4bit":
        # the parameter stays the one that hooks of modules were given
        layer.weight.data = weight.data
        vars(layer.weight).update(vars(weight))
    else:
        layer._parameters["weight"] = weight
    if hasattr(layer, "init_8bit_state"):
        layer.init_8bit_state()


@contextmanager
def code_tables() -> Iterator[None]:
    """The library keeps its tables of codes for the process, on the device that asked first."""
    with mock.patch.dict(bitsandbytes().functional.name2qmap, clear=True):
        yield


def twins_on_meta(module: torch.nn.Module, memo: dict[int, Any]) -> Loading | None:
    """The quantised weights of a live model, on meta, for a copy of it.

    Args:
        module: any model.
        memo: of ``copy.deepcopy``; what is replaced is entered by ``id``.

    Returns:
        How its weights came to the device, None where nothing is quantised.
    """
    dtype = None
    for layer in module.modules():
        if not is_quantized(layer):
            continue
        weight: Any = layer.weight
        for tensor in companions(layer):
            memo[id(tensor)] = torch.empty_like(tensor, device="meta")
        attributes: dict[str, Any] = dict(vars(weight))
        state = attributes.get("quant_state")
        if state is not None:
            # the layer holds it too
            memo[id(state)] = attributes["quant_state"] = copy.deepcopy(state, memo)
        if "module" in attributes:
            attributes["module"] = None
        twin = type(weight)(
            torch.empty_like(weight.data, device="meta"), requires_grad=False, **attributes
        )
        for holder in (weight, getattr(layer, "state", None)):
            # the int8 numbers themselves, and their scales, which may hang on either
            numbers = getattr(holder, "CB", None)
            if isinstance(numbers, torch.Tensor):
                memo[id(numbers)] = twin.data
        for name in ("CB", "SCB"):
            tensor = getattr(twin, name, None)
            if isinstance(tensor, torch.Tensor):
                setattr(twin, name, memo[id(tensor)])
        memo[id(weight)] = twin
        dtype = state.dtype if state is not None else torch.float16
    return None if dtype is None else Loading(dtype, quantized=True, ready=True)


def companions(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that a quantised weight needs beside itself: scales, codes, offsets."""
    if not is_quantized(module):
        return
    weight: Any = module.weight
    state = getattr(weight, "quant_state", None)
    if state is not None:
        yield from _tensors(state)
        if state.nested:
            yield from _tensors(state.state2)
            yield state.offset
    for holder in (weight, getattr(module, "state", None)):
        scales = getattr(holder, "SCB", None)
        if isinstance(scales, torch.Tensor):
            yield scales


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    yield state.absmax
    yield state.code


def num_elements(parameter: torch.Tensor) -> int:
    """Weights that a parameter holds: two of them in each byte of a 4-bit one."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())


def prepare_kbit(model: Any, loading: Loading, setup: Setup) -> list[str]:
    """``prepare_model_for_kbit_training``: all is frozen, what is not quantised becomes float32.

    Releases before peft 0.3 cast less (:mod:`memest.trace.legacy.peft`).

    Args:
        model: quantised; it is changed.
        loading: told which parameters were cast.
        setup: of the run.

    Returns:
        What there is to say.

    Raises:
        MissingDependencyError: peft is not installed.
    """
    if not setup.prepares_base:
        return []
    try:
        import peft
    except ImportError as error:
        raise PREPARATION.missing() from error
    dtypes_before = {id(parameter): parameter.dtype for parameter in model.parameters()}
    if release_default("prepare_kbit", setup.software).value == "layer_norm":
        prepare_int8(model)
    else:
        # checkpointing is switched on where the setup says so, embeddings' hooks with it
        peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    loading.cast_from = {
        id(p): dtypes_before[id(p)] for p in model.parameters() if p.dtype != dtypes_before[id(p)]
    }
    note = (
        "prepare_model_for_kbit_training makes float32 of everything that is not quantised; "
        "--no-prepare-kbit leaves it out"
    )
    return [note] if loading.cast_from else []


@contextmanager
def restore_biases(model: torch.nn.Module) -> Iterator[None]:
    """``Linear4bit.forward`` casts its bias for good; the first step of a run finds it uncast."""
    bias_data = [
        (module.bias, module.bias.data)
        for module in model.modules()
        if is_quantized(module) and isinstance(getattr(module, "bias", None), torch.nn.Parameter)
    ]
    try:
        yield
    finally:
        for bias, data in bias_data:
            bias.data = data
