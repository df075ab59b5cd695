"""torch.einsum before it swapped operands: which of the two matrices comes first in the product.

Newer versions swap the operands of a pair where that gives the result its final memory order;
older ones always multiplied left by right and returned a transposed view. Layouts decide what
later reductions take as scratch, which copies of operands are made, and in which order backward
makes its two products.

Source: ``sumproduct_pair`` and ``einsum`` in ``aten/src/ATen/native/Linear.cpp``. The version was
found by running CPU builds: 2.6 and 2.8 return the transposed view, 2.9 and 2.10 swap.
"""

from __future__ import annotations

import string
from collections import Counter
from typing import Any

import torch

__all__ = ["EINSUM_SWAPS", "einsum_unswapped"]

EINSUM_SWAPS = (2, 9)


def einsum_unswapped(equation: str, tensors: list[torch.Tensor], *, path: Any = None) -> Any:
    """``einsum`` of two operands as older versions compute it: a kernel for the dispatcher.

    Three operands and more are contracted as the installed version does it.
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
    labels = _explicit(equation, tensors)
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
    summed = {*left, *right} - {*output}
    if not summed or any(size.get(label, 1) == 1 for label in summed for size in sizes):
        # nothing to contract; or summed beforehand, and what remains counts as right and last
        return None
    if not lone_left or not lone_right:
        return None
    if output.index(lone_right[-1]) > output.index(lone_left[0]):
        return None
    inner = [*both, *lone_left, *lone_right]
    return f"{left},{right}->{''.join(inner)}", [inner.index(label) for label in output]


def _explicit(equation: str, tensors: list[torch.Tensor]) -> tuple[str, str, str] | None:
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
    shared = "".join(free[: max(extra)])
    left, right = (
        name.replace("...", shared[len(shared) - count :])
        for name, count in zip(names, extra, strict=True)
    )
    if any(len(name) != tensor.dim() for name, tensor in zip((left, right), tensors, strict=True)):
        return None
    return left, right, output.replace("...", shared)
