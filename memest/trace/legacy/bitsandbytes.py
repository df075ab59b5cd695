"""4-bit layers as bitsandbytes before 0.50 multiplied them, for the time of a trace.

Until 0.49 the weight was dequantised to the dtype it was loaded in and cast to that of the input,
both by operators; until 0.42 the input was kept for backward beside the packed weight, used or not.

Source: bitsandbytes 0.42.0 autograd/_functions.py, MatMul4Bit and matmul_4bit; releases up to 0.49
differ in what ``ctx.tensors`` keeps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from memest.config.setup import Setup

__all__ = ["bitsandbytes_as_before"]

_ONE_KERNEL_SINCE = (0, 50)
_INPUT_DROPPED_SINCE = (0, 43)


@contextmanager
def bitsandbytes_as_before(setup: Setup) -> Iterator[None]:
    """The matmul of 4-bit layers as the declared release has it."""
    version = setup.software.bitsandbytes
    absent = "bitsandbytes" not in sys.modules  # a live model may have its layers
    if absent or version is None or version >= _ONE_KERNEL_SINCE:
        yield
        return
    import bitsandbytes

    keeps_input = version < _INPUT_DROPPED_SINCE

    def matmul_4bit(
        a: torch.Tensor, b: torch.Tensor, quant_state: Any, out: Any = None, bias: Any = None
    ) -> Any:
        # layers gave the transposed weight, a view: what is kept of it is what was gathered
        return _MatMul4Bit.apply(a, b.t(), bias, quant_state, keeps_input)

    with mock.patch.object(bitsandbytes, "matmul_4bit", matmul_4bit):
        yield


def _weight(packed_weight: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed_weight.view(-1, 1), state).to(dtype)


class _MatMul4Bit(torch.autograd.Function):
    """``input @ dequantised weight``; what backward needs hangs on the node as attributes."""

    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        packed_weight: torch.Tensor,
        bias: Any,
        state: Any,
        keeps_input: bool,
    ) -> torch.Tensor:
        output = torch.nn.functional.linear(a, _weight(packed_weight, state, a.dtype), bias)
        ctx.state = state
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.tensors = (a if keeps_input else None, packed_weight)
        if not any(ctx.needs_input_grad[:2]):
            ctx.tensors = (None, None)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = gradient.sum(0, dtype=ctx.bias_dtype)
        grad_input = None
        if ctx.needs_input_grad[0]:
            _, packed_weight = ctx.tensors
            grad_input = torch.matmul(gradient, _weight(packed_weight, ctx.state, gradient.dtype))
        return grad_input, None, grad_bias, None, None
