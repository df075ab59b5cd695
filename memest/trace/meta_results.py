"""What operators return on meta, remembered: shapes follow from shapes.

Most meta kernels are Python: an addition takes torch sixty microseconds, and a trace asks for the
same one in every layer of every micro-step. What an operator returned for tensors of some shapes,
strides and dtypes is made anew from that; torch's FakeTensor does the same (``FakeTensor.cache``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["MetaResults"]

_Spec = tuple[torch.Size, tuple[int, ...], torch.dtype]
_SELF = "what it writes into"
_UNKNOWN = object()
_RESHAPING = tuple(
    f"aten::{name}" for name in ("resize", "_resize_output", "as_strided_", "set_", "copy_")
)
"""They write more into their argument than values."""


class MetaResults:
    """Results of operators that give back new tensors, or the one that they write into."""

    def __init__(self) -> None:
        self._results: dict[Any, Any] = {}
        self._kinds: dict[Any, str] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """What an operator returns.

        Args:
            func: the operator.
            args: its arguments; what is written into is the first, or ``out``.
            kwargs: likewise.
        """
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        if not kind:
            return func(*args, **kwargs) if kwargs else func(*args)
        written = None
        if kind == "in place":
            written = args[0]
        elif kind == "out" and kwargs:
            written = kwargs["out"]
        options = _key(tuple(kwargs.items())) if kwargs else None
        key = (func, torch.get_default_dtype(), _key(args), options)
        try:
            specs = self._results.get(key, _UNKNOWN)
        except TypeError:  # something in it cannot be looked up
            return func(*args, **kwargs) if kwargs else func(*args)
        if specs is _SELF:
            return written
        if specs is not _UNKNOWN and specs is not None:
            made = [_empty(*spec) for spec in specs]
            return made[0] if kind == "one" else tuple(made)
        before = None if written is None else (written.shape, written.stride())
        out = func(*args, **kwargs) if kwargs else func(*args)
        if specs is _UNKNOWN:
            if written is not None:
                same = out is written and (out.shape, out.stride()) == before
                self._results[key] = _SELF if same else None
            else:
                given = _storages((args, kwargs.values() if kwargs else ()))
                self._results[key] = _specs((out,) if kind == "one" else out, given)
        return out


def _kind_of(func: Any) -> str:
    """``one`` new tensor comes back, ``many``, or what is written into ``in place`` or ``out``."""
    schema = func._schema
    returns, arguments = schema.returns, schema.arguments
    if not returns or any(str(r.type) != "Tensor" for r in returns):
        return ""
    writes = [bool(a.alias_info and a.alias_info.is_write) for a in arguments]
    if not any(writes) and all(r.alias_info is None for r in returns):
        return "one" if len(returns) == 1 else "many"
    if len(returns) != 1 or schema.name.startswith(_RESHAPING):
        return ""
    aliased = [a for a in arguments if a.alias_info]
    if len(aliased) != 1 or sum(writes) != 1:
        return ""
    if writes[0]:
        return "in place"
    return "out" if aliased[0].name == "out" and aliased[0].kwarg_only else ""


def _key(values: Any) -> Any:
    out: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            # what is on the host has values, and is computed
            if value.device.type != "meta" or value.layout is not torch.strided:
                return [None]  # not to be looked up
            out.append((value.shape, value.stride(), value.dtype, type(value)))
        elif isinstance(value, (list, tuple)):
            out.append(_key(value))
        else:
            out.append((type(value), value))
    return tuple(out)


def _storages(values: Any) -> set[int]:
    """The storages of all tensors among values."""
    out: set[int] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            out.add(value.untyped_storage()._cdata)
        elif isinstance(value, Iterable) and not isinstance(value, str):
            out |= _storages(value)
    return out


def _specs(out: Any, given: set[int]) -> tuple[_Spec, ...] | None:
    """What to make the results from; None where there is more to them.

    Some operators give back their argument though they do not say so (``_unsafe_view``).
    """
    specs = []
    given = set(given)
    for tensor in out:
        if tensor is not None and tensor.untyped_storage()._cdata in given:
            return None
        if (
            type(tensor) is not torch.Tensor
            or tensor.device.type != "meta"
            or tensor.layout is not torch.strided
            or tensor.storage_offset()
            or tensor._is_view()
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        spec = tensor.shape, tensor.stride(), tensor.dtype
        if _empty(*spec).untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            return None
        given.add(tensor.untyped_storage()._cdata)  # two results may share one
        specs.append(spec)
    return tuple(specs)


def _empty(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten.empty_strided.default(
        shape, stride, dtype=dtype, device="meta"
    )
    return out
