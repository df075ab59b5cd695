"""Liger kernels in a trace: the library's own Python, its kernels launched into nothing.

Liger's operators are autograd functions that allocate with torch and launch Triton kernels on what
they allocated. Their Python is run as it is, so what they save, reuse and allocate is the library's
own doing; launches are left out. Three things are told to it that meta tensors cannot say: that
their device counts as CUDA, what the GPU's properties are, and that there is a Triton.

Source: liger-kernel 0.8, ``ops/`` and ``transformers/monkey_patch.py``; ``apply_liger_kernel`` of
transformers ``integrations/liger.py``, which the Trainer calls for ``use_liger_kernel``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any
from unittest import mock

import torch

from memest.errors import ConfigError, MissingDependencyError
from memest.hidden.call import GpuTraits

__all__ = ["liger_applied"]

_OPS = "liger_kernel.ops"
_AS_CUDA = (('device.type == "cuda"', 'device.type == "meta"'),
            ('device.type != "cuda"', 'device.type != "meta"'))  # fmt: skip


class _Nothing:
    """Stands for anything of Triton: a decorator, a type, a kernel, a launch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a decorator returns what it decorates: a kernel that does nothing
        return _Nothing()

    def __getitem__(self, grid: Any) -> Any:
        return _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __eq__(self, other: object) -> bool:
        raise TypeError("Liger's Python asks for a value of Triton that a trace does not have")

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError("Liger's Python asks for a value of Triton that a trace does not have")


class _Constexpr:
    """``tl.constexpr``, whose value the Python around the kernels reads."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Triton(types.ModuleType):
    """A module in which everything is there and does nothing, but for its arithmetic."""

    __version__ = "3.4.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Constexpr if name == "constexpr" else _Nothing()

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        """Division, rounded up."""
        return -(-x // y)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        """The least power of two that is not below."""
        return 1 << max(0, n - 1).bit_length()


class _Finder(MetaPathFinder):
    """Finds a Triton that does nothing, and Liger's operators with meta for CUDA."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "triton" or name.startswith("triton."):
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        if name.startswith(f"{_OPS}."):
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and isinstance(spec.loader, SourceFileLoader):
                spec.loader = _MetaLoader(spec.loader.name, spec.loader.path)
            return spec
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Triton(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _MetaLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        source = self.get_source(fullname) or ""
        for said, meant in _AS_CUDA:
            source = source.replace(said, meant)
        return compile(source, self.path, "exec")


_loaded: dict[str, types.ModuleType] = {}
"""Liger as it was loaded for traces."""


@contextmanager
def liger_applied(model: torch.nn.Module, gpu: GpuTraits) -> Iterator[None]:
    """Apply Liger's kernels to a model as the Trainer does, for the time of a trace.

    Args:
        model: of transformers, on meta. Its own modules stay patched; what Liger replaces in
            transformers is put back.
        gpu: whose properties Liger asks for.

    Raises:
        MissingDependencyError: liger-kernel is not installed.
        ConfigError: Liger has no kernels for this kind of model.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise MissingDependencyError(
            "--use-liger-kernel is priced by tracing liger-kernel, which is not installed: pip "
            "install --no-deps liger-kernel"
        )
    properties = types.SimpleNamespace(
        multi_processor_count=gpu.sm_count, major=gpu.capability[0], minor=gpu.capability[1]
    )
    with ExitStack() as stack:
        for name, value in (
            ("get_device_properties", properties), ("get_device_capability", gpu.capability),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=value))
        stack.enter_context(_library())
        stack.enter_context(_put_back(model))
        apply = importlib.import_module("liger_kernel.transformers.monkey_patch")
        kind = str(getattr(getattr(model, "config", None), "model_type", ""))
        if kind not in apply.MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise ConfigError(
                f"--use-liger-kernel: Liger has no kernels for models of type {kind!r}, and the "
                "Trainer would train without them. Leave it out."
            )
        apply._apply_liger_kernel_to_instance(model=model)
        yield


@contextmanager
def _library() -> Iterator[None]:
    """Liger as it was loaded for traces, beside whatever the process has of it."""
    names = ("triton", "liger_kernel")

    def theirs() -> dict[str, types.ModuleType]:
        return {n: m for n, m in sys.modules.items() if n.partition(".")[0] in names}

    _asked_before()
    before = theirs()
    for name in before:
        del sys.modules[name]
    sys.modules.update(_loaded)
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        if not _loaded:
            utils: Any = importlib.import_module("liger_kernel.utils")
            utils.infer_device = lambda: "cuda"
            # it warns of backends that are not installed; the Triton kernels are its default
            logging.getLogger("liger_kernel").setLevel(logging.ERROR)
            importlib.import_module("liger_kernel.transformers")
        yield
    finally:
        sys.meta_path.remove(finder)
        _loaded.update(theirs())
        for name in theirs():
            del sys.modules[name]
        sys.modules.update(before)


def _asked_before() -> None:
    """Whether there is a real Triton is asked once in a process: before there is another one."""
    from torch.utils._triton import has_triton_package
    from transformers.utils.import_utils import is_triton_available

    has_triton_package()
    is_triton_available()


@contextmanager
def _put_back(model: torch.nn.Module) -> Iterator[None]:
    """What Liger replaces in transformers' modules and in torch is as before afterwards."""
    owners = {
        type(part).__module__ for part in model.modules()
        if type(part).__module__.startswith("transformers.")
    }  # fmt: skip
    spaces = [sys.modules[name].__dict__ for name in sorted(owners)]
    classes = {type(part) for part in model.modules() if type(part).__module__ in owners}
    kept = [(space, dict(space)) for space in spaces]
    forwards = [(kind, kind.__dict__.get("forward")) for kind in classes]
    cross_entropy = torch.nn.functional.cross_entropy
    try:
        yield
    finally:
        torch.nn.functional.cross_entropy = cross_entropy
        for space, values in kept:
            space.update(values)
        for kind, forward in forwards:
            if forward is not None and kind.__dict__.get("forward") is not forward:
                kind.forward = forward
