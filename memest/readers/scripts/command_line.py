"""Arguments that a script takes: argparse, HfArgumentParser and TRL's, tyro, with defaults.

Source: argparse of Python 3.13 (``dest``, ``action``, ``default``); transformers 5.23
``hf_argparser.py``; TRL 1.16 ``scripts/utils.py`` (``TrlParser``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memest.config.option_table import OPTIONS
from memest.config.options import HARMLESS_ARGUMENTS
from memest.readers.command_words import read_arguments
from memest.readers.documents import plain_value
from memest.readers.scripts.things import Call, Class, Namespace, Symbol, Unknown, Value
from memest.readers.training_arguments import IGNORED_KEYS, UNMODELLED_KEYS

__all__ = [
    "DATACLASS_PARSERS",
    "PARSERS",
    "CommandLine",
    "Option",
    "parsed_arguments",
    "parsed_dataclasses",
]

PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
"""Parsers whose arguments are the fields of dataclasses."""
DATACLASS_PARSERS = ("tyro.cli", "simple_parsing.parse", "draccus.parse", "pyrallis.parse")
"""Functions that fill the dataclass they are given."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "ModelConfig": {"dtype": "float32", "attn_implementation": None, "model_revision": "main"},
    "TrainingArguments": {"model_init_kwargs": None},
}
"""What TRL's own scripts ask of the arguments, which a command may leave out (TRL 1.16)."""


@dataclass(frozen=True, slots=True)
class Option:
    """An argument, as a parser declares it.

    Attributes:
        shown: how answers call it.
        flags: how it is spelt; none for one that goes by its place.
        off: spellings that switch it off.
        takes: how many values: ``value``, ``many``, ``maybe``, or none where it is a switch.
        const: its value where it may have one and has none.
        otherwise: its value where it is not there, and no default is named.
        text: its value stays a text.
        truth: any text is true, ``type=bool`` of argparse.
    """

    shown: str
    flags: tuple[str, ...]
    off: tuple[str, ...] = ()
    takes: str = ""
    const: Any = None
    otherwise: Any = None
    text: bool = False
    truth: bool = False

    def value_of(self, word: str) -> Any:
        """A word as the value that the parser makes of it."""
        return bool(word) if self.truth else word if self.text else plain_value(word)


def _spelt(flag: str) -> str:
    return flag.replace("_", "-") if flag.startswith("--") else flag


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

    def find(self, option: Option, every: Iterable[str] = ()) -> tuple[bool, Any]:
        """Whether an argument is among the words, and its value: the last one counts.

        A hyphen is as good as an underscore: a program that is stricter stops and takes nothing.

        Args:
            option: the argument.
            every: all flags of a parser that takes beginnings of them, as argparse does.
        """
        flags, off = set(map(_spelt, option.flags)), set(map(_spelt, option.off))
        long = {_spelt(flag) for flag in every if flag.startswith("--")}
        words = self.words or ()
        for place in reversed(range(len(words))):
            typed, equals, text = words[place].partition("=")
            flag = _spelt(typed)
            if flag.startswith("--") and flag not in long:
                begun = [each for each in long if each.startswith(flag)]
                flag = begun[0] if len(begun) == 1 else flag
            elif typed[:1] == "-" and len(typed) > 2 and typed[:2] in flags and option.takes:
                flag, equals, text = typed[:2], "=", words[place][2:].removeprefix("=")
            if flag not in flags | off:
                continue
            self.words_taken.add(typed.lstrip("-").replace("-", "_"))
            if flag in off or (not option.takes and not equals):
                return True, flag not in off
            if equals:
                return True, option.value_of(text)
            values: list[Any] = []
            for value in words[place + 1 :]:
                if value.startswith("--") or (values and option.takes != "many"):
                    break
                if option.takes == "maybe" and value.startswith("-"):
                    break
                self.words_taken.add(value)
                values.append(option.value_of(value))
            if option.takes == "many":
                return True, values
            return True, values[0] if values else option.const
        return False, None

    def option(self, option: Option, default: Value | None, every: Iterable[str] = ()) -> Value:
        """The value of an argument: the command's, else its default; None for one that has none."""
        found, data = self.find(option, every)
        if found:
            self.taken[option.shown.lstrip("-").replace("-", "_")] = data
            return Value(data, given=(option.shown,))
        if default is None:
            return Value(Unknown(f"{option.shown} of the command line"))
        return default.beside(Value(None, defaults=(option.shown,)))

    def value_of(self, name: str, default: Value | None) -> Value:
        """A field of a dataclass."""
        if name in self.named:
            self.words_taken.add(name.partition(".")[0] if "." in name else "")
            return Value(self.named[name], given=(f"--{name}",))
        if default is not None and isinstance(default.data, Namespace):
            inner = default.data  # a dataclass in a dataclass: --train.batch-size
            values = {key: self.value_of(f"{name}.{key}", v) for key, v in inner.values.items()}
            return Value(Namespace(values, inner.rest, inner.methods))
        if default is None:
            return Value(Unknown(f"--{name} of the command line"))
        return default.beside(Value(None, defaults=(f"--{name}",)))


