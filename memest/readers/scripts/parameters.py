"""Functions whose parameters a command line fills: those of click, Typer, Fire and tyro.

Source: click 8.3 ``core.py`` (``Option``, ``Parameter``), Typer 0.20 ``main.py``, Fire 0.7
``core.py`` (``_ParseKeywordArgs``, ``_ParseArgs``), tyro 0.9, absl 2.3 ``flags/_flag.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from memest.readers.documents import plain_value
from memest.readers.scripts.command_line import CommandLine, Option
from memest.readers.scripts.things import Call, Class, Namespace, Unknown, Value

__all__ = ["absl_flag", "of_click", "of_fire", "of_signature"]

_TYPER = ("typer.Option", "typer.Argument")
_NUMBER = re.compile(r"-[\d.]")


def of_click(decorators: Sequence[Call], line: CommandLine) -> dict[str, Value]:
    """What click gives a function, by its ``@click.option(...)`` and ``@click.argument(...)``."""
    out: dict[str, Value] = {}
    for call in decorators:
        names = [each.data for each in call.arguments if isinstance(each.data, str)]
        if call.name not in ("option", "argument") or not names:
            continue
        own = [name for name in names if not name.startswith("-")]
        pairs = [[part.strip() for part in name.partition("/")[::2]] for name in names]
        flags = tuple(first for first, _ in pairs if first.startswith("-"))
        longest = max(flags, key=lambda flag: (flag.startswith("--"), len(flag)), default="")
        name = (own[0] if own else longest.lstrip("-")).replace("-", "_").lower()
        keywords = {key: value.data for key, value in call.keywords.items()}
        default = call.keywords.get("default")
        if not flags:
            why = Unknown(f"{name} of the command line", call.line)
            out[name] = Value(why) if default is None or _loose(line) else default
            continue
        off = tuple(second for _, second in pairs if second)
        several = keywords.get("multiple") is True or isinstance(keywords.get("nargs"), int)
        is_switch = keywords.get("is_flag") is True or bool(off)
        if several or "flag_value" in keywords or keywords.get("count") is True:
            out[name] = Value(Unknown(f"{longest} of the command line", call.line))
            continue
        option = Option(
            longest,
            flags,
            off,
            takes="" if is_switch else "value",
            text=isinstance(default.data if default else None, str) or _is_text(keywords),
        )
        if default is None and (keywords.get("required") is True or "prompt" in keywords):
            out[name] = line.option(option, None)
        else:
            out[name] = line.option(option, default or Value(False if is_switch else None))
    return out


def _is_text(keywords: Mapping[str, object]) -> bool:
    """Whether an option's type is ``str``, or a choice of words."""
    kind = keywords.get("type")
    return isinstance(kind, Unknown) and kind.why == "str"


def of_signature(
    parameters: Mapping[str, tuple[Value | None, Value]], line: CommandLine
) -> dict[str, Value]:
    """What Typer and tyro give a function, by its parameters.

    Args:
        parameters: by name, the default, None for none, and the annotation.
        line: the words.
    """
    out: dict[str, Value] = {}
    for name, (default, annotation) in parameters.items():
        if isinstance(annotation.data, Class):  # tyro: --args.batch-size
            fields = annotation.data.fields
            values = {key: line.value_of(f"{name}.{key}", each) for key, each in fields.items()}
            out[name] = Value(Namespace(values, methods=dict(annotation.data.methods)))
            continue
        declared = next((each for each in (default, annotation) if _declares(each)), None)
        flags: tuple[str, ...] = (f"--{name}",)
        by_place = default is None
        if declared is not None:
            given = list(declared.data.arguments)
            if declared is default:
                first = declared.data.argument(0, "default")
                default = None if first is None or first.data is Ellipsis else first
                default = None if default and isinstance(default.data, Unknown) else default
                given = given[1:]
            named = [each.data for each in given if isinstance(each.data, str)]
            flags = tuple(named) or flags
            by_place = declared.data.name == "Argument"
        if by_place:
            why = Value(Unknown(f"{name} of the command line"))
            found, data = line.find(Option(f"--{name}", flags, takes="value"))
            out[name] = (
                Value(data, given=(f"--{name}",))
                if found
                else why
                if default is None or _loose(line)
                else default
            )
            continue
        words = annotation.data.why if isinstance(annotation.data, Unknown) else ""
        is_switch = bool(re.search(r"\bbool\b", words)) or (
            default is not None and isinstance(default.data, bool)
        )
        pairs = [flag.partition("/") for flag in flags]
        off = tuple(second.strip() for _, _, second in pairs if second)
        if is_switch and not off:
            off = tuple(f"--no-{first[2:]}" for first, _, _ in pairs if first.startswith("--"))
        is_text = words == "str" or (default is not None and isinstance(default.data, str))
        option = Option(
            f"--{name}",
            tuple(first.strip() for first, _, _ in pairs),
            off,
            takes="" if is_switch else "many" if re.search(r"\b[Ll]ist\b", words) else "value",
            text=is_text,
        )
        out[name] = line.option(option, default)
    return out


