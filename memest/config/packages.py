"""Packages that something needs, and what is said where one is not installed. None is imported."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass

from memest.config.installed import VERIFIED, installed_version, release
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
    "is_there",
    "library_needed",
    "library_of",
    "needs_of",
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
    kept by a build of it (``+cpu``) as well. Releases too old for memest's extras are not kept.
    """
    kept = [
        f" '{name}=={release(name)}'"
        for name, (oldest, *_) in VERIFIED.items()
        if (installed_version(name) or (0, 0)) >= tuple(map(int, oldest.split(".")))
    ]
    return _INSTALL.sub(lambda match: match[0] + "".join(kept), text)


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
