"""What an option of an estimate is, whoever names it: command line, Python, a file, a page."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Kind", "Option", "Panel", "legal"]


class Kind(enum.StrEnum):
    """What an option takes."""

    WHOLE = "whole number"
    NUMBER = "number"
    TEXT = "text"
    SWITCH = "switch"
    """On when named; Python and the command line take True and False too."""
    EITHER = "switch with a negative form"
    """On, off, or left to the software."""
    MODE = "switch that may carry a value"
    LIST = "text, repeatable"


class Panel(enum.StrEnum):
    """Under which heading of the help an option stands."""

    MODEL = "Model"
    OWN_MODULE = "Modules of your own"
    ADAPTERS = "Adapters (peft)"
    QUANTIZATION = "Quantised base (bitsandbytes)"
    BATCH = "Batch"
    LENGTHS = "Lengths of samples"
    GENERATION = "Generation"
    PRECISION = "Precision"
    OPTIMIZER = "Optimizer"
    RECOMPUTE = "Activation checkpointing"
    KERNELS = "Attention"
    SOFTWARE = "Loop, software and allocator"
    GPU = "GPU"
    DISTRIBUTED = "Several GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: its keyword in Python.
        flags: spellings of the command line, the one that its help shows first.
        help: one or two sentences.
        panel: heading in the help.
        kind: what it takes.
        metavar: how the help calls the value.
        aliases: further keywords in Python; with dashes they work on the command line too.
        field: the field of :class:`memest.setup.Setup` it sets, empty for an argument of
            :func:`memest.estimate` itself.
        names_file: its value may be the path of a file.
    """

    name: str
    flags: tuple[str, ...]
    help: str
    panel: Panel
    kind: Kind = Kind.TEXT
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    field: str = ""
    names_file: bool = False

    @property
    def keywords(self) -> tuple[str, ...]:
        """Every name it has in Python."""
        spelt = (flag[2:].replace("-", "_") for flag in self.flags if flag.startswith("--"))
        return tuple(dict.fromkeys((self.name, *spelt, *self.aliases)))


def legal(kind: type[enum.StrEnum]) -> str:
    """The values of a choice, as a help text lists them."""
    return ", ".join(member.value for member in kind)
