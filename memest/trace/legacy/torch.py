"""torch as earlier releases had it: kernels for the dispatcher, and functions of Python."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from memest.trace.isolation import also_in_backward
from memest.trace.legacy.changes import Change, Release, changes_of

__all__ = ["FLASH_2", "einsum_without_swap", "kernels_as_before", "packed_flash", "torch_as_before"]

aten = torch.ops.aten
FLASH_2 = (2, 2)
"""The release of torch that brought FlashAttention 2."""


def kernels_as_before(release: Release) -> dict[str, Callable[..., Any]]:
    """Kernels, by operator, of what this release of torch computed otherwise."""
    return {change.name: change.patch for change in changes_of(_CHANGES, release)}


@contextmanager
def torch_as_before(release: Release) -> Iterator[None]:
    """Functions of torch as this release had them, for the time of a trace."""
    with ExitStack() as stack:
        for change in changes_of(_FUNCTIONS, release):
            stack.enter_context(change.patch())
        yield


# -- what backward kept ---------------------------------------------------------------------------


def _softmax_of(op: Any) -> Callable[..., torch.Tensor]:
    """(log_)softmax saved its input beside its result.

    Source: ``torch/csrc/autograd/generated/Functions.h`` of 1.10.2 against 1.11.0
    (``SoftmaxBackward0`` lost ``self_``).
    """

    def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return _Softmax.apply(x, op, dim, half_to_float)

    return softmax


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: Any, dim: int, half_to_float: bool) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out = op(x, dim, half_to_float)
        ctx.save_for_backward(x, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, out = ctx.saved_tensors
        return aten._softmax_backward_data(grads[0], out, ctx.dim, x.dtype), None, None, None


def _mean_of_dims(
    x: torch.Tensor,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The backward of ``mean`` kept the input, though it needs the size alone.

    So the squares of which an RMS norm takes the mean stayed alive.

    Source: ``torch/csrc/autograd/generated/Functions.h`` of the wheels. ``MeanBackward1``, which is
    ``mean.dim``, has no saved variable in 1.12.1, ``self_`` in 1.13.1, 2.0.1 and 2.1.2, and none
    from 2.2.2 on; ``MeanBackward0``, of all elements, has ``self_`` in 2.0.1 and 2.1.2 alone.
    """
    return _Mean.apply(x, None if dim is None else tuple(dim), keepdim, dtype)