def parsed_arguments(parser: Call, added: Iterable[Call], line: CommandLine) -> Namespace:
    """What ``parse_args`` of argparse returns.

    Args:
        parser: what was made.
        added: the calls of its ``add_argument``.
        line: the words.
    """
    options = [(call, *_declared(call)) for call in added]
    every = [flag for _, _, option in options for flag in (*option.flags, *option.off)]
    values: dict[str, Value] = {}
    for call, name, option in options:
        if not option.flags and not option.off:
            values[name] = Value(Unknown(f"{name} of the command line", call.line))
            continue
        # by set_defaults, of what a file says, perhaps
        changed = parser.attributes.get(name, parser.attributes.get("**"))
        default = changed or call.keywords.get("default") or Value(option.otherwise)
        required, kind = (call.keywords.get(each) for each in ("required", "type"))
        is_required = required is not None and required.data is True
        if isinstance(default.data, str) and kind is not None and not option.text:
            is_builtin = isinstance(kind.data, Unknown)
            default = default.with_data(option.value_of(default.data)) if is_builtin else default
        value = line.option(option, None if is_required else default, every)
        if name not in values or value.given:
            values[name] = value  # of several that share a name, the first says the default
    rest = Value(Unknown("an argument of the command line", parser.line))
    return Namespace({**parser.attributes, **values}, rest)


def _declared(call: Call) -> tuple[str, Option]:
    """What ``add_argument`` declares: where its value goes, and how it is spelt."""
    names = [each.data for each in call.arguments if isinstance(each.data, str)]
    keywords = {name: value.data for name, value in call.keywords.items()}
    longest = next((name for name in names if name.startswith("--")), names[0] if names else "")
    dest = keywords.get("dest")
    name = dest if isinstance(dest, str) else longest.lstrip("-").replace("-", "_")
    if not longest.startswith("-"):
        return name, Option(longest, ())
    longest = f"--{longest.lstrip('-')}"
    action = keywords.get("action")
    action = action.name if isinstance(action, Symbol) else action
    kind = keywords.get("type")
    kind = kind.why if isinstance(kind, Unknown) else ""
    if action in ("store_true", "store_false"):
        on = action == "store_true"
        return name, Option(
            longest, tuple(names) if on else (), () if on else tuple(names), otherwise=not on
        )
    if action == "BooleanOptionalAction":
        off = tuple(f"--no-{each[2:]}" for each in names if each.startswith("--"))
        return name, Option(longest, tuple(names), off)
    if action == "store_const":
        return name, Option(longest, tuple(names), takes="maybe", const=keywords.get("const"))
    nargs = keywords.get("nargs")
    takes = "many" if nargs in ("+", "*") else "maybe" if nargs == "?" else "value"
    choices = keywords.get("choices")
    words = isinstance(choices, list) and all(isinstance(each, str) for each in choices)
    return name, Option(
        longest,
        tuple(names),
        takes=takes,
        const=keywords.get("const"),
        text=kind == "str" or (words and not kind),
        truth=kind == "bool",
    )


def parsed_dataclasses(parser: Call, line: CommandLine) -> list[Value]:
    """What a parser of dataclasses returns: one thing for each."""
    first = parser.argument(0, "dataclass_types", "f", "config_class")
    kinds = first.data if first is not None else None
    kinds = list(kinds) if isinstance(kinds, (list, tuple)) else [kinds]
    own_fields = {name for kind in kinds if isinstance(kind, Class) for name in kind.fields}
    if parser.name in PARSERS:
        _complete(line, own_fields)
    rest = {
        name: Value(data, given=(f"--{name}",))
        for name, data in line.named.items()
        if name not in own_fields
    }
    return [Value(_filled(kind, line, rest, parser.line)) for kind in kinds]


def _complete(line: CommandLine, own_fields: set[str]) -> None:
    """Beginnings of arguments as what they stand for: HfArgumentParser is an argparse parser."""
    names = own_fields | HARMLESS_ARGUMENTS | {*IGNORED_KEYS, *UNMODELLED_KEYS}
    names |= {keyword for option in OPTIONS for keyword in option.keywords}
    for typed in [name for name in line.named if name not in names]:
        begun = [name for name in names if name.startswith(typed)]
        if len(begun) == 1:
            line.named.setdefault(begun[0], line.named.pop(typed))
            line.words_taken.add(typed)


def _filled(kind: Any, line: CommandLine, rest: Mapping[str, Value], place: int) -> Any:
    if isinstance(kind, Class):
        values = {name: line.value_of(name, default) for name, default in kind.fields.items()}
        if not kind.base:
            return Namespace(values)
        whole = {**values, **rest}
        return Call(
            kind.base, place, keywords=whole, subclass=kind.name, own=frozenset(kind.fields)
        )
    if isinstance(kind, Symbol):
        made = Call(kind.path, place, keywords=dict(rest))
        of_models = "ModelConfig" if kind.name == "ModelConfig" else "TrainingArguments"
        for name, data in _DEFAULTS[of_models].items() if line.words is not None else ():
            made.attributes.setdefault(name, rest.get(name, Value(data)))
        return made
    return Unknown("a dataclass that is not read", place)
