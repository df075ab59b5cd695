"""What expressions of a script stand for: plain values, calls of libraries, what is not known."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = [
    "Call",
    "Class",
    "Function",
    "NamedPart",
    "Namespace",
    "OpenFile",
    "Part",
    "Settings",
    "Symbol",
    "Unknown",
    "Value",
    "entry_of",
    "is_unknown",
    "known",
]

_VALUES = ("torch", "transformers", "peft", "trl", "accelerate", "unsloth", "bitsandbytes")
"""Libraries whose names are values: ``torch.bfloat16``, ``TaskType.CAUSAL_LM``."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """What cannot be told without running.

    Attributes:
        why: in words, mostly the expression itself.
        line: where.
    """

    why: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class OpenFile(Unknown):
    """A file that is open.

    Attributes:
        path: as the script names it.
    """

    path: str = ""


class Part(Unknown):
    """Some parameters of a model, ``model.fc.parameters()``; how many cannot be told."""

    __slots__ = ()


class NamedPart(Part):
    """Parameters whose names or shapes decide: others of the model may be in another list."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Symbol:
    """Something of a library.

    Attributes:
        path: with the names it was imported under undone: ``torch.optim.AdamW``.
    """

    path: str

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rpartition(".")[2]

    @property
    def library(self) -> str:
        """The first part."""
        return self.path.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Value:
    """What an expression stands for.

    Attributes:
        data: a plain value, or one of the classes here.
        given: arguments of the command line that are in it and that the command names.
        defaults: those that have their default.
        line: where it is an argument of a call.
    """

    data: Any
    given: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()
    line: int = 0

    def with_data(self, data: Any) -> Value:
        """Other data from the same arguments."""
        return Value(data, self.given, self.defaults, self.line)

    def at(self, line: int) -> Value:
        """The same as an argument in a line."""
        return Value(self.data, self.given, self.defaults, line)

    def beside(self, *others: Value) -> Value:
        """The same data, with the arguments of others besides."""
        parts = (self, *others)
        return Value(
            self.data,
            tuple(dict.fromkeys(flag for part in parts for flag in part.given)),
            tuple(dict.fromkeys(flag for part in parts for flag in part.defaults)),
            self.line,
        )


class Settings(dict[str, Any]):
    """A mapping some of whose entries a command changes.

    Attributes:
        given: those entries, with how the command names them.
    """

    __slots__ = ("given",)

    def __init__(self, entries: Mapping[str, Any] | None = None) -> None:
        super().__init__(entries or {})
        self.given: dict[str, str] = {}


def entry_of(base: Value, key: str) -> Value:
    """An entry of a mapping; what refers to another entry, ``${batch_size}``, cannot be told."""
    data = base.data[key]
    if isinstance(data, str) and "${" in data:
        return base.with_data(Unknown(data))
    named = base.data.given.get(key) if isinstance(base.data, Settings) else None
    value = base.with_data(data)
    return value if named is None else value.beside(Value(None, given=(named,)))


@dataclass(eq=False, slots=True)
class Call:
    """A call of a library's function or class, or of a method of something.

    Attributes:
        path: with the names of imports undone; a method's name alone.
        receiver: what the method is of.
        arguments: by position.
        keywords: by name; ``**`` for a mapping that is not known.
        line: where it stands.
        conditional: it stands under a condition that cannot be told.
        every: N of such a condition ``if step % N == 0``.
        loops: the loops around it, from the outside in.
        loaders: what these loops take their batches from.
        inside: the functions of the script in whose bodies it stands, from the outside in.
        handed: it is in a function that is handed on, to whoever calls it.
        without_grad: it stands under ``torch.no_grad()``, or what is as good.
        owner: the class of the script that it stands in.
        subclass: the class of the script that stands for the library's.
        own: fields that this class adds.
        methods: those that the class of the script has.
        attributes: what was assigned to it.
        deleted: ``del`` took it.
    """

    path: str
    line: int
    receiver: Any = None
    arguments: tuple[Value, ...] = ()
    keywords: dict[str, Value] = field(default_factory=dict)
    conditional: bool = False
    every: Value | None = None
    loops: tuple[int, ...] = ()
    loaders: tuple[Call, ...] = ()
    inside: tuple[Function, ...] = ()
    handed: bool = False
    without_grad: bool = False
    owner: str = ""
    subclass: str = ""
    own: frozenset[str] = frozenset()
    methods: frozenset[str] = frozenset()
    attributes: dict[str, Value] = field(default_factory=dict)
    deleted: bool = False

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def maker(self) -> str:
        """What stands before the last part: the class of ``AutoModel.from_pretrained``."""
        return self.path.rpartition(".")[0].rpartition(".")[2]

    @property
    def kind(self) -> str:
        """The class that it makes an instance of: its own name, or what a class method is of."""
        return self.name if self.name[:1].isupper() else self.maker

    @property
    def library(self) -> str:
        """The first part of the path."""
        return self.path.partition(".")[0]

    @property
    def is_instance(self) -> bool:
        """Whether it makes an instance of a class, of which something is known."""
        return self.name[:1].isupper() or self.name in ("from_pretrained", "from_config")

    @property
    def parameters(self) -> Value | None:
        """What an optimizer is given to update."""
        return self.argument(0, "params", "optimizer_grouped_parameters", "model_or_params")

    def unconditional(self) -> Call:
        """The same as a call of a function that is handed on: made whatever stands around it."""
        return Call(self.path, self.line, keywords=self.keywords)

    def argument(self, place: int, *names: str) -> Value | None:
        """An argument by its position (-1 for none) or by one of its names."""
        for name in names:
            if name in self.keywords:
                return self.keywords[name]
        return self.arguments[place] if 0 <= place < len(self.arguments) else None


