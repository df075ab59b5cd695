"""Values that a meta trace still knows: masks, indices and sizes computed from the inputs.

Models ask their masks questions ("is anything padded?", "how long is the longest?"). Meta tensors
have no values, but integer and bool tensors that come from known inputs by known operators can be
computed when somebody asks. Each such tensor carries a recipe; nothing is computed until then.
What cannot be known (it depends on weights) is answered by a documented rule, and noted: a recipe
may begin with an assumption, and :func:`assumptions_of` tells which ones an answer rests on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Recipe", "assume", "assumptions_of", "attach", "evaluate", "recipe_of", "track"]

aten = torch.ops.aten

_ATTRIBUTE = "_memest_recipe"
_UNKNOWN: tuple[int, None, None] = (0, None, None)
_DISCRETE = frozenset((torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_MAX_ELEMENTS = 1 << 27
# constants that a model makes on the CPU and moves to the device
_MAX_COPIED = 1 << 22
_FACTORIES = frozenset(
    """aten.arange.default aten.arange.start aten.arange.start_step aten.zeros.default
    aten.ones.default aten.full.default aten.scalar_tensor.default aten.zeros_like.default
    aten.ones_like.default aten.full_like.default aten.new_zeros.default aten.new_ones.default
    aten.new_full.default aten.eye.default aten.eye.m aten.linspace.default
    aten.tril_indices.default aten.lift_fresh.default""".split()
)


@dataclass(slots=True, eq=False)
class Recipe:
    """How to compute a tensor's value: an operator over other recipes and constants."""

    func: Any = None
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    index: int | None = None
    value: torch.Tensor | None = None
    assumption: str = ""
    make: Callable[[], torch.Tensor] | None = None


