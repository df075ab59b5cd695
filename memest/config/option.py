"""What an option of an estimate is, and how a field of a dataclass declares one."""

from __future__ import annotations

import dataclasses
import enum
import functools
from dataclasses import dataclass
from typing import Any, TypeVar

from memest.config.kinds import choose, whole

__all__ = ["Kind", "Option", "Panel", "legal", "option", "options_of", "settle"]

_T = TypeVar("_T")


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
        field: the field of :class:`memest.config.setup.Setup` it sets, empty for an argument of
            :func:`memest.estimate` itself.
        key: the part of that field's value it sets; empty = all of it, or something else.
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
    key: str = ""
    names_file: bool = False

    @property
    def keywords(self) -> tuple[str, ...]:
        """Every name it has in Python."""
        spelt = (flag[2:].replace("-", "_") for flag in self.flags if flag.startswith("--"))
        return tuple(dict.fromkeys((self.name, *spelt, *self.aliases)))

    @classmethod
    def of(
        cls,
        name: str,
        help_text: str,
        panel: Panel,
        kind: Kind = Kind.TEXT,
        *,
        flags: str = "",
        aliases: str = "",
        **more: Any,
    ) -> Option:
        """An option whose names are words in a line.

        Args:
            name: its keyword in Python.
            help_text: one or two sentences.
            panel: heading in the help.
            kind: what it takes.
            flags: spellings of the command line; left out, the name with dashes.
            aliases: further keywords in Python.
            more: other attributes.
        """
        if not flags:
            dashed = name.replace("_", "-")
            flags = f"--{dashed} --no-{dashed}" if kind is Kind.EITHER else f"--{dashed}"
        if kind is Kind.WHOLE:
            more = {"metavar": "N", **more}
        return cls(
            name=name,
            flags=tuple(flags.split()),
            help=help_text,
            panel=panel,
            kind=kind,
            aliases=tuple(aliases.split()),
            **more,
        )


def option(
    default: _T,
    help_text: str,
    kind: Kind | None = None,
    *,
    between: tuple[int, int] | None = None,
    traced: bool = True,
    **more: Any,
) -> _T:
    """A field of a dataclass that is an option: its one declaration.

    Args:
        default: of the field; the help says what it is.
        help_text: one or two sentences.
        kind: what it takes; left out, what the default is: a switch, a whole number or text.
        between: the least and the greatest of a whole number.
        traced: it may change the trace of a step.
        more: arguments of :meth:`Option.of`.
    """
    if kind is None:
        kind = Kind.TEXT
        if isinstance(default, int):
            kind = Kind.SWITCH if isinstance(default, bool) else Kind.WHOLE
    if (
        kind not in (Kind.SWITCH, Kind.EITHER)
        and isinstance(default, (int, float, str))
        and default != ""
    ):
        shown = f"{default:g}" if isinstance(default, float) else default
        help_text += f" Default: {shown}."
    declared = {"help_text": help_text, "kind": kind, **more}
    metadata = {"option": declared, "between": between, "traced": traced}
    return dataclasses.field(default=default, metadata=metadata)


def options_of(
    owner: type, *, field: str = "", panel: Panel | None = None, prefix: str = ""
) -> list[Option]:
    """The options that the fields of a dataclass declare.

    Args:
        owner: the dataclass.
        field: the field of a setup that holds it; left out, its fields are the setup's own.
        panel: heading of those that name none.
        prefix: of the keywords.
    """
    made = []
    for each in dataclasses.fields(owner):
        if "option" in each.metadata:
            values: dict[str, Any] = {"name": prefix + each.name, "panel": panel}
            values |= {"field": field, "key": each.name} if field else {"field": each.name}
            made.append(Option.of(**values | each.metadata["option"]))
    return made


def settle(owner: object) -> None:
    """Check the numbers of a frozen dataclass against their ranges, make members of its choices.

    Raises:
        ConfigError: a value that is not legal.
    """
    declaring: Any = type(owner)
    for name, flag, default, between in _settled(declaring):
        value = getattr(owner, name)
        if isinstance(default, enum.StrEnum):
            object.__setattr__(owner, name, choose(flag, value, type(default)))
        elif between and not (value is None and default is None):
            whole(flag, value, *between)


@functools.cache
def _settled(owner: Any) -> list[tuple[str, str, Any, tuple[int, int] | None]]:
    flags = {made.key or made.field: made.flags[0] for made in options_of(owner)}
    return [
        (each.name, flags[each.name], each.default, each.metadata["between"])
        for each in dataclasses.fields(owner)
        if "option" in each.metadata
    ]


def legal(kind: type[enum.StrEnum]) -> str:
    """The values of a choice, as a help text lists them."""
    return ", ".join(member.value for member in kind)
