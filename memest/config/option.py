"""What an option of an estimate is, and how a field of a dataclass declares one."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from memest.config.kinds import check_whole_number, choose
from memest.errors import ConfigError
from memest.files.texts import read_mapping

__all__ = [
    "OFF_WORDS",
    "ON_WORDS",
    "Kind",
    "Option",
    "Panel",
    "changed_flags",
    "check_pattern",
    "legal_values",
    "option",
    "options_of",
    "plain_values",
    "read_parts",
    "sentences",
    "settle",
]

_T = TypeVar("_T")
ON_WORDS = frozenset({"true", "yes", "on", "1", "t", "y"})
OFF_WORDS = frozenset({"false", "no", "off", "0", "f", "n"})
"""What people and configuration files write for a switch, in small letters."""


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
    """Under which heading of the help an option stands.

    Attributes:
        words: what the heading is asked for by, ``--help WORD``; the first is the one that is told.
    """

    words: tuple[str, ...]

    def __new__(cls, heading: str, *words: str) -> Panel:
        """A member whose value is the heading."""
        member = str.__new__(cls, heading)
        member._value_ = heading
        member.words = words
        return member

    MODEL = "Model", "model"
    OWN_MODULE = "Modules of your own", "modules"
    ADAPTERS = "Adapters (peft)", "peft", "lora", "adapters"
    QUANTIZATION = "Quantised base (bitsandbytes)", "quantisation", "quantization", "bitsandbytes"
    BATCH = "Batch", "batch"
    LENGTHS = "Lengths of samples", "lengths"
    GENERATION = "Generation", "generation"
    ROLLOUTS = "Completions to learn from", "rollouts", "rl"
    PRECISION = "Precision", "precision"
    OPTIMIZER = "Optimizer", "optimizer"
    RECOMPUTE = "Activation checkpointing", "checkpointing", "recompute"
    KERNELS = "Attention and kernels", "attention", "kernels"
    SOFTWARE = "Loop, software and allocator", "software", "allocator"
    LIFE = "Saving, resuming and host memory", "host", "saving", "resuming"
    GPU = "GPU", "gpu"
    DISTRIBUTED = "Several GPUs", "ddp", "gpus"
    FSDP = "FSDP", "fsdp"
    ZERO = "DeepSpeed ZeRO", "zero", "deepspeed"
    SHARED_LAYERS = "Tensor, sequence and expert parallelism", "parallel"
    PIPELINE = "Pipelines", "pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: its keyword in Python.
        flags: spellings of the command line, the one that its help shows first.
        help: one or two sentences.
        panel: heading in the help.
        short: its line in the short help; empty = the first sentence of ``help``, and the default.
            None = it stands in the long help alone.
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
    short: str | None = None
    kind: Kind = Kind.TEXT
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    field: str = ""
    key: str = ""
    names_file: bool = False

    @property
    def line(self) -> str:
        """What the short help says of it."""
        first, *others = sentences(self.help)
        return self.short or " ".join([first, *(x for x in others if x.startswith("Default: "))])

    @property
    def keywords(self) -> tuple[str, ...]:
        """Every name it has in Python."""
        spellings = (flag[2:].replace("-", "_") for flag in self.flags if flag.startswith("--"))
        return tuple(dict.fromkeys((self.name, *spellings, *self.aliases)))


def sentences(text: str) -> list[str]:
    """The sentences of a help text.

    Example:
        >>> sentences("Micro-batches of one step. Default: 1.")
        ['Micro-batches of one step.', 'Default: 1.']
    """
    return re.split(r"(?<=[.?!])\s+(?=[A-Z])", " ".join(text.split()))


_KINDS = {
    "int": Kind.WHOLE,
    "float": Kind.NUMBER,
    "bool": Kind.SWITCH,
    "bool | None": Kind.EITHER,
    "tuple[str, ...]": Kind.LIST,
}
"""What an option takes, by the type of its field; text for any other."""


def option(
    default: _T,
    help_text: str,
    names: str = "",
    *,
    between: tuple[int, int] | None = None,
    traced: bool = True,
    **more: Any,
) -> _T:
    """A field of a dataclass that is an option: its one declaration.

    Args:
        default: of the field; the help says what it is.
        help_text: one or two sentences.
        names: words in a line: flags (left out, the name with dashes), the metavar in capitals,
            further keywords in Python.
        between: the least and the greatest of a whole number.
        traced: it may change the trace of a step.
        more: attributes of :class:`Option`. Left out, the kind is that of the field's type, and
            the panel is that of the option in front of it.
    """
    declaration = {"help": help_text, "names": names, **more}
    metadata = {"option": declaration, "between": between, "traced": traced}
    return dataclasses.field(default=default, metadata=metadata)


def options_of(
    owner: type,
    *,
    field: str | None = None,
    parts: bool = True,
    panel: Panel | None = None,
    prefix: str = "",
) -> list[Option]:
    """The options that the fields of a dataclass declare.

    Args:
        owner: the dataclass.
        field: the field of a setup that they set; left out, its fields are the setup's own.
        parts: each sets the part of that field's value that has its name.
        panel: heading of the first ones.
        prefix: of the keywords.
    """
    options = []
    for owner_field in dataclasses.fields(owner):
        if "option" in owner_field.metadata:
            values: dict[str, Any] = {"name": prefix + owner_field.name, "panel": panel}
            values |= {"field": owner_field.name if field is None else field}
            values |= {"key": owner_field.name if parts and field else ""}
            options.append(_option_of(owner_field, values | owner_field.metadata["option"]))
            panel = options[-1].panel
    return options


def _option_of(field: dataclasses.Field[Any], values: dict[str, Any]) -> Option:
    """The option that a field declares."""
    annotation = str(field.type)
    plain_type = annotation.removesuffix(" | None")
    kind = values.setdefault("kind", _KINDS.get(annotation) or _KINDS.get(plain_type, Kind.TEXT))
    words = values.pop("names").split()
    flags = [word for word in words if word.startswith("-")]
    metavar = "".join(word for word in words if word.isupper())
    dashed_name = values["name"].replace("_", "-")
    default_flags = (
        [f"--{dashed_name}", f"--no-{dashed_name}"] if kind is Kind.EITHER else [f"--{dashed_name}"]
    )
    if field.default not in (None, "") and isinstance(field.default, (int, float, str)):
        default = f"{field.default:g}" if isinstance(field.default, float) else field.default
        if kind not in (Kind.SWITCH, Kind.EITHER):
            values["help"] += f" Default: {default}."
    values.setdefault("names_file", metavar in ("FILE", "PATH"))
    return Option(
        flags=tuple(flags or default_flags),
        metavar=metavar or ("N" if kind is Kind.WHOLE else ""),
        aliases=tuple(word for word in words if word not in flags and word != metavar),
        **values,
    )


def settle(owner: object) -> None:
    """Check the numbers of a frozen dataclass against their ranges, make members of its choices.

    Raises:
        ConfigError: a value that is not legal.
    """
    declaring: Any = type(owner)
    for name, flag, default, between in _option_rows(declaring):
        value = getattr(owner, name)
        if isinstance(default, enum.StrEnum):
            object.__setattr__(owner, name, choose(flag, value, type(default)))
        elif between and not (value is None and default is None):
            check_whole_number(flag, value, *between)


def changed_flags(owner: object) -> dict[str, str]:
    """The flags of a dataclass's options that are not as by default, by field."""
    declaring: Any = type(owner)
    return {
        name: flag.replace("--", "--no-", 1) if default is True else flag
        for name, flag, default, _ in _option_rows(declaring)
        if getattr(owner, name) != default
    }


