"""Which layers of a model are alike, and the model with fewer of them.

Layers are alike where nothing that can be read off them differs: classes and flags, shapes and
dtypes, what trains, hooks, attributes, and what the configuration says of each. The layer's own
number may, and the size of a probability.
"""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from memest.profiles.transcript import Stack
from memest.trace.model.adapters import prefix_of

__all__ = ["find_stacks", "shallow"]

_MOST_LAYERS_ALIKE = 12
"""The longest period that is looked for."""
_COUNTS = re.compile(r"layers?$|n_layer|depth$|blocks?$")
_NUMBER = re.compile(r"idx|index|layer|block|number")
_INDICES = re.compile(r"ind(ex|ices)|idx|layers?$|stages?$")
_SIDES = ("encoder", "decoder")
_OWN = frozenset(("_parameters", "_buffers", "_modules"))
_DEEP = 3


def find_stacks(model: torch.nn.Module) -> dict[Stack, int]:
    """The stacks whose layers repeat, none within another's, and of how many modules a layer is."""
    out: dict[Stack, int] = {}
    prefix = prefix_of(model)
    shared = _shared_tensors(model)
    skipped: set[int] = set()
    for path, owner in model.named_modules():
        if id(owner) in skipped:
            continue
        by_length: dict[int, list[tuple[str, torch.nn.Module]]] = {}
        for name, child in owner.named_children():
            is_list = isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential))
            if is_list and len(child) > 2 and all(layer is not None for layer in child):
                by_length.setdefault(len(child), []).append((name, child))
        for length, lists in by_length.items():
            layers = [_Layer(owner, lists, number, shared) for number in range(length)]
            sizes = [sum(1 for _, each in lists for _ in each[n].modules()) for n in range(length)]
            repeat = _repeat(_signatures(layers), sizes)
            if repeat is None:
                continue
            before, period, count = repeat
            names = (f"{path}.{name}" if path else name for name, _ in lists)
            paths = tuple(name.removeprefix(prefix) for name in names)
            stack = Stack(paths, period, before, length - before - period * count, count)
            out[stack] = sum(sizes[before : before + period]) // period
            skipped.update(id(module) for _, each in lists for module in each.modules())
    return out


def _shared_tensors(model: torch.nn.Module) -> dict[int, int]:
    """Parameters and buffers that several modules have, by identity."""
    owners = Counter(
        id(tensor)
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    )
    return {tensor: count for tensor, count in owners.items() if count > 1}


# -- what tells layers apart -----------------------------------------------------------------------


def _attributes(source: Any) -> dict[str, Any]:
    """What a module or a configuration is made of; configurations of one's own may be dicts."""
    values = source if isinstance(source, dict) else getattr(source, "__dict__", None)
    return values if isinstance(values, dict) else {}


