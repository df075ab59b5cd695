"""How a question is spelt: the same options as a scenario, a command line, Python.

A scenario is what follows ``--vs`` of ``memest compare``: ``name=value`` words in a line, short
enough to stand in a link.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from memest.config.meant import what_says
from memest.config.option import Kind, Option
from memest.config.options import find_option
from memest.errors import ConfigError

__all__ = ["command_words", "option_texts", "python_snippet", "read_scenario", "write_scenario"]

_FULL_PRECISION = ("fp32", "float32")


def read_scenario(text: str) -> dict[str, Any]:
    """The options of a scenario as the command line writes it.

    Args:
        text: words of ``name=value``, or names alone for switches: ``fp16``,
            ``checkpointing=full``, ``grad-accum=4 batch=2``; leading dashes do no harm. What takes
            several values is named several times.

    Raises:
        ConfigError: a word that is no option, or an option without its value.

    Example:
        >>> read_scenario("grad-accum=4 batch=2 checkpointing")
        {'grad_accum': '4', 'batch': '2', 'checkpointing': 'full'}
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--vs {text!r} cannot be read: {error}.") from None
    options: dict[str, Any] = {}
    for word in words:
        name, value = _read_word(word, text)
        if name not in options:
            options[name] = value
        elif find_option(name).kind is Kind.LIST:
            before = options[name]
            options[name] = (*before, value) if isinstance(before, tuple) else (before, value)
        else:
            raise ConfigError(f"--vs {text!r} names {name.replace('_', '-')} twice: drop one.")
    if not options:
        raise ConfigError("--vs is empty: write for example --vs fp16 or --vs 'batch=4'.")
    return options


def _read_word(word: str, text: str) -> tuple[str, Any]:
    flag, equals, value = word.lstrip("-").partition("=")
    name = flag.replace("-", "_")
    if name in _FULL_PRECISION and not equals:
        return "precision", "fp32"
    if name == "no_checkpointing" and not equals:
        return "checkpointing", "none"
    negative = name.startswith("no_")
    try:
        option = find_option(name.removeprefix("no_") if negative else name)
    except ConfigError as error:
        says = re.sub(r"--([\w-]+) (\w+)(?=,|$)", r"\1=\2", what_says(name))
        if not says or equals:
            raise
        raise ConfigError(f"--vs {text!r}: {flag!r} is no option. What says it: {says}.") from error
    if negative and option.kind is not Kind.EITHER:
        raise ConfigError(f"--vs {text!r}: {option.flags[0]} has no negative form.")
    if equals:
        return option.name, value
    if option.kind in (Kind.SWITCH, Kind.EITHER):
        return option.name, not negative
    if option.kind is Kind.MODE:
        return option.name, "full"
    raise ConfigError(
        f"--vs {text!r}: {flag} needs a value, for example {flag}="
        f"{'4' if option.kind is Kind.WHOLE else option.metavar}."
    )


def write_scenario(options: Mapping[str, Any]) -> str:
    """Options as :func:`read_scenario` reads them.

    Args:
        options: values by the options' keywords; those that take several may have a sequence.

    Raises:
        ConfigError: a name that is no option.

    Example:
        >>> write_scenario({"grad_accum": 4, "fp16": True})
        'grad-accum=4 fp16'
    """
    words = []
    for name, value in _spelt(options):
        option = find_option(name)
        word = option.flags[0].removeprefix("--")
        if isinstance(value, bool):
            words.append(word if value else f"no-{word}")
        else:
            words += [shlex.quote(f"{word}={text}") for text in _texts(option, value)]
    return " ".join(words)


def command_words(command: str, model: str, options: Mapping[str, Any]) -> list[str]:
    """A command line, word by word.

    Args:
        command: of memest, for example ``estimate``.
        model: as the command takes it.
        options: values by the options' keywords.
    """
    command_line = ["memest", command, model]
    for name, value in _spelt(options):
        option = find_option(name)
        flag = option.flags[0]
        if isinstance(value, bool):
            command_line.append(flag if value else f"--no-{flag.removeprefix('--')}")
        else:
            command_line += [word for text in _texts(option, value) for word in (flag, text)]
    return command_line


def python_snippet(model: str, options: Mapping[str, Any]) -> str:
    """The Python that asks the same of ``memest.estimate``."""
    lines = [f"    {model!r},"]
    for name, value in options.items():
        literal = list(value) if isinstance(value, tuple) else value
        lines.append(f"    {name}={literal!r},")
    body = "\n".join(lines)
    return (
        f"import memest\n\nanswer = memest.estimate(\n{body}\n)\n"
        "print(answer)\nanswer.peak.device_bytes, answer.verdict"
    )


def option_texts(name: str, value: Any) -> list[str]:
    """The value of an option as a link has it: one text, or several of those that are repeatable.

    Example:
        >>> option_texts("padded", True), option_texts("gpu", ("t4", "v100"))
        (['true'], ['t4', 'v100'])
    """
    return [str(value).lower()] if isinstance(value, bool) else _texts(find_option(name), value)


def _spelt(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Options with the values that a text can have: ZeRO's settings stand in a document."""
    for name, value in options.items():
        if (
            isinstance(value, Mapping)
            and name == "zero_settings"
            and "zero_optimization" not in value
        ):
            yield name, {"zero_optimization": {"stage": options.get("zero", 0), **dict(value)}}
        else:
            yield name, value


def _texts(option: Option, value: Any) -> list[str]:
    values = value if option.kind is Kind.LIST and not isinstance(value, str) else (value,)
    return [_text(each) for each in values]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):  # several in one word, as --optim-target-modules has them
        return json.dumps(list(value))
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return repr(value) if isinstance(value, float) and float(short) != value else short
