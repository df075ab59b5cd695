from __future__ import annotations

import pytest

from memest.workspaces.operator_call import GpuTraits, OpCall, TensorSpec, Workspace
from memest.workspaces.registry import workspaces_of


def _dense(*shape, dtype="float32"):
    stride, step = [], 1
    for extent in reversed(shape):
        stride.insert(0, step)
        step *= max(extent, 1)
    return TensorSpec(tuple(shape), tuple(stride), dtype)


def _call(op, *args, outputs=(), thread="main", **kwargs):
    return OpCall(op, tuple(args), tuple(sorted(kwargs.items())), tuple(outputs), thread)


@pytest.fixture(scope="session")
def dense():
    """A contiguous tensor: dense(4, 8, dtype="float16")."""
    return _dense


@pytest.fixture(scope="session")
def call():
    """A call: call("aten.mm.default", a, b, outputs=(c,))."""
    return _call


@pytest.fixture(scope="session")
def allocate():
    """Hidden allocations of a call on a GPU: allocate(gpu, op, *args, outputs=...)."""

    def run(gpu: GpuTraits, op: str, *args, **rest) -> tuple[Workspace, ...]:
        return workspaces_of(_call(op, *args, **rest), gpu)

    return run


@pytest.fixture(scope="session")
def sizes(allocate):
    """Their sizes only."""

    def run(*args, **rest) -> list[int]:
        return [hidden.nbytes for hidden in allocate(*args, **rest)]

    return run


@pytest.fixture(scope="session")
def h100():
    return GpuTraits((9, 0), 132, 2048)


@pytest.fixture(scope="session")
def a100():
    return GpuTraits((8, 0), 108, 2048)


@pytest.fixture(scope="session")
def v100():
    return GpuTraits((7, 0), 80, 2048)


@pytest.fixture(scope="session")
def t4():
    return GpuTraits((7, 5), 40, 1024)


@pytest.fixture(scope="session")
def rtx3090():
    return GpuTraits((8, 6), 82, 1536)
