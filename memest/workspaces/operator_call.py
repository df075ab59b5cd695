"""What a workspace rule sees and answers: an operator call by shapes, and the hidden allocations.

Torch-free on purpose: a trace stores its distinct calls, and the rules are evaluated when the
GPU is known, so one trace serves every GPU that runs the same operators.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "CONVOLUTION_WORKSPACE",
    "DTYPE_BYTES",
    "GpuTraits",
    "Lifetime",
    "OpCall",
    "TensorSpec",
    "Value",
    "Workspace",
]

CONVOLUTION_WORKSPACE = "cuDNN convolution workspace"
"""Labels what a run can do without: where it cannot be had, another algorithm is taken."""

DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "complex128": 16,
    "uint64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a call: shape and stride in elements, dtype by torch's name ("float32").

    ``on_host`` marks a tensor of the CPU that was handed to an operator of the GPU.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    on_host: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]


Value: TypeAlias = TensorSpec | int | float | bool | str | tuple["Value", ...] | None
"""An argument: tensors as specs, lists as tuples, dtypes and other objects by their text."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call of an operator, as the dispatcher saw it.

    Attributes:
        op: overload by name, for example ``aten.sum.dim_IntList``.
        args: positional arguments in the order of the schema.
        kwargs: keyword arguments, sorted by name.
        outputs: tensors returned, None where the operator returned none.
        thread: ``main`` (forward, optimizer) or ``autograd`` (backward): cuBLAS keeps one
            handle, hence one workspace, per thread.
    """

    op: str
    args: tuple[Value, ...]
    kwargs: tuple[tuple[str, Value], ...]
    outputs: tuple[TensorSpec | None, ...]
    thread: str

    @property
    def output(self) -> TensorSpec | None:
        """The first tensor returned."""
        return self.outputs[0] if self.outputs else None


class Lifetime(enum.StrEnum):
    """How long a hidden allocation lives."""

    OP = "op"
    """Freed before the operator returns."""
    PERSISTENT = "persistent"
    """Made at the first call that needs it (one for each ``key``), never freed."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """One allocation that a kernel makes and no tensor shows.

    Attributes:
        nbytes: expected size; 0 where none is expected but ``high_nbytes`` may be needed.
        label: what it is, for the report ("reduction scratch").
        lifetime: see :class:`Lifetime`.
        key: identity of a persistent allocation, for example ``("cublas", "main")``.
        high_nbytes: upper bound where the size is only known as a range, else ``nbytes``.
        freed_before: position, among the allocations of the same call, of the first one that
            is made after this one was freed; None when it lives until the operator returns. Those
            of one place go as C++ ends their scope, the youngest first.
        in_expression: part of one expression, and freed with it, before what the others hold.
        results_before: how many of the results the operator has made before; None for all.
            Those of a call do not fall.
    """

    nbytes: int
    label: str
    lifetime: Lifetime = Lifetime.OP
    key: tuple[str, ...] = ()
    high_nbytes: int | None = None
    freed_before: int | None = None
    results_before: int | None = None
    in_expression: bool = False


@dataclass(frozen=True, slots=True)
class GpuTraits:
    """What kernels ask about the GPU, and the software that decides for them.

    Attributes:
        capability: (major, minor) compute capability.
        sm_count: streaming multiprocessors.
        max_threads_per_sm: resident threads of one of them.
        torch: (major, minor) of PyTorch on that machine.
        deterministic: ``torch.use_deterministic_algorithms(True)``.
    """

    capability: tuple[int, int]
    sm_count: int
    max_threads_per_sm: int
    torch: tuple[int, int] = (2, 13)
    deterministic: bool = False
