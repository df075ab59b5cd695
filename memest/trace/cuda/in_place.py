"""Handlers that undo what tracing does to operators.

``ATen/TensorSubclassLikeUtils.h``: a tensor counts as subclass-like when it lives on meta or when
any dispatch mode is active, and autograd then avoids writing in place. These handlers turn such
operators back into the in-place writes of a real run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from memest.trace.recorder import Handler, Recorder

__all__ = ["in_place_handlers"]

aten = torch.ops.aten
_Observation = TypeVar("_Observation")

# derivatives that add two tensors of their own, out of place, before the engine sees them
# (``var_std_mean_backward`` and ``aminmax_backward`` in ``FunctionsManual.cpp``)
_OWN_SUMS = frozenset(("VarMeanBackward0", "StdMeanBackward0", "AminmaxBackward0"))
_PRODUCTS = ("aten.mm", "aten.bmm")
_ZEROS = ("aten.zeros", "aten.new_zeros", "aten.zeros_like", "aten.full", "aten.new_full")


# -- the engine's joins -------------------------------------------------------------------------


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold the tensor, and how many tensors its storage has, as a handler sees them."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def _sole_owner() -> tuple[int, int]:
    """The counts of a gradient that nobody but the engine's buffer holds.

    The dispatcher's own references are in the counts, so they are measured, once, on the smallest
    join there is: two gradients that arrive at one multiplication.
    """

    def join() -> None:
        torch.autograd.grad(loss, start)

    with torch.enable_grad():
        start = torch.empty(2, device="meta", requires_grad=True) * 2
        loss = (start.tanh() + start.sin()).pow(2).sum()
    return _at_addition(join, lambda args: _references(args[0]))


def _at_addition(run: Callable[[], Any], look: Callable[[Any], _Observation]) -> _Observation:
    """What ``look`` observes of the arguments of the first addition that ``run`` makes."""
    observations: list[_Observation] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor:
                observations.append(look(args))
            return func(*args, **(kwargs or {}))

    with Watch():
        run()
    return observations[0]


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their storage range without gaps or overlap."""
    dense_stride = 1
    for extent, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if extent == 1:
            continue
        if stride != dense_stride:
            return False
        dense_stride *= extent
    return True


def _accumulate(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A second gradient arriving at a node is added in place if the engine owns the first alone.

    Source: ``torch/csrc/autograd/input_buffer.cpp``, ``can_accumulate_inplace``: a dense tensor,
    its use count and its storage's use count are one. A gradient that a view made, or that waits
    for another node too (parallel residuals), is added out of place. Additions that a Python
    ``backward`` makes hold one reference less: they are not the engine's.
    """
    if recorder.autograd_writes and not kwargs and not torch.is_grad_enabled():
        old, new = args
        if (
            isinstance(new, torch.Tensor)
            and old.shape == new.shape
            and old.dtype == new.dtype
            and _references(old) == _sole_owner()
            and _dense(old)
            and not _sums_itself(torch._C._current_autograd_node())
        ):
            return old
    return recorder.result_of(func, args, kwargs)


def _sums_itself(node: Any) -> bool:
    return node is not None and node.name() in _OWN_SUMS


# -- a bias that the composite adds ---------------------------------------------------------------


@functools.cache
def _held_by_composite() -> int:
    """Python's count of references of what C++ alone holds; an expression of Python adds its own.

    Measured, once, on the smallest product whose bias ``linear`` adds.
    """

    def multiply() -> None:
        weight, bias = torch.empty(2, 3, device="meta"), torch.empty(2, device="meta")
        functional.linear(rows, weight, bias)

    rows = torch.empty(2, 3, 2, device="meta").transpose(1, 2)
    with torch.no_grad():
        return _at_addition(multiply, lambda args: sys.getrefcount(args[0]))


def _is_bias_of_linear(recorder: Recorder, args: Any) -> bool:
    """Whether ``linear`` adds its bias to a product, in place where nothing is subclass-like.

    Source: ``ATen/native/Linear.cpp``. Two dimensions, and three contiguous ones, go to ``addmm``.
    """
    product, bias = args
    return (
        isinstance(bias, torch.Tensor)
        and bias.dim() == 1
        and product.dim() > 2
        and product.shape[-1:] == bias.shape
        and product.dtype == bias.dtype
        and sys.getrefcount(args[0]) == _held_by_composite() + 1  # ``product``
        and recorder.origin_of(product).startswith(_PRODUCTS)
    )


def _add(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    if not kwargs and _is_bias_of_linear(recorder, args):
        return aten.alias.default(args[0])
    return _accumulate(recorder, func, args, kwargs)


# -- gradients written into fresh zeros ----------------------------------------------------------


def _into_zeros(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """``scatter``, ``index_add`` … into fresh zeros write in place in a real backward."""
    if (
        recorder.autograd_writes
        and not torch.is_grad_enabled()
        and recorder.origin_of(args[0]).startswith(_ZEROS)
    ):
        return args[0]
    return recorder.result_of(func, args, kwargs)


def in_place_handlers() -> dict[Any, Handler]:
    """Handlers that undo what tracing does to operators."""
    _sole_owner()
    _held_by_composite()
    return {
        aten.add.Tensor: _add,
        aten.scatter_add.default: _into_zeros,
        aten.scatter.src: _into_zeros,
        aten.scatter.value: _into_zeros,
        aten.index_add.default: _into_zeros,
        aten.index_put.default: _into_zeros,
    }
