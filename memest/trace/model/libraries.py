"""Models of timm and torchvision, built by the library's own function, without weights.

What a classifier or a segmentation network is fed and how its loss is taken follow from what the
library says of it: the size of its images, its channels, the number of its classes.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memest.catalog.libraries import library_need
from memest.catalog.resolve import ModelSource
from memest.config.setup import Precision, Setup, Task
from memest.errors import ConfigError, MemestError, ModelLoadError, UnknownModelError, closest
from memest.trace.model.build import BuiltModel, move_to_meta, of_module

__all__ = ["IMAGE_SIDE", "LibraryModel", "build_library_model"]

IMAGE_SIDE = "H"
"""The letter of the image's side in the specifications of the batch."""
_FUSED_ATTENTION = (2, 0)
"""The torch that brought ``scaled_dot_product_attention``, which timm takes where there is one."""
_CLASSES = "num_classes"


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryModel:
    """A model that a library built.

    Attributes:
        built: the model, with its batch as specifications and its loss by name.
        image_size: pixels of a side.
    """

    built: BuiltModel
    image_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What a library says of one of its models."""

    image_size: int
    channels: int = 3
    task: Task = Task.IMAGE_CLASSIFICATION


def build_library_model(
    source: ModelSource, setup: Setup, arguments: Mapping[str, Any]
) -> LibraryModel:
    """Build ``timm/NAME`` or ``torchvision/NAME`` on the meta device.

    Args:
        source: names library and model.
        setup: its image size and number of labels, where they are named, are the model's.
        arguments: of the library's function.

    Raises:
        MissingDependencyError: the library is not installed.
        UnknownModelError: it has no model of that name.
        ConfigError: arguments or options that the model does not take.
        ModelLoadError: the library cannot be imported, or fails.
    """
    assert source.library is not None
    library, name = source.library
    library_need(library).check()
    if setup.num_labels is not None:
        if arguments.get(_CLASSES, setup.num_labels) != setup.num_labels:
            raise ConfigError(
                f"{source.id}: {_CLASSES}={arguments[_CLASSES]} and --num-labels "
                f"{setup.num_labels} say the same differently: drop one."
            )
        arguments = {**arguments, _CLASSES: setup.num_labels}
    kind, create = (_of_timm if library == "timm" else _of_torchvision)(name)
    if setup.task not in (Task.AUTO, kind.task):
        raise ConfigError(f"--task {setup.task}: {source.id} is for {kind.task}: leave it out.")
    size = setup.image_size or kind.image_size
    before = _without_fused_attention() if _is_old(library, setup) else nullcontext()
    with before, torch.device("meta"):
        if size != kind.image_size:
            model = _create_for(source, create, arguments, size)
        else:
            model = _create(source, create, arguments)
    move_to_meta(model)
    pixels = f",{IMAGE_SIDE},{IMAGE_SIDE}"
    per_pixel = pixels if kind.task is Task.IMAGE_SEGMENTATION else ""
    inputs = (f"x:{_dtype_of_images(setup)}[B,{kind.channels}{pixels}]", f"y:int64[B{per_pixel}]")
    # its head is the one that these options name already
    headless_setup = replace(setup, task=Task.AUTO, num_labels=None)
    built = of_module(model, headless_setup, inputs=inputs, loss="cross_entropy")
    return LibraryModel(built=replace(built, task=kind.task, config=None), image_size=size)


def _dtype_of_images(setup: Setup) -> str:
    """What images come as: a convolution takes those of its weights' dtype alone, or autocast."""
    is_pure = setup.loaded_dtype.is_half and setup.precision is Precision.FP32
    return setup.loaded_dtype.value if is_pure else "float32"


Create = Callable[..., torch.nn.Module]


_SIZES = {"timm": "img_size", "torchvision": "image_size"}
"""What functions call the size of images, where they ask for it."""


def _create_for(
    source: ModelSource, create: Create, arguments: Mapping[str, Any], image_size: int
) -> torch.nn.Module:
    """The model, told of the image size where it asks for one: its position tables depend on it."""
    assert source.library is not None
    name = _SIZES[source.library[0]]
    if name not in arguments:
        try:
            return _build(create, {**arguments, name: image_size})
        except TypeError as error:
            if name not in str(error):
                raise _refusal(source, error) from error
        except Exception as error:
            raise _refusal(source, error) from error
    return _create(source, create, arguments)


def _create(source: ModelSource, create: Create, arguments: Mapping[str, Any]) -> torch.nn.Module:
    try:
        return _build(create, arguments)
    except Exception as error:
        raise _refusal(source, error) from error


