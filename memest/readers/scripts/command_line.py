"""Arguments that a script takes: argparse, HfArgumentParser and TRL's, Fire, tyro, with defaults.

Source: argparse of Python 3.13 (``dest``, ``action``, ``default``); transformers 5.23
``hf_argparser.py``; TRL 1.16 ``scripts/utils.py`` (``TrlParser``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memest.readers.command_words import read_arguments
from memest.readers.documents import plain_value
from memest.readers.scripts.things import Call, Class, Namespace, Symbol, Unknown, Value

__all__ = ["DATACLASS_PARSERS", "PARSERS", "CommandLine", "add_argument", "parsed_dataclasses"]

PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
"""Parsers whose arguments are the fields of dataclasses."""
DATACLASS_PARSERS = ("tyro.cli", "simple_parsing.parse", "draccus.parse", "pyrallis.parse")
"""Functions that fill the dataclass they are given."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "ModelConfig": {"dtype": "float32", "attn_implementation": None, "model_revision": "main"},
    "TrainingArguments": {"model_init_kwargs": None},
}
"""What TRL's own scripts ask of the arguments, which a command may leave out (TRL 1.16)."""


@dataclass(slots=True)
class CommandLine:
    """The words behind a script's name; None where it is read without a command.

    Attributes:
        words: as typed.
        named: ``--name value`` by name, and what a configuration file besides says.
        environment: variables that the command sets, where it starts Python itself; else None.
        used: arguments that reach a call which is read, or a condition.
        taken: values that the script's own parser took, by name.
        words_taken: the words that they were.
    """

    words: tuple[str, ...] | None = None
    named: dict[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] | None = None
    used: set[str] = field(default_factory=set)
    taken: dict[str, Any] = field(default_factory=dict)
    words_taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.words and not self.named:
            self.named = read_arguments(self.words)[0]

    def use(self, flags: Iterable[str]) -> None:
        """Note that arguments were read, however they are spelt."""
        self.used |= {flag.lstrip("-").replace("-", "_") for flag in flags}

    def find(self, flags: Sequence[str], *, takes_value: bool, many: bool) -> tuple[bool, Any]:
        """Whether one of an argument's spellings is there, and its value: the last one counts."""
        words = self.words or ()
        for place in reversed(range(len(words))):
            flag, equals, text = words[place].partition("=")
            if flag not in flags:
                continue
            self.words_taken.add(flag.lstrip("-").replace("-", "_"))
            if not takes_value:
                return True, None
            if equals:
                return True, plain_value(text)
            values: list[Any] = []
            for value in words[place + 1 :]:
                if value.startswith("--") or (values and not many):
                    break
                self.words_taken.add(value)
                values.append(plain_value(value))
            return True, values if many else (values[0] if values else None)
        return False, None

    def value_of(self, name: str, default: Value | None) -> Value:
        """A field of a dataclass, or a parameter of a function that Fire calls."""
        if name in self.named:
            return Value(self.named[name], given=(f"--{name}",))
        if default is None:
            return Value(Unknown(f"--{name} of the command line"))
        return default.beside(Value(None, defaults=(f"--{name}",)))


def add_argument(parser: Call, call: Call, line: CommandLine) -> None:
    """Keep what ``parser.add_argument`` adds, with the value that it has here."""
    flags = [each.data for each in call.arguments if isinstance(each.data, str)]
    if not flags:
        return
    keywords = {name: value.data for name, value in call.keywords.items()}
    longest = next((flag for flag in flags if flag.startswith("--")), flags[0])
    dest = keywords.get("dest")
    name = dest if isinstance(dest, str) else longest.lstrip("-").replace("-", "_")
    action = keywords.get("action")
    kind = action.name if isinstance(action, Symbol) else action
    stores = {"store_true": True, "store_false": False}.get(str(kind))
    shown = f"--{longest.lstrip('-')}"
    both_ways = kind == "BooleanOptionalAction"
    takes_value = stores is None and not both_ways
    many = keywords.get("nargs") in ("+", "*")
    found, data = line.find(flags, takes_value=takes_value, many=many)
    if both_ways and not found:
        found, _ = line.find([f"--no-{longest.lstrip('-')}"], takes_value=False, many=False)
        data, stores = False, None
    elif both_ways:
        data = True
    if not flags[0].startswith("-"):
        value = Value(Unknown(f"{flags[0]} of the command line", call.line))
    elif found:
        value = Value(stores if stores is not None else data, given=(shown,))
    elif keywords.get("required") is True:
        value = Value(Unknown(f"{shown} of the command line", call.line))
    else:
        default = call.keywords.get("default", Value(None if stores is None else not stores))
        kind = keywords.get("type")
        if isinstance(default.data, str) and isinstance(kind, Unknown) and kind.why != "str":
            default = default.with_data(plain_value(default.data))
        value = default.beside(Value(None, defaults=(shown,)))
    parser.attributes[name] = value
    if found:
        line.taken[longest.lstrip("-").replace("-", "_")] = value.data


def parsed_dataclasses(parser: Call, line: CommandLine) -> list[Value]:
    """What a parser of dataclasses returns: one thing for each."""
    first = parser.argument(0, "dataclass_types", "f", "config_class")
    kinds = first.data if first is not None else None
    kinds = list(kinds) if isinstance(kinds, (list, tuple)) else [kinds]
    own_fields = {name for kind in kinds if isinstance(kind, Class) for name in kind.fields}
    rest = {
        name: Value(data, given=(f"--{name}",))
        for name, data in line.named.items()
        if name not in own_fields
    }
    return [Value(_filled(kind, line, rest, parser.line)) for kind in kinds]


def _filled(kind: Any, line: CommandLine, rest: Mapping[str, Value], place: int) -> Any:
    if isinstance(kind, Class):
        values = {name: line.value_of(name, default) for name, default in kind.fields.items()}
        if not kind.base:
            return Namespace(values)
        return Call(kind.base, place, keywords={**values, **rest}, subclass=kind.name)
    if isinstance(kind, Symbol):
        made = Call(kind.path, place, keywords=dict(rest))
        of_models = "ModelConfig" if kind.name == "ModelConfig" else "TrainingArguments"
        for name, data in _DEFAULTS[of_models].items() if line.words is not None else ():
            made.attributes.setdefault(name, rest.get(name, Value(data)))
        return made
    return Unknown("a dataclass that is not read", place)