def _declares(value: Value | None) -> bool:
    return value is not None and isinstance(value.data, Call) and value.data.path in _TYPER


def _loose(line: CommandLine) -> bool:
    """Whether words may be there that go by their place."""
    return any(not word.startswith("-") for word in line.words or ())


def of_fire(defaults: Mapping[str, Value | None], line: CommandLine) -> dict[str, Value]:
    """What Fire gives a function: by name, ``--no`` before a switch, else in their order.

    Args:
        defaults: of its parameters by name; None for one that has none.
        line: the words.
    """
    given: dict[str, object] = {}
    loose: list[str] = []
    queue = list(line.words or ())
    while queue:
        word = queue.pop(0)
        if not word.startswith("-") or _NUMBER.match(word):
            loose.append(word)
            continue
        key, equals, text = word.lstrip("-").partition("=")
        key = key.replace("-", "_")
        begun = [name for name in defaults if len(key) == 1 and name.startswith(key)]
        name = key if key in defaults else begun[0] if len(begun) == 1 else ""
        switched = key.removeprefix("no")
        value: object = True
        if equals:
            value = _of_python(text)
        elif not name and key.startswith("no") and switched in defaults:
            name, value = switched, False
        elif queue and (not queue[0].startswith("-") or _NUMBER.match(queue[0])):
            if not name:
                queue.pop(0)
                continue
            line.words_taken.add(queue[0])
            value = _of_python(queue.pop(0))
        if name:
            line.words_taken.add(key)
            given[name] = value
    for name, word in zip([each for each in defaults if each not in given], loose, strict=False):
        line.words_taken.add(word)
        given[name] = _of_python(word)
    line.taken.update(given)
    out: dict[str, Value] = {}
    for name, default in defaults.items():
        if name in given:
            out[name] = Value(given[name], given=(f"--{name}",))
        elif default is None:
            out[name] = Value(Unknown(f"--{name} of the command line"))
        else:
            out[name] = default.beside(Value(None, defaults=(f"--{name}",)))
    return out


def _of_python(text: str) -> object:
    """A word as Fire takes it: a value of Python, whose names without quotes are texts.

    Example:
        >>> [_of_python(text) for text in ("8", "no", "[q_proj, 'v_proj']")]
        [8, 'no', ['q_proj', 'v_proj']]
    """
    if text.startswith(("[", "(")) and text.endswith(("]", ")")):
        parts = [part.strip().strip("'\"") for part in text[1:-1].split(",")]
        return [plain_value(part) for part in parts if part]
    value = plain_value(text)
    return text if isinstance(value, bool) and text not in ("True", "False") else value


def absl_flag(call: Call, line: CommandLine) -> tuple[str, Value] | None:
    """A flag that ``flags.DEFINE_integer("batch_size", 8)`` of absl declares, by its name."""
    name, default = call.argument(0, "name"), call.argument(1, "default")
    kind = call.name.removeprefix("DEFINE_")
    if name is None or not isinstance(name.data, str):
        return None
    flags = (f"--{name.data}", f"-{name.data}")
    if kind in ("bool", "boolean"):
        option = Option(flags[0], flags, (f"--no{name.data}",))
    elif kind in ("integer", "float", "string", "enum"):
        option = Option(flags[0], flags, takes="value", text=kind in ("string", "enum"))
    else:
        return name.data, Value(Unknown(f"{flags[0]} of the command line", call.line))
    return name.data, line.option(option, default)