def _build(create: Create, arguments: Mapping[str, Any]) -> torch.nn.Module:
    """Call the function; once more with rows of numbers on the host where it asks for them."""
    try:
        return create(**arguments)
    except RuntimeError as error:  # "... cannot be called on meta tensors", "Cannot copy ..."
        if "meta" not in str(error):
            raise
    with _NumbersOnHost():
        return create(**arguments)


class _NumbersOnHost(TorchFunctionMode):
    """Rows of numbers that a constructor makes are on the host, so that it may read them.

    RegNets work their widths out of such a row.
    """

    _ROWS = (torch.arange, torch.linspace, torch.tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._ROWS:
            kwargs.setdefault("device", "cpu")
        return func(*args, **kwargs)


def _refusal(source: ModelSource, error: Exception) -> MemestError:
    text = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    if isinstance(error, TypeError) and "argument" in text:
        return ConfigError(f"{source.id}: the library does not take it: {text}.")
    return ModelLoadError(f"{source.id} cannot be built: {type(error).__name__}: {text}.")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        text = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
        raise ModelLoadError(
            f"{name} is installed and cannot be imported ({type(error).__name__}: {text}): timm "
            "and torchvision must be of the release that goes with the installed torch "
            f"{torch.__version__}."
        ) from error


def _unknown(library: str, name: str, names: list[str]) -> UnknownModelError:
    near = [f"{library}/{each}" for each in closest(name, names)]
    hint = f" Nearest: {', '.join(near)}." if near else ""
    return UnknownModelError(f"the installed {library} has no model {name!r}.{hint}")


# -- timm ------------------------------------------------------------------------------------------


def _of_timm(name: str) -> tuple[_Kind, Create]:
    timm = _import("timm")
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        raise _unknown("timm", name, timm.list_models())

    def create(**arguments: Any) -> torch.nn.Module:
        model: torch.nn.Module = timm.create_model(name, pretrained=False, **arguments)
        return model

    channels, height, width = _timm_input_size(timm, name, create)
    if height != width:
        raise ModelLoadError(
            f"timm/{name} takes images of {height} x {width}: memest prices square ones; build it "
            "by a factory of your own and give --input."
        )
    return _Kind(image_size=height, channels=channels), create


def _timm_input_size(timm: Any, name: str, create: Create) -> tuple[int, int, int]:
    """Channels, height and width; names that are kept for old scripts tell it once built."""
    config = timm.get_pretrained_cfg(name) or timm.get_pretrained_cfg(name.partition(".")[0])
    if config is not None:
        return tuple(config.input_size)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = create()
    return tuple(getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224)))


def _is_old(library: str, setup: Setup) -> bool:
    release = setup.software.torch
    return library == "timm" and release is not None and release < _FUSED_ATTENTION


@contextmanager
def _without_fused_attention() -> Iterator[None]:
    """Attention of timm as it is where torch has none of its own.

    Source: ``timm/layers/config.py`` (``use_fused_attn``, which asks torch), read when a layer is
    made; before timm 0.9 there was no other.
    """
    config: Any = importlib.import_module("timm.layers.config")
    before = config._USE_FUSED_ATTN
    config._USE_FUSED_ATTN = 0
    try:
        yield
    finally:
        config._USE_FUSED_ATTN = before


# -- torchvision -----------------------------------------------------------------------------------


_NOT_PRICED = {
    "detection": "takes lists of images and makes its losses of boxes",
    "video": "takes clips",
    "optical_flow": "takes pairs of images",
    "quantization": "is for inference",
}


def _of_torchvision(name: str) -> tuple[_Kind, Create]:
    models = _import("torchvision").models
    if name not in models.list_models():
        raise _unknown("torchvision", name, models.list_models())
    package = models.get_model_builder(name).__module__.split(".")[2]
    if package in _NOT_PRICED:
        raise ModelLoadError(
            f"torchvision/{name} {_NOT_PRICED[package]}: it is not priced by name. Build it by a "
            "factory of your own (package.module:factory) with --input and --loss."
        )
    weights = models.get_model_weights(name)
    preset = next(iter(weights)).transforms() if len(weights) else None
    segments = package == "segmentation"
    sizes = getattr(preset, "resize_size" if segments else "crop_size", None) or [224]
    kind = _Kind(
        image_size=int(sizes[0]),
        task=Task.IMAGE_SEGMENTATION if segments else Task.IMAGE_CLASSIFICATION,
    )

    def create(**arguments: Any) -> torch.nn.Module:
        if segments:
            arguments = {"weights_backbone": None, **arguments}
        model: torch.nn.Module = models.get_model(name, weights=None, **arguments)
        return model

    return kind, create
