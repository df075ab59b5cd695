"""Handlers for operators whose result on a GPU depends on values.

Questions that need a value (``.item()``, ``nonzero``) are answered from what is known or by a
stated rule.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

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


def _known_value(recorder: Recorder, tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The value that decides the shape of a result.

    Raises:
        TraceError: no trace can know it.
    """
    value = _value_of(recorder, tensor)
    if value is None:
        raise TraceError(
            f"{recorder.current_module or 'the model'}: {what} on a tensor made by "
            f"{recorder.origin_of(tensor) or 'an unknown operator'} has a shape that depends on "
            f"weights or data, which no trace can know{_at_line()}. {_STATIC}"
        )
    return value


_STATIC = (
    "If the model offers a static path, choose that (for mixtures of experts: grouped_mm experts; "
    "an attention implementation). In code of your own: keep the shape and mask (torch.where, "
    "masked sums), or give the input that it depends on as a tensor on the CPU, whose values are "
    "known."
)
_MOST_QUESTIONS = 4096


def _at_line() -> str:
    """Where in the user's own code this is, if it is there."""
    line = line_here(own=True)
    return f" at {line}" if line else ""


def _layers(recorder: Recorder) -> str:
    """The module that is running, without the number of its layer: each says the same."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", recorder.current_module)


def _note_own_question(recorder: Recorder, *, quietly: bool = False) -> None:
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
    value = _value_of(recorder, tensor)
    if value is not None:
        return value.item()
    if tensor.dtype == torch.bool:
        made_by = recorder.origin_of(tensor)
        answer = made_by.startswith(("aten.all", "aten.eq", "aten.isfinite"))
        recorder.note(
            f"A branch depends on values ({made_by or 'a bool tensor'} in "
            f"{_layers(recorder) or 'the model'}{_at_line()}): taken as {answer}, as for "
            "finite, dense data."
        )
        _note_own_question(recorder, quietly=True)
        return answer
    if tensor.is_floating_point():
        # scales, norms and learning rates
        _note_own_question(recorder)
        return 0.0 if recorder.origin_of(tensor).startswith(("aten.full", "aten.zeros")) else 1.0
    raise TraceError(
        f"{recorder.current_module or 'the model'} asks for the value of an integer tensor that "
        f"depends on weights ({recorder.origin_of(tensor) or 'unknown operator'}), which no trace "
        f"can know{_at_line()}. {_STATIC}"
    )


def _to_copy(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "cpu":
        return recorder.result_of(func, args, kwargs)
    value = _value_of(recorder, args[0])
    if value is None:
        value = torch.zeros(args[0].shape, dtype=args[0].dtype)
        recorder.note(
            f"{_layers(recorder) or 'The model'} copies a computed tensor to the "
            f"CPU{_at_line()}: taken as zeros."
        )
    return value.to(kwargs.get("dtype") or value.dtype, copy=True)


def _masked_select(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, mask = args
    value = _known_value(recorder, mask, "masked_select")
    count = int(value.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum())
    return torch.empty((count,), dtype=tensor.dtype, device="meta")


def _index(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, indices = args
    new_indices: list[Any] = []
    for index in indices:
        if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
            new_indices.append(index)
            continue
        rows = _known_value(recorder, index, "boolean indexing").nonzero()
        new_indices += (
            torch.empty((rows.shape[0],), dtype=torch.int64, device="meta")
            for _ in range(rows.shape[1])
        )
    return recorder.result_of(func, (tensor, new_indices), kwargs)


def _equal(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    left, right = (_value_of(recorder, a) if a.device.type == "meta" else a for a in args[:2])
    if left is not None and right is not None:
        return bool(torch.equal(left, right))
    return True


def _by_value(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Operators whose result shape depends on their (known) values."""
    what = "nonzero" if func is aten.nonzero.default else str(func)
    real = [
        _known_value(recorder, a, what)
        if isinstance(a, torch.Tensor) and a.device.type == "meta"
        else a
        for a in args
    ]
    return tree_map_only(torch.Tensor, _on_meta, func(*real, **kwargs))


def _on_meta(value: torch.Tensor) -> torch.Tensor:
    return attach(torch.empty(value.shape, dtype=value.dtype, device="meta"), value)


_BALANCED = (
    "Experts get equal shares of the tokens here; routing decides in a real run, and an uneven "
    "one needs more memory in some layers."
)


def _topk(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Indices of the best: routers ask which expert gets which token, taken as equal shares."""
    out = recorder.result_of(func, args, kwargs)
    choices, indices = args[0], out[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if dim in (-1, choices.dim() - 1):
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
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    if isinstance(target_lengths, torch.Tensor):
        lengths = _value_of(recorder, target_lengths)
        longest = int(lengths.max()) if lengths is not None else targets.shape[-1]
    else:
        longest = max(target_lengths)
    losses = log_probs.new_empty((batch,))
    return losses, log_probs.new_empty((batch, log_probs.shape[0], 2 * longest + 1))


def _ctc_loss_backward(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    return torch.empty_like(args[1], memory_format=torch.contiguous_format)


def _grouped_mm(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """CUDA takes fp32 and fp16 too, one group after the other, into the same output.

    Source: ``ATen/native/cuda/GroupedBlas.cpp``, ``_grouped_mm_cuda`` and its fallback; rows of
    the output are padded to 16 bytes (``create_grouped_gemm_output_tensor``).
    """
    left, right = args[:2]
    if left.dtype == torch.bfloat16:
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


def _for_meta(handler: Handler) -> Handler:
    """A handler for tensors on meta: others have their values."""

    def handle(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        if args[0].device.type != "meta":
            return func(*args, **kwargs)
        return handler(recorder, func, args, kwargs)

    return handle


def answer_handlers() -> dict[Any, Handler]:
    """Handlers that answer data-dependent operators."""
    by_value = (
        aten.nonzero.default,
        aten.repeat_interleave.Tensor,
        aten.unique_consecutive.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.bincount.default,
    )
    of_meta = {
        aten._local_scalar_dense.default: _item,
        aten._to_copy.default: _to_copy,
        aten.masked_select.default: _masked_select,
        aten.index.Tensor: _index,
        **dict.fromkeys(by_value, _by_value),
        aten.topk.default: _topk,
        aten._ctc_loss.default: _ctc_loss,
        aten._ctc_loss.Tensor: _ctc_loss,
        aten._ctc_loss_backward.default: _ctc_loss_backward,
        aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
        aten._grouped_mm.default: _grouped_mm,
    }
    return {
        **{op: _for_meta(handler) for op, handler in of_meta.items()},
        aten.equal.default: _equal,
        aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    }
