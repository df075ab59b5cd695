"""Libraries of Triton kernels, loaded without Triton: their Python runs, their launches do nothing.

Such a library is Python that allocates with torch and launches kernels on what it allocated. It is
loaded beside whatever the process has of it, with a Triton in which everything is there and does
nothing, and with its questions about the device answered as on CUDA.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

__all__ = ["Library", "without_triton"]


@dataclass(frozen=True, slots=True)
class Library:
    """A library of Triton kernels.

    Attributes:
        name: its package.
        rewritten_prefix: how the names of its modules begin whose source is changed.
        replacements: texts of that source, each with what is read in its place.
        modules: the library as it was loaded for traces, by module name.
    """

    name: str
    rewritten_prefix: str
    replacements: tuple[tuple[str, str], ...]
    modules: dict[str, types.ModuleType] = field(default_factory=dict)


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

    def __iter__(self) -> Iterator[Any]:
        return iter(())  # the parameters of a configuration of a kernel

    def __eq__(self, other: object) -> bool:
        raise TypeError(
            "Python around Triton kernels asks for a value of Triton that a trace does not have"
        )

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError(
            "Python around Triton kernels asks for a value of Triton that a trace does not have"
        )


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
    """Finds a Triton that does nothing, and a library with meta for CUDA."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == "triton" or name.startswith("triton."):
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        if name.startswith(self._library.rewritten_prefix):
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and isinstance(spec.loader, SourceFileLoader):
                loader = spec.loader
                spec.loader = _Rewriting(loader.name, loader.path, self._library)
            return spec
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Triton(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Rewriting(SourceFileLoader):
    def __init__(self, name: str, path: str, library: Library) -> None:
        super().__init__(name, path)
        self._library = library

    def get_code(self, fullname: str) -> Any:
        source = self.get_source(fullname) or ""
        for old, new in self._library.replacements:
            source = source.replace(old, new)
        return compile(source, self.path, "exec")


@contextmanager
def without_triton(library: Library, prepare: Callable[[], None]) -> Iterator[None]:
    """A library as it was loaded for traces, beside whatever the process has of it.

    Args:
        library: what to load.
        prepare: imports it, the first time.
    """
    names = ("triton", library.name)

    def library_modules() -> dict[str, types.ModuleType]:
        return {n: m for n, m in sys.modules.items() if n.partition(".")[0] in names}

    _look_for_triton()
    before = library_modules()
    for name in before:
        del sys.modules[name]
    sys.modules.update(library.modules)
    finder = _Finder(library)
    sys.meta_path.insert(0, finder)
    try:
        if not library.modules:
            prepare()
        yield
    finally:
        sys.meta_path.remove(finder)
        library.modules.update(library_modules())
        for name in library_modules():
            del sys.modules[name]
        sys.modules.update(before)


def _look_for_triton() -> None:
    """Whether there is a real Triton is asked once in a process: before there is another one."""
    has_triton_package: Any = importlib.import_module("torch.utils._triton").has_triton_package
    imports: Any = importlib.import_module("transformers.utils.import_utils")

    has_triton_package()
    imports.is_triton_available()
