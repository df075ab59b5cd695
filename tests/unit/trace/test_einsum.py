"""Layouts of einsum's results before 2.9, as a CPU build of torch 2.8 gave them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from memest.config.setup import SdpaBackend
from memest.trace.cuda.cuda_ops import cuda_operators
from memest.trace.legacy.torch import einsum_without_swap
from memest.workspaces.operator_call import GpuTraits

OLD = [
    ("ab,...b->...a", (10, 6), (2, 3, 6), (3, 1, 6)),
    ("ab,...b->...a", (10, 6), (6,), (1,)),
    ("ab,b...->...a", (5, 7), (7, 2, 3), (3, 1, 6)),
    ("ab,...b->a...", (5, 7), (2, 3, 7), (6, 3, 1)),
    ("bhqd,bhkd->bhkq", (2, 3, 4, 5), (2, 3, 6, 5), (72, 24, 1, 6)),
    ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5), (72, 24, 6, 1)),
    ("bqd,bkd->kqb", (2, 4, 5), (2, 6, 5), (1, 6, 24)),
    ("...qd,...kd->...kq", (2, 3, 4, 5), (2, 3, 6, 5), (72, 24, 1, 6)),
    ("bqd,bkd->bkq", (1, 4, 5), (1, 6, 5), (6, 1, 6)),
    ("bqd,kd->kbq", (2, 4, 5), (6, 5), (1, 24, 6)),
    ("bqd,kd->bkq", (2, 4, 5), (6, 5), (24, 1, 6)),
    ("bqd,kd->qkb", (2, 4, 5), (6, 5), (12, 1, 6)),
    ("ij,kl->klij", (2, 3), (4, 5), (30, 6, 3, 1)),
    ("ijs,kl->kij", (2, 3, 4), (5, 6), (6, 3, 1)),
    ("ij,jk->ki", (2, 3), (3, 4), (1, 4)),
    ("ij,jk->ki", (1, 3), (3, 4), (1, 4)),
    ("ij,jk", (4, 3), (3, 2), (2, 1)),
    ("zj,ja", (4, 3), (3, 2), (1, 2)),
    ("abcd,ad->cba", (2, 3, 4, 5), (2, 5), (3, 1, 12)),
    ("ac,abc->cb", (2, 3), (2, 4, 3), (4, 1)),
    ("iij,jk->ki", (3, 3, 4), (4, 5), (1, 5)),
    ("bnd,hdk->hbnk", (2, 3, 4), (5, 4, 6), (6, 90, 30, 1)),
    ("b...d,d...->...b", (2, 3, 4), (4, 3), (2, 1)),
    ("ij,jk->k i", (2, 3), (3, 4), (1, 4)),
]


@pytest.mark.parametrize(("equation", "left", "right", "strides"), OLD)
def test_layout_before_2_9(equation, left, right, strides):
    operands = torch.randn(left), torch.randn(right)

    result = einsum_without_swap(equation, list(operands))

    assert result.stride() == strides
    torch.testing.assert_close(result, torch.einsum(equation, *operands))


@pytest.mark.parametrize(("version", "first"), [((2, 8), "weight"), ((2, 9), "input")])
def test_a_trace_multiplies_as_its_version_does(version, first):
    weight = torch.empty(10, 6, device="meta", requires_grad=True)
    x = torch.empty(2, 3, 6, device="meta", requires_grad=True)

    with cuda_operators(GpuTraits((9, 0), 132, 2048, version), SdpaBackend.AUTO):
        result = torch.einsum("ab,...b->...a", weight, x)

    assert result.shape == (2, 3, 10)
    assert result.is_contiguous() == (first == "input")
    result.sum().backward()
    assert weight.grad.shape == weight.shape
    assert x.grad.shape == x.shape
