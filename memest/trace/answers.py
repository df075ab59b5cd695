"""Handlers for operators whose result on a GPU depends on values.

Questions that need a value (``.item()``, ``nonzero``) are answered from what is known or by a
stated rule.
"""

from __future__ import annotations

from typing import Any

import torch

from memest.errors import TraceError
from memest.trace.known import attach, evaluate
from memest.trace.recorder import Handler, Recorder

__all__ = ["answer_handlers"]

aten = torch.ops.aten


# -- what needs a value -----------------------------------------------------------------------------


def _item(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if tensor.device.type != "meta":
        return func(*args, **kwargs)
    value = evaluate(tensor)
    if value is not None:
        return value.item()
    if tensor.dtype == torch.bool:
        made_by = recorder.origin_of(tensor)
        answer = made_by.startswith(("aten.all", "aten.eq", "aten.isfinite"))
        recorder.note(
            f"A branch depends on values ({made_by or 'a bool tensor'} in "
            f"{recorder.current_module or 'the model'}): taken as {answer}, as for finite, dense "
            "data."
        )
        return answer
    if tensor.is_floating_point():
        # scales, norms and learning rates; found_inf of the gradient scaler is 0 in a good step
        return 0.0 if recorder.origin_of(tensor).startswith(("aten.full", "aten.zeros")) else 1.0
    raise TraceError(
        f"{recorder.current_module or 'the model'} asks for the value of an integer tensor that "
        f"depends on weights ({recorder.origin_of(tensor) or 'unknown operator'}), which no trace "
        "can know. If the model has a static path (for example experts_implementation or an "
        "attention implementation), choose that."
    )


def _to_copy(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device")
    if args[0].device.type == "meta" and device is not None and torch.device(device).type == "cpu":
        value = evaluate(args[0])
        if value is None:
            value = torch.zeros(args[0].shape, dtype=args[0].dtype)
            recorder.note(
                f"{recorder.current_module or 'The model'} copies a computed tensor to the CPU: "
                "taken as zeros."
            )
        dtype = kwargs.get("dtype")
        return value.to(dtype) if dtype is not None else value.clone()
    return func(*args, **kwargs)


def _nonzero(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if tensor.device.type != "meta":
        return func(*args, **kwargs)
    value = evaluate(tensor)
    if value is None:
        _unknown_shape(recorder, "nonzero", tensor)
    found = torch.nonzero(value)
    return attach(torch.empty(found.shape, dtype=torch.int64, device="meta"), found)


def _masked_select(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, mask = args
    if tensor.device.type != "meta":
        return func(*args, **kwargs)
    value = evaluate(mask)
    if value is None:
        _unknown_shape(recorder, "masked_select", mask)
    count = int(value.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum())
    return torch.empty((count,), dtype=tensor.dtype, device="meta")


def _index(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, indices = args
    if tensor.device.type == "meta" and any(
        isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices
    ):
        expanded: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                value = evaluate(index)
                if value is None:
                    _unknown_shape(recorder, "boolean indexing", index)
                rows = value.nonzero()
                expanded.extend(
                    torch.empty((rows.shape[0],), dtype=torch.int64, device="meta")
                    for _ in range(rows.shape[1])
                )
            else:
                expanded.append(index)
        return func(tensor, expanded)
    return func(*args, **kwargs)


def _equal(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    left, right = (evaluate(a) if a.device.type == "meta" else a for a in args[:2])
    if left is not None and right is not None:
        return bool(torch.equal(left, right))
    return True


def _by_value(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Operators whose result shape depends on their (known) values."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if all(t.device.type != "meta" for t in tensors):
        return func(*args, **kwargs)
    real = []
    for argument in args:
        if isinstance(argument, torch.Tensor) and argument.device.type == "meta":
            value = evaluate(argument)
            if value is None:
                _unknown_shape(recorder, str(func), argument)
            real.append(value)
        else:
            real.append(argument)
    out = func(*real, **kwargs)
    if isinstance(out, torch.Tensor):
        return attach(torch.empty(out.shape, dtype=out.dtype, device="meta"), out)
    return tuple(attach(torch.empty(o.shape, dtype=o.dtype, device="meta"), o) for o in out)


def _unknown_shape(recorder: Recorder, what: str, tensor: torch.Tensor) -> None:
    raise TraceError(
        f"{recorder.current_module or 'the model'}: {what} on a tensor made by "
        f"{recorder.origin_of(tensor) or 'an unknown operator'} has a shape that depends on "
        "weights or data, which no trace can know. If the model offers a static implementation, "
        "choose that (for mixtures of experts: grouped_mm experts)."
    )


def answer_handlers() -> dict[Any, Handler]:
    """Handlers that answer data-dependent operators."""
    return {
        aten._local_scalar_dense.default: _item,
        aten._to_copy.default: _to_copy,
        aten.nonzero.default: _nonzero,
        aten.masked_select.default: _masked_select,
        aten.index.Tensor: _index,
        aten.equal.default: _equal,
        aten.repeat_interleave.Tensor: _by_value,
        aten.unique_consecutive.default: _by_value,
        aten._unique2.default: _by_value,
        aten.unique_dim.default: _by_value,
        aten.bincount.default: _by_value,
    }