def _mean_of_all(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _mean_of_dims(x, None, dtype=dtype)


class _Mean(torch.autograd.Function):
    """``mean_backward``: the gradient is expanded, and divided by how many were taken together."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dim: tuple[int, ...] | None,
        keepdim: bool,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out = aten.mean.dim(x, dim, keepdim, dtype=dtype)
        ctx.save_for_backward(x)
        ctx.dims = sorted(d % x.dim() for d in dim or range(x.dim())) if x.dim() else []
        ctx.keepdim = keepdim
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        grad, count = grads[0], 1
        for d in ctx.dims:
            count *= x.shape[d]
            if not ctx.keepdim:
                grad = grad.unsqueeze(d)
        return (grad.expand(x.shape) / count).to(x.dtype), None, None, None


# -- how operators were composed -------------------------------------------------------------------


def _rms_norm_parts(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """``rms_norm_symint`` before the fused kernel of torch 2.9: power, mean, rsqrt, products."""
    dims = list(range(-len(shape), 0))
    up = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    scale = torch.rsqrt(up.pow(2).mean(dims, keepdim=True).add_(eps or 1e-6))
    out = up.mul(scale)
    if weight is not None:
        out = out.mul(weight)
    return out.to(x.dtype)


def einsum_without_swap(equation: str, tensors: list[torch.Tensor], *, path: Any = None) -> Any:
    """``einsum`` of two operands as older versions compute it: a kernel for the dispatcher.

    Newer versions swap the operands of a pair where that gives the result its final memory order;
    older ones always multiplied left by right and returned a transposed view. Layouts decide what
    later reductions take as scratch, which copies of operands are made, and in which order backward
    makes its two products. Three operands and more are contracted as the installed version does it.

    Source: ``sumproduct_pair`` and ``einsum`` in ``aten/src/ATen/native/Linear.cpp``. The version
    was found by running CPU builds: 2.6 and 2.8 return the transposed view, 2.9 and 2.10 swap.
    """
    einsum = torch.ops.aten.einsum.default
    order = _older_order(equation, tensors) if path is None and len(tensors) == 2 else None
    if order is None:
        return einsum.decompose(equation, tensors, path=path)
    inner, back = order
    return einsum.decompose(inner, tensors).permute(back)


def _older_order(equation: str, tensors: list[torch.Tensor]) -> tuple[str, list[int]] | None:
    """An equation whose output needs no swap, and how to permute that output into the asked one.

    None where no version swaps.
    """
    labels = _explicit_labels(equation, tensors)
    if labels is None:
        return None
    left, right, output = labels
    sizes = [
        dict(zip(names, tensor.shape, strict=True))
        for names, tensor in zip((left, right), tensors, strict=True)
    ]
    both: list[str] = []
    lone_left: list[str] = []
    lone_right: list[str] = []
    for label in output:
        in_left, in_right = (size.get(label, 1) != 1 for size in sizes)
        (both if in_left and in_right else lone_left if in_left else lone_right).append(label)
    summed_labels = {*left, *right} - {*output}
    if not summed_labels or any(
        size.get(label, 1) == 1 for label in summed_labels for size in sizes
    ):
        # nothing to contract; or summed beforehand, and what remains counts as right and last
        return None
    if not lone_left or not lone_right:
        return None
    if output.index(lone_right[-1]) > output.index(lone_left[0]):
        return None
    inner = [*both, *lone_left, *lone_right]
    return f"{left},{right}->{''.join(inner)}", [inner.index(label) for label in output]


def _explicit_labels(equation: str, tensors: list[torch.Tensor]) -> tuple[str, str, str] | None:
    """The labels of both operands and of the output, with letters in place of ellipses."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != len(tensors):
        return None  # wrong, or given as numbers: einsum itself says so
    if not arrow:
        once = Counter(inputs.replace(",", "").replace(".", ""))
        output = "..." * ("..." in inputs) + "".join(sorted(k for k, n in once.items() if n == 1))
    extra = [
        tensor.dim() - len(name.replace("...", "")) if "..." in name else 0
        for name, tensor in zip(names, tensors, strict=True)
    ]
    free = [letter for letter in string.ascii_letters if letter not in equation]
    if max(extra) > len(free) or min(extra) < 0:
        return None
    ellipsis_labels = "".join(free[: max(extra)])
    left, right = (
        name.replace("...", ellipsis_labels[len(ellipsis_labels) - count :])
        for name, count in zip(names, extra, strict=True)
    )
    if any(len(name) != tensor.dim() for name, tensor in zip((left, right), tensors, strict=True)):
        return None
    return left, right, output.replace("...", ellipsis_labels)


def packed_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """FlashAttention before torch 2.2, the first one: ``[batch, heads, tokens, size]``.

    It takes queries, keys and values as ``[tokens, heads, size]``. Tensors that do not lie so, such
    as those of ``nn.MultiheadAttention``, whose sequence comes first, are copied for the call,
    forward and backward; and the output is a new tensor of packed tokens, however the queries lay.
    Since 2.2 it lies as the queries do.

    Source: ``_scaled_dot_product_flash_attention_cuda`` and ``_flash_attention_forward`` of
    ``ATen/native/transformers/cuda/attention.cu``, torch 2.0 and 2.1 (``query_reshaped``,
    ``at::empty_like(query)``), and ``attention_backward.cu``.

    Args:
        query: ``[batch, heads, tokens, size]``; size a multiple of 8.
        key: as the query.
        value: as the query.
        dropout_p: share of dropped probabilities.
        is_causal: no token sees later ones.
        scale: of the products.
    """
    return _PackedFlash.apply(query, key, value, dropout_p, is_causal, scale)


def _pack_tokens(x: torch.Tensor) -> torch.Tensor:
    """As ``[batch, heads, tokens, size]`` over ``[tokens, heads, size]``: a view, else a copy."""
    batch, heads, tokens, size = x.shape
    flat = x.transpose(1, 2).reshape(batch * tokens, heads, size)
    return flat.view(batch, tokens, heads, size).transpose(1, 2)


class _PackedFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float,
        is_causal: bool,
        scale: float,
    ) -> torch.Tensor:
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = (
            aten._scaled_dot_product_flash_attention.default(
                _pack_tokens(query),
                _pack_tokens(key),
                _pack_tokens(value),
                dropout_p,
                is_causal,
                False,
                scale=scale,
            )
        )
        ctx.save_for_backward(query, key, value, out, lse, cum_q, cum_k, seed, offset)
        ctx.longest = max_q, max_k
        ctx.settings = dropout_p, is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, out, lse, cum_q, cum_k, seed, offset = ctx.saved_tensors
        dropout_p, is_causal, scale = ctx.settings
        into = aten._scaled_dot_product_flash_attention_backward.default(
            _pack_tokens(grads[0]),
            _pack_tokens(query),
            _pack_tokens(key),
            _pack_tokens(value),
            out,
            lse,
            cum_q,
            cum_k,
            *ctx.longest,
            dropout_p,
            is_causal,
            seed,
            offset,
            scale=scale,
        )
        return (*into, None, None, None)