@functools.cache
def _option_rows(owner: Any) -> list[tuple[str, str, Any, tuple[int, int] | None]]:
    flags = {entry.key or entry.field: entry.flags[0] for entry in options_of(owner)}
    return [
        (field.name, flags[field.name], field.default, field.metadata["between"])
        for field in dataclasses.fields(owner)
        if "option" in field.metadata
    ]


def read_parts(
    kind: Callable[..., _T], source: Any, name: str, *, takes: str, instead: str
) -> _T | None:
    """A part of a setup from a mapping of its names, or itself; None where nothing is said of it.

    Args:
        kind: its dataclass.
        source: what was given.
        name: of the field that it is the value of.
        takes: what to give, for errors.
        instead: what to type, likewise.

    Raises:
        ConfigError: another kind of value, or names that there are not.
    """
    declaring: Any = kind
    if source is None or isinstance(source, declaring):
        return cast("_T | None", source)
    values = read_mapping(source, name, takes=takes, instead=instead)
    names = [field.name for field in dataclasses.fields(declaring)]
    for key in values:
        if key not in names:
            raise ConfigError(
                f"{name} has the key {key!r}, which is not known. Legal: {', '.join(names)}."
            )
    return kind(**values)


def plain_values(owner: Any) -> dict[str, Any]:
    """The fields of a dataclass as plain values for JSON, in their order."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if hasattr(value, "to_dict"):
            value = value.to_dict()
        elif isinstance(value, enum.StrEnum):
            value = value.value
        out[field.name] = list(value) if isinstance(value, tuple) else value
    return out


def check_pattern(flag: str, pattern: str) -> re.Pattern[str]:
    """A regular expression that an option was given.

    Raises:
        ConfigError: it is none.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{flag} {pattern!r} is not a regular expression: {error}. Write one that names match, "
            f"for example {flag} 'layer.[0-5].', and a backslash before signs that mean themselves."
        ) from None


def legal_values(kind: type[enum.StrEnum]) -> str:
    """The values of a choice, as a help text lists them."""
    return ", ".join(member.value for member in kind)
