"""One axis of a grid: an option and its values, from text or from Python. Torch-free.

One syntax for the command line and for text in Python::

    batch=1,2,4,8        single values
    seq-len=128:512:128  from, to and step, both ends included
    batch=1:64:x2        from, to and factor
    bf16                 a switch alone: off and on
    software=torch=2.6;torch=2.10,cuda=12.8   values that hold commas are parted by semicolons
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from memest.config.option import Kind, Option
from memest.config.option_table import OPTIONS, OWN_MODULE_NAMES
from memest.config.options import find_option, read_bool, read_size, read_whole
from memest.config.setup import Software
from memest.errors import ConfigError, closest

__all__ = ["MAX_POINTS", "Axis", "axis_option", "axis_values", "parse_axis", "read_value"]

MAX_POINTS = 100_000
"""Points of one sweep; a slip of the pen (``1:1000000``) must not keep a machine for a week."""

_MAX_FACTORS = 1_000
"""Values of one geometric range: powers of a fraction get ever longer."""
_NUMBER = r"[-+]?\d{1,30}(?:\.\d{1,30})?"
_RANGE = re.compile(rf"^({_NUMBER}):({_NUMBER})(?::(x?)({_NUMBER}))?$")
_NO_AXIS = frozenset({*OWN_MODULE_NAMES, "trust_remote_code"})
_SYNTAX = (
    "write for example --over batch=1,2,4 or --over seq-len=128:512:128 or --over batch=1:64:x2"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One option and the values it takes, in order.

    Attributes:
        name: the option's keyword in Python.
        values: at least one; None stands for the option left out.
    """

    name: str
    values: tuple[Any, ...]

    @property
    def label(self) -> str:
        """The option as the command line spells it, without dashes in front."""
        return find_option(self.name).flags[0].removeprefix("--")


def axis_option(name: str) -> Option:
    """The option of an axis, by any spelling of the command line or of Python."""
    flags = {flag.lstrip("-"): option for option in OPTIONS for flag in option.flags}
    spelling = name.strip().lstrip("-")
    if spelling in flags:
        # -b has no keyword
        option = flags[spelling]
    else:
        try:
            option = find_option(spelling.replace("-", "_"))
        except ConfigError:
            keywords = (k for o in OPTIONS if o.name not in _NO_AXIS for k in o.keywords)
            suggestions = closest(spelling.replace("-", "_"), keywords)
            hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
            raise ConfigError(
                f"{name!r} is not an option to sweep over.{hint} Every option of "
                "`memest estimate --help all` may be an axis."
            ) from None
    if option.name in _NO_AXIS:
        raise ConfigError(
            f"{option.flags[0]} cannot be an axis: it is allowed for a whole sweep or not at all. "
            f"Give it beside --over: {option.flags[0]}."
        )
    return option


def _numbers(option: Option, text: str) -> list[Any]:
    """The numbers of one value or one range."""
    flag = option.flags[0]
    match = _RANGE.match(text)
    if match is None:
        if ":" in text:
            raise ConfigError(
                f"{flag}: {text!r} is not a range: write FROM:TO:STEP or FROM:TO:xFACTOR, for "
                "example 128:512:128 or 1:64:x2."
            )
        if re.fullmatch(r"\d+\s*-\s*\d+", text):
            colon = re.sub(r"\s*-\s*", ":", text)
            raise ConfigError(
                f"{flag}: {text!r} is not a range: write {colon}, or {colon}:x2 for doubles."
            )
        return [_number(option, text)]
    low, high = Fraction(match[1]), Fraction(match[2])
    geometric, step = match[3] == "x", Fraction(match[4] or 1)
    if geometric and (float(step) <= 1 or low <= 0):
        raise ConfigError(
            f"{flag}: the range {text} never ends: a factor is above 1 and starts above 0, as in "
            "1:64:x2."
        )
    if step <= 0:
        raise ConfigError(f"{flag}: the range {text} never ends: its step must be above 0.")
    if low > high:
        turned = text.replace(f"{match[1]}:{match[2]}", f"{match[2]}:{match[1]}", 1)
        raise ConfigError(
            f"{flag}: the range {text} runs backwards: write the smaller number first, {turned}."
        )
    steps = math.log(high / low) / math.log(step) if geometric else (high - low) / step
    limit = _MAX_FACTORS if geometric else MAX_POINTS
    if steps >= limit:
        larger = "larger factor"
        if not geometric:
            larger = f"larger step, or a factor as in {match[1]}:{match[2]}:x2"
        raise ConfigError(
            f"{flag}: the range {text} has more than {limit:,} values: take a {larger}."
        )
    values: list[Any] = []
    current = low
    while current <= high:
        if option.kind is Kind.NUMBER:
            values.append(float(current))
        elif current.denominator != 1:
            raise ConfigError(
                f"{flag}: the range {text} has {float(current):g} in it, which is not a whole "
                "number."
            )
        else:
            values.append(int(current))
        current = current * step if geometric else current + step
    return values


