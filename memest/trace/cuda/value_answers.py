"""Handlers for operators whose result on a GPU depends on values.

Questions that need a value (``.item()``, ``nonzero``) are answered from what is known or by a
stated rule.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from memest.errors import TraceError
from memest.trace.cuda.known_values import assume, assumptions_of, attach, evaluate
from memest.trace.isolation import line_here
from memest.trace.recorder import Handler, Recorder

__all__ = ["answer_handlers"]

aten = torch.ops.aten


# -- what needs a value ----------------------------------------------------------------------------


def _value_of(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor, if it is known or assumed; what was assumed is noted."""
    value = evaluate(tensor)
    if value is not None:
        for assumption in assumptions_of(tensor):
            recorder.note(assumption)
    return value


_STATIC = (
    "If the model offers a static path, choose that (for mixtures of experts: grouped_mm experts; "
    "an attention implementation). In code of your own: keep the shape and mask (torch.where, "
    "masked sums), or give the input that it depends on as a tensor on the CPU, whose values are "
    "known."
)
_MOST_QUESTIONS = 4096


def _at() -> str:
    """Where in the user's own code this is, if it is there."""
    line = line_here(own=True)
    return f" at {line}" if line else ""


def _asked_by_own_code(recorder: Recorder, *, quietly: bool = False) -> None:
    """A value that no trace knows, asked for by a line of the user's: said, and not for ever.

    Raises:
        TraceError: one line asks again and again: a loop that ends when a value says so.
    """
    line = line_here(own=True)
    if not line:
        return
    recorder.questions[line] = recorder.questions.get(line, 0) + 1
    if recorder.questions[line] > _MOST_QUESTIONS:
        raise TraceError(
            f"{recorder.current_module or 'the model'} asks for a value more than "
            f"{_MOST_QUESTIONS:,} times at {line}: a loop that ends when the data say so, which no "
            "trace can know. Bound it by a number of turns."
        )
    if not quietly:
        recorder.note(
            f"a value that depends on weights or data is asked for at {line}: taken as 1 (0 where "
            "it was just made as zero). What follows from it is a guess, unless it is only logged."
        )