# -- what Python called ---------------------------------------------------------------------------


class _WholeSlices(TorchFunctionMode):
    """Indexing sliced a dimension that was taken whole, ``x[:, -1, :]``: a view for each ``:``.

    Its backward makes a gradient of the size of what was sliced. Found by running the wheels:
    1.13.1, 2.4.1, 2.5.1, 2.6.0, 2.7.1 and 2.8.0 dispatch ``aten::slice`` for each ``:``, 2.9.1 and
    2.10.0 for none but a lone one. (A patched ``Tensor.__getitem__`` would make tensors sequences
    to ``torch.tensor``, for good.)
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1]
            indices = index if isinstance(index, tuple) else (index,)
            if len(indices) > 1 and any(_is_whole(each) for each in indices):
                return _taken_in_turn(args[0], indices)
        return func(*args, **(kwargs or {}))


def _is_whole(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def _taken_in_turn(x: torch.Tensor, indices: tuple[Any, ...]) -> Any:
    """``applySlicing`` of ``python_variable_indexing.cpp``: index by index, from the left.

    Tensors and lists come last, all together: what is whole beside them is sliced before.
    """
    counted = [each for each in indices if each is not None and each is not Ellipsis]
    if not all(isinstance(each, (int, slice)) and not isinstance(each, bool) for each in counted):
        if not any(each is Ellipsis or each is None for each in indices):
            for dim, each in enumerate(indices):
                if _is_whole(each):
                    x = aten.slice.Tensor(x, dim, 0, _TO_THE_END)
        return x[indices]
    dim, rest = 0, x.dim() - len(counted)
    for each in indices:
        if each is Ellipsis:
            dim += rest
        elif isinstance(each, int):
            x = x.select(dim, each)
        elif each is None:
            x = x.unsqueeze(dim)
            dim += 1
        else:
            x = (
                aten.slice.Tensor(x, dim, 0, _TO_THE_END)
                if _is_whole(each)
                else x[(*(slice(None),) * dim, each)]
            )
            dim += 1
    return x


_TO_THE_END = 2**63 - 1


def _denominators_beside_roots() -> Any:
    """Adam's and AdamW's foreach kept roots and denominators: two temporaries of all weights.

    Source: ``denom = torch._foreach_add(exp_avg_sq_sqrt, eps)`` in ``_multi_tensor_adam`` and
    ``_multi_tensor_adamw`` of 2.0.1; 2.1.2 adds to the roots in place.
    """
    from torch.optim import adam

    update: Callable[..., None] = adam._multi_tensor_adam
    add_in_place: Callable[..., Any] = torch._foreach_add_

    def update_with_both(*args: Any, **kwargs: Any) -> None:
        denominators: list[Any] = []

        def add(tensors: Any, other: Any, **options: Any) -> Any:
            if not isinstance(other, float):  # steps are counted by one
                return add_in_place(tensors, other, **options)
            denominators[:] = torch._foreach_add(tensors, other)
            return None

        with mock.patch.object(torch, "_foreach_add_", add):
            update(*args, **kwargs)

    return mock.patch.object(adam, "_multi_tensor_adam", update_with_both)


_FUNCTIONS = (
    Change(lambda: also_in_backward(_WholeSlices()), {"": (2, 9)}, name="indexing"),
    Change(_denominators_beside_roots, {"": (2, 1)}),
)

_CHANGES = (
    Change(_rms_norm_parts, {"": (2, 9)}, name="rms_norm"),
    Change(einsum_without_swap, {"": (2, 9)}, name="einsum"),
    Change(_softmax_of(aten._softmax.default), {"": (1, 11)}, name="_softmax"),
    Change(_softmax_of(aten._log_softmax.default), {"": (1, 11)}, name="_log_softmax"),
    Change(_mean_of_dims, {"": (2, 2)}, {"": (1, 13)}, name="mean.dim"),
    Change(_mean_of_all, {"": (2, 2)}, {"": (2, 0)}, name="mean"),
)