@dataclass(eq=False, slots=True)
class Function:
    """A function of the script.

    Attributes:
        node: its definition.
        names: what it sees around it.
        owner: the class that it is a method of.
        first: what it is a method of, and given as its first argument.
        is_followed: it was called, and its body with it.
        is_uncertain: its name may stand for something else.
        entry: decorators that make it one that the command line fills.
    """

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    names: Any
    owner: str = ""
    first: Value | None = None
    is_followed: bool = False
    is_uncertain: bool = False
    entry: tuple[Call, ...] = ()

    @property
    def decorators(self) -> frozenset[str]:
        """The last names of its decorators, ``staticmethod`` or ``no_grad``."""
        nodes = [] if isinstance(self.node, ast.Lambda) else self.node.decorator_list
        texts = [ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in nodes]
        return frozenset(text.rpartition(".")[2] for text in texts)

    def bound(self, instance: Call | Namespace | None, kind: Class) -> Function:
        """A method as an attribute of an instance of its class, or of the class where none is."""
        if "staticmethod" in self.decorators:
            return replace(self)
        if "classmethod" in self.decorators:
            return replace(self, first=Value(kind))
        return replace(self, first=None if instance is None else Value(instance))


@dataclass(eq=False, slots=True)
class Class:
    """A class of the script.

    Attributes:
        name: of it.
        base: the first base that is a library's, its path; empty for none.
        fields: of a dataclass, with their defaults; None for one that must be given.
        methods: functions of its body.
    """

    name: str
    base: str
    fields: dict[str, Value | None]
    methods: dict[str, Function]


@dataclass(eq=False, slots=True)
class Namespace:
    """Arguments of the command line, as ``parse_args`` returns them, or a dataclass of the script.

    Attributes:
        values: by name.
        rest: what any other name stands for; None where there are no others.
        methods: of its class.
    """

    values: dict[str, Value]
    rest: Value | None = None
    methods: dict[str, Function] = field(default_factory=dict)

    def update(self, entries: object, unknown: Value, *, told: bool) -> None:
        """Give entries of a mapping to it; where they cannot be told, none of its is known.

        Args:
            entries: a mapping, or anything else.
            unknown: what stands for what cannot be told.
            told: it surely runs.
        """
        if isinstance(entries, dict):
            self.values |= {k: Value(v) if told else unknown for k, v in entries.items()}
        else:
            self.values.clear()
            self.rest = unknown


def known(data: Any) -> Any:
    """Data as a document has it: names of libraries as words, unknown things as they are.

    Example:
        >>> known([Symbol("torch.bfloat16"), 3])
        ['bfloat16', 3]
    """
    if isinstance(data, Symbol):
        return data.name if data.library in _VALUES else Unknown(data.path)
    if isinstance(data, Mapping):
        return {str(key): known(value) for key, value in data.items()}
    if isinstance(data, (list, tuple, set, frozenset)):
        return [known(each) for each in data]
    if isinstance(data, (Call, Class, Function, Namespace)):
        return Unknown(getattr(data, "path", "") or type(data).__name__.lower())
    return data


def is_unknown(data: Any) -> bool:
    """Whether something in the data is not known."""
    if isinstance(data, Mapping):
        return any(is_unknown(each) for each in data.values())
    if isinstance(data, list):
        return any(is_unknown(each) for each in data)
    return isinstance(data, Unknown)
