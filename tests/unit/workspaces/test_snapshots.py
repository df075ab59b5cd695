"""The rules against allocator histories that were recorded on real GPUs.

The recordings are not part of the repository: MEMEST_SNAPSHOTS names their folder, else
``shared/snapshots`` beside the checkout is tried, and without it these tests are skipped.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections import Counter
from pathlib import Path

import pytest

from memest.workspaces.operator_call import GpuTraits, TensorSpec
from support.paths import SHARED

FOLDER = Path(os.environ.get("MEMEST_SNAPSHOTS", SHARED / "snapshots"))

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no recorded snapshots at hand")

H100 = GpuTraits((9, 0), 132, 2048, (2, 6))
BATCH, WIDTH, VOCABULARY = 4, 2560, 10_000
CASES = [("h100_lm3b_fp32_ctx128_fullstep", 128), ("h100_lm3b_fp32_ctx256_fullstep", 256)]


class Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"a snapshot holds plain containers, not {module}.{name}")


@functools.cache
def history(name: str) -> list[list[dict]]:
    path = FOLDER / f"{name}.pickle"
    if not path.is_file():
        pytest.skip(f"{path.name} is not at hand")
    with path.open("rb") as file:
        return Plain(file).load()["device_traces"]


def made_in(name: str, *functions: str) -> list[int]:
    """Sizes of the allocations below one of some C++ functions, in order."""
    return [
        event["size"]
        for trace in history(name)
        for event in trace
        if event["action"] == "alloc"
        and any(f in frame["name"] for frame in event["frames"] for f in functions)
    ]


def direct(name: str, function: str, depth: int = 8) -> list[int]:
    """The same for allocations that the function itself makes, not an operator below it."""
    found = []
    for trace in history(name):
        for event in trace:
            names = [frame["name"] for frame in event["frames"]]
            own = next((i for i, n in enumerate(names) if function in n), None)
            if event["action"] == "alloc" and own is not None and own <= depth:
                found.append(event["size"])
    return found


@pytest.mark.parametrize(
    ("name", "gpu", "count"),
    [
        ("h100_lm3b_fp32_ctx128_fullstep", H100, 2),
        ("h100_lm3b_autocast_ctx128_forward", H100, 1),
        ("qwen3_4gpu_expandable_oom", GpuTraits((8, 0), 108, 2048, (2, 8)), 4),
    ],
)
def test_cublas_workspaces(dense, sizes, name, gpu, count):
    a = dense(64, 64)
    (expected,) = sizes(gpu, "aten.mm.default", a, a, outputs=(a,))
    assert direct(name, "getCurrentCUDABlasHandle") == [expected] * count


@pytest.mark.parametrize(("name", "context"), CASES)
def test_reduction_scratch(dense, sizes, name, context):
    rows = BATCH * context

    def columns(width):  # positions lie fastest in what these reductions get
        return TensorSpec((rows, width), (1, rows), "float32")

    maximum = sizes(
        H100,
        "aten.max.dim",
        columns(VOCABULARY),
        1,
        outputs=(dense(rows), dense(rows, dtype="int64")),
    )
    total = sizes(H100, "aten.sum.dim_IntList", columns(VOCABULARY), (1,), outputs=(dense(rows),))
    norms = sizes(
        H100, "aten.sum.dim_IntList", columns(WIDTH), (1,), True, outputs=(dense(rows, 1),)
    )
    expected = Counter(maximum) + Counter(total) + Counter(norms * 65)
    assert Counter(direct(name, "gpu_reduce_kernel")) == expected


@pytest.mark.parametrize(("name", "context"), CASES)
def test_reductions_that_needed_no_scratch(dense, sizes, name, context):
    del name
    # norm of each position, and gradient of the norm's weight: in the step, without scratch
    x = dense(BATCH, context, WIDTH)
    norm = dense(BATCH, context, 1)
    args = x, 2, (-1,), True
    assert sizes(H100, "aten.linalg_vector_norm.default", *args, outputs=(norm,)) == []
    if context == 128:
        args = x, (0, 1), True
        out = dense(1, 1, WIDTH)
        assert sizes(H100, "aten.sum.dim_IntList", *args, outputs=(out,)) == []


@pytest.mark.parametrize(("name", "context"), CASES)
def test_gradient_of_token_look_up(dense, sizes, name, context):
    positions = BATCH * context
    gradient = TensorSpec((BATCH, context, WIDTH), (context, 1, positions), "float32")
    tokens = dense(BATCH, context, dtype="int64")
    args = dense(VOCABULARY, WIDTH), (tokens,), gradient, True, True
    expected = sizes(H100, "aten._index_put_impl_.default", *args)
    # the last of the two in the step; the other one indexed with a tensor of the host
    assert made_in(name, "at::native::_index_put_impl_")[-len(expected) :] == expected


def test_nonzero(dense, sizes):
    found = made_in("qwen3_4gpu_expandable_oom", "nonzero_cuda_out_impl")
    short = sizes(H100, "aten.nonzero.default", dense(64, dtype="bool"))
    long = sizes(H100, "aten.nonzero.default", dense(200_000, dtype="bool"))
    # count, scratch, (output,) scratch: what the limits between short and long are is unknown
    assert {tuple(found[i : i + 2]) for i in range(0, len(found), 4)} <= {
        tuple(short[:2]),
        tuple(long[:2]),
    }
    assert set(found[3::4]) == {short[2]}


def test_broadcast_look_up(dense, sizes):
    # the attention mask: 8 x 376 positions by two indices, then the looked-up bools
    found = made_in("qwen3_4gpu_expandable_oom", "_ops::index_Tensor")[:3]
    length = found[2] // 8
    indices = dense(8, 1, dtype="int64"), dense(length, dtype="int64")
    args = dense(8, length, dtype="bool"), indices
    assert sizes(H100, "aten.index.Tensor", *args) == found[:2]


def test_topk_of_one_long_slice(dense, sizes):
    found = made_in("qwen3_4gpu_expandable_oom", "mbtopk::launch")
    outputs = dense(1, 50), dense(1, 50, dtype="int64")
    expected = sizes(H100, "aten.topk.default", dense(1, 131_072), 50, outputs=outputs)

    def rounded(size):
        return -(-size // 512) * 512

    assert [rounded(s) for s in found[:8]] == [rounded(s) for s in expected]
