"""The parts of a batch: tensors that are planned first and made on the device later."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memest.config.positions import TARGET_POSITIONS, check_length, max_targets
from memest.config.setup import Setup
from memest.errors import ConfigError
from memest.trace.cuda.known_values import attach
from memest.trace.model.adjust import end_token
from memest.trace.model.build import BuiltModel

__all__ = [
    "WORD",
    "BatchPlan",
    "BatchSizes",
    "TensorPlan",
    "attention_mask",
    "class_labels",
    "described",
    "floats",
    "forward_parameters",
    "labels",
    "pixels",
    "realise",
    "target_length",
    "tokens",
    "unmodelled",
]

# a word of any vocabulary: neither padding nor a special token of the families at hand
WORD = 5


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One argument of the model's forward.

    Attributes:
        name: of the argument.
        shape: of the tensor.
        dtype: of the tensor.
        fill: its known value, the same everywhere.
        value: makes its known value, on the CPU.
        constant: a Python value that is passed instead of a tensor (``return_loss=True``).
        channels_last: an image whose channels lie last.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int64
    fill: int | None = None
    value: Callable[[], torch.Tensor] | None = None
    constant: Any = None
    channels_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The sizes that were taken, for the report and the resolved setup."""

    seq_len: int | None = None
    target_len: int | None = None
    image_size: int | None = None
    audio_seconds: float | None = None


BatchPlan = tuple[tuple[TensorPlan, ...], BatchSizes, list[str]]
"""Plans in the order a collator makes them, the sizes taken, and notes."""


def forward_parameters(model: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    """What the forward takes; adapters pass everything on to the model they wrap."""
    get_base = getattr(model, "get_base_model", None)
    base = get_base() if callable(get_base) else model
    return inspect.signature(base.forward).parameters


def realise(plans: tuple[TensorPlan, ...], device: str = "meta") -> dict[str, Any]:
    """Make the planned tensors on the device (each is one allocation, as a copy to the GPU is)."""
    out: dict[str, Any] = {}
    for plan in plans:
        if plan.constant is not None:
            out[plan.name] = plan.constant
            continue
        layout = torch.channels_last if plan.channels_last else torch.contiguous_format
        tensor = torch.empty(plan.shape, dtype=plan.dtype, device=device, memory_format=layout)
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


# -- inputs that nobody makes ----------------------------------------------------------------------


_CACHES = ("past_key_values", "cache")  # the same, by transformers until 5.23 and from 5.24 on
_OF_ANY_FORWARD = ("self", "args", "kwargs", "return_dict", "use_cache", *_CACHES)


def unmodelled(model: torch.nn.Module) -> ConfigError:
    """What to tell of a model whose batch memest cannot make."""
    names = [
        name
        for name in forward_parameters(model)
        if name not in _OF_ANY_FORWARD and not name.startswith("output_")
    ]
    example = f"{next(iter(names), 'x')}:dtype[B,...]"
    return ConfigError(
        f"The inputs of {type(model).__name__} ({', '.join(names)}) are not modelled. Let the "
        f"factory return (module, inputs), or give example inputs: --input '{example}' and so on, "
        "or from Python memest.estimate(model, inputs={...}, loss=lambda outputs, batch: ...)."
    )


def described(plans: Iterable[TensorPlan]) -> str:
    """The names and shapes of a batch, as ``--input`` takes them."""
    return ", ".join(
        f"{plan.name}:{str(plan.dtype).removeprefix('torch.')}[{','.join(map(str, plan.shape))}]"
        for plan in plans
        if plan.constant is None
    )


# -- lengths ---------------------------------------------------------------------------------------


def target_length(config: Any, setup: Setup, default: int, *, reason: str) -> tuple[int, list[str]]:
    """The length of a decoder's target: as asked, else ``default`` capped by its positions.

    Raises:
        ConfigError: longer than the decoder's position table.
    """
    limit = max_targets(config)
    if setup.target_len is None:
        length = min(default, limit) if limit else default
        return length, [f"target length {length}, {reason} (--target-len sets it)"]
    check_length("target-len", setup.target_len, limit, TARGET_POSITIONS)
    return setup.target_len, []


# -- common tensors --------------------------------------------------------------------------------


def tokens(shape: tuple[int, ...], config: Any) -> Callable[[], torch.Tensor]:
    """Token ids: plain words, the end-of-sequence token last (some heads look for it)."""
    end = end_token(config)

    def make() -> torch.Tensor:
        ids = torch.full(shape, WORD, dtype=torch.int64)
        if end is not None:
            ids[..., -1] = end
        return ids

    return make


def attention_mask(
    shape: tuple[int, ...], *, padded: bool, name: str = "attention_mask"
) -> TensorPlan:
    """All ones, or with the last column of every row but the first padded."""

    def make() -> torch.Tensor:
        mask = torch.ones(shape, dtype=torch.int64)
        mask[1:, ..., -1] = 0
        if shape[0] == 1:
            mask[..., -1] = 0
        return mask

    if padded:
        return TensorPlan(name=name, shape=shape, value=make)
    return TensorPlan(name=name, shape=shape, fill=1)


def labels(shape: tuple[int, ...]) -> TensorPlan:
    """Token labels, none of them ignored."""
    return TensorPlan(name="labels", shape=shape, fill=WORD)


def floats(name: str, *shape: int) -> TensorPlan:
    """Numbers that nobody knows, in fp32 as collators make them."""
    return TensorPlan(name, shape, torch.float32)


def pixels(*shape: int) -> TensorPlan:
    """Images as processors return them."""
    return floats("pixel_values", *shape)


def class_labels(built_model: BuiltModel, batch: int) -> TensorPlan:
    """One class for each sample, or whatever the config's problem type asks for."""
    kind = getattr(built_model.config, "problem_type", None)
    classes = getattr(built_model.config, "num_labels", 2)
    if kind == "multi_label_classification":
        return floats("labels", batch, classes)
    if kind == "regression" or classes == 1:
        return floats("labels", batch)
    return TensorPlan(name="labels", shape=(batch,), fill=0)