def _item(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if tensor.device.type != "meta":
        return func(*args, **kwargs)
    value = _value_of(recorder, tensor)
    if value is not None:
        return value.item()
    if tensor.dtype == torch.bool:
        made_by = recorder.origin_of(tensor)
        answer = made_by.startswith(("aten.all", "aten.eq", "aten.isfinite"))
        recorder.note(
            f"A branch depends on values ({made_by or 'a bool tensor'} in "
            f"{recorder.current_module or 'the model'}{_at()}): taken as {answer}, as for finite, "
            "dense data."
        )
        _asked_by_own_code(recorder, quietly=True)
        return answer
    if tensor.is_floating_point():
        # scales, norms and learning rates
        _asked_by_own_code(recorder)
        return 0.0 if recorder.origin_of(tensor).startswith(("aten.full", "aten.zeros")) else 1.0
    raise TraceError(
        f"{recorder.current_module or 'the model'} asks for the value of an integer tensor that "
        f"depends on weights ({recorder.origin_of(tensor) or 'unknown operator'}), which no trace "
        f"can know{_at()}. {_STATIC}"
    )


def _to_copy(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device")
    if args[0].device.type == "meta" and device is not None and torch.device(device).type == "cpu":
        value = _value_of(recorder, args[0])
        if value is None:
            value = torch.zeros(args[0].shape, dtype=args[0].dtype)
            recorder.note(
                f"{recorder.current_module or 'The model'} copies a computed tensor to the "
                f"CPU{_at()}: taken as zeros."
            )
        dtype = kwargs.get("dtype")
        return value.to(dtype, copy=True) if dtype is not None else value.clone()
    return func(*args, **kwargs)


def _nonzero(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if tensor.device.type != "meta":
        return func(*args, **kwargs)
    value = _value_of(recorder, tensor)
    if value is None:
        _unknown_shape(recorder, "nonzero", tensor)
    positions = torch.nonzero(value)
    return attach(torch.empty(positions.shape, dtype=torch.int64, device="meta"), positions)


def _masked_select(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, mask = args
    if tensor.device.type != "meta":
        return func(*args, **kwargs)
    value = _value_of(recorder, mask)
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
                value = _value_of(recorder, index)
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
    left, right = (_value_of(recorder, a) if a.device.type == "meta" else a for a in args[:2])
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
            value = _value_of(recorder, argument)
            if value is None:
                _unknown_shape(recorder, str(func), argument)
            real.append(value)
        else:
            real.append(argument)
    out = func(*real, **kwargs)
    if isinstance(out, torch.Tensor):
        return attach(torch.empty(out.shape, dtype=out.dtype, device="meta"), out)
    return tuple(attach(torch.empty(o.shape, dtype=o.dtype, device="meta"), o) for o in out)


_BALANCED = (
    "Experts get equal shares of the tokens here; routing decides in a real run, and an uneven "
    "one needs more memory in some layers."
)


def _topk(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Indices of the best: routers ask which expert gets which token, taken as equal shares."""
    out = func(*args, **kwargs)
    choices, indices = args[0], out[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if indices.device.type == "meta" and dim in (-1, choices.dim() - 1):
        shape, count = tuple(indices.shape), choices.shape[-1]
        assume(
            indices,
            lambda: (torch.arange(math.prod(shape)) % count).reshape(shape),
            _BALANCED,
        )
    return out


# -- operators that have no meta kernel, or a narrower one than CUDA's -----------------------------


def _ctc_loss(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """``ATen/native/cuda/LossCTC.cu``: the loss of each sample, and all alphas in log space."""
    log_probs, targets, _, target_lengths = args[:4]
    if log_probs.device.type != "meta":
        return func(*args, **kwargs)
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    if isinstance(target_lengths, torch.Tensor):
        lengths = _value_of(recorder, target_lengths)
        longest = int(lengths.max()) if lengths is not None else targets.shape[-1]
    else:
        longest = max(target_lengths)
    losses = log_probs.new_empty((batch,))
    return losses, log_probs.new_empty((batch, log_probs.shape[0], 2 * longest + 1))


def _ctc_loss_backward(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    log_probs = args[1]
    if log_probs.device.type != "meta":
        return func(*args, **kwargs)
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _grouped_mm(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """CUDA takes fp32 and fp16 too, one group after the other, into the same output.

    Source: ``ATen/native/cuda/GroupedBlas.cpp``, ``_grouped_mm_cuda`` and its fallback; rows of
    the output are padded to 16 bytes (``create_grouped_gemm_output_tensor``).
    """
    left, right = args[:2]
    if left.device.type != "meta" or left.dtype == torch.bfloat16:
        return func(*args, **kwargs)
    if left.dtype != right.dtype:
        raise RuntimeError(f"grouped_mm of {left.dtype} and {right.dtype}")
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    if left.dim() == 2 and right.dim() == 2:
        shape: tuple[int, ...] = (offsets.shape[0], left.shape[0], right.shape[1])
    elif left.dim() == 2:
        shape = (left.shape[0], right.shape[-1])
    elif right.dim() == 2:
        shape = (left.shape[1], right.shape[1])
    else:
        shape = (left.shape[0], left.shape[1], right.shape[-1])
    unit = 16 // left.element_size()
    row = -(-shape[-1] // unit) * unit
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, strides, dtype=left.dtype, device=left.device)


def _unscale(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient scaler looks for infinities: a step is shown in which it finds none."""
    func(*args, **kwargs)
    attach(args[1], torch.zeros(args[1].shape, dtype=args[1].dtype))


def _unknown_shape(recorder: Recorder, what: str, tensor: torch.Tensor) -> NoReturn:
    raise TraceError(
        f"{recorder.current_module or 'the model'}: {what} on a tensor made by "
        f"{recorder.origin_of(tensor) or 'an unknown operator'} has a shape that depends on "
        f"weights or data, which no trace can know{_at()}. {_STATIC}"
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
        aten.topk.default: _topk,
        aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
        aten._ctc_loss.default: _ctc_loss,
        aten._ctc_loss.Tensor: _ctc_loss,
        aten._ctc_loss_backward.default: _ctc_loss_backward,
        aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
        aten._grouped_mm.default: _grouped_mm,
    }
