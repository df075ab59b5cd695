"""Methods of plain values of a script: texts, lists, and mappings, which they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memest.readers.scripts.things import Value, entry_of

__all__ = ["plain_method"]

_REST = "**"
"""The entry of a mapping that stands for others, which cannot be told."""


def plain_method(
    base: Value,
    name: str,
    arguments: Sequence[Value],
    keywords: Mapping[str, Value],
    unknown: Value,
    *,
    told: bool,
) -> Value:
    """What a method returns; a mapping or a list is changed as it changes it.

    Args:
        base: whose method it is.
        name: of the method.
        arguments: by position.
        keywords: by name.
        unknown: what stands for what cannot be told of it.
        told: it surely runs.
    """
    data = base.data
    if isinstance(data, dict):
        return _of_mapping(base, name, arguments, keywords, unknown, told=told)
    if isinstance(data, str):
        return _of_text(base, name, arguments, keywords, unknown)
    if isinstance(data, list) and name not in ("count", "index", "copy"):
        data.append(unknown.data)
    return unknown


def _of_text(
    base: Value,
    name: str,
    arguments: Sequence[Value],
    keywords: Mapping[str, Value],
    unknown: Value,
) -> Value:
    text: str = base.data
    word = arguments[0].data if arguments else None
    if name in ("lower", "upper", "strip") and not arguments:
        return base.with_data(getattr(text, name)())
    if name in ("startswith", "endswith") and isinstance(word, str):
        return base.with_data(getattr(text, name)(word))
    if name == "split" and not keywords and (word is None or (isinstance(word, str) and word)):
        return base.with_data(text.split(word))
    return unknown


def _of_mapping(
    base: Value,
    name: str,
    arguments: Sequence[Value],
    keywords: Mapping[str, Value],
    unknown: Value,
    *,
    told: bool,
) -> Value:
    entries: dict[str, Any] = base.data
    first = arguments[0].data if arguments else {}
    default = arguments[1] if len(arguments) > 1 else Value(None)
    found = default
    if isinstance(first, str) and first in entries:
        found = entry_of(base, first)
    if name == "get" and arguments:
        return found
    if name == "copy":
        return base.with_data(dict(entries))
    if name == "update" and isinstance(first, dict):
        new = {**first, **{key: value.data for key, value in keywords.items()}}
        entries.update(new if told else dict.fromkeys(new, unknown.data))
        return Value(None)
    if name in ("pop", "setdefault") and isinstance(first, str):
        if not told:
            entries[first] = unknown.data
        elif name == "pop":
            entries.pop(first, None)
        else:
            entries.setdefault(first, default.data)
        return found
    if name in ("update", "pop", "setdefault", "clear", "popitem"):
        entries.clear()
        if name != "clear" or not told:
            entries[_REST] = unknown.data
    return unknown
