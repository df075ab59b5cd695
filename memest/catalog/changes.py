"""A model with some of its configuration changed: ``MODEL?num_hidden_layers=4``.

One more layer or four instead of thirty-two: written into the reference itself, so that it goes
wherever a model can be named (a command, a scenario, a record of a measurement).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from memest.errors import ConfigError

__all__ = ["split_changes", "with_changes"]

_SIZES = re.compile(r"(n|num)_\w+|\w+_(size|layers|heads|dim)")
_EXAMPLE = "write for example 'gpt2?n_layer=4&n_head=8'"


def split_changes(ref: str) -> tuple[str, dict[str, Any]]:
    """The reference without its changes, and the changes.

    Raises:
        ConfigError: what follows the question mark is no list of ``name=value``.
    """
    base, mark, text = ref.partition("?")
    if not mark:
        return ref, {}
    changes: dict[str, Any] = {}
    for item in text.split("&"):
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(
                f"{ref!r}: {item!r} is not a change of the configuration: {_EXAMPLE}."
            )
        if name in changes:
            raise ConfigError(f"{ref!r} changes {name} twice: drop one.")
        if name in ("model_type", "auto_map"):
            raise ConfigError(f"{ref!r}: {name} says what the model is, and cannot be changed.")
        changes[name] = _value(unquote(value))
        if _SIZES.fullmatch(name) and isinstance(changes[name], int) and changes[name] < 0:
            raise ConfigError(f"{ref!r}: {item}: a size of a model is 0 or more: {_EXAMPLE}.")
    return base, changes


def with_changes(ref: str, changes: Mapping[str, Any]) -> str:
    """The reference with changes behind it; those that it has itself stay.

    Example:
        >>> with_changes("gpt2?n_layer=2", {"n_layer": 4, "n_head": 8})
        'gpt2?n_layer=2&n_head=8'
    """
    base, _, text = ref.partition("?")
    items = [item for item in text.split("&") if item]
    own = {item.partition("=")[0] for item in items}
    items += [
        f"{name}={quote(json.dumps(value))}" for name, value in changes.items() if name not in own
    ]
    return f"{base}?{'&'.join(items)}" if items else base


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        words = {"True": True, "False": False, "None": None}
        return words.get(text, text)