def attach(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Give a meta tensor a known value (a CPU tensor of the same shape, or one to expand)."""
    _attach_recipe(tensor, Recipe(value=value))
    return tensor


def _attach_recipe(
    tensor: torch.Tensor,
    recipe: Recipe,
    version: int | None = None,
    origin: Recipe | None = None,
) -> None:
    """Attach a recipe, which holds for one version of a tensor: a write makes the next one.

    A view remembers the recipe of the tensor it looks at, to look again after a write.
    """
    version = tensor._version if version is None else version
    setattr(tensor, _ATTRIBUTE, (version, recipe, origin))


def assume(tensor: torch.Tensor, make: Callable[[], torch.Tensor], reason: str) -> torch.Tensor:
    """Give a tensor the value that is assumed where weights decide; ``reason`` is for the user."""
    _attach_recipe(tensor, Recipe(assumption=reason, make=make))
    return tensor


def assumptions_of(tensor: torch.Tensor) -> set[str]:
    """The assumptions that the value of a tensor rests on."""
    assumptions: set[str] = set()
    seen_ids: set[int] = set()
    waiting = [recipe_of(tensor)]
    while waiting:
        recipe = waiting.pop()
        if recipe is None or id(recipe) in seen_ids:
            continue
        seen_ids.add(id(recipe))
        if recipe.assumption:
            assumptions.add(recipe.assumption)
        waiting += _recipes((recipe.args, recipe.kwargs))
    return assumptions


def recipe_of(tensor: Any) -> Recipe | None:
    """The recipe a tensor carries, None if its value is unknown."""
    version, recipe, origin = getattr(tensor, _ATTRIBUTE, _UNKNOWN)
    if recipe is None or tensor._version == version:
        return recipe
    if origin is None or tensor._base is None:
        return None
    # written since, through this or another view
    base_recipe = recipe_of(tensor._base)
    if base_recipe is None or not _leads_to(recipe, origin):
        return None
    view_recipe = _rebase(recipe, origin, base_recipe)
    _attach_recipe(tensor, view_recipe, origin=base_recipe)
    return view_recipe


def track(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Let the results of an operator carry its recipe, if all its inputs are known.

    Floating results too: what is computed from known indices alone (one-hot rows, pooling
    weights) is asked about as well. Nothing that a weight enters is ever known.
    """
    if isinstance(out, torch.Tensor):
        _track_one(func, args, kwargs, out, None)
    elif isinstance(out, (tuple, list)):
        for index, item in enumerate(out):
            if isinstance(item, torch.Tensor):
                _track_one(func, args, kwargs, item, index)


def _track_one(func: Any, args: Any, kwargs: Any, out: torch.Tensor, index: int | None) -> None:
    if any(out is a for a in args):
        _track_write(func, args, kwargs, out)
        return
    if out.dtype not in _DISCRETE and not _may_be_known(args):
        return
    if recipe_of(out) is not None or out.numel() > _MAX_ELEMENTS:
        return
    if func is aten._to_copy.default and args[0].device.type == "cpu":
        if out.device.type == "meta" and out.numel() <= _MAX_COPIED:
            attach(out, args[0].detach().to(out.dtype, copy=True))
        return
    try:
        frozen_args, frozen_kwargs = _freeze(args), _freeze(kwargs)
    except _UnknownValueError:
        return
    made_here = str(func) in _FACTORIES and out.device.type != "cpu"
    if not made_here and not _recipes((frozen_args, frozen_kwargs)):
        return
    recipe = Recipe(func, frozen_args, frozen_kwargs, index)
    returns = func._schema.returns
    if returns and returns[0].alias_info is not None and isinstance(args[0], torch.Tensor):
        # a new view shares its origin's count of writes, but only once the operator is done
        origin = getattr(args[0], _ATTRIBUTE, _UNKNOWN)[2] or recipe_of(args[0])
        _attach_recipe(out, recipe, args[0]._version, origin)
    else:
        _attach_recipe(out, recipe)


def _may_be_known(args: Any) -> bool:
    """A quick no for activations and gradients, which are by far the most."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    # without any: a mask of ones, a number as a tensor
    return not tensors or any(a.device.type == "cpu" or recipe_of(a) is not None for a in tensors)


def _track_write(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    """An in-place write: the new value is known if the old one and the operands are."""
    base = out._base
    if base is not None and base is not out:
        _track_view_write(func, args, kwargs, out, base)
        return
    try:
        recipe = Recipe(func, _freeze(args), _freeze(kwargs))
    except _UnknownValueError:
        _forget(out)
        return
    _attach_recipe(out, recipe, out._version + 1)


def _track_view_write(
    func: Any, args: Any, kwargs: Any, view: torch.Tensor, base: torch.Tensor
) -> None:
    """``mask[:, 0] = 1`` writes into a view: the tensor behind it changes."""
    base_recipe, view_recipe = recipe_of(base), recipe_of(view)
    _forget(base)
    _forget(view)
    try:
        operands, options = _freeze(tuple(args[1:])), _freeze(kwargs)
    except _UnknownValueError:
        return
    if view_recipe is None:
        return
    if base_recipe is None or not _leads_to(view_recipe, base_recipe):
        _attach_recipe(view, Recipe(func, (view_recipe, *operands), options), view._version + 1)
        return

    def make() -> torch.Tensor:
        value = _compute(base_recipe).clone()
        func(_replay_view(view_recipe, base_recipe, value), *_thaw(operands), **_thaw(options))
        return value

    new_recipe = Recipe(func, (base_recipe, operands), options, make=make)
    _attach_recipe(base, new_recipe, base._version + 1)
    _attach_recipe(
        view, _rebase(view_recipe, base_recipe, new_recipe), view._version + 1, new_recipe
    )


def _leads_to(recipe: Recipe, origin: Recipe) -> bool:
    """Whether a chain of views begins at ``origin``."""
    while recipe is not origin:
        if not recipe.args or not isinstance(recipe.args[0], Recipe) or recipe.make is not None:
            return False
        recipe = recipe.args[0]
    return True


def _rebase(recipe: Recipe, origin: Recipe, new_origin: Recipe) -> Recipe:
    """The same chain of views over another tensor."""
    if recipe is origin:
        return new_origin
    parent = _rebase(recipe.args[0], origin, new_origin)
    return Recipe(recipe.func, (parent, *recipe.args[1:]), recipe.kwargs, recipe.index)


def _replay_view(recipe: Recipe, origin: Recipe, value: torch.Tensor) -> torch.Tensor:
    if recipe is origin:
        return value
    parent = _replay_view(recipe.args[0], origin, value)
    out = recipe.func(parent, *_thaw(recipe.args[1:]), **_thaw(recipe.kwargs))
    view: torch.Tensor = out if recipe.index is None else out[recipe.index]
    return view


def _forget(tensor: torch.Tensor) -> None:
    if hasattr(tensor, _ATTRIBUTE):
        delattr(tensor, _ATTRIBUTE)


class _UnknownValueError(Exception):
    """A value that depends on something the trace does not know."""


def _freeze(value: Any) -> Any:
    """Arguments with a recipe in place of each tensor on meta.

    Raises:
        _UnknownValueError: one of them has none.
    """
    if isinstance(value, torch.Tensor):
        return _freeze_tensor(value)
    # arguments of operators are nested in nothing else
    if isinstance(value, (tuple, list)):
        return type(value)([_freeze(part) for part in value])
    if isinstance(value, dict):
        return {name: _freeze(part) for name, part in value.items()}
    return value


def _freeze_tensor(tensor: torch.Tensor) -> torch.Tensor | Recipe:
    if tensor.device.type == "cpu":
        return tensor
    recipe = recipe_of(tensor)
    if recipe is None:
        raise _UnknownValueError
    return recipe


def _thaw(value: Any) -> Any:
    """Arguments with their values in place of recipes."""
    return tree_map_only(Recipe, _compute, value)


def _recipes(value: Any) -> list[Recipe]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Recipe)]


def evaluate(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a meta tensor as a CPU tensor, or None if it cannot be known."""
    recipe = recipe_of(tensor)
    if recipe is None:
        return None
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        try:
            return _compute(recipe)
        except (RuntimeError, NotImplementedError, IndexError, TypeError):
            return None


def _compute(recipe: Recipe) -> torch.Tensor:
    if recipe.value is None and recipe.make is not None:
        recipe.value = recipe.make()
    if recipe.value is None:
        args = _thaw(recipe.args)
        kwargs = {k: v for k, v in _thaw(recipe.kwargs).items() if k != "pin_memory"}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        if recipe.func._schema.is_mutable:
            args = (args[0].clone(), *args[1:])
        out = recipe.func(*args, **kwargs)
        recipe.value = out if recipe.index is None else out[recipe.index]
    return recipe.value