class _Layer:
    """Everything that can be read off the layer of one number: places and plain values."""

    def __init__(
        self,
        owner: torch.nn.Module,
        lists: Sequence[tuple[str, Any]],
        number: int,
        shared: dict[int, int],
    ) -> None:
        self.values: dict[str, Any] = {}
        self._shared = shared
        self.number = number
        length = len(lists[0][1])
        for name, each in lists:
            for path, module in each[number].named_modules(prefix=name):
                self._read_module(path, module)
        for source in (owner, getattr(owner, "config", None)):
            self._read_owner(source, number, length)

    def _read_owner(self, source: Any, number: int, length: int) -> None:
        """What a list with an entry for each layer says of this one, and what names it."""
        for name, value in _attributes(source).items():
            if not isinstance(value, (list, tuple)) or not value:
                continue
            if len(value) == length:
                self._read(f"{name}[]", value[number], _DEEP)
            if _INDICES.search(name) and all(type(v) is int and 0 <= v < length for v in value):
                self.values[f"in {name}"] = number in value

    def _read_module(self, path: str, module: torch.nn.Module) -> None:
        self.values[path] = type(module)
        for name, value in vars(module).items():
            if name not in _OWN:
                self._read(f"{path}.{name}", value, _DEEP)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            self._read_tensor(f"{path}.{name}", tensor)

    def _read_tensor(self, path: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            self.values[path] = None
            return
        self.values[path] = (
            type(tensor),
            tuple(tensor.shape),
            tensor.stride() if tensor.layout is torch.strided else None,
            tensor.dtype,
            tensor.requires_grad,
            tensor.device.type,
            id(tensor) if id(tensor) in self._shared else None,
        )
        for name, value in vars(tensor).items():
            self._read(f"{path}.{name}", value, 1)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            self._read(f"{path}.{name}", getattr(tensor, name, None), _DEEP)

    def _read(self, path: str, value: Any, deep: int) -> None:
        """Note a value, plain or by what it consists of."""
        if isinstance(value, float):
            # how probable, how large: what matters is whether it is there
            self.values[path] = float, value == 0, value == 1
        elif isinstance(value, str):
            # a path of the layer itself has its number in it
            parts = value.split(".")
            self.values[path] = tuple("its number" if p == str(self.number) else p for p in parts)
        elif value is None or isinstance(value, (bool, int, type, torch.dtype, torch.device)):
            self.values[path] = value
        elif isinstance(value, torch.Tensor):
            self._read_tensor(path, value)
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            self._read_collection(path, value, deep)
        elif isinstance(value, partial):
            self._read(f"{path}()", value.func, deep)
            self._read_collection(path, (*value.args, *value.keywords.items()), deep)
        elif isinstance(value, (types.FunctionType, types.MethodType)):
            self.values[path] = getattr(value, "__code__", None) or value.__qualname__
            for number, cell in enumerate(getattr(value, "__closure__", None) or ()):
                if deep > 0 and cell != types.CellType():
                    self._read(f"{path}<{number}>", cell.cell_contents, deep - 1)
            for name in ("__self__", "__defaults__", "__kwdefaults__"):
                if deep > 0 and getattr(value, name, None) is not None:
                    self._read(f"{path}.{name}", getattr(value, name), deep - 1)
        elif isinstance(value, torch.nn.Module) or deep <= 0 or not hasattr(value, "__dict__"):
            self.values[path] = type(value)
        else:
            self.values[path] = type(value)
            if not type(value).__module__.startswith("transformers.models"):
                for name, part in vars(value).items():
                    self._read(f"{path}.{name}", part, deep - 1)

    def _read_collection(self, path: str, value: Any, deep: int) -> None:
        self.values[path] = type(value), len(value)
        if deep <= 0:
            return
        # hooks are kept under numbers that nobody else has
        parts = value.values() if isinstance(value, dict) else value
        if isinstance(value, (set, frozenset)):
            parts = sorted(value, key=repr)
        elif isinstance(value, dict) and not all(isinstance(key, int) for key in value):
            self.values[f"{path} keys"] = tuple(map(str, value))
        for number, part in enumerate(parts):
            self._read(f"{path}[{number}]", part, deep - 1)


def _signatures(layers: Sequence[_Layer]) -> list[int]:
    """A number for each layer: equal for those that are alike."""
    known: dict[Any, int] = {}
    counted = _counters(layers)
    out = []
    for layer in layers:
        values = frozenset(
            (path, "its number" if path in counted else value)
            for path, value in layer.values.items()
        )
        out.append(known.setdefault(values, len(known)))
    return out


def _counters(layers: Sequence[_Layer]) -> set[str]:
    """Integers that are the number of their layer, or as far from it in every layer."""
    distances: dict[str, set[int]] = {}
    values_of: dict[str, set[int]] = {}
    for layer in layers:
        for path, value in layer.values.items():
            if type(value) is int:
                distances.setdefault(path, set()).add(value - layer.number)
                values_of.setdefault(path, set()).add(value)
    return {path for path, all_ in distances.items() if len(all_) == 1 and len(values_of[path]) > 1}


def _repeat(signatures: Sequence[int], sizes: Sequence[int]) -> tuple[int, int, int] | None:
    """Where layers begin to repeat, with which period, how often: the repeat of most modules."""
    best: tuple[int, int, int] | None = None
    most = 0
    length = len(signatures)
    for period in range(1, min(_MOST_LAYERS_ALIKE, length // 2) + 1):
        start = 0
        while start + 2 * period <= length:
            end = start + period
            while end < length and signatures[end] == signatures[end - period]:
                end += 1
            count = (end - start) // period
            size = sum(sizes[start : start + count * period])
            if count >= 2 and size > most:
                best, most = (start, period, count), size
            start = end - period + 1
    return best


# -- the model with fewer --------------------------------------------------------------------------


@contextmanager
def shallow(
    model: torch.nn.Module, stacks: Sequence[Stack], periods: Sequence[int]
) -> Iterator[None]:
    """For a time, a model has fewer periods of layers.

    Args:
        model: that has the stacks, or a copy of it.
        stacks: those that are shortened.
        periods: that each keeps, the first ones.
    """
    undo: list[Callable[[], None]] = []
    try:
        for stack, count in zip(stacks, periods, strict=True):
            _shorten(model, stack, count, undo)
        yield
    finally:
        for step in reversed(undo):
            step()


def _shorten(
    model: torch.nn.Module, stack: Stack, count: int, undo: list[Callable[[], None]]
) -> None:
    front = stack.before + stack.period * count
    kept = [*range(front), *range(stack.depth - stack.behind, stack.depth)]
    if len(kept) == stack.depth:
        return
    prefix = prefix_of(model)
    for path in stack.paths:
        modules = model.get_submodule(prefix + path)._modules
        undo.append(partial(_put_back, modules, dict(modules)))
        layers, keys = list(modules.values()), list(modules)
        modules.clear()
        modules.update((keys[new], layers[old]) for new, old in enumerate(kept))
        for new, old in enumerate(kept):
            if new != old:
                _renumber(layers[old], old, new, undo)
    owner = model.get_submodule((prefix + stack.paths[0]).rpartition(".")[0])
    for source in (owner, getattr(owner, "config", None)):
        if source is not None:
            both = bool(getattr(source, "is_encoder_decoder", False))
            _shorten_owner(_attributes(source), stack, kept, undo, both=both)


def _put_back(contents: dict[str, Any], before: dict[str, Any]) -> None:
    contents.clear()
    contents.update(before)


def _renumber(layer: Any, old: int, new: int, undo: list[Callable[[], None]]) -> None:
    """A layer behind those that were left out has another number now."""
    for module in layer.modules():
        values = vars(module)
        for name, value in list(values.items()):
            if type(value) is int and value == old and _NUMBER.search(name):
                undo.append(partial(values.__setitem__, name, old))
                values[name] = new


def _shorten_owner(
    values: dict[str, Any],
    stack: Stack,
    kept: Sequence[int],
    undo: list[Callable[[], None]],
    *,
    both: bool,
) -> None:
    """What counts the layers, or has an entry for each.

    Where one configuration is of ``both`` an encoder and a decoder, names say whose layers they
    count.
    """
    sides = {side for side in _SIDES if any(side in path for path in stack.paths)}
    for name, value in list(values.items()):
        shorter: Any = None
        named_sides = {side for side in _SIDES if side in name}
        is_of_other = not named_sides <= sides or (both and not named_sides)
        if type(value) is int and value == stack.depth and _COUNTS.search(name) and not is_of_other:
            shorter = len(kept)
        elif isinstance(value, (list, tuple)) and len(value) == stack.depth:
            shorter = type(value)(value[number] for number in kept)
        if shorter is not None:
            undo.append(partial(values.__setitem__, name, value))
            values[name] = shorter
