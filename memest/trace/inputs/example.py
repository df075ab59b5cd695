"""The batch that a user describes: tensors, specifications, or a function that makes them.

Whatever its form (dict, tuple, nested), its tensors go through the loops as a flat dict, as every
batch does, and are put together again where the user's code gets them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from memest.config.inputs import InputSpec, ModuleInputs, names_in, read_spec
from memest.config.setup import Setup
from memest.errors import ConfigError, MemestError, ModelLoadError, closest
from memest.profiles.sizing import SizeAnswer
from memest.trace.cuda.devices import cuda_is_meta
from memest.trace.inputs.tensors import TensorPlan
from memest.trace.isolation import line_of

__all__ = ["ExampleBatch"]

_LENGTH = 512
"""Of ``S``, where nothing says it: the length that memest takes for models it knows too."""


@dataclass(slots=True)
class ExampleBatch:
    """What a user said of a batch.

    Attributes:
        inputs: inputs and the letters of specifications.
        batch: samples of example tensors, None where the inputs take any batch.
        image_side: the letter of specifications that is the image size, and the size that the
            model has where none is asked for; None where the inputs have no such letter.
    """

    inputs: ModuleInputs
    batch: int | None = None
    image_side: tuple[str, int] | None = None
    _spec: TreeSpec | None = None
    _names: tuple[str, ...] = ()
    _leaves: tuple[Any, ...] = ()
    _parts: dict[tuple[int, int | None], tuple[tuple[str, ...], tuple[Any, ...], TreeSpec]] = field(
        default_factory=dict
    )
    _forms: dict[tuple[str, ...], tuple[tuple[str, ...], TreeSpec]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.inputs.inputs):
            self._names, self._leaves, self._spec = _take_apart(_read(self.inputs.inputs))
            self.batch = _example_batch(self._leaves)
        self._check_dims()

    def _check_dims(self) -> None:
        """A letter that stands nowhere is a slip of the pen."""
        dim_names = {name for name, _ in self.inputs.dims}
        if dim_names and self.image_side is not None:  # what the library says takes no letters
            name, value = self.inputs.dims[0]
            example = f"--image-size {value if name == self.image_side[0] else self.image_side[1]}"
            raise ConfigError(
                f"--dim {name}={value}: no --input has it. What a model of this library is fed is "
                f"known: --batch sets how many images, {example} their side."
            )
        used = self._letters
        for name in sorted(dim_names - used):
            near = closest(name, used)
            hint = f" Did you mean {near[0]}?" if near else ""
            letters = ", ".join(sorted(used)) or "none"
            raise ConfigError(f"--dim {name}: no --input has it. Their letters: {letters}.{hint}")

    @property
    def _letters(self) -> set[str]:
        return {
            n
            for leaf in self._leaves
            if isinstance(leaf, InputSpec)
            for text in leaf.extents
            for n in names_in(text)
        }

    def answer(self, setup: Setup) -> SizeAnswer:
        """The sizes that the batch takes of a setup, and what there is to say of them."""
        batch_sizes: dict[str, Any] = {}
        notes = []
        if self.image_side is not None:
            own_size = self.image_side[1]
            batch_sizes["image_size"] = setup.image_size or own_size
            if setup.image_size is None:
                notes.append(f"images of {own_size} x {own_size} pixels (--image-size sets it)")
        takes_length = "S" in self._letters or _takes_length(self.inputs.inputs)
        if takes_length:
            batch_sizes["seq_len"] = setup.seq_len or _LENGTH
            if setup.seq_len is None:
                notes.append(f"S, the length, is {_LENGTH} (--seq-len sets it)")
        for name, value in (
            ("seq_len", None if takes_length else setup.seq_len),
            ("target_len", setup.target_len),
            ("image_size", None if self.image_side is not None else setup.image_size),
            ("audio_seconds", setup.audio_seconds),
        ):
            if value is not None:
                flag = f"--{name.replace('_', '-')} {value:.15g}"
                notes.append(f"{flag} has no effect on the inputs that were given")
        return SizeAnswer(batch_sizes, tuple(notes))

    def plan(self, setup: Setup) -> tuple[TensorPlan, ...]:
        """The tensors of a batch of this setup.

        Raises:
            ConfigError: a letter that nothing binds, inputs that are no tensors.
        """
        names, leaves, spec = self._parts_of(setup)
        dims = {"B": setup.batch, **dict(self.inputs.dims)}
        if setup.seq_len is not None:
            dims["S"] = setup.seq_len
        if self.image_side is not None:
            letter, own_size = self.image_side
            dims[letter] = setup.image_size or own_size
        plans = []
        for name, leaf in zip(names, leaves, strict=True):
            if isinstance(leaf, InputSpec):
                plans.append(
                    TensorPlan(
                        name=name,
                        shape=leaf.shape(dims),
                        dtype=getattr(torch, leaf.dtype),
                        fill=leaf.fill,
                    )
                )
            elif isinstance(leaf, torch.Tensor):
                plans.append(_tensor_plan(name, leaf, self.batch, setup.batch))
            elif leaf is not None:
                plans.append(TensorPlan(name=name, constant=leaf))
        self._forms[tuple(plan.name for plan in plans)] = names, spec
        return tuple(plans)

    def _parts_of(self, setup: Setup) -> tuple[tuple[str, ...], tuple[Any, ...], TreeSpec]:
        if self._spec is not None:
            return self._names, self._leaves, self._spec
        key = setup.batch, setup.seq_len
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = _take_apart(_read(_call_function(self.inputs.inputs, setup)))
        return parts

    def unflatten(self, batch: Mapping[str, Any]) -> Any:
        """The batch in the form in which the user gave it.

        Args:
            batch: tensors by name, and perhaps what a loop added.
        """
        for present, (names, spec) in self._forms.items():
            if all(name in batch for name in present):
                return tree_unflatten([batch.get(name) for name in names], spec)
        raise AssertionError("a batch that was not planned")

    def caller(
        self, model: torch.nn.Module
    ) -> tuple[Callable[[Any, Any], Any] | None, Callable[[Any], list[Any]]]:
        """How the model is called with a batch, and what of the batch is left for the loss.

        Returns:
            A function of (model, batch), None for ``model(**batch)``; and one that gives what the
            model is not called with.
        """
        parameters, takes_kwargs, takes_args = _parameters(model)
        form: Any = None if self._spec is None else tree_unflatten(list(self._leaves), self._spec)
        flat = isinstance(form, Mapping) and all(name in form for name in self._names)
        if flat and (takes_kwargs or all(name in parameters for name in form)):
            return None, lambda _: []

        def split(batch: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], list[Any]]:
            user_batch = self.unflatten(batch)
            if isinstance(user_batch, Mapping):
                arguments = {k: v for k, v in user_batch.items() if takes_kwargs or k in parameters}
                rest = [v for k, v in user_batch.items() if k not in arguments]
                if arguments or not parameters:
                    return [], arguments, rest
                # named otherwise than the forward names them
                user_batch = tuple(user_batch.values())
                num_required = max(sum(parameters.values()), 1)
                return list(user_batch[:num_required]), {}, list(user_batch[num_required:])
            items = list(user_batch) if isinstance(user_batch, (tuple, list)) else [user_batch]
            count = len(items) if takes_args else len(parameters)
            return items[:count], {}, items[count:]

        def call(model: Any, batch: Mapping[str, Any]) -> Any:
            args, kwargs, _ = split(batch)
            return model(*args, **kwargs)

        return call, lambda batch: split(batch)[2]


def _parameters(model: torch.nn.Module) -> tuple[dict[str, bool], bool, bool]:
    """What a forward takes: names, each with whether it must be given; ``**`` and ``*``."""
    get_base = getattr(model, "get_base_model", None)
    base = get_base() if callable(get_base) else model
    try:
        parameters = inspect.signature(base.forward).parameters.values()
    except (TypeError, ValueError):
        return {}, True, True
    requirements = {
        p.name: p.default is p.empty
        for p in parameters
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return requirements, takes_kwargs, any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _takes_length(function: Any) -> bool:
    if not callable(function):
        return False
    try:
        return "seq_len" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _call_function(function: Any, setup: Setup) -> Any:
    """The inputs that a user's function makes for a batch, on meta."""
    arguments = {"seq_len": setup.seq_len or _LENGTH} if _takes_length(function) else {}
    try:
        with cuda_is_meta(), torch.device("meta"):
            return function(setup.batch, **arguments)
    except MemestError:
        raise
    except Exception as error:
        text = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
        raise ModelLoadError(
            f"inputs({setup.batch}) raised {type(error).__name__} at "
            f"{line_of(error.__traceback__) or 'an unknown line'}: {text}. It is called as "
            "inputs(batch) and returns what one step is fed."
        ) from error


