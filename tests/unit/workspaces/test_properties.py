from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memest.workspaces.operator_call import GpuTraits, Lifetime, OpCall, TensorSpec, Workspace
from memest.workspaces.registry import all_rules, workspaces_of

EXTENTS = st.sampled_from([0, 1, 1, 2, 3, 7, 8, 31, 64, 129, 768, 4096])
DTYPES = st.sampled_from(["float32", "float16", "bfloat16", "float64", "int64", "bool"])
GPUS = st.builds(
    GpuTraits,
    capability=st.sampled_from([(7, 0), (7, 5), (8, 0), (8, 6), (9, 0), (12, 0)]),
    sm_count=st.sampled_from([1, 40, 82, 132, 148]),
    max_threads_per_sm=st.sampled_from([1024, 1536, 2048]),
    torch=st.sampled_from([(1, 12), (1, 13), (2, 0), (2, 6), (2, 9), (2, 11), (2, 13), (2, 15)]),
    deterministic=st.booleans(),
)


def dense(shape, dtype):
    stride, step = [], 1
    for extent in reversed(shape):
        stride.insert(0, step)
        step *= max(extent, 1)
    return TensorSpec(tuple(shape), tuple(stride), dtype)


@st.composite
def layouts(draw, ndim, dtype):
    """A tensor of a given rank: dense, permuted, expanded or sliced."""
    shape = [draw(EXTENTS) for _ in range(ndim)]
    kind = draw(st.sampled_from(["dense", "permuted", "expanded", "sliced"]))
    spec = dense(shape, dtype)
    if kind == "dense" or not ndim:
        return spec
    if kind == "permuted":
        order = draw(st.permutations(range(ndim)))
        moved = [0] * ndim
        step = 1
        for d in order:
            moved[d] = step
            step *= max(shape[d], 1)
        return TensorSpec(tuple(shape), tuple(moved), dtype)
    if kind == "expanded":
        return TensorSpec(tuple(shape), (0, *spec.stride[1:]), dtype)
    return TensorSpec(tuple(shape), tuple(2 * s for s in spec.stride), dtype)


@st.composite
def calls(draw, op):
    """Any arguments of legal kinds, whether or not the operator would take them together."""
    ndim = draw(st.integers(0, 5))
    dtype = draw(DTYPES)
    args = []
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["tensor", "tensor", "int", "bool", "none", "list", "tensors"]))
        if kind == "tensor":
            args.append(draw(layouts(ndim, dtype)))
        elif kind == "int":
            args.append(draw(st.integers(-1, 0)))
        elif kind == "bool":
            args.append(draw(st.booleans()))
        elif kind == "list":
            args.append(tuple(draw(st.lists(st.integers(0, 4), max_size=3))))
        elif kind == "tensors":
            args.append((dense((3,), "int64"), None))
        else:
            args.append(None)
    outputs = tuple(draw(layouts(ndim, dtype)) for _ in range(draw(st.integers(0, 3))))
    return OpCall(op, tuple(args), (), outputs, draw(st.sampled_from(["main", "autograd"])))


def check(found: tuple[Workspace, ...]) -> None:
    for position, hidden in enumerate(found):
        assert hidden.nbytes >= 0
        assert hidden.high_nbytes is None or hidden.high_nbytes >= hidden.nbytes
        assert hidden.freed_before is None or hidden.freed_before > position
        assert bool(hidden.key) == (hidden.lifetime is Lifetime.PERSISTENT)
        assert hidden.label


REDUCTIONS = [
    "aten.sum.dim_IntList",
    "aten.mean.dim",
    "aten.amax.default",
    "aten.max.dim",
    "aten.argmax.default",
    "aten.any.dim",
    "aten.var.correction",
    "aten.linalg_vector_norm.default",
    "aten.logsumexp.default",
]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_no_reduction_of_any_layout_raises(data):
    ndim = data.draw(st.integers(0, 5))
    spec = data.draw(layouts(ndim, data.draw(DTYPES)))
    dim = data.draw(st.integers(0, max(ndim - 1, 0)))
    keepdim = data.draw(st.booleans())
    kept = [1 if d == dim else e for d, e in enumerate(spec.shape) if keepdim or d != dim]
    op = data.draw(st.sampled_from(REDUCTIONS))
    at = (2, dim, keepdim) if "norm" in op else (dim, keepdim)
    call = OpCall(op, (spec, *at), (), (dense(kept, spec.dtype),), "main")
    check(workspaces_of(call, data.draw(GPUS)))


@pytest.mark.parametrize("info", all_rules(), ids=lambda info: info.name)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_no_rule_breaks_its_contract_on_odd_arguments(info, data):
    op = data.draw(st.sampled_from(info.ops))
    call = data.draw(calls(op if op.count(".") == 2 else f"{op}.default"))
    check(workspaces_of(call, data.draw(GPUS)))


H100 = GpuTraits((9, 0), 132, 2048)


def total(call: OpCall) -> int:
    return sum(hidden.nbytes for hidden in workspaces_of(call, H100))


@given(st.integers(1, 4096), st.integers(0, 4096))
def test_flash_backward_grows_with_the_sequence(length, more):
    def backward(s):
        q = TensorSpec((2, 8, s, 64), (s * 512, 64, 512, 1), "bfloat16")
        op = "aten._scaled_dot_product_flash_attention_backward.default"
        return OpCall(op, (q, q, q, q, q), (), (q, q, q), "autograd")

    assert total(backward(length)) <= total(backward(length + more))


@given(st.integers(3073, 50_000), st.integers(0, 50_000))
def test_embedding_gradient_grows_with_the_indices(count, more):
    def backward(n):
        args = dense((n, 64), "float32"), dense((n,), "int64"), 1 << 20, -1, False
        return OpCall("aten.embedding_dense_backward.default", args, (), (), "autograd")

    assert total(backward(count)) <= total(backward(count + more))


@given(st.integers(1, 64), st.integers(0, 64))
def test_convolution_grows_with_the_batch(batch, more):
    def forward(n):
        x = dense((n, 16, 8, 8), "float16")
        args = x, dense((16, 16, 3, 3), "float16")
        return OpCall("aten.convolution.default", args, (), (x,), "main")

    assert total(forward(batch)) <= total(forward(batch + more))