def _number(option: Option, value: Any) -> Any:
    flag = option.flags[0]
    if option.kind is Kind.WHOLE:
        return read_whole(flag, value)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{flag} {value!r} is not a number.") from None


def _split(text: str) -> list[str]:
    parts = text.split(";") if ";" in text else text.split(",")
    return [part.strip() for part in parts if part.strip()]


def _from_text(option: Option, text: str) -> list[Any]:
    """The values that one piece of text names."""
    values: list[Any] = []
    for part in _split(text):
        if option.kind in (Kind.WHOLE, Kind.NUMBER):
            values += _numbers(option, part)
        else:
            values.append(read_value(option, part))
    return values


def read_value(option: Option, value: Any) -> Any:
    """One value in the type it has in a result; its range and choices are Setup's business."""
    if value is None:
        return None
    if option.kind in (Kind.SWITCH, Kind.EITHER):
        return read_bool(option.flags[0], value)
    if option.kind in (Kind.WHOLE, Kind.NUMBER):
        return _number(option, value)
    if option.kind is Kind.LIST:
        return value if isinstance(value, str) else tuple(value)
    if option.name in ("gpu_memory", "device_context"):
        read_size(option.name, value)
    return value


def axis_values(option: Option, source: Any) -> tuple[Any, ...]:
    """The values of an axis, each once, in the order given.

    Args:
        option: what is swept over.
        source: text as on the command line, one value, or any iterable of values.

    Raises:
        ConfigError: for no values, or one of the wrong type.
    """
    # a mapping is one value: versions of software, or the keywords of checkpointing
    if isinstance(source, str):
        values = _from_text(option, source)
    elif not isinstance(source, Iterable) or isinstance(source, (Mapping, Software)):
        values = [read_value(option, source)]
    else:
        values = [read_value(option, value) for value in source]
    if not values:
        raise ConfigError(f"{option.flags[0]} has no values to sweep over: {_SYNTAX}.")
    # True and 1 are equal and not the same value
    return tuple({(type(value), repr(value)): value for value in values}.values())


def parse_axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """Read one ``--over``.

    Args:
        text: ``option=values``, or the name of a switch alone.

    Returns:
        The option's keyword, and the values.

    Raises:
        ConfigError: for an unknown option, a value of the wrong type, or a range without end.

    Example:
        >>> parse_axis("seq-len=128:512:128")
        ('seq_len', (128, 256, 384, 512))
        >>> parse_axis("b=1:10:x2,16")
        ('batch', (1, 2, 4, 8, 16))
        >>> parse_axis("bf16")
        ('bf16', (False, True))
    """
    name, equals, values = text.partition("=")
    if not name.strip():
        raise ConfigError(f"--over {text!r} names no option: {_SYNTAX}.")
    option = axis_option(name)
    if equals:
        return option.name, axis_values(option, values)
    if option.kind in (Kind.SWITCH, Kind.EITHER):
        return option.name, (False, True)
    if option.kind is Kind.MODE:
        return option.name, ("none", "full")
    raise ConfigError(
        f"--over {text} names no values: write {option.flags[0].removeprefix('--')}=..., "
        "for example --over batch=1,2,4."
    )
