"""Floating-point operations of an operator call, from its shapes.

A multiplication and its addition count two. Only operators that work on matrices count: products,
convolutions and fused attention, forward and backward. Everything else is bound by memory, not by
arithmetic. Bias additions, causal masks and padding are not considered, as in
``torch.utils.flop_counter`` (2.13), with which the figures agree; the one exception is named at
:func:`_convolution_backward`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from functools import partial

from memest.workspaces.layout import argument, tensor
from memest.workspaces.operator_call import OpCall, TensorSpec

__all__ = ["Arithmetic", "arithmetic", "counts_flops", "flops"]


class Arithmetic(enum.StrEnum):
    """What the multiplications of a call run on, as far as the call can tell."""

    FULL = "fp32"
    """fp32 operands of a matrix product: tensor cores only where TF32 is allowed."""
    FULL_CONVOLUTION = "fp32 convolution"
    """fp32 operands of a convolution: PyTorch lets cuDNN use TF32 unless told otherwise."""
    HALF = "half"
    """fp16 and narrower operands."""
    BF16 = "bf16"
    """bf16 operands, for which not every GPU has arithmetic."""
    DOUBLE = "fp64"


Formula = Callable[[OpCall], int]


def flops(call: OpCall) -> int:
    """Floating-point operations of one call; 0 for operators that do not count.

    Example:
        >>> weight = TensorSpec((4096, 1024), (1024, 1), "float32")
        >>> rows = TensorSpec((512, 4096), (4096, 1), "float32")
        >>> out = TensorSpec((512, 1024), (1024, 1), "float32")
        >>> flops(OpCall("aten.mm.default", (rows, weight), (), (out,), "main"))
        4294967296
    """
    formula = _FORMULAS.get(_packet(call.op))
    return 0 if formula is None else formula(call)


def counts_flops(op: str) -> bool:
    """Whether calls of an overload (``aten.mm.default``) count."""
    return _packet(op) in _FORMULAS


def arithmetic(call: OpCall) -> Arithmetic:
    """What a call that counts computes in, by its first floating-point operand."""
    dtype = next((a.dtype for a in call.args if isinstance(a, TensorSpec)), "float32")
    if dtype in ("float64", "complex128"):
        return Arithmetic.DOUBLE
    if dtype == "bfloat16":
        return Arithmetic.BF16
    if dtype not in ("float32", "complex64"):
        return Arithmetic.HALF
    return Arithmetic.FULL_CONVOLUTION if "conv" in call.op else Arithmetic.FULL


def _packet(op: str) -> str:
    return op.rpartition(".")[0] if op.count(".") == 2 else op


def _product(call: OpCall, position: int = 0, names: tuple[str, str] = ("self", "mat2")) -> int:
    """2 x (elements of the result) x (length of the sums): [.., m, k] times [.., k, n].

    Of ``_grouped_mm`` every row meets one matrix: 2 m n k with [m, k] and [g, k, n]. Where the sums
    run over the groups ([m, t] times [t, n] into [g, m, n]) each of the t terms belongs to one
    group: 2 t m n.
    """
    first, second = tensor(call, position, names[0]), tensor(call, position + 1, names[1])
    if first is None or second is None or not first.shape or not second.shape:
        return 0
    return 2 * first.numel * second.shape[-1]


def _linear(call: OpCall) -> int:
    """linear: 2 x (rows of the input) x in x out; the weight is stored [out, in]."""
    rows, weight = tensor(call, 0, "input"), tensor(call, 1, "weight")
    if rows is None or weight is None or len(weight.shape) != 2:
        return 0
    return 2 * rows.numel * weight.shape[0]


def _convolution_of(grid: TensorSpec, weight: TensorSpec) -> int:
    """2 x (points of the grid, batch included) x (elements of the weight).

    The grid is the output, or the input of a transposed convolution; the weight is
    [out, in / groups, kernel...], so groups are accounted for.
    """
    points = grid.shape[0] * math.prod(grid.shape[2:])
    return 2 * points * weight.numel


def _convolution(call: OpCall) -> int:
    weight = tensor(call, 1, "weight")
    out = call.output
    transposed = call.op.startswith(("aten.convolution", "aten._convolution")) and bool(
        argument(call, 6, "transposed")
    )
    grid = tensor(call, 0, "input") if transposed else out
    if weight is None or grid is None or len(grid.shape) < 3:
        return 0
    return _convolution_of(grid, weight)


def _convolution_backward(call: OpCall) -> int:
    """Once the forward for the input's gradient, once for the weight's, as asked for.

    Every multiplication of the forward has one counterpart in each gradient.
    ``torch.utils.flop_counter`` counts the weight's gradient of a grouped convolution as if it
    had one group, that is ``groups`` times as much.
    """
    grad, inputs = tensor(call, 0, "grad_output"), tensor(call, 1, "input")
    weight = tensor(call, 2, "weight")
    grid = inputs if argument(call, 7, "transposed") else grad
    mask = argument(call, 10, "output_mask")
    if grid is None or weight is None or not isinstance(mask, tuple) or len(grid.shape) < 3:
        return 0
    return sum(map(bool, mask[:2])) * _convolution_of(grid, weight)


def _heads(call: OpCall, first: int) -> tuple[int, int, int, int] | None:
    """Queries of all samples and heads, keys that each one meets, and the two head dimensions.

    ``_scaled_dot_product_*`` takes [B, H, S, D], the inner operators take [B, S, H, D] or, for
    samples packed behind each other, [T, H, D] or [1, T, H, D]: there every query is taken to
    meet as many keys as the longest sample has.
    """
    names = enumerate(("query", "key", "value"))
    operands = [tensor(call, first + i, name) for i, name in names]
    shapes = [t.shape for t in operands if t is not None and len(t.shape) in (3, 4)]
    if len(shapes) < 3:
        return None
    query, key, value = shapes
    by_head = call.op.startswith("aten._scaled_dot_product")
    keys = key[2] if by_head else key[-3]
    if not by_head:
        keys = _longest_key(call, first) or keys
    return math.prod(query[:-1]), keys, query[-1], value[-1]


def _longest_key(call: OpCall, first: int) -> int:
    """Keys of the longest of packed samples; 0 where samples are not packed."""
    name = "cum_seq_k"
    if "efficient" in call.op:
        offsets, longest = (5, 7) if first == 0 else (7, 9)
        name = "cu_seqlens_k"
    elif "flash" in call.op:
        offsets, longest = (4, 6) if first == 0 else (7, 9)
    else:
        offsets, longest = (5, 7) if first == 0 else (10, 12)
    if tensor(call, offsets, name) is None:
        return 0
    value = argument(call, longest, "max_k")
    return int(value) if isinstance(value, (int, float)) else 0


def _attention(call: OpCall) -> int:
    """Scores and their product with the values: 2 x queries x keys x (D + Dv), all heads."""
    sizes = _heads(call, 0)
    if sizes is None:
        return 0
    queries, keys, dim, value_dim = sizes
    return 2 * queries * keys * (dim + value_dim)


def _attention_backward(call: OpCall) -> int:
    """Scores again, then dP, dV, dQ, dK: 2 x queries x keys x (3 D + 2 Dv), all heads."""
    sizes = _heads(call, 1)
    if sizes is None:
        return 0
    queries, keys, dim, value_dim = sizes
    return 2 * queries * keys * (3 * dim + 2 * value_dim)


def _quantized_product(call: OpCall) -> int:
    """gemm_4bit of bitsandbytes: 2 x elements of the input x outputs; its shape is an argument."""
    rows, shape = tensor(call, 0, "A"), call.args[2] if len(call.args) > 2 else None
    if rows is None or not isinstance(shape, tuple) or not isinstance(shape[0], int):
        return 0
    return 2 * rows.numel * shape[0]


def _formulas() -> dict[str, Formula]:
    addmm_product = partial(_product, position=1, names=("mat1", "mat2"))
    baddbmm_product = partial(_product, position=1, names=("batch1", "batch2"))
    table: dict[Formula, str] = {
        _product: "mm _int_mm _scaled_mm bmm _grouped_mm",
        addmm_product: "addmm addmm_ _addmm_activation",
        baddbmm_product: "baddbmm baddbmm_",
        _linear: "linear",
        _convolution: "convolution _convolution cudnn_convolution convolution_overrideable "
        "_slow_conv2d_forward",
        _convolution_backward: "convolution_backward",
    }
    formulas = {f"aten.{op}": formula for formula, ops in table.items() for op in ops.split()}
    formulas["bitsandbytes.gemm_4bit"] = _quantized_product
    for kernel in ("flash", "efficient", "cudnn"):
        outer, inner = f"aten._scaled_dot_product_{kernel}_attention", f"aten._{kernel}_attention"
        formulas |= dict.fromkeys((outer, f"{inner}_forward"), _attention)
        formulas |= dict.fromkeys((f"{outer}_backward", f"{inner}_backward"), _attention_backward)
    return formulas


_FORMULAS = _formulas()
