"""Packages that something needs, and what is said where one is not installed. None is imported."""

from __future__ import annotations

import importlib.util
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from memest.config.installed import (
    VERIFIED,
    build_of,
    full_release,
    installed_version,
    release,
)
from memest.config.optimizers import facts_of
from memest.config.training_run import TrainingRun
from memest.errors import MissingDependencyError

__all__ = [
    "ADAPTERS",
    "BITSANDBYTES",
    "CUT_CROSS_ENTROPY",
    "LIGER",
    "LIGHTNING",
    "OPTIMIZER",
    "PREPARATION",
    "TORCH",
    "TRANSFORMERS",
    "Need",
    "broken_import",
    "build_again",
    "is_there",
    "library_needed",
    "library_of",
    "needs_of",
    "other_build",
    "pinned",
]


def is_there(module: str) -> bool:
    """Whether a package of the top level can be imported, as far as that is known before."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


_INSTALL = re.compile(r"pip install (?!--)('[^']+'|[\w-]+)")
"""A line to type, up to what it installs; with ``--no-deps`` nothing else is replaced anyway."""


def pinned(text: str) -> str:
    """A text whose lines to type keep the torch and the transformers that are installed.

    Packages that are built for one release of torch (torchvision) replace another one: gigabytes,
    and what was traced with the one that was there is not believed any more. ``torch==2.13.0`` is
    kept by a build of it (``+cpu``) as well, and where that came from an index of PyTorch's the
    line names it: what PyPI has beside it is built for CUDA, and cannot be imported with that one.
    Releases too old for memest's extras are not kept.
    """
    kept = [
        f" '{name}=={release(name)}'"
        for name, (oldest, *_) in VERIFIED.items()
        if (installed_version(name) or (0, 0)) >= tuple(map(int, oldest.split(".")))
    ]
    index = _index((full_release("torch") or "").partition("+")[2]) if kept else ""
    added = "".join((f" --extra-index-url {index}" if index else "", *kept))
    return _INSTALL.sub(lambda match: match[0] + added, text)


_BUILD = re.compile(r"cpu|xpu|cu\d+|rocm[\d.]+")


def _index(build: str) -> str:
    """The index of PyTorch's that has a build; empty for one of somebody else's."""
    return f"https://download.pytorch.org/whl/{build}" if _BUILD.fullmatch(build) else ""


def other_build(module: str) -> str:
    """What to say of a package that was built for another torch than is there; empty otherwise."""
    build, own = build_of(module), build_of("torch")
    if not is_there(module) or not build or not own or build == own:
        return ""
    return f"{module} is built for {build}, and the installed torch for {own}"


def build_again(module: str) -> str:
    """What to type for the release and the build of a package that go with the torch there is."""
    index = _index(build_of("torch"))
    place = f"--index-url {index} " if index else ""
    return f"pip uninstall -y {module}; pip install {place}{module} 'torch=={release('torch')}'"


def broken_import(error: BaseException) -> MissingDependencyError | None:
    """What to raise in place of an import that failed inside an installed package.

    transformers wraps such errors in its own (``Could not import module 'LlamaConfig'``), so that
    to blame is the last package that was being imported when the first of them was raised.

    Args:
        error: as it was caught; what caused it is followed.

    Returns:
        None where no package was being imported, or one is not installed.
    """
    from importlib.metadata import packages_distributions

    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if isinstance(error, ModuleNotFoundError):
        return None
    names = [
        str(frame.f_globals.get("__name__", "")).partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    known = packages_distributions() if names else {}
    blamed = [name for name in names if name in known and name not in _BYSTANDERS]
    if not blamed:
        return None
    name = blamed[-1]
    package = known[name][0]
    text = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    found = f"{package} is installed and cannot be imported ({type(error).__name__}: {text})"
    if package not in _BUILT_FOR_TORCH:
        return MissingDependencyError(f"{found}: pip install --force-reinstall {package}.")
    why = other_build(name) or f"it must go with the installed torch {full_release('torch')}"
    return MissingDependencyError(f"{found}: {why}. Do: {build_again(package)}.")


_BYSTANDERS = frozenset("memest torch transformers".split())
"""Packages through which an import runs that fails in another one."""
_BUILT_FOR_TORCH = frozenset("torchvision torchaudio".split())
"""Packages each release and build of which goes with one of torch."""


@dataclass(frozen=True, slots=True)
class Need:
    """A package without which something cannot be done.

    Attributes:
        module: what is imported.
        why: what needs it, and what to install.
        since: (major, minor) of the first release that will do; None = any.
    """

    module: str
    why: str
    since: tuple[int, int] | None = None

    def missing(self) -> MissingDependencyError:
        """What to raise where it is not installed."""
        return MissingDependencyError(pinned(self.why))

    def check(self) -> None:
        """Refuse a package that is not there, or too old.

        Raises:
            MissingDependencyError: it is so.
        """
        if not is_there(self.module):
            raise self.missing()
        version = None if self.since is None else installed_version(self.module)
        if self.since is not None and version is not None and version < self.since:
            needed, found = (".".join(map(str, numbers)) for numbers in (self.since, version))
            raise MissingDependencyError(
                f"{self.module} {found} is older than what memest works with: "
                + pinned(f"pip install '{self.module}>={needed}'.")
            )


TORCH = Need(
    "torch", "Tracing a model needs torch and transformers: pip install 'memest-gpu[torch]'."
)
TRANSFORMERS = Need(
    "transformers",
    "Tracing a model by name needs torch and transformers: pip install 'memest-gpu[torch]'.",
)
OPTIMIZER = Need(
    "torch", "Tracing an optimizer needs torch and transformers: pip install 'memest-gpu[torch]'."
)
ADAPTERS = Need(
    "peft",
    "Adapters (--lora-r, --peft) are built by peft, which is not installed: pip install "
    "'memest-gpu[peft]'.",
)
PREPARATION = Need(
    "peft",
    "prepare_model_for_kbit_training is peft's, which is not installed: pip install "
    "'memest-gpu[peft]', or add --no-prepare-kbit.",
)
LIGHTNING = Need(
    "lightning",
    "--loop lightning runs Lightning's Trainer, which is not installed: pip install lightning.",
)
BITSANDBYTES = Need(
    "bitsandbytes",
    "Quantised bases (--load-in-4bit, --load-in-8bit) are built by bitsandbytes, which is not "
    "installed: pip install 'memest-gpu[peft]'.",
    since=(0, 50),
)


def _kernels(option: str, module: str, package: str) -> Need:
    return Need(
        module,
        f"{option} is priced by tracing {package}, which is not installed: pip install --no-deps "
        f"{package}",
    )


CUT_CROSS_ENTROPY = _kernels("--fused-loss cce", "cut_cross_entropy", "cut-cross-entropy")
LIGER = _kernels("--use-liger-kernel", "liger_kernel", "liger-kernel")


def library_of(optim: str) -> Need | None:
    """The library whose code an optimizer is priced by; None for what memest knows by itself."""
    facts = facts_of(optim)
    if not facts.module:
        return None
    package = facts.package or facts.module
    return Need(
        facts.module.partition(".")[0],
        f"--optim {optim} is priced by tracing {package}, which is not installed: pip install "
        f"{package}",
    )


def library_needed(optim: str) -> Need | None:
    """:func:`library_of`, where its code runs; of the others the states are known."""
    return library_of(optim) if facts_of(optim).package else None


def needs_of(setup: TrainingRun) -> Iterator[Need]:
    """What the traces of a setup need beside torch and transformers, in the order of its use."""
    quantization = setup.quantization
    if quantization is not None:
        if not quantization.format.packed:
            yield BITSANDBYTES
        if setup.prepares_base:
            yield PREPARATION
    if setup.adapter is not None:
        yield ADAPTERS
    if setup.use_liger_kernel:
        yield LIGER
    if setup.fused_loss == "cce":
        yield CUT_CROSS_ENTROPY
    library = library_needed(setup.optimizer)
    if library is not None:
        yield library