def _read(inputs: Any) -> Any:
    """Specifications in place of their texts; several at the top make a dict."""
    if isinstance(inputs, tuple) and inputs and all(isinstance(i, str) for i in inputs):
        out: dict[str, Any] = {}
        for text in inputs:
            spec = read_spec(text)
            *path, name = spec.name.split(".")
            place = out
            for part in path:
                place = place.setdefault(part, {})
                if not isinstance(place, dict):
                    raise ConfigError(f"--input {spec.name}: {part} is a tensor already.")
            place[name] = spec
        return out
    if isinstance(inputs, (str, InputSpec, torch.Tensor)):
        return read_spec(inputs) if isinstance(inputs, str) else inputs
    if isinstance(inputs, Mapping):
        return {name: _read(value) for name, value in inputs.items()}
    if isinstance(inputs, (list, tuple)) and not hasattr(inputs, "_fields"):
        return type(inputs)(_read(value) for value in inputs)
    return inputs


def _take_apart(inputs: Any) -> tuple[tuple[str, ...], tuple[Any, ...], TreeSpec]:
    """Names, leaves and the form of a batch."""
    if not isinstance(inputs, (Mapping, tuple, list, torch.Tensor, InputSpec)) or (
        isinstance(inputs, (Mapping, tuple, list)) and not inputs
    ):
        what = (
            "empty" if isinstance(inputs, (Mapping, tuple, list)) else f"a {type(inputs).__name__}"
        )
        raise ConfigError(
            f"inputs is {what}: give tensors by argument name ({{'x': torch.empty(8, 3)}}), in a "
            "tuple, "
            "specifications ('x:float32[B,3,224,224]'), or a function of the batch that returns "
            "them."
        )
    leaves, spec = tree_flatten(inputs)
    names = tuple(_paths(inputs))
    if len(names) != len(leaves):  # a node that only the tree knows: numbered
        names = tuple(str(number) for number in range(len(leaves)))
    for name, leaf in zip(names, leaves, strict=True):
        plain = (torch.Tensor, InputSpec, int, float, bool, str, type(None), torch.dtype)
        if not isinstance(leaf, plain):
            raise ConfigError(
                f"inputs[{name!r}] is a {type(leaf).__name__}, not a tensor. Batches are made of "
                "tensors and numbers, in dicts, tuples and lists."
            )
    return names, tuple(leaves), spec


