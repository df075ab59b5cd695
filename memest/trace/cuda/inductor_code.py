"""The Python that Inductor writes for a GPU, run on meta tensors.

A compiled graph is a function that takes buffers (``empty_strided_cuda``), launches Triton kernels
on them, calls libraries (``extern_kernels.mm(..., out=)``, ``torch.ops.aten...``), renames buffers
it uses again and drops them (``del``). It is run as it is: buffers are meta tensors, launches are
left out, and the recorder sees what is born and what dies.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import torch

from memest.trace.recorder import Recorder
from memest.workspaces.operator_call import TensorSpec

__all__ = ["Code", "CodeWatch"]

_KERNEL = re.compile(r"^(\w+) = async_compile\.(\w+)\(", re.MULTILINE)
_FUNCTIONS = re.compile(r"^(?:class Runner|def call\()", re.MULTILINE)
_END = re.compile(r"^(?:def get_args|def benchmark_compiled_module|if __name__)", re.MULTILINE)
_MATMULS = frozenset(("mm", "addmm", "bias_addmm", "bmm", "baddbmm"))


class CodeWatch:
    """Who is told what compiled code does.

    Attributes:
        recorder: None while nothing is recorded.
        calls: how often compiled code ran.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.calls = 0


class Code:
    """One compiled graph, in place of the module that Inductor would load.

    Args:
        source: the module as Inductor wrote it.
        constants: tensors and objects that it names.

    Attributes:
        call: what Inductor calls.
        kernels: how many Triton kernels it has.
        watch: told of what is run; set before it is.
    """

    __file__ = "<inductor>"

    def __init__(self, source: str, constants: dict[str, Any]) -> None:
        self.watch = CodeWatch()
        self.kernels = 0
        space = self._names(source) | constants
        start = _FUNCTIONS.search(source)
        assert start is not None, "Inductor writes a function named call"
        end = _END.search(source, start.end())
        text = source[start.start() : end.start() if end else None]
        exec(compile(text, self.__file__, "exec"), space)  # noqa: S102 (Inductor's own code)
        self._call = space["call"]
        self.runner = space.get("runner")
        self.recursively_apply_fns = space.get("recursively_apply_fns")

    def call(self, args: list[Any]) -> Any:
        """Run the graph; the list of arguments is emptied, as Inductor does."""
        self.watch.calls += 1
        return self._call(args)

    def _names(self, source: str) -> dict[str, Any]:
        """What the written code takes from its module."""
        guards = torch._C._dynamo.guards  # type: ignore[attr-defined]

        def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")

        def do_nothing(*_: Any) -> None:
            """Layouts are Inductor's own; a fallback's meta kernel may lay out otherwise."""

        space: dict[str, Any] = {
            "torch": torch,
            "aten": torch.ops.aten,
            "inductor_ops": torch.ops.inductor,
            "_quantized": torch.ops._quantized,
            "math": math,
            "inf": math.inf,
            "nan": math.nan,
            "nanj": complex(0, math.nan),
            "device": _device,
            "empty_strided": torch.empty_strided,
            "empty_strided_cuda": empty,
            "empty_strided_cpu": guards._empty_strided_cpu,
            "empty_strided_cpu_pinned": guards._empty_strided_cpu,
            "reinterpret_tensor": guards._reinterpret_tensor,
            "alloc_from_pool": torch.ops.inductor._alloc_from_pool,
            "assert_size_stride": do_nothing,
            "assert_alignment": do_nothing,
            "copy_if_misaligned": lambda tensor: tensor,
            "extern_kernels": _Extern(self),
            "get_raw_stream": lambda _: 0,
            "run_intermediate_hooks": do_nothing,
            "maybe_profile": lambda *_: contextlib.nullcontext(),
        }
        for name, language in _KERNEL.findall(source):
            if language == "triton":
                self.kernels += 1
                space[name] = _Kernel(self)
            else:  # computes on the host, which takes nothing from the GPU
                space[name] = do_nothing
        return space


def _device(*args: Any, **kwargs: Any) -> torch.device:
    device = torch.device(*args, **kwargs)
    return torch.device("meta") if device.type == "cuda" else device


class _Kernel:
    """A Triton kernel that is not launched."""

    def __init__(self, code: Code) -> None:
        self._code = code

    def run(self, *_: Any, **__: Any) -> None:
        """A launch: counted, and a place where the first one may measure configurations."""
        recorder = self._code.watch.recorder
        if recorder is not None:
            recorder.count_launch()
            recorder.site("inductor.triton", (), ())


class _Extern:
    """Library calls of compiled code: PyTorch's own, on meta tensors."""

    def __init__(self, code: Code) -> None:
        self._code = code

    def __getattr__(self, name: str) -> Any:
        from torch._inductor.select_algorithm import extern_kernels

        function = getattr(extern_kernels, name)
        if name not in _MATMULS:
            return function

        def multiply(*args: Any, **kwargs: Any) -> Any:
            recorder = self._code.watch.recorder
            if recorder is not None:
                first, second = (_spec(a) for a in args[-2:])
                recorder.site("inductor.matmul", (first, second), ())
            return function(*args, **kwargs)

        return multiply


def _spec(tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(tuple(tensor.shape), tensor.stride(), dtype, tensor.device.type == "cpu")
