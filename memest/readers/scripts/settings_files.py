"""Files of settings that a script reads: YAML, JSON and TOML as mappings, OmegaConf's among them.

Source: OmegaConf 2.3 ``omegaconf.py`` (``merge``, ``from_cli``, ``structured``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from memest.errors import ConfigError
from memest.readers.documents import find_file, plain_value, read_document
from memest.readers.scripts.command_line import CommandLine
from memest.readers.scripts.things import (
    Class,
    Namespace,
    OpenFile,
    Settings,
    Unknown,
    Value,
)

__all__ = ["made_settings", "merged", "overrides_of", "settings_of"]

_READERS = frozenset(
    """yaml.safe_load yaml.load yaml.full_load json.load tomllib.load tomli.load toml.load
    omegaconf.OmegaConf.load""".split()
)
"""Functions that make a mapping of a file, or of its name."""
_AS_MAPPINGS = frozenset(
    """omegaconf.OmegaConf.create omegaconf.DictConfig easydict.EasyDict munch.Munch
    munch.munchify box.Box ml_collections.ConfigDict addict.Dict omegaconf.OmegaConf.structured
    omegaconf.OmegaConf.to_container omegaconf.OmegaConf.to_object""".split()
)
"""What makes a mapping of a mapping, whose entries are attributes too."""
_MERGES = ("omegaconf.OmegaConf.merge", "omegaconf.OmegaConf.unsafe_merge")
_OF_WORDS = ("omegaconf.OmegaConf.from_cli", "omegaconf.OmegaConf.from_dotlist")


def made_settings(
    path: str,
    arguments: Sequence[Value],
    folder: Path | None,
    line: CommandLine,
    unknown: Value,
) -> Value | None:
    """What a function returns that makes a mapping of settings; None for any other function.

    Args:
        path: of the function.
        arguments: that it is given by position.
        folder: of the script.
        line: the words of the command.
        unknown: what stands for a mapping that cannot be told.
    """
    first = arguments[0] if arguments else Value(None)
    if path in _READERS:
        settings = settings_of(first, folder)
        return unknown if settings is None else first.with_data(settings)
    if path in _OF_WORDS:
        words = first.data if isinstance(first.data, list) else line.words or ()
        return Value(overrides_of([each for each in words if isinstance(each, str)], line))
    if path not in _MERGES and path not in _AS_MAPPINGS:
        return None
    parts = [_mapping(value.data) for value in arguments[: None if path in _MERGES else 1]]
    if not parts or any(part is None for part in parts):
        return unknown if path in _MERGES else None
    if path not in _MERGES:
        return first.with_data(parts[0])
    whole: dict[str, Any] = Settings()
    for part in parts:
        whole = merged(whole, part or {})
    return Value(whole).beside(*arguments)


def _mapping(data: object) -> dict[str, Any] | None:
    """A mapping, or a dataclass of the script, as one; None for anything else."""
    fields: Mapping[str, Value | None] | None = None
    if isinstance(data, dict):
        return data
    if isinstance(data, Class):
        fields = data.fields
    elif isinstance(data, Namespace) and data.rest is None:
        fields = data.values
    if fields is None:
        return None
    values = {key: Unknown(key) if each is None else each.data for key, each in fields.items()}
    inner = {key: _mapping(value) for key, value in values.items()}
    return {key: value if inner[key] is None else inner[key] for key, value in values.items()}


def overrides_of(words: Sequence[str], line: CommandLine) -> Settings:
    """Words ``train.batch_size=16`` as settings; they are taken off the command."""
    out = Settings()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key.startswith("-"):
            continue
        key = key.lstrip("+~")
        first, *rest = key.split(".")
        line.words_taken.add(first)
        line.taken[key.replace("-", "_")] = plain_value(text)
        part: Settings = out
        for name in (first, *rest)[:-1]:
            inner = part.get(name)
            part[name] = inner if isinstance(inner, Settings) else Settings()
            part = part[name]
        part[key.rpartition(".")[2]] = plain_value(text)
        part.given[key.rpartition(".")[2]] = key
    return out


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Settings:
    """Two mappings as one, entry by entry; of what both have, the second counts."""
    out = Settings(first)
    out.given |= getattr(first, "given", {})
    for key, value in second.items():
        before = out.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        out[key] = merged(before or {}, value) if both else value
        out.given.pop(key, None)
    out.given |= getattr(second, "given", {})
    return out


def settings_of(given: Value | None, folder: Path | None) -> dict[str, Any] | None:
    """The settings that a script has, or reads from a file; None where they cannot be told.

    A file elsewhere than in the folders below, the working one's or the script's, is not looked at.

    Args:
        given: a mapping, a file that is open, or its name.
        folder: of the script.
    """
    file = None if given is None else given.data
    if isinstance(file, dict):
        return file
    name = file.path if isinstance(file, OpenFile) else file
    if not isinstance(name, str) or name.startswith(("/", "~")) or "\\" in name:
        return None
    if ".." in PurePosixPath(name).parts:
        return None
    try:
        return read_document(find_file(name, folder=folder, origin="the script"), name)
    except ConfigError:
        return None