def _paths(value: Any, path: str = "") -> list[str]:
    if isinstance(value, Mapping):
        pairs = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, (list, tuple)):
        pairs = [(str(number), item) for number, item in enumerate(value)]
    else:
        return [path or "input"]
    out = []
    for name, item in pairs:
        out += _paths(item, f"{path}.{name}" if path else name)
    return out


def _example_batch(leaves: tuple[Any, ...]) -> int | None:
    """The batch of example tensors, None where specifications say what it is."""
    if any(isinstance(leaf, InputSpec) for leaf in leaves):
        return None
    return next((int(v.shape[0]) for v in leaves if isinstance(v, torch.Tensor) and v.dim()), 1)


def _tensor_plan(name: str, value: torch.Tensor, own: int | None, batch: int) -> TensorPlan:
    """The plan of one example tensor with another batch: a leading extent of it is the batch."""
    shape = tuple(value.shape)
    if shape and own is not None and shape[0] == own:
        shape = (batch, *shape[1:])
    make_value = None
    if not value.is_floating_point() and value.device.type == "cpu":
        rows = torch.arange(shape[0]) % value.shape[0] if shape and value.shape[0] else None
        make_value = value.clone if rows is None else (lambda: value[rows])
    return TensorPlan(name=name, shape=shape, dtype=value.dtype, value=make_value)
